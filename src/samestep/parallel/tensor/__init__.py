"""Tensor parallel: each rank of a group holds a slice of the matrices and computes with it (Shoeybi et al. 2019).

In the order of reading:

- `modules`: which modules can be sliced, and along which dimension. `pairs`: columns and the row layer behind them.
- `plan`: what of a model is sliced over how many ranks. `apply`: slices it, and leaves whole what goes wrong.
- `layers`: how a layer computes on its slice; `parallel.collectives` has its messages. `compare`: the sliced model
  against the whole one.
- `sequence_parallel`: tokens split between the sliced layers. `vocab_parallel`: the output layer and the loss.

Ranks of the tensor axis have the same samples, so what isn't sliced they compute alike, random numbers
included. Their gradients of whole parameters are the same too, and aren't averaged; where each has a part of one
(`Plan.in_parts`), parts are summed.
"""
