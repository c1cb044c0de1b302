"""Collectives of CPU ranks on one host, through memory that they all map; used like any other process group.

In the order of reading:

- `process_group`: the `ProcessGroup` that DDP, FSDP2, tensor and pipeline parallel call. It owns a gloo group, takes
  over all-reduce, reduce, reduce-scatter, all-gather, broadcast and barrier, and leaves the rest to gloo.
- `work`: runs a group's collectives one after the other, in the caller's thread or in the group's own.
- `backend`: makes a group, as `torch.distributed` asks for one, with the fastest kernel that all its ranks can have.
- `region`: the memory that the ranks of a group share, which has no name that could outlive them; and which ranks
  can share one, asked of the ranks, group by group.
- `hierarchical`: all-reduce, all-gather, broadcast and barrier over several hosts, by one of those in each host.
- `kernel`: what runs in that memory, one interface with two implementations: `compiled` (kernel.cpp, built on first
  use by `build`) and `interpreted` (PyTorch's operators on views of the region, where there is no compiler).
"""
