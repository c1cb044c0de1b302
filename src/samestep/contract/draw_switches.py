"""Which setting of a model's configuration makes its forward draw: found by switching settings off, one at a time.

Models of transformers have draws that their configurations switch, some of them on by default, such as the masks of
SpecAugment (Park et al. 2019) in speech models, which NumPy draws.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# Parts of the names of settings that may have to do with random numbers.
_NAMES = ("augment", "drop", "mask", "prob", "noise", "jitter", "random", "sampl")

_UNSET = object()


def switch_of_draws(model: nn.Module, draws: Callable[[], str | None]) -> str | None:
    """Return the setting without which a forward draws nothing, such as "apply_spec_augment=False"; None if none is.

    `draws` runs the forward and names the generator that it advances, or None.
    """
    for config in _configurations(model):
        for name, value in vars(config).items():
            if not _may_switch(name, value):
                continue
            off = False if isinstance(value, bool) else type(value)(0)
            with _switched(model, config, name, off):
                try:
                    stopped = draws() is None
                except Exception:  # the model needs the setting, so it is not the one to advise
                    continue
            if stopped:
                return f"{name}={off}"
    return None


def _configurations(model: nn.Module) -> list[Any]:
    """The configurations that modules of a model have, the outermost first."""
    by_identity = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in by_identity.values() if hasattr(config, "__dict__")]


def _may_switch(name: str, value: Any) -> bool:
    """Whether a setting is on, and may have to do with draws."""
    on = value is True or (isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0)
    return on and any(part in name for part in _NAMES)


@contextmanager
def _switched(model: nn.Module, config: Any, name: str, value: Any) -> Iterator[None]:
    """Change a setting, also where modules keep it under its name."""
    holders = [
        config,
        *(module for module in model.modules() if isinstance(vars(module).get(name), (bool, int, float))),
    ]
    before = [getattr(holder, name, _UNSET) for holder in holders]
    for holder in holders:
        setattr(holder, name, value)
    try:
        yield
    finally:
        for holder, kept in zip(holders, before, strict=True):
            setattr(holder, name, kept)
