"""The comparison: many methods train one job, each in processes of its own, and their results are compared.

Read `methods` first (what can be compared, a line each), then `compare` (makes each method's job and the rows, in
turn), `runs` (how a job is run) and `same_step` (its first steps versus those of one process); `results` has a row a
method. `columns` are those of its tables; `terminal` shows them, and `page` with the `plots` of it, in the
languages of `bilingual`.

The package is not called `compare`, which is the function's name: `samestep.compare` would be one or the other.
"""
