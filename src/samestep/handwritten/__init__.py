"""Jobs as an expert would write them by hand, in plain PyTorch: what engines are measured against.

Read `loop` first (the training loop), then `training` (a whole training on one rank) and `ranks` (how ranks start).
"""

PRECISIONS = frozenset({"fp64", "fp32", "bf16"})

# Files that ranks leave in the run's folder where it comes to nothing: why the job can't be trained so; a traceback.
REFUSED = "refused.txt"
FAILED = "failed-rank-"
