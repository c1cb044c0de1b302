"""A proof of any training script: it runs alone and split under a recorder, and the records are compared.

Read in this order. `settings`: the recorder's settings. `runner`: the first lines of a rank, before the user's;
`installation`: of the recorder in it. `recorder`: what it notes, by `interception` (the functions of PyTorch that it
listens to), `batches`, `given`, `fetching`, `draws`, `held`, `states`, `own_gradients`, `halves` and what
`samestep.recording` has. `runs`: the script alone, alone once more with its rows in another order, and split;
`follow`: alone on the split run's batches. `compare`: the first difference; `sampling`, `gradients`, `updates`,
`averages`, `copies` and `evaluation` say what a difference looks like, `kinds` in which words. `report`: the verdict
in the terminal; `page`: as a page. `options` and `command`: the command `samestep-prove`, which needs nothing else of
samestep than the base; `torchrun` starts its ranks then. `forked`: ranks are forked by a `server` that has imported
what `imports` reads in the script; `rebinding`: what was imported so early gets the replaced functions as well.
`children`: ranks that the script starts itself. `extensions`: operators that it compiles. `devices`: `--on cpu` and
`--on gpu:0`; `tiny`: `--tiny`. `start_notes`: what a verdict says of all that. `annotations`: the verdict on the line
of a file.

Three runs make a verdict: the script alone in one process, alone once more with rows in another order (which shows
what rounding does), and split over ranks as the user starts it. Nothing in the script is changed; what it calls of
PyTorch is listened to.
"""
