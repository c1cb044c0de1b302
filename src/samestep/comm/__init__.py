"""Process groups and collectives: which ranks talk to whom, through what, and how long it takes.

In the order of reading:

- `mesh`: the ranks of a layout as a grid, and the process group of each of its dimensions.
- `shared_memory`: the process group of CPU ranks that share a host. `transports`: what may carry messages.
- `compression`: methods that send less than plain data parallelism.
- `gather`: all-gather and reduce-scatter of one tensor. `agree`: what the ranks' hosts have to know.
- `operands`: the tensors of an operator. `observer`: a look at every operator that runs.
- `traffic`: the bytes that a rank sends.
- `collectives`, `correctness`, `measure`, `limits`, `support`, `demo`: what `samestep comm` runs on each rank.
- `leave`: the end of a process group.
"""
