"""DeepSpeed as an engine: its ZeRO stages, offload, loss scaling, schedulers and checkpoints take the step.

Read `engine` first (which layouts and configurations it takes), then `trainer` (the step) and `gradients` (how the
loss of the global batch comes out of an engine that takes means). `keys` says what a ds_config.json means, `config`
reads it and completes it, `initialize` starts DeepSpeed, `nvme` builds its extension for disks, `pipeline` has its
pipelines.
"""
