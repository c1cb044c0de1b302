"""Who takes the step: one file and one line here each.

Read `base` first (what an engine is and declares), then `native` (samestep's own step). `registry` finds an engine,
`checks` holds a job against what it can do, `precision` has dtypes, autocast and loss scaling.

`config_file` reads other tools' files, `accelerate_keys` says what Accelerate's means.

`setup` is what all native trainers are made of. Engines that take the native step with another package's parts:
`data_parallel`, `accelerate`, `horovod`, `parameter_server`. With a step of their own: `deepspeed`, `keras`.

A module imports only itself and those before it in this order: `base`, `precision`, `setup`, `native`, the others.

The life of a trainer: `Engine.check` (in the starting process, before anything is spent) -> `Engine.prepare` on every
rank (model and optimizer spread) -> `Trainer.step` for each batch, `Trainer.predict` for evaluations; checkpoints by
`Checkpointed.pieces` and `Checkpointed.restore`. Each is called by all ranks in the same order.
"""

ENGINES = {
    "accelerate": "samestep.engines.accelerate:Accelerate",
    "data-parallel": "samestep.engines.data_parallel:DataParallel",
    "deepspeed": "samestep.engines.deepspeed.engine:DeepSpeed",
    "horovod": "samestep.engines.horovod:Horovod",
    "keras-mirrored": "samestep.engines.keras.engine:Mirrored",
    "keras-multi-worker": "samestep.engines.keras.engine:MultiWorker",
    "keras-parameter-server": "samestep.engines.keras.parameter_server:KerasParameterServer",
    "native": "samestep.engines.native.engine:Native",
    "parameter-server": "samestep.engines.parameter_server.engine:ParameterServer",
}
