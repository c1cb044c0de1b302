"""Which samples of a data set a forward has: the numbers of the batch from a DataLoader that went into it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from samestep.recording.forward import GIVEN, NUMBERED
from samestep.recording.samples import ForwardRows, rows_of

_KEPT = 8  # batches; frameworks take one ahead of the one in use


@dataclass(kw_only=True)
class _Batch:
    samples: Sequence[str]
    hashes: Sequence[Sequence[str]]  # of each of its tensors, by row
    used: bool = False


class GivenBatches:
    """The last batches that DataLoaders gave."""

    def __init__(self) -> None:
        self._batches: deque[_Batch] = deque(maxlen=_KEPT)
        self._new: list[str] = []  # samples since the last forward in training
        self._evaluated = False  # whether the last forward was not in training

    def add(self, samples: Sequence[str], batch: Any) -> None:
        """Register a batch on its way to the script, with the name of each sample."""
        rows = rows_of((batch,), {})
        hashes = list(rows.hashes.values()) if rows is not None and rows.batch == len(samples) else []
        self._batches.append(_Batch(samples=samples, hashes=hashes))
        if self._evaluated:
            self._new, self._evaluated = [], False
        self._new += samples

    def columns(self, rows: ForwardRows | None, *, training: bool) -> dict[str, list[str]]:
        """Return what is known of a forward's samples: by row, and those given since the last one in training."""
        columns: dict[str, list[str]] = {GIVEN: list(self._new)} if self._new and training else {}
        self._evaluated = not training
        if training:
            self._new = []
        batch = self._batch_of(rows) if rows is not None else None
        if batch is not None:
            batch.used = True
            columns[NUMBERED] = list(batch.samples)
        return columns

    def _batch_of(self, rows: ForwardRows) -> _Batch | None:
        """The batch whose rows these are; if the script has made others of them, the last one of this size."""
        latest = [batch for batch in reversed(self._batches) if len(batch.samples) == rows.batch]
        hashes_of_rows = [list(hashes) for hashes in rows.hashes.values()]
        for batch in latest:
            if any(list(hashes) in hashes_of_rows for hashes in batch.hashes):
                return batch
        return next((batch for batch in latest if not batch.used), next(iter(latest), None))
