"""Context parallel: tokens split over ranks, which meet in attention.

Read `split` first (which blocks work on a rank's own tokens, and how they are made to; `hidden` is what blocks hand
on, `token_wise` what works on each token alone), then `attention` (over the tokens of all ranks; `ring` where keys
and values travel, by the kernels of `block_attention`), `gathered` (other modules that need all tokens) and
`messages` (which tokens a rank has, and the collectives under all this, which backward knows).
"""
