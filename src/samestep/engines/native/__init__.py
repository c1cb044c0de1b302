"""samestep's own engine, on PyTorch's parts: every layout, and the step of one process under each of them.

Read `trainer` first (the step, and how its losses are weighed), then `engine` (what a job may ask of it).
"""
