"""samestep's own engine, on PyTorch's parts: every layout, and the step of one process under each of them.

Read `trainer` first (the step, and how its losses are weighed), then `engine` (what a job may ask of it). Variants of
the step: `ordered` (sums in one order), `shared_replicas` (replicas of one host share their memory),
`less_communication` (replicas that send less than their gradients).
"""
