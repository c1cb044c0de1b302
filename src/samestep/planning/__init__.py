"""Planning: which layout of a job fits and how fast each will be, before anything is started.

Read in this order: `shapes` (a model's sizes), `hardware` (devices and links), `software` (what a program fuses and
overlaps), `operators` (time of a layer's kernels), `collectives` (time of messages), `pipeline_events` (simulation of
a schedule), `stage_time` and `step_time` (the whole step, with copies to the host), `memory` (`module_memory` for any
module), `price`, `search` (all layouts of a job), `published` and `accuracy` (published measurements, and the errors
of predictions).

Units throughout: seconds, bytes, FLOPs (a multiplication and an addition are two), bytes per second, FLOPs per
second. Work and bytes are those of one rank unless a name says otherwise.
"""
