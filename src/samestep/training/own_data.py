"""What a loop of one's own learns from: the data set of which it was dealt batches, and its code.

A checkpoint says both. After a resume the data set is compared when the loop gives it, the code at the first step.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist

from samestep.checkpoint.code import code_of
from samestep.checkpoint.identity import Identity, LearnsFrom, changed_code
from samestep.checkpoint.load import CheckpointLoader
from samestep.data.fingerprint import SamplesIdentity, identify
from samestep.data.types import Samples
from samestep.training.learned_from import ACCEPT_IN_LOOP, code_line, looked, refuse_other_data, told

Warn = Callable[[str], None]


class OwnData:
    """The data and the code of a custom training loop, as far as it has given them to its session."""

    def __init__(self) -> None:
        self._objects: list[Any] = [sys.modules.get("__main__")]  # whose code is part of a step
        self._loss: Any = None
        self._samples: Samples | None = None
        self._known: SamplesIdentity | None = None  # of `_samples`
        self._data_of: CheckpointLoader | None = None  # with which the data are still to be compared
        self._code_of: CheckpointLoader | None = None  # with which the code is
        self._accepts = False
        self._code: Mapping[str, str] | None = None  # as it was when it was read by Python, or soon after

    def uses(self, objects: Iterable[Any]) -> None:
        """Count classes and functions among the code."""
        self._objects += objects

    def resumed(self, loader: CheckpointLoader, *, accepts: bool) -> None:
        """Compare what the loop gives from now on with a checkpoint. `accepts`: other data are taken."""
        if loader.info.identity is not None:
            self._data_of = self._code_of = loader
            self._accepts = accepts

    def dealt(self, samples: Samples, collate: Any, group: Callable[[], dist.ProcessGroup], warn: Warn) -> None:
        """Note the data set of which batches are dealt; every rank must call it.

        Raises CheckpointError where it isn't the one of the checkpoint that was resumed.
        """
        if samples is not self._samples:
            self._samples, self._known = samples, None
        if self._loss is None:
            self._objects.append(collate)
        if self._data_of is None:
            return
        loader, self._data_of = self._data_of, None
        compared = looked(LearnsFrom(train=samples), loader, group())
        self._known = compared.now.train
        if not self._accepts:
            refuse_other_data(compared, loader.folder, ACCEPT_IN_LOOP)
        for line in told(compared, loader):
            warn(line)

    def stepped(self, loss: Any, warn: Warn) -> None:
        """Note the loss of the first step, and compare the code with that of a checkpoint."""
        if self._loss is not None:
            return
        self._loss = loss
        self._objects.append(loss)
        if self._code_of is not None and (before := self._code_of.info.identity) is not None:
            if names := changed_code(before, self._code_now()):
                warn(code_line(names, self._code_of.folder))
            self._code_of = None

    def identity(self) -> Identity | None:
        """What a checkpoint says of data and code; None where no batches were dealt."""
        if self._samples is None:
            return None
        if self._known is None:
            self._known = identify(self._samples)
        return Identity(train=self._known, code=self._code_now())

    def _code_now(self) -> Mapping[str, str]:
        """The code that makes a step: looked at once, since files may change while the loop runs."""
        if self._code is not None:
            return self._code
        code = code_of(self._objects)
        if self._loss is not None:
            self._code = code
        return code
