"""Drills: a job is trained under one fault after the other, and compared with its undisturbed run.

`drill` says what a drill is and what it leaves, `faults` has the drills and their table, `run` runs them all.
`soak` is one long job under many faults at random moments: `disturbances` has the kinds, `under_faults` commits them.
"""
