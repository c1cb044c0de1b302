"""The files of a record: a line of JSON an event, and tensors one after the other in a file of bytes."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EVENTS, TENSORS = "events.jsonl", "tensors.bin"
_STEP = b'{"event": "step"'  # the beginning of such an event's line


class RecordWriter:
    """Writes one rank's record; a tensor is flushed before the next is copied.

    Each event is flushed to the operating system, so that a killed rank leaves its records.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._events = (folder / EVENTS).open("w", encoding="utf-8")
        self._tensors = (folder / TENSORS).open("wb")

    def event(self, kind: str, **values: Any) -> None:
        """Write an event, after the tensors that it refers to."""
        self._tensors.flush()
        self._events.write(json.dumps({"event": kind, **values}) + "\n")
        self._events.flush()

    def tensor(self, value: Tensor) -> dict[str, Any]:
        """Append a tensor, and return where it stands: for an event."""
        value = value.detach()
        if value.is_sparse:
            value = value.to_dense()
        value = value.cpu().contiguous()
        at = self._tensors.tell()
        self._tensors.write(value.reshape(-1).view(torch.uint8).numpy().data)
        return {"at": at, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}

    def close(self) -> None:
        self._events.close()
        self._tensors.close()


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """The events of a rank; the last line of one that was killed may be half a line."""
    file = folder / EVENTS
    if not file.is_file():
        return
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def steps_in(folder: Path) -> int:
    """The number of steps in a rank's record so far."""
    try:
        return (folder / EVENTS).read_bytes().count(_STEP)
    except OSError:  # none yet
        return 0


def load(folder: Path, place: Mapping[str, Any]) -> Tensor:
    """A tensor of a rank's record, as it was written."""
    dtype = getattr(torch, place["dtype"])
    size = math.prod(place["shape"]) * dtype.itemsize
    with (folder / TENSORS).open("rb") as file:
        file.seek(place["at"])
        data = file.read(size)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(place["shape"])
