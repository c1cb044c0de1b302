"""Context parallel: tokens split over ranks, which meet in attention.

Read `split` first (which blocks work on a rank's own tokens, and how they are made to; `hidden` is what blocks hand
on, `token_wise` what works on each token alone), then `attention` (over the tokens of all ranks; `ring` where keys
and values travel, by the kernels of `block_attention`), `gathered` (other modules that need all tokens) and
`shares` (which tokens a rank has). `parallel.collectives` has the collectives under all this.

Shapes on a rank, for t tokens over p ranks: hidden states [batch, ceil(t / p), features] between blocks; in attention
under ulysses [batch, heads / p, t, head_dim]; under ring queries [batch, heads, own tokens, head_dim] against one
rank's keys at a time. The last rank's part is filled up with zeros, whose outputs are cut off and have no gradient.
"""
