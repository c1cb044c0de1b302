"""Pipelines of models whose forward asks for values between and behind the layers: stages get what they ask for."""

from collections.abc import Callable, Mapping, Sequence

import pytest
from proving import Case, Proof, prove, same
from small_tasks import Points
from torch import Tensor, nn

import samestep


def scales(rows: Tensor, yes: float, no: float) -> Tensor:
    """For each row one of two numbers, by whether its sum is positive, which Python decides. [rows, 1]"""
    return rows.new_tensor([[yes if row.detach().sum() > 0 else no] for row in rows])


class Layers(nn.Module):
    """Four layers, and between them what a subclass decides by values."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(8, classes)
        self.bound = nn.Parameter(0.1 * nn.Linear(1, 1).weight[0])

    def forward(self, x: Tensor) -> Tensor:
        begun = x = self.first(x)
        for layer in self.layers:
            x = self.between(begun, layer(x))
        return self.behind(begun, self.last(x))

    def between(self, begun: Tensor, x: Tensor) -> Tensor:
        return x

    def behind(self, begun: Tensor, output: Tensor) -> Tensor:
        return output


class Between(Layers):
    """The sign of the next layer's input depends on the last one's output."""

    def between(self, begun: Tensor, x: Tensor) -> Tensor:
        return x * scales(x, -1.0, 1.0)


class Early(Layers):
    """Behind every layer it asks for what the first stage alone has computed, and nothing else takes."""

    def between(self, begun: Tensor, x: Tensor) -> Tensor:
        return x * scales(begun, 2.0, 0.5)


class Behind(Layers):
    """Behind the layers it goes over the samples one by one, as the losses of detection models do."""

    def behind(self, begun: Tensor, output: Tensor) -> Tensor:
        places = output.detach().numpy().argmax(axis=1).tolist()
        firsts = [float(row[0]) for row in begun.detach()]
        pairs = zip(places, firsts, strict=True)
        return output * output.new_tensor(
            [[1.0 + 0.1 * place + (0.5 if first > 0 else 0.0)] for place, first in pairs]
        )


class Selected(Layers):
    """Sizes depend on values: rows are selected, and put back."""

    def between(self, begun: Tensor, x: Tensor) -> Tensor:
        positive = x[:, 0] > 0
        changed = x.clone()
        changed[positive] = 2 * x[positive]
        return changed


class OfParameter(Layers):
    """Asks for a parameter outside of the layers."""

    def between(self, begun: Tensor, x: Tensor) -> Tensor:
        return x * self.bound if self.bound > -9 else x


class Kept(nn.Module):
    """A layer that keeps what it has computed, and does not return it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.kept = self.layer(x)
        return x.tanh()


class OfKept(Layers):
    """Asks for what a layer has kept."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.layers = nn.ModuleList(Kept() for _ in range(4))

    def behind(self, begun: Tensor, output: Tensor) -> Tensor:
        kept = self.layers[0].kept
        assert isinstance(kept, Tensor)
        return output * scales(kept, 2.0, 1.0)


class Asking(Points):
    """Points, by one of these models."""

    def __init__(self, build: Callable[[int], nn.Module]) -> None:
        super().__init__(samples=40, held_out=5)
        self.build = build

    def model(self) -> nn.Module:
        return self.build(self.classes)


ANSWERED = (Between, Early, Behind, Selected)
REFUSED = {
    OfParameter: r"asks for values (__bool__) of what bound is, a parameter outside of the layers",
    OfKept: "asks for values (__bool__) of what layers.0 computes and does not return",
}


FAST = (OfParameter,)
MORE = (Between, Early, Behind, Selected, OfKept)


def cases(builds: Sequence[type[Layers]]) -> dict[str, Case]:
    recipes = {build.__name__: samestep.Recipe(task=Asking(build), batch=6, steps=3) for build in builds}
    return {name: (recipe, "pp2", {}) for name, recipe in recipes.items()}


def test_what_no_stage_can_pass_on_is_refused_with_the_reason() -> None:
    proofs = prove(cases(FAST), steps=3)
    for build in FAST:
        assert_refused(build, proofs)


@pytest.mark.slow
def test_stages_that_need_values_for_a_decision_get_them_or_are_refused() -> None:
    found = prove(cases(MORE), steps=3)
    assert same(found, [build.__name__ for build in MORE if build in ANSWERED]) == {}
    for build in MORE:
        if build in REFUSED:
            assert_refused(build, found)


def assert_refused(build: type[Layers], proofs: Mapping[str, Proof | str]) -> None:
    said = proofs[build.__name__]
    assert isinstance(said, str), said
    assert REFUSED[build] in said
