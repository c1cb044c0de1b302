"""`samestep verify`: the steps of a layout compared with those of one process.

Read in this order. `steps`: takes a few steps of a training and keeps what is compared. `proof`: compares those of a
layout with those of one process in float64 or float32, number by number, and `tensors` what each rank holds. `bits`:
compares a layout's ordered steps bit for bit, and times them. `noise`: how far rounding alone moves the steps, where
they differ by more than the fixed tolerance. `job_record`: records steps as the recorder of scripts does.
`departure`: where the steps of a failed proof first depart, and what kind of difference it is, by the code that
judges scripts, and by `parts` from the weights of the ranks' samples. `matrix`: many jobs under many layouts.
`itself`: refuses one process against itself. Ranks run their part through `samestep.rank_tasks`;
`samestep.api.verify` starts them. Scripts that are no samestep jobs are verified by `samestep.script_proof`.
"""
