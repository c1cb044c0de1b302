"""DeepSpeed as an engine: its ZeRO stages, offload, loss scaling, schedulers and checkpoints take the step."""
