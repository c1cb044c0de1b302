"""The optimizer under a layout: which rank steps what, with which state, and where that is kept.

- `spread`: applies a layout to an optimizer; read it first. `kinds`: by trial, whether parts of a parameter may be
  stepped apart. `joined`: several optimizers as one.
- `whole`: optimizers that need whole parameters, on shards. `lots`: parameters that are stepped together, so that a
  step's temporaries exist for one lot at a time.
- `master_weights`, `average`: what is kept besides parameters. `rounded`: Adam's averages in bf16 or 8 bits.
- `offloaded`: state and step on the CPU. `shared`: one copy of the parameters for the replicas of a host.
- `late`: what a ZeRO-1 step has changed, on its way during the next forward.

Who owns a parameter's state is decided by the layout's shards (`parallel.sharding`), not here: these modules step
what a rank is given, and send nothing but the new values of parameters that others have as well.
"""
