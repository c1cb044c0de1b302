"""Start by Ray: an actor on each of the job's nodes holds the node's far end.

As a program it is the process behind which one far end stands: `python -m samestep.cluster.start.ray ADDRESS HOST`.
"""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from io import FileIO
from typing import Any

from samestep import environment
from samestep.cluster.start.part import Part
from samestep.cluster.start.remote import far_end
from samestep.cluster.start.starter import Bring, Starter, Ways

_MODULE = "samestep.cluster.start.ray"
_PATIENCE = 5.0  # seconds that one question for output waits


def _bring(parts: Sequence[Part], ways: Ways) -> list[Bring]:
    return [
        Bring(
            command=tuple(far_end([sys.executable]))
            if part.node_rank == ways.this
            else (sys.executable, "-m", _MODULE, ways.ray or "auto", part.host),
            parts=(part,),
        )
        for part in parts
    ]


class FarEnd:
    """On a node: the far end's process, its input, and what it prints."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            far_end([sys.executable]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._printed: queue.Queue[tuple[int, bytes] | None] = queue.Queue()
        for number, stream in ((1, self._process.stdout), (2, self._process.stderr)):
            threading.Thread(target=self._read, args=(number, stream), daemon=True).start()

    def _read(self, number: int, stream: Any) -> None:
        for line in stream:
            self._printed.put((number, line))
        self._printed.put(None)

    def write(self, data: bytes) -> None:
        """More of its input; none ends it."""
        assert self._process.stdin is not None
        if data:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        else:
            self._process.stdin.close()

    def printed(self) -> list[tuple[int, bytes] | None]:
        """What it has printed since, after some seconds at most; a None for each stream that has ended."""
        try:
            found = [self._printed.get(timeout=_PATIENCE)]
            while not self._printed.empty():
                found.append(self._printed.get())
        except queue.Empty:
            return []
        return found

    def ended(self) -> int:
        """Its exit code, once its streams have ended."""
        return self._process.wait()


def main(arguments: Sequence[str]) -> int:
    """Stand for the far end on a node: pass its input and its output on."""
    ray: Any = import_module("ray")  # only some have it
    scheduling: Any = import_module("ray.util.scheduling_strategies")
    address, host = arguments
    here = environment.snapshot()
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        node = next(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == host)
        # Of no resources: what the node has is for the agent's ranks. A thread reads while another writes.
        actor = ray.remote(FarEnd).options(
            num_cpus=0,
            max_concurrency=4,
            scheduling_strategy=scheduling.NodeAffinitySchedulingStrategy(node, soft=False),
            # Ray shows these to all who see its pages, so no more of them than it takes to find this module.
            runtime_env={"env_vars": {name: here[name] for name in ("PYTHONPATH",) if name in here}},
        )
        there = actor.remote()
        threading.Thread(target=_pass_input, args=(ray, there), daemon=True).start()
        _pass_output(ray, there)
        return ray.get(there.ended.remote())
    except StopIteration:
        print(f"Ray has no live node {host}", file=sys.stderr)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
        print(str(error).strip().partition("\n")[0], file=sys.stderr)
    return 1


def _pass_input(ray: Any, there: Any) -> None:
    for line in FileIO(0, closefd=False):
        ray.get(there.write.remote(line))
    ray.get(there.write.remote(b""))


def _pass_output(ray: Any, there: Any) -> None:
    ends = 0
    while ends < 2:
        for each in ray.get(there.printed.remote()):
            if each is None:
                ends += 1
            else:
                number, line = each
                os.write(number, line)


STARTER = Starter(bring=_bring)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
