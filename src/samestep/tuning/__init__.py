"""`samestep tune`: which settings of `run:` make a job's step shorter on the machine at hand, by trying.

- `settings`: what can be tried, and with which values.
- `tune`: tries one setting after another, each value in processes of its own, and keeps the best.
- `results`: what was tried and what it was worth, as a table and as the `run:` section to paste.
"""
