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
        samples = self._samples_of(rows) if rows is not None else None
        if samples is not None:
            columns[NUMBERED] = list(samples)
        return columns

    def _samples_of(self, rows: ForwardRows) -> Sequence[str] | None:
        """The sample of each row: of the whole batch that these rows are, else of the rows wherever they stood.

        A rank may take its rows out of a batch that all ranks have, and one forward may have several batches.
        """
        latest = [batch for batch in reversed(self._batches) if len(batch.samples) == rows.batch]
        hashes_of_rows = [list(hashes) for hashes in rows.hashes.values()]
        for batch in latest:
            if any(list(hashes) in hashes_of_rows for hashes in batch.hashes):
                batch.used = True
                return batch.samples
        for hashes in hashes_of_rows:
            samples = self._by_row(hashes)
            if samples is not None:
                return samples
        batch = next((batch for batch in latest if not batch.used), next(iter(latest), None))
        if batch is None:
            return None
        batch.used = True
        return batch.samples

    def _by_row(self, hashes: Sequence[str]) -> list[str] | None:
        """The samples whose rows have these hashes, in the newest batches; None where one isn't there."""
        known: dict[str, list[str]] = {}
        for batch in self._batches:
            for of_tensor in batch.hashes:
                for hash_, sample in zip(of_tensor, batch.samples, strict=True):
                    known.setdefault(hash_, []).append(sample)
        # A label that several samples have does not identify one.
        if any(len(set(known.get(hash_, ()))) != 1 for hash_ in hashes):
            return None
        return [known[hash_][-1] for hash_ in hashes]
