"""Places that offer hosts to a job: a file each, and an entry each in `registry`.

Read `base` first: what a place is given, and what it finds. `local` is the shortest. By their variables: `torchrun`,
`open_mpi`, `sagemaker`, `kubernetes`, `lsf`. `hostfile` reads a file; `slurm` finds the nodes of an allocation and
starts on them, as `ray` does for a Ray cluster.
"""
