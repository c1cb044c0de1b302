"""Who takes the step: one file and one line here each."""

ENGINES = {
    "data-parallel": "samestep.engines.data_parallel:DataParallel",
    "keras-mirrored": "samestep.engines.keras.synchronous:Mirrored",
    "keras-multi-worker": "samestep.engines.keras.synchronous:MultiWorker",
    "native": "samestep.engines.native:Native",
}
