"""Stands for the process that starts the doctor's ranks: writes what they would, and ends as it is told."""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

REDUCE = {"collective": "reduce", "dtype": "float32"}
BROADCAST = {"collective": "broadcast", "dtype": "bfloat16"}


def write(folder: Path, rank: int, *lines: Mapping[str, object]) -> None:
    # Without samestep, whose import would take seconds of the time limit.
    (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    folder = Path(json.loads(sys.argv[3])[0])  # behind the function's name and the number of ranks
    way = os.environ["SAMESTEP_TEST_WAY"]
    if way == "raises":
        raise RuntimeError("planted")
    write(folder, 0, BROADCAST, {**BROADCAST, "works": True}, REDUCE, {**REDUCE, "works": True})
    if way == "hangs":
        write(folder, 1, BROADCAST, {**BROADCAST, "works": True}, REDUCE)
        time.sleep(600)
    else:
        reason = {"works": False, "reason": "a wrong result"}
        write(folder, 1, BROADCAST, {**BROADCAST, **reason}, REDUCE, {**REDUCE, "works": True})


if __name__ == "__main__":
    main()
