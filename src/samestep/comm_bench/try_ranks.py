"""`python -m samestep.comm_bench.try_ranks FILE DEVICE RANKS FIRST LIMIT`: starts the ranks that try a back end."""

import sys
from pathlib import Path

from samestep.comm_bench.support import try_rank
from samestep.launch import local


def main(file: str, device: str, ranks: str, first: str, limit: str) -> None:
    local.start(try_rank, (Path(file), device, int(first), float(limit)), int(ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])
