"""Pickles that would run code where they are loaded carelessly, inside files that look like a model's weights."""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.folder import sums_of
from samestep.checkpoint.info import sealed


class Trap:
    """Unpickled, it makes a folder: the trace of code that ran."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def trapped_state(trace: Path, prefix: str = "") -> dict[str, Any]:
    return {f"{prefix}weight": torch.ones(2), f"{prefix}bias": Trap(trace)}


def trap_index(folder: Path, trace: Path) -> None:
    """Put a trap into the index of a folder in PyTorch's format."""
    file = folder / ".metadata"
    index = pickle.loads(file.read_bytes())
    index.planner_data = Trap(trace)
    file.write_bytes(pickle.dumps(index))


def lead_out(folder: Path, path: str) -> None:
    """Have the index of a folder in PyTorch's format say that its tensors are in another file."""
    file = folder / ".metadata"
    index = pickle.loads(file.read_bytes())
    for stored in index.storage_data.values():
        stored.relative_path = path
    file.write_bytes(pickle.dumps(index))


def trap_tensors(folder: Path, trace: Path) -> None:
    """Put a trap in the place of the tensors of a folder in PyTorch's format."""
    index_file = folder / ".metadata"
    index = pickle.loads(index_file.read_bytes())
    for number, stored in enumerate(index.storage_data.values()):
        file = folder / stored.relative_path
        if not number:
            torch.save(Trap(trace), file)
        stored.relative_path, stored.offset = next(iter(index.storage_data.values())).relative_path, 0
        stored.length = (folder / stored.relative_path).stat().st_size
    index_file.write_bytes(pickle.dumps(index))


def renew_sums(folder: Path) -> None:
    """Make a checkpoint's sums fit its files again, as one who altered them would."""

    def of_files(values: dict[str, Any]) -> None:
        values["files"] = {name: asdict(each) for name, each in sums_of(folder, values["files"]).items()}

    rewrite_info(folder, of_files)


def rewrite_info(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what a checkpoint says of itself, and make its own sum fit again."""
    file = folder / "checkpoint.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    values.pop("sum", None)
    change(values)
    file.write_text(sealed(values), encoding="utf-8")
