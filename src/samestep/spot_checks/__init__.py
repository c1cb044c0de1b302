"""Spot checks of a real training: every k-th step is recorded on each rank, and judged afterwards.

A run that takes days can't be repeated on one process. What can be seen of it without: whether ranks hold the same
weights, step by the same rates, train on samples of their own, and whether the gradients that they step by are the
mean of what each rank's own loss gives.

- `fingerprints`: a few numbers of a tensor, of which those of a sum are the sum; so nothing is sent or kept whole.
- `recorder`: `SpotChecks`, which records. `callbacks`: the same for transformers' Trainer and for Lightning.
- `records`: the files. `reduction`: what was made of ranks' own gradients in a step. `judgement`: what is wrong in
  ranks' records. `report`: it in the terminal.
"""
