"""`python -m samestep.doctor.try_ranks FOLDER DEVICE RANKS`: the process that starts the ranks of a trial."""

import sys
from pathlib import Path

from samestep.doctor.collectives import try_all
from samestep.launch import local


def main(folder: str, device: str, ranks: str) -> None:
    local.start(try_all, (Path(folder), device), int(ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])
