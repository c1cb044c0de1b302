"""The loop around the step: optimizers and schedules, evaluation, records, checkpoints.

In the order of reading:

- `fit`: a whole training on one rank. `loop`: its steps, and how they are logged. `session`: one rank's part, also
  for loops of one's own (`own_loop`; `own_loader` reads their DataLoaders).
- `optimizer`, `named_optimizer`, `schedule`, `adapters`: what is stepped, by what, and at which rate.
- `evaluation`, `early_stop`, `metrics_log`, `hooked`, `usage`, `result`: what is measured, shown and left on disk.
- `own_folder`, `earlier_run`: where a training writes, and what it finds there.
- `checkpointing`, `state`: when a checkpoint is saved, and what of a training goes into it. `learned_from`: what a
  resume compares of data and code, and `own_data` in a loop of one's own.
- `in_turn`: ranks whose model() writes files. `example`: the inputs with which layouts follow a model.
  `model_checks`: what is checked of the model on the ranks. `as_built`, `rounding`, `last_bits`,
  `update_rule`, `nonfinite_values`: parts of a proof.
- `rehearsal`, `step_work`: steps without values, and the work in them.

What a training is made of, and who calls whom: `fit` builds a `Training` (task, loader, session, optimizer), `loop`
takes its steps, and hands each step's values to `metrics_log` a step later. `checkpointing` and `evaluation` are
called between steps by all ranks at once.
"""
