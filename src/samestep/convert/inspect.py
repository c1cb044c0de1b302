"""What a checkpoint of any format holds: its tensors, and what it says of itself."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from samestep.checkpoint.folder import AT_ONCE, Info, read_info
from samestep.checkpoint.inspect import UNFINISHED, Held, fault_in, held_as, held_in, listed
from samestep.convert.convert import format_of
from samestep.convert.formats import FORMATS
from samestep.run_folder import candidates
from samestep.training.metrics_log import Bar


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a checkpoint holds."""

    path: Path
    format: str
    tensors: Sequence[Held]
    info: Info | None  # of samestep's own
    tied: Mapping[str, str]  # further names of the model's tensors -> those under which they stand

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of the model, of each kind of the optimizer's state, and of the rest."""
        sums: defaultdict[str, int] = defaultdict(int)
        for held in self.tensors:
            key = held.name.rpartition(".")[2]
            sums[f"{held.kind} {key}" if held.kind == "optimizer" else held.kind] += held.bytes
        return dict(sums)

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "format": self.format,
            "bytes": self.bytes_by_kind(),
            "tied": dict(self.tied),
            "info": None if self.info is None else asdict(self.info),
            "tensors": [asdict(held) for held in self.tensors],
        }


def verified(place: Path) -> dict[Path, str | None]:
    """What is wrong with each checkpoint that a path holds, None where it is whole; with a bar, as it may take long.

    Raises CheckpointError where there are none.
    """
    paths = [each.path for each in listed(place) if each.state != UNFINISHED]
    sizes = [file.stat().st_size for path in paths for file in path.iterdir()]
    with Bar("verify", sum(-(-size // AT_ONCE) for size in sizes)) as bar:
        return {path: fault_in(path, partial(_advance, bar, path.name)) for path in paths}


def _advance(bar: Bar, name: str, _: int) -> None:
    bar.advance(name)


def inspect(path: Path) -> Contents:
    """Look into a checkpoint of any format, without reading its tensors. Raises UserError for what is none."""
    if found := candidates(path):  # the newest of them, with the optimizer's state, too
        info = read_info(found[0])
        return Contents(path=found[0], format="samestep", tensors=held_in(found[0]), info=info, tied=info.tied)
    form = format_of(path)
    with FORMATS[form].open(path) as weights:
        tensors = [held_as("model", name, entry) for name, entry in weights.entries.items()]
        return Contents(path=path, format=form, tensors=tensors, info=None, tied=weights.tied)
