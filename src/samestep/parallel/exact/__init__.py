"""What keeps a step exact however it is cut, and a proof exact to the last digits.

- `forward_context`: which samples and tokens the running forward has. `draws`: how its random numbers are made by
  sample number, with `counter_rng`; `dropout`: which forwards that is done for. Read these first.
  `sample_dims`: where a user says that samples are another dimension of a draw than the first.
- `generators`: how a draw that nothing answers is found, and the line that makes it.
- `batch_norm`: statistics of the global batch. `buffers`: those that a forward changes, and must not.
  `batch_buffers`: those that are a mean or a sum over the batch, joined over forwards and ranks.
- `float64`: the mode under which a step of precision fp64 runs. `grouped_product`: the one operator of many models
  that PyTorch has in float32 and below only.

Why all this: a layout takes the step of one process if each number that it computes is the same function of the same
samples. Sums over samples are so by themselves; what draws random numbers, normalises over the batch, or remembers in
a buffer depends on how the batch is cut, unless it is told which samples it has. `ForwardContext` tells it.
"""
