"""How a layout is applied to a model.

Read `apply` first: one function that calls the others in one order. Then, by what it calls:

- `trace`, `recorder`, `calls`, `dataflow`: follow the model's forward, before anything is changed.
- `context`, `tensor`, `pipeline`, `experts`: split tokens, slice matrices, cut stages, share experts.
- `exact`: what keeps random numbers, batch statistics and precision those of one process.
- `recompute`, `compile`, `offload`: what happens to single blocks (`blocks`).
- `chunked_logits`: the output layer and its cross-entropy, some tokens at a time.
- `ddp`, `zero1`, `fsdp`, `shared_replicas`, `sparse_rows`: data ranks and their gradients.
- `sharding`: the table of who holds which part of which parameter; `state_shards`: the same for checkpoints.
- `joined_optimizer`, `spread_optimizer`, `whole_optimizer`, `optimizer_kinds`: optimizers of parts and of wholes.
- `step_loss`, `coupled_loss`: the loss of a step. `deferred_init`, `init_recorder`: the initial weights.
- `parallel_model`: what comes out, as engines step it.
"""
