"""A script that needs no PyTorch: it tells which rank it is, and then does what its first argument says."""

import os
import signal
import sys
import time
import traceback
from pathlib import Path

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")


def main(way: str, *arguments: str) -> None:
    rank = int(os.environ["RANK"])
    told = " ".join(f"{name}={os.environ[name]}" for name in NAMES)
    print(f"{told} colour={os.environ.get('SAMESTEP_COLOUR')} {list(arguments)}", flush=True)
    if way == "raise" and rank == 1:
        print("about to fail", file=sys.stderr, flush=True)
        raise ValueError("planted in rank 1")
    if way == "lose" and rank == 0:  # as those do whose peer is gone
        while not Path("rank-1-is-lost").exists():
            time.sleep(0.05)
        raise ConnectionResetError("[Errno 104] Connection reset by peer")
    if way == "lose":
        try:
            raise ValueError("planted in rank 1")
        except ValueError:
            traceback.print_exc()
            sys.stderr.flush()
            Path("rank-1-is-lost").touch()
            time.sleep(5)  # as slow to end as an interpreter with much to take apart
            raise
    if way == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "exit":
        sys.exit(int(arguments[0]))
    if way == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(f"rank {rank} fails the first time")
    if way == "deaf":  # it goes on with what it does
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: Path(f"{arguments[0]}-{rank}-told").touch())
    if way in ("wait", "deaf", "raise", "kill"):
        if arguments:
            Path(f"{arguments[0]}-{rank}").touch()
        time.sleep(60)


main(*sys.argv[1:])
