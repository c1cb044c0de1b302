"""Progress of long work on standard error, by the one process that reports it.

- `phases`: off a terminal, whole lines: the phases, how far the work is, and that it still runs
- `bars`: progress bars: on a terminal rich's, elsewhere by `phases`
"""
