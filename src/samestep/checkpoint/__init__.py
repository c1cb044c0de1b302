"""Checkpoints: a training's state on disk, the same whatever layout wrote it (PyTorch's distributed checkpoint).

In the order of reading:

- `info`: what a checkpoint says of itself, in `checkpoint.json`. `plain_files`: opens a checkpoint's files.
- `folder`: where checkpoints lie and what they are called; only complete ones bear their name.
- `save`, `load`: what a rank writes and reads. `planner`: which boxes of which tensors those are.
- `attempts`: what becomes of a save that the system refuses.
- `compatibility`: whether a checkpoint belongs to a job, and what one of trained parameters alone leaves out.
- `identity`: what a training learns from, its data, the user's `code` and the `values` that the task and its model
  hold, and what of it has changed.
- `peer_memory`: copies in the memory of other hosts.
- `one_process`, `inspect`, `safe_index`: for commands, which need no ranks and run nothing that a file contains.
"""
