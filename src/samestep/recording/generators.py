"""The global random number generators of PyTorch, Python and NumPy: their states, seeds and restoration.

A sample that is augmented at random draws from whichever of the three its data set uses, so the three are always
handled together. NumPy's is left alone where nothing has imported NumPy: a script may do without it.
"""

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

States = Mapping[str, Any]  # by library


def states() -> States:
    """Read the states of the generators on the CPU."""
    read: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        read["numpy"] = numpy.random.get_state()
    return read


def restore(before: States) -> None:
    """Put the generators back into states that were read."""
    torch.set_rng_state(before["torch"])
    random.setstate(before["random"])
    if "numpy" in before:
        sys.modules["numpy"].random.set_state(before["numpy"])


@contextmanager
def kept() -> Iterator[None]:
    """Restore the generators after a block."""
    before = states()
    try:
        yield
    finally:
        restore(before)


def seed(of_torch: int, of_python: int, of_numpy: int) -> None:
    """Seed the generators on the CPU. `of_numpy` has 32 bits."""
    torch.default_generator.manual_seed(of_torch)
    random.seed(of_python)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(of_numpy)


def same(before: States, after: States) -> bool:
    """Whether no generator has been drawn from between two states."""
    if not torch.equal(before["torch"], after["torch"]) or before["random"] != after["random"]:
        return False
    if before.keys() != after.keys():
        return False
    if "numpy" not in before:
        return True
    (_, keys_before, *rest_before), (_, keys_after, *rest_after) = before["numpy"], after["numpy"]
    return rest_before == rest_after and bool((keys_before == keys_after).all())
