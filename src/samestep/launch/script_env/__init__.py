"""What the scripts of each engine expect when they start: variables and arguments, a file an engine.

Read `base` first (what a contract is, and how ranks agree on ports before they start), then `torch`, the shortest,
and `registry`. The others are `accelerate`, `deepspeed`, `horovod`, `keras` and `lightning`. Some need a helper
process next to their ranks (`sidecar`).
"""
