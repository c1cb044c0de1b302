"""`samestep comm`: starts ranks that run, time and try the collectives of samestep.comm, and shows what they found.

In the order of reading: `request` (what is wanted, checked before anything starts), `run` (measure and show),
`support` (try what each transport has, in ranks that `try_ranks` starts and reads the notes of), `results` (what was
found) and `display` (how it is shown).
"""
