"""Plans of a job: which layouts of a job file fit on a machine or cluster, and how long each one's step takes.

Read in this order: `machine` (rates of the place, measured or of a data sheet), `predict` (a
rehearsed layout's memory and time), `plan` (which layouts are looked at, and all of it together), `auto` (the first
that fits), `measure` (steps taken really, and the rates corrected by them), `display` (what is shown).

Where `samestep.planning` counts a known model from its sizes, this package rehearses the job's own ranks
(`samestep.training.rehearsal`): any module, any lever that training has, what a layout really sends.
"""
