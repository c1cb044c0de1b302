"""Expert parallel: data ranks in groups share out the experts of a mixture, and exchange tokens (all-to-all).

Each rank of the expert axis has samples of its own and a part of the experts. A token travels to the rank that holds
the expert which its router chose, and what the expert makes of it travels back; no token is dropped, and there is no
capacity. (Lepikhin et al. 2021, "GShard", section 3; Fedus et al. 2022, "Switch transformers", section 2.)

Read `find` first: what counts as experts. Then `stacked` and `listed`: how the two kinds compute with a part of them.
`share` applies a plan to a model; `parallel.collectives` has the all-to-all and its backward.

For E experts over the e ranks of the expert axis, each rank holds E / e of them and has its own samples: tokens go to
their experts' ranks by an all-to-all and come back by another. Gradients of an expert are sums over the tokens of all
e ranks already; `ddp.average_experts` adds the ranks that hold the same experts.
"""
