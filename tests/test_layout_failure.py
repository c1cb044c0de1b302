"""A mistake in samestep's own code is no refusal: it says where, and what to report; a model's failure is its own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.errors import InternalError, LayoutError, UserError
from samestep.layout import Layout
from samestep.parallel import recorder
from samestep.parallel.blocks import find_blocks
from samestep.parallel.layout_failure import LayoutFailures
from samestep.parallel.trace import trace

pytestmark = pytest.mark.quick


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Careless(Net):
    """Its own code is wrong, in ways that end below lines of samestep's."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake

    def forward(self, x: Any) -> Tensor:
        if self.mistake == "operator":
            return torch.cat(None)  # type: ignore[call-overload]
        if self.mistake == "attribute":
            return x.no_such_thing
        return self.linear(x, x)


def explained(model: nn.Module, error: Exception | None = None) -> None:
    with LayoutFailures(model, Layout.parse("pp2")).explained():
        if error is not None:
            raise error
        find_blocks(None)  # type: ignore[arg-type]


def test_a_mistake_of_samesteps_names_its_line_and_what_to_report() -> None:
    with pytest.raises(InternalError) as caught:
        explained(Net())
    message = str(caught.value)
    assert message.startswith("samestep itself failed at parallel/blocks.py:")
    assert 'when it applied layout "pp2" to Net (AttributeError: ' in message
    assert "please report this traceback" in message
    assert message.endswith("until it is mended, use dp2, which leaves the model whole on every rank")
    assert not isinstance(caught.value, UserError)
    assert isinstance(caught.value.__cause__, AttributeError)


@pytest.mark.parametrize("error", [AttributeError("'list' has no 'items'"), RuntimeError("sizes"), TypeError("None")])
def test_a_failure_elsewhere_is_one_of_the_layout(error: Exception) -> None:
    with pytest.raises(LayoutError, match="fails when the model is spread so"):
        explained(Net(), error)


@pytest.mark.parametrize("mistake", ["operator", "attribute", "arguments"])
def test_a_mistake_in_a_model_is_the_models_while_it_is_followed(mistake: str) -> None:
    with pytest.raises(UserError, match="its forward can't be followed"):
        trace(Careless(mistake), torch.zeros(2, 4))


def test_a_mistake_while_a_model_is_followed_is_samesteps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "seen_in", None)
    with pytest.raises(InternalError, match=r"samestep itself failed at parallel/recorder\.py"):
        trace(Net(), torch.zeros(2, 4))
