"""Context parallel: tokens split over ranks, which meet in attention.

Read `split` first (which blocks work on a rank's own tokens, and how they are made to; `hidden` is what blocks hand
on, `token_wise` what works on each token alone), then `attention` (over the tokens of all ranks), `gathered` (other
modules that need all tokens) and `messages` (the collectives under them, which backward knows).
"""
