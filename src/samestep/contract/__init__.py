"""The contract of a task: what a model, its data and its loss must keep so that every layout can take the same step.

It is checked once, in one process, on the first samples, before any rank starts. Read `check` first (the parts in
their order), then `trial` (how a training forward is run here), `samples` (data and collate), `parts` (the forwards
and backwards of the samples at once and in two parts), `watched` (what a forward does besides its loss), `step` (what
holds of one forward and backward: loss, parameters, draws), `second_gradients` (which not every layout can have),
`coupling` (which code couples the samples, where the parts don't add up), `decisions` (solvers whose steps depend on
the batch), `draw_switches` (which setting of a configuration makes a forward draw), `scores` (evaluation), and
`errors` (what ends a check, and how a message names a line).

What the contract is, in one sentence: the loss of a batch is a sum over its samples (or what it gathers of others is
declared), its count says over how many terms, forward and draws depend on samples and step alone, and all that is
trained is a parameter of the model. From that follows that any cut of a batch over ranks and micro-batches adds up.
"""
