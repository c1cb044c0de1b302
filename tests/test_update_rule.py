"""The update by its rule: torch's own optimizers keep it, and each planted mistake is seen in one step."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from float32_mistakes import MISTAKES
from torch import Tensor, nn

import samestep
from samestep.engines.base import Trainer
from samestep.training.update_rule import UpdateFound, UpdateRule

pytestmark = pytest.mark.quick


class Stepped(Trainer):
    """A net that is stepped with gradients as coarse as those of bfloat16."""

    def __init__(self, optimizer: Any, groups: Mapping[str, Any] | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 3))
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.generator = generator
        matrices = [p for p in self.net.parameters() if p.dim() > 1]
        others = [p for p in self.net.parameters() if p.dim() == 1]
        self.optimizer = optimizer(
            [{"params": matrices, **(groups or {})}, {"params": others, **(groups or {}), "weight_decay": 0.0}]
        )

    def take(self, *, without: nn.Module | None = None) -> None:
        left_out = set() if without is None else set(without.parameters())
        self.optimizer.zero_grad()
        for parameter in self.net.parameters():
            if parameter in left_out:
                continue
            size = 10.0 ** torch.empty(parameter.shape).uniform_(-6, 0, generator=self.generator)
            gradient = size * torch.randn(parameter.shape, generator=self.generator)
            parameter.grad = gradient.bfloat16().float()
        self.optimizer.step()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, value.detach()) for name, value in self.net.named_parameters())

    def optimizer_state(self, keys: Sequence[str]) -> Iterator[tuple[str, str, Tensor]]:
        for name, parameter in self.net.named_parameters():
            for key in keys:
                if (value := self.optimizer.state.get(parameter, {}).get(key)) is not None:
                    yield name, key, value

    def step(self, batch: Any, loss: Any) -> Any: ...
    def predict(self, inputs: Any) -> Any: ...
    def holdings(self) -> Any: ...
    def state(self) -> dict[str, Tensor]:
        return {}


def found(recipe: samestep.Recipe, trainer: Stepped, steps: int = 6) -> UpdateFound:
    rule = UpdateRule(recipe, steps, trainer)
    for _ in range(steps):
        trainer.take()
        rule.after_step()
    assert rule.found is not None
    return rule.found


def recipe(optimizer: Any) -> samestep.Recipe:
    return samestep.Recipe(task="x", batch=4, steps=6, optimizer=optimizer)


ADAMW = samestep.AdamW(lr=1e-2)


def adamw(**changed: Any) -> Any:
    return lambda groups: torch.optim.AdamW(groups, **{"lr": 1e-2, "eps": 1e-8, **changed})


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_adamw_keeps_the_rule(fused: bool) -> None:
    assert found(recipe(ADAMW), Stepped(adamw(fused=fused))).worst < 0.5


@pytest.mark.parametrize("nesterov", [False, True])
def test_torchs_sgd_keeps_the_rule(nesterov: bool) -> None:
    trainer = Stepped(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=nesterov))
    optimizer = samestep.SGD(lr=0.1, momentum=0.9, nesterov=nesterov)
    assert found(recipe(optimizer), trainer).worst < 0.5
    assert found(recipe(optimizer), Stepped(lambda groups: torch.optim.SGD(groups, lr=0.11, momentum=0.9))).worst > 10


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_in_a_setting_is_seen(mistake: str) -> None:
    trainer = Stepped(adamw())
    for group in trainer.optimizer.param_groups:
        MISTAKES[mistake](group)
    assert found(recipe(ADAMW), trainer).worst > 5


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"])
def test_another_rate_is_seen_and_the_parameter_named(name: str) -> None:
    trainer = Stepped(adamw())
    (other,) = (value for each, value in trainer.net.named_parameters() if each == name)
    (group,) = (each for each in trainer.optimizer.param_groups if any(value is other for value in each["params"]))
    group["params"] = [value for value in group["params"] if value is not other]
    trainer.optimizer.add_param_group({**group, "params": [other], "lr": 1.01e-2})
    seen = found(recipe(ADAMW), trainer)
    assert seen.worst > 10
    assert seen.parameter == name


def test_what_has_no_gradient_is_left_out_and_counted_by_itself() -> None:
    trainer = Stepped(adamw())
    rule = UpdateRule(recipe(ADAMW), 6, trainer)
    for step in range(6):
        trainer.take(without=trainer.net[0] if step in (0, 3) else None)
        rule.after_step()
    assert rule.found is not None
    assert rule.found.worst < 0.5


def test_two_steps_in_one_are_seen() -> None:
    trainer = Stepped(adamw())
    rule = UpdateRule(recipe(ADAMW), 6, trainer)
    trainer.take()
    trainer.take()
    rule.after_step()
    assert rule.found is not None
    assert rule.found.worst > 10
