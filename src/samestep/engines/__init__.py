"""Who takes the step: one file and one line here each."""

ENGINES = {
    "accelerate": "samestep.engines.accelerate:Accelerate",
    "data-parallel": "samestep.engines.data_parallel:DataParallel",
    "deepspeed": "samestep.engines.deepspeed.engine:DeepSpeed",
    "horovod": "samestep.engines.horovod:Horovod",
    "keras-mirrored": "samestep.engines.keras.engine:Mirrored",
    "keras-multi-worker": "samestep.engines.keras.engine:MultiWorker",
    "keras-parameter-server": "samestep.engines.keras.parameter_server:ParameterServer",
    "native": "samestep.engines.native:Native",
    "parameter-server": "samestep.engines.parameter_server.engine:ParameterServer",
}
