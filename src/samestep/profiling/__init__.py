"""Where a step's time goes: `run.profile`.

In the order of reading:

- `clock`: divides the time of a rank's own thread among the phases of a step and the waits in them.
- `profiler`: runs clock and `torch.profiler` over the steps that are asked for; a file a rank for Perfetto.
- `breakdown`: from what a clock noted to categories that add up to the step, and the rank that holds the others up.

Times are of the monotonic clock, in nanoseconds within a rank and in seconds in what is reported. Ranks' clocks are
never subtracted from each other: only durations are compared.
"""
