"""Tensors without memory, and process groups without other ranks: what rehearsals run on."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

__all__ = [
    "DataDependentOutputException",  # raised where code asks for the value of a tensor that has none
    "DynamicOutputShapeException",  # raised where a result's shape depends on values
    "FakeTensor",
    "FakeTensorMode",
]


FAKES_LOGGER = "torch._subclasses.fake_tensor"  # logs each operator that fails on fake tensors


class QuickFakeMode(FakeTensorMode):
    """A fake mode whose keys of PyTorch's cache of results may be built faster, by `add_to_key`."""

    def add_to_key(self, key: list[Any], args: Any, others: tuple[Any, ...]) -> None:
        """Append what identifies an operator's arguments; PyTorch's own way, which raises for what it doesn't cache.

        `others`: what PyTorch's method takes after the arguments, which differs between versions.
        """
        super()._prep_args_for_hash(key, args, *others)

    def _prep_args_for_hash(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, result: list[Any], args: Any, *others: Any
    ) -> None:
        # Where a version has no such method, it is never called, and the keys are built as PyTorch builds them.
        self.add_to_key(result, args, others)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and every operator would pass another call


def fake_store() -> dist.Store:
    """A store for the process group "fake", whose other ranks don't exist; the import registers that back end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def swap_tensor_meta(wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Wrap DTensor's method that runs an operator on whole shapes, to know its result's; returns what undoes that."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    before = ShardingPropagator._propagate_tensor_meta_non_cached
    ShardingPropagator._propagate_tensor_meta_non_cached = wrap(before)

    def restore() -> None:
        ShardingPropagator._propagate_tensor_meta_non_cached = before

    return restore


def forget_meshes() -> None:
    """Clear DTensor's caches by mesh: another rank's mesh compares equal and has other groups."""
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
