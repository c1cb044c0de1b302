"""The hooks of a job: found before ranks start, called on each rank; what they ask for, on which all ranks agree."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from samestep.comm.mesh import new_group
from samestep.errors import UserError
from samestep.hooks import Ask, Began, Ended, Evaluated, Hooks, Saved, Stepped
from samestep.tasks.registry import find_callable

_WHAT = "a subclass of samestep.Hooks such as path/to/file.py:Class"


def check_hooks(names: Sequence[str]) -> None:
    """Raise UserError for a hook that isn't there, is no subclass of Hooks, or can't be made."""
    for name in names:
        _made(name)


def _made(name: str) -> Hooks:
    hook_class = find_callable(name, "run.hooks", _WHAT, _is_hook)
    if not _is_hook(hook_class):
        raise UserError(f'run.hooks has "{name}", which is no subclass of samestep.Hooks; use {_WHAT}')
    try:
        return hook_class()
    except Exception as error:  # whatever a user's class raises
        raise UserError(
            f'run.hooks has "{name}", which can\'t be made without arguments: {type(error).__name__}: {error}'
        ) from error


def _is_hook(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Hooks) and value is not Hooks


class CalledHooks:
    """Calls the hooks of a training on this rank, and collects what they ask for."""

    def __init__(self, names: Sequence[str], world_size: int) -> None:
        """Every rank must construct one."""
        self._hooks = {name: _made(name) for name in names}
        self._asked = Ask()
        self._group = new_group(range(world_size), backend="gloo") if names and world_size > 1 else None

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def began(self, began: Began) -> None:
        for hooks in self._hooks.values():
            hooks.on_begin(began)

    def stepped(self, stepped: Stepped) -> None:
        self._call(lambda hooks: hooks.on_step(stepped))

    def evaluated(self, evaluated: Evaluated) -> None:
        self._call(lambda hooks: hooks.on_evaluation(evaluated))

    def saved(self, saved: Saved) -> None:
        for hooks in self._hooks.values():
            hooks.on_checkpoint(saved)

    def ended(self, ended: Ended) -> None:
        for hooks in self._hooks.values():
            hooks.on_end(ended)

    def _call(self, act: Callable[[Hooks], Ask | None]) -> None:
        """Call `act` with each hook, and add what it asks for to what was asked before."""
        for name, hooks in self._hooks.items():
            ask: Any = act(hooks)
            if ask is None:
                continue
            if not isinstance(ask, Ask):
                raise UserError(f'run.hooks: "{name}" returned {type(ask).__name__}; return samestep.Ask, or nothing')
            before = self._asked
            self._asked = Ask(
                stop=before.stop or ask.stop,
                save=before.save or ask.save,
                evaluate=before.evaluate or ask.evaluate,
                log={**before.log, **ask.log},
            )

    def asked(self) -> Ask:
        """What the hooks have asked for since the last call; the same on every rank, which all must call it.

        Raises UserError where ranks' hooks ask for different things.
        """
        ask, self._asked = self._asked, Ask()
        if self._group is None:
            return ask
        # A collective needs a message of one size: the reason to stop is compared by its checksum.
        reason = 0 if ask.stop is None else 1 + zlib.crc32(ask.stop.encode())
        mine = torch.tensor([reason, ask.save, ask.evaluate], dtype=torch.int64)
        of_ranks = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(of_ranks, mine, group=self._group)
        for rank, other in enumerate(of_ranks):
            if not torch.equal(other, of_ranks[0]):
                raise UserError(
                    f"run.hooks: rank {rank} asks for {_told(other)} and rank 0 for {_told(of_ranks[0])}; ask by "
                    "what hooks are told, which is the same on all ranks, not by a rank's own time, files or random "
                    "numbers"
                )
        return ask


def _told(message: torch.Tensor) -> str:
    """What a rank's message asks for."""
    wanted = [
        word for word, asks in zip(("a stop", "a save", "an evaluation"), message.tolist(), strict=True) if asks
    ]
    return " and ".join(wanted) or "nothing"
