"""Context parallel: tokens split over ranks, which meet in attention.

Read split.py first (which blocks work on a rank's own tokens, and how they are made to), then attention.py (attention
over the tokens of all ranks), gathered.py (other modules that need all tokens) and messages.py (the collectives under
them, which backward knows).
"""
