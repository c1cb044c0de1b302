"""Who takes the step: one file and one line here each."""

ENGINES = {
    "data-parallel": "samestep.engines.data_parallel:DataParallel",
    "deepspeed": "samestep.engines.deepspeed.engine:DeepSpeed",
    "native": "samestep.engines.native:Native",
}
