"""A trace leaves a model as it was, whatever containers its modules have."""

from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.parallel.attributes import Attributes
from samestep.parallel.trace import imagine, trace

pytestmark = pytest.mark.quick


def refuse(*_: Any, **__: Any) -> Any:
    raise TypeError("it is frozen")


class FrozenDict(OrderedDict[str, Any]):
    """As diffusers has its configurations: what was set when it was made can't be changed, nor copied this way."""

    clear = update = copy = pop = refuse
    __setitem__ = __delitem__ = refuse

    def __init__(self, size: int) -> None:
        super().__init__()
        OrderedDict.__setitem__(self, "size", size)
        OrderedDict.__setitem__(self, "names", ["a", "b"])


class FrozenList(list[int]):
    clear = copy = extend = __setitem__ = __delitem__ = refuse  # type: ignore[assignment]


class FrozenSet(set[int]):
    clear = update = copy = refuse  # type: ignore[assignment]


class Counted(dict[str, int]):
    """Counts what is done to it."""

    writes = 0

    def clear(self) -> None:
        Counted.writes += 1
        super().clear()

    def update(self, *given: Any, **named: Any) -> None:
        Counted.writes += 1
        super().update(*given, **named)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config, self.sizes, self.ways = FrozenDict(4), FrozenList([1, 2]), FrozenSet({3})
        self.known, self.caches, self.order = Counted(one=1), dict[int, Tensor](), ["first"]

    def forward(self, x: Tensor) -> Tensor:
        self.caches[len(x)] = x
        self.order.append("more")
        self.order.reverse()
        self.seen = x
        return self.linear(x) * self.config["size"]


def contents(layer: Layer) -> list[Any]:
    held = (layer.config, layer.sizes, layer.ways, layer.known, layer.caches, layer.order)
    return [*map(list, held), layer.config["names"]]


def test_what_a_forward_changes_is_restored_and_the_rest_is_not_touched() -> None:
    layer = Layer()
    expected, ids = contents(layer), [id(value) for value in vars(layer).values()]
    found = trace(nn.Sequential(layer), torch.zeros(2, 4))
    assert found.stop is None
    assert contents(layer) == expected
    assert [id(value) for value in vars(layer).values()] == ids
    assert not hasattr(layer, "seen")
    assert Counted.writes == 0


def test_a_container_that_refuses_to_be_written_to_is_restored() -> None:
    """Code of a model's own may change it in the way that it keeps for itself."""
    layer = Layer()
    expected = contents(layer)
    before = Attributes(layer)
    OrderedDict.__setitem__(layer.config, "more", 1)
    OrderedDict.move_to_end(layer.config, "size")
    list.append(layer.sizes, 3)
    set.clear(layer.ways)
    layer.known["two"] = 2
    before.restore()
    assert contents(layer) == expected
    assert isinstance(layer.config, FrozenDict)


class Distances(nn.Module):
    """A bias by position, which stays in a buffer, as that of ALiBi in x-transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", None)

    def forward(self, size: int) -> Tensor:
        self.register_buffer("bias", torch.arange(size).float())
        return self.get_buffer("bias")


class Biased(nn.Module):
    """Is called with a module that isn't a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.own = nn.Linear(4, 3), Distances()

    def forward(self, x: Tensor, biases: list[nn.Module]) -> Tensor:
        return self.linear(x + biases[0](4) + self.own(4))


def test_a_call_without_values_leaves_none_in_the_modules_that_it_is_given() -> None:
    module, given = Biased(), Distances()
    for _ in range(2):  # what stayed of the first call would be of another mode in the second
        assert imagine(module, (torch.zeros(2, 4), [given]), {}).shape == (2, 3)
        assert dict(given.named_buffers()) == dict(module.named_buffers()) == {}


LIBRARY = """
import torch

table = torch.tensor([0.5, 1.0])  # made when it is first imported, which is in a forward
"""

_made: dict[int, Tensor] = {}
_scale: Tensor | None = None


@cache
def positions(size: int) -> Tensor:
    return torch.arange(size).float()


class KeepsOutside(nn.Module):
    """Keeps what it makes in the first forward in globals, in its class, in a cache, and in a library's globals."""

    ones: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        global _scale
        import first_imported_in_a_forward as library  # pyright: ignore[reportMissingImports]

        if _scale is None:
            _scale = torch.full((4,), 2.0)
        if KeepsOutside.ones is None:
            KeepsOutside.ones = torch.ones(4)
        shift = _made.setdefault(4, torch.zeros(4)) + positions(4) + library.table[1]
        return self.linear(x * _scale * KeepsOutside.ones + shift)


def test_no_tensor_without_values_stays_outside_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a class, a global, a cache or a library keeps is made in the first forward that has values."""
    (tmp_path / "first_imported_in_a_forward.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    model, x = KeepsOutside(), torch.ones(2, 4)
    assert trace(nn.Sequential(model), x).stop is None
    assert imagine(model, (x,), {}).shape == (2, 3)
    with torch.no_grad():
        expected = model.linear(2 * x + torch.arange(4) + 1)
        torch.testing.assert_close(model(x), expected)
        kept = _scale, KeepsOutside.ones, _made[4], positions(4)
        assert trace(nn.Sequential(model), x).stop is None
    assert all(a is b for a, b in zip(kept, (_scale, KeepsOutside.ones, _made[4], positions(4)), strict=True))
