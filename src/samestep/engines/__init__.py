"""Who takes the step: one file and one line here each."""

ENGINES = {
    "accelerate": "samestep.engines.accelerate:Accelerate",
    "data-parallel": "samestep.engines.data_parallel:DataParallel",
    "horovod": "samestep.engines.horovod:Horovod",
    "native": "samestep.engines.native:Native",
}
