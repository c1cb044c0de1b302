"""Process groups and collectives: which ranks communicate, through which transport, and how long it takes.

In the order of reading:

- `mesh`: the ranks of a layout as a grid, and the process group of each of its axes.
- `group_pool`: groups that several layouts take one after the other.
- `shared_memory`: the process group of CPU ranks that share a host. `transports`: what may carry messages.
- `compression`: methods that send less than plain data parallelism.
- `messages`: all-gather and reduce-scatter of one tensor, and what the ranks' hosts have to know.
- `observer`: a look at every operator that runs, and at its tensors.
- `traffic`: the bytes that a rank sends.
- `collectives`, `correctness`, `measure`, `limits`, `demo`: what `samestep comm` runs on each rank.

What holds throughout. Collectives of a group pair up by their order alone: every rank of it calls the same ones, of
the same sizes, in the same order. "Every rank must ask" in a docstring says that a function sends messages. Groups
are made by all ranks of the world, in one order, also by those that aren't members. What a host decides by (flags,
counts) travels on the CPU, so that it doesn't wait for an accelerator's queue.
"""
