"""A proof of any training script: it runs alone and split under a recorder, and the records are compared.

Read in this order. `settings`: what the recorder is told. `runner`: the first lines of a rank, before the user's.
`recorder`: what it notes, by `samples` (hashes of rows), `activations` (what modules made of them), `shards` (which
part of which parameter a rank holds) and `interception` (the functions of PyTorch that it listens to), and `store`,
the files. `runs`: the script alone, alone once more with its rows in another order, and split. `record`: what a run
left, with the shards joined; `batches` and `follow` give the run alone the batches of the split one. `compare`: the
first difference; `differences` measures tensors and says what is rounding, `sampling`, `forward`, `gradients` and
`updates` say what a difference looks like, `kinds` in which words. `report`: the verdict in the terminal; `page`: as
a page.
"""
