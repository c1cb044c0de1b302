"""Saves and loads a session's state: model, optimizer, random number generators, and the training's step."""

import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from samestep.checkpoint.compatibility import Base, check_base, fingerprint
from samestep.checkpoint.identity import Identity
from samestep.checkpoint.info import Info
from samestep.checkpoint.load import CheckpointLoader
from samestep.checkpoint.save import Saver
from samestep.engines.base import Checkpointed
from samestep.errors import CheckpointError
from samestep.launch.world import World
from samestep.layout import Layout
from samestep.parallel.state_shards import MODEL, Piece, whole_piece
from samestep.run_folder import versions
from samestep.training.adapters import AdapterFacts


def save_state(
    trainer: Checkpointed,
    saver: Saver,
    world: World,
    layout: Layout,
    *,
    engine: str,
    step: int,
    epoch: int | None = None,
    recipe: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    extra: Mapping[str, Any] | None = None,
    base: Base | None = None,
    identity: Identity | None = None,
) -> None:
    """Save a trainer's state after `step` steps, without the parameters of `base`.

    Raises CheckpointError where it can't be written, or a parameter of `base` has changed.
    """
    pieces = {**trainer.pieces(), **_random_pieces(world)}
    if base is not None:
        if fingerprint(pieces, base.left_out, saver.idle_group()) != base.fingerprint:
            raise CheckpointError(
                "a frozen parameter has changed since the training began, as by an average that the forward keeps in "
                "it, so it can't be left out of a checkpoint; use run.checkpoint.only_trained: false"
            )
        pieces = _without(base, pieces)
    info = Info(
        step=step,
        epoch=epoch,
        layout=str(layout),
        processes=world.world_size,
        engine=engine,
        recipe=recipe or {},
        scaler=trainer.scaler_state(),
        metrics=metrics or {},
        extra=extra or {},
        base=base,
        identity=identity,
        tied=trainer.tied(),
        versions=versions(),
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    saver.save(pieces, info)


def saved_pieces(trainer: Checkpointed, world: World, base: Base | None) -> dict[str, Piece]:
    """This rank's pieces of a checkpoint that were saved now. Before the first step an optimizer has no state."""
    return _without(base, {**trainer.pieces(), **_random_pieces(world)})


def _without(base: Base | None, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    left_out = () if base is None else base.left_out
    return {name: piece for name, piece in pieces.items() if name.removeprefix(MODEL) not in left_out}


def base_of(trainer: Checkpointed, adapter: AdapterFacts | None, group: dist.ProcessGroup) -> Base:
    """The frozen parameters that a trainer's checkpoints leave out, with their fingerprint; every rank must call."""
    names = trainer.frozen()
    return Base(
        left_out=tuple(sorted(names)),
        fingerprint=fingerprint(trainer.pieces(), names, group),
        adapter=adapter.config if adapter is not None else {},
        adapter_name=adapter.name if adapter is not None else "",
    )


def load_state(trainer: Checkpointed, loader: CheckpointLoader, world: World, layout: Layout) -> None:
    """Load a checkpoint into a trainer of any layout. Raises CheckpointError where it is of another model.

    Parameters that the checkpoint leaves out are not changed.
    """
    base, entries = loader.info.base, trainer.entries()
    left_out: set[str] = set()
    if base is not None:
        here = {name.removeprefix(MODEL) for name in entries}
        names = [name for name in base.left_out if name in here]
        check_base(base, names, fingerprint(trainer.pieces(), names, loader.group), loader.folder)
        left_out = {MODEL + name for name in base.left_out}
    loader.check({name: entry for name, entry in entries.items() if name not in left_out}, trainer.tied())
    generators: dict[str, Piece] = {}
    states = _random_states(world)
    # Under another layout ranks have other samples, so saved generator states don't apply; the ranks are reseeded.
    if loader.info.layout == str(layout) and loader.info.processes == world.world_size:
        generators = {name: whole_piece(state) for name, (state, _) in states.items() if name in loader.entries}

    def read(pieces: Mapping[str, Piece]) -> None:
        """Read the model, the optimizer, and this rank's generators."""
        held = {name: piece for name, piece in pieces.items() if name not in left_out}
        loader.read({**held, **generators})

    trainer.restore(loader.info.step, loader.entries, read, loader.info.scaler)
    for name in generators:
        state, put_back = states[name]
        put_back(state)
    if not generators:
        torch.manual_seed(torch.initial_seed() + loader.info.step)


def _random_pieces(world: World) -> dict[str, Piece]:
    return {name: whole_piece(state) for name, (state, _) in _random_states(world).items()}


def _random_states(world: World) -> dict[str, tuple[Tensor, Callable[[Tensor], Any]]]:
    """The state of each of this rank's random number generators, by name, and the function that sets it.

    A generator's states all have one shape, since a checkpoint's state is read into this tensor.
    """
    states: dict[str, tuple[Tensor, Callable[[Tensor], Any]]] = {
        f"random.{world.rank}": (torch.get_rng_state(), torch.set_rng_state),
        f"random.{world.rank}.python": (_python_state(), _set_python_state),
    }
    if (numpys := _numpy_state()) is not None:
        states[f"random.{world.rank}.numpy"] = numpys, _set_numpy_state
    if world.device.type != "cpu":
        of_device = torch.get_device_module(world.device)
        states[f"random.{world.rank}.{world.device.type}"] = (of_device.get_rng_state(), of_device.set_rng_state)
    return states


_TWISTER = "MT19937"  # NumPy's default global generator


def _python_state() -> Tensor:
    """Python's generator state [628]: version, Mersenne Twister's 624 words and position, and the cached normal."""
    version, words, kept = random.getstate()
    return torch.tensor([version, *words, kept is not None, _bits(kept or 0.0)])


def _set_python_state(state: Tensor) -> None:
    """Set Python's generator from a state of `_python_state`."""
    version, *words, has_kept, kept = state.tolist()
    random.setstate((version, tuple(words), _number(kept) if has_kept else None))


def _numpy_state() -> Tensor | None:
    """NumPy's global generator state [627]: Mersenne Twister's 624 words and position, and the cached normal."""
    kind, words, position, has_kept, kept = np.random.get_state()
    if kind != _TWISTER:
        return None
    return torch.tensor([*np.asarray(words).tolist(), position, has_kept, _bits(float(kept))])


def _set_numpy_state(state: Tensor) -> None:
    """Set NumPy's global generator (MT19937) from a state of `_numpy_state`."""
    *words, position, has_kept, kept = state.tolist()
    np.random.set_state((_TWISTER, np.asarray(words, dtype=np.uint32), position, has_kept, _number(kept)))


def _bits(number: float) -> int:
    """The bits of a float64 as an integer."""
    return int(np.float64(number).view(np.int64))


def _number(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))
