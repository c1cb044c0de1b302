"""Planning: which layout of a job fits and how fast each will be, before anything is started.

Read in this order: `shapes` (a model's sizes), `hardware` (devices and links), `software` (what a program fuses and
overlaps), `operators` (time of a layer's kernels), `collectives` (time of messages), `pipeline_events` (a schedule
played), `stage_time` and `step_time` (all of it together, and copies to the host), `memory` (`module_memory` for any
module), `price`, `search` (every layout of a job), `published` and `accuracy` (what others measured, and how far from
it predictions are).

Units throughout: seconds, bytes, FLOPs (a multiplication and an addition are two), bytes a second, FLOPs a second.
Work and bytes are those of one rank unless a name says otherwise.
"""
