"""The comparison: many methods train one job, each in processes of its own, and are held side by side.

Read `methods` first (what can be compared, a line each), then `compare` (runs them in turn; `kept` keeps a server
from which ranks are forked) and `results` (a row a method). `terminal` and `page` show them, in the languages of
`bilingual`.

The package is not called `compare`, which is the function's name: `samestep.compare` would be one or the other.
"""
