"""`python -m samestep.handwritten JOB.yaml --folder F`: one process, a rank of torchrun's, or several by spawn."""

import argparse
from pathlib import Path

from samestep import environment
from samestep.handwritten.ranks import run_rank, spawn_ranks
from samestep.ranks import Ranks


def main() -> int:
    """Train on this rank, or start ranks that do; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m samestep.handwritten", description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="where the run's files go")
    parser.add_argument("--spawn", type=int, metavar="N", help="start N processes by torch.multiprocessing.spawn")
    parser.add_argument(
        "--local-rank", type=int, help="given by torch.distributed.launch; its environment says it too"
    )
    options = parser.parse_args()
    if options.spawn:
        spawn_ranks(options.job, options.folder, options.spawn)
        return 0
    alone = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)
    return run_rank(options.job, options.folder, environment.ranks() or alone)


if __name__ == "__main__":
    raise SystemExit(main())
