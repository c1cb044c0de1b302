"""Tensor parallel: each rank of a group holds a slice of the matrices and computes with it (Shoeybi et al. 2019).

In the order of reading:

- `modules`: which modules can be sliced, and along which dimension. `pairs`: columns and the row layer after them.
- `plan`: which modules of a model are sliced over how many ranks. `apply`: slices them, and leaves a module whole if
  its slices give a wrong result.
- `regions`: whole parameters and tensors that sliced layers' outputs meet, and what is done about their gradients.
- `layers`: forwards of sliced layers, with the collectives of `parallel.collectives`. `compare`: compares the sliced
  model's output with the whole one's; `gradients`: and its gradients.
- `sequence_parallel`: splits tokens between the sliced layers. The output layer's slices, and the loss on them, are
  in `parallel.loss`.

Ranks of the tensor axis have the same samples, so they compute the modules that aren't sliced identically, random
numbers included. Their gradients of whole parameters are identical too, and aren't averaged; if each rank has a part
of a gradient (`TensorPlan.in_parts`, `Regions.summed`), the parts are summed.
"""
