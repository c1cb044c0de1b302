"""The parameter server: some ranks hold the parameters and step the optimizer, the others compute gradients.

    worker 0  worker 1  worker 2        ranks S, S + 1, ...: each takes its part of every batch
        |  \\    / | \\    /  |           push: gradients; pull: parameters
      server 0   server 1               ranks 0 to S - 1: each holds a shard of near-equal bytes

Read in this order: `settings` (what can be chosen), `shards` (which server holds which elements), `messages` (what
is sent), `worker` and `server` (one rank's step each), `member` (what both have: evaluation, checkpoints), `engine`.
Workers that may die: `restarting_worker` (away, back or lost), `worker_process` (what dies).

Li et al. 2014, "Scaling distributed machine learning with the parameter server" (OSDI), section 3: push and pull.
Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter server" (NeurIPS): the
bound.
Zheng et al. 2017, "Asynchronous stochastic gradient descent with delay compensation" (ICML): the compensation.
"""
