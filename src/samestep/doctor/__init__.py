"""The doctor: what works on this machine, and what went wrong in a run. Each problem has its remedy.

Of a machine: `examine` lists the checks of `machine`, `network` and `collectives`, which tries each collective in
ranks of its own. Of a run: `run` judges the files that `run_files` reads, and `plan_and_run` compares a run
with the plan by which its layout was chosen. `findings` is what both give.
"""
