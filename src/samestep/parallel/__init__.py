"""How a layout is applied to a model.

Read `apply` first: ten steps in one order. Then, by what it calls:

- `trace`, `recorder`, `calls`, `dataflow`: follow the model's forward, before anything is changed; `attributes` takes
  back what that changed, and `code_state` what stays in globals and caches.
- `context`, `tensor`, `pipeline`, `experts`: split tokens, slice matrices, cut stages, share experts.
- `exact`: what keeps random numbers, batch statistics and precision those of one process.
- `recompute`, `compile`, `offload`: what happens to single blocks (`blocks`).
- `ddp`, `zero1`, `fsdp`, `sparse_rows`, `ordered`: data ranks and their gradients; `unused_parameters`: those that a
  step doesn't reach.
- `sharding`: the table of who holds which part of which parameter; `state_shards`: the same for checkpoints;
  `holdings`: what a rank holds from step to step.
- `optimizer`: which rank steps what, and where its state is kept. `loss`: the loss of a step.
- `deferred_init`, `init_recorder`: the initial weights.
- `complex_parameters`, `low_rank`: kinds of parameters. `collectives`: those that have a backward.
- `own_messages`, `own_backwards`: models that send messages, or run a backward in the backward, themselves. `checks`,
  `layout_failure`: what a layout can't have, in one sentence. `variation`: values with which models are compared.
  `valueless`, `valueless_replicas`: rehearsals.
- `parallel_model`: what comes out, as engines step it.
"""
