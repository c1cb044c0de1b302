"""samestep's own checkpoints: their weights, and a checkpoint at step 0 of weights from elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from samestep.checkpoint.folder import Info, fault_of, read_info
from samestep.checkpoint.one_process import Tensors, write_weights
from samestep.convert.base import OutputOptions, Weights
from samestep.errors import CheckpointError
from samestep.parallel.state_shards import MODEL
from samestep.parallel.weight_average import AVERAGE
from samestep.run_folder import candidates, step_of, versions


def recognises(path: Path) -> bool:
    return bool(candidates(path))


def fits(path: Path) -> bool:
    return step_of(path) is not None


@contextmanager
def open_(path: Path) -> Iterator[Weights]:
    """The weights of a checkpoint, or of the newest one of a folder or a run. Raises CheckpointError if damaged."""
    found = candidates(path)
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint of samestep; use the folder of one, or a run's")
    info = read_info(found[0])
    if fault := fault_of(found[0], info.files):
        raise CheckpointError(f"checkpoint {found[0]} is damaged: {fault}")
    tensors = Tensors(found[0])
    names = [name.removeprefix(MODEL) for name in tensors.entries if name.startswith(MODEL)]
    # Where an average of the weights is kept, that is what is evaluated and exported.
    stored = {name: AVERAGE + name if AVERAGE + name in tensors.entries else MODEL + name for name in names}
    yield Weights(
        entries={name: tensors.entries[there] for name, there in stored.items()},
        read=lambda name: tensors.read(stored[name]),
        tied=info.tied,
        recipe=info.recipe,
        base=info.base,
    )


def write(into: Path, name: str, weights: Weights, _: OutputOptions) -> None:
    """A checkpoint of the weights alone, before the first step; a training from it begins with a new optimizer."""
    if step_of(Path(name)) not in (None, 0):
        raise CheckpointError(f"{name} is the name of a later step, and converted weights are at step 0; use step-0")
    info = Info(
        step=0,
        epoch=None,
        layout="",
        processes=0,
        engine="",
        recipe={},
        base=weights.base,
        tied=weights.tied,
        versions=versions(),
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_weights(into, weights.entries, weights.read, info)
