"""A session's state to disk and back: model, optimizer, random numbers, and where the training stood."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoint.info import Info
from samestep.checkpoint.load import Loader
from samestep.checkpoint.save import Saver
from samestep.cluster.world import World
from samestep.engines.base import Checkpointed
from samestep.layout import Layout
from samestep.parallel.pieces import Piece, whole_piece
from samestep.versions import versions


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
) -> None:
    """Save what a trainer is after `step` steps. Raises CheckpointError where it can't be written."""
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
        tied=trainer.tied(),
        versions=versions(),
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    saver.save({**trainer.pieces(), **_random_pieces(world)}, info)


def load_state(trainer: Checkpointed, loader: Loader, world: World, layout: Layout) -> None:
    """Become what was saved, under this layout. Raises CheckpointError where the checkpoint is another model's."""
    loader.check(trainer.entries(), trainer.tied())
    random: dict[str, Piece] = {}
    states = _random_states(world)
    # Ranks of another layout hold other samples, so there is no state of theirs; they draw new random numbers.
    if loader.info.layout == str(layout) and loader.info.processes == world.world_size:
        random = {name: whole_piece(state) for name, (state, _) in states.items() if name in loader.entries}

    def read(pieces: Mapping[str, Piece]) -> None:
        loader.read({**pieces, **random})

    trainer.restore(loader.info.step, loader.entries, read, loader.info.scaler)
    for name in random:
        state, put_back = states[name]
        put_back(state)
    if not random:
        torch.manual_seed(torch.initial_seed() + loader.info.step)


def _random_pieces(world: World) -> dict[str, Piece]:
    return {name: whole_piece(state) for name, (state, _) in _random_states(world).items()}


def _random_states(world: World) -> dict[str, tuple[Tensor, Callable[[Tensor], Any]]]:
    """The state of each of this rank's random number generators, and what sets it."""
    states: dict[str, tuple[Tensor, Callable[[Tensor], Any]]] = {
        f"random.{world.rank}": (torch.get_rng_state(), torch.set_rng_state)
    }
    if world.device.type != "cpu":
        of_device = torch.get_device_module(world.device)
        states[f"random.{world.rank}.{world.device.type}"] = (of_device.get_rng_state(), of_device.set_rng_state)
    return states
