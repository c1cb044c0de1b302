"""Records the steps of a training, and compares the steps of two runs.

Read in this order. `samples`: hashes of the rows that go into a model. `activations`: what modules make of them;
`calls`: where a model's forward begins and ends. `shards`: which part of which parameter a rank holds. `store`: the
files of a record. `skipped`: what no step used is left out. `record`: what a run left, with the shards joined.
`differences`: how far tensors are apart, and what is rounding. `forward`: the first module that departs.
`generators`: states of the global random numbers, which a sample's augmentation draws from.
`samestep.script_proof` proves scripts by these, and a job's proof names by them where its steps depart.

Comparisons need no messages: each rank writes what it has, with names and places in the whole, and one process joins
the pieces afterwards. So a record changes nothing of the order in which ranks wait for each other.
"""
