"""Ranks are forked from a server that has imported PyTorch once, so that a start takes tenths of a second.

Without it each rank would import everything anew: seconds of every core, for every rank of every start. The server is
multiprocessing's own; it lives as long as the process that starts ranks, and each start uses it again.
"""

import multiprocessing
import os
import sys
from multiprocessing.reduction import DupFd
from typing import Any

# Forking a process that has loaded the system's frameworks is not safe on macOS.
METHOD = "forkserver" if sys.platform == "linux" else "spawn"

_ALWAYS = ("samestep.api", "torch.distributed.elastic.multiprocessing.api", "samestep.cluster.start.served")

# Slow to import, and imported by the ranks of a job whose starting process has imported them.
_WHERE_USED = (
    "safetensors.torch",
    "tokenizers",
    "samestep.training.board",
    "torchmetrics.classification",
    "transformers.modeling_utils",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
)


def preload() -> None:
    """Say what the server imports when it starts; without effect on one that runs already."""
    if METHOD == "forkserver":
        multiprocessing.set_forkserver_preload([*_ALWAYS, *(name for name in _WHERE_USED if name in sys.modules)])


class Streams:
    """The standard output and error of the process that starts ranks, for ranks that a server of earlier forks.

    Pickled while a process is started, it takes the two file descriptors along; `take` puts them in place.
    """

    def __init__(self, descriptors: tuple[int, int] | None = None) -> None:
        self._descriptors = descriptors

    def __reduce__(self) -> tuple[Any, ...]:
        if METHOD == "spawn":
            return Streams, ()  # a spawned process inherits them
        return _received, (DupFd(1), DupFd(2))

    def take(self) -> None:
        for number, descriptor in enumerate(self._descriptors or (), start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def _received(output: Any, errors: Any) -> Streams:
    return Streams((output.detach(), errors.detach()))
