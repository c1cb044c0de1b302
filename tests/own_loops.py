"""A loop of one's own under many layouts in one start of ranks, and the same loop as a textbook has it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import samestep
from samestep.data.order import SampleOrder
from samestep.launch import local
from samestep.launch.world import join

CLIP = 0.7


class Looped(samestep.Task):
    """A task that brings its optimizer along."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)


@dataclass(kw_only=True)
class Taken:
    """What each step had, and the model's parameters and buffers after the last one."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to take the steps."""

    layout: str = "single"
    micro_batch: int | None = None
    engine: Any = "native"


def under(cases: Sequence[Case], task: Looped, *, batch: int, steps: int, ranks: int) -> list[Any]:
    """What the loop took under each layout, all of them in one start of ranks; or a user's mistake."""
    if ranks == 1:
        return [take(case, task, batch, steps) for case in cases]
    return local.start(_on_rank, (cases, task, batch, steps), ranks)


def _on_rank(cases: Sequence[Case], task: Looped, batch: int, steps: int) -> list[Any]:
    with join(device="cpu", threads=1):
        return [take(case, task, batch, steps) for case in cases]


def take(case: Case, task: Looped, batch: int, steps: int) -> Any:
    """The loop on this rank; a user's mistake is returned as its message."""
    taken = Taken()
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model)
    with samestep.session(
        layout=case.layout,
        engine=case.engine,
        precision="fp64",
        clip=CLIP,
        micro_batch=case.micro_batch,
        device="cpu",
        threads=1,
    ) as session:
        try:
            example = task.collate([task.train_set()[0], task.train_set()[1]]).inputs
            model, optimizer = session.prepare(model, optimizer, example, batch_buffers=task.batch_buffers())
            for each in session.batches(task.train_set(), batch=batch, collate=task.collate, steps=steps):
                for group in optimizer.param_groups:
                    group["lr"] = rate(group, each.step)
                report = session.step(each, task.loss)
                taken.losses.append(report.loss.item())
                taken.norms.append(report.grad_norm.item())
        except samestep.UserError as error:
            return str(error)
        taken.state = session.trainer.state()
    return taken


def rate(group: dict[str, Any], step: int) -> float:
    """A schedule of one's own: every group from its own rate downwards."""
    return group.setdefault("initial", group["lr"]) / (1 + 0.3 * step)


def plain(task: Looped, *, batch: int, steps: int, model: nn.Module | None = None) -> Taken:
    """One process, the whole batch at once, float64, PyTorch alone."""
    taken = Taken()
    torch.manual_seed(0)
    model = (model or task.model()).double().train()
    optimizer = task.optimizer(model)
    samples = task.train_set()
    order = SampleOrder(size=len(samples), batch=batch, seed=0)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))
    for step in range(steps):
        numbers = order.global_batch(step).tolist()
        inputs, targets = task.collate([samples[number] for number in numbers])
        each = samestep.Batch(inputs.double() if inputs.is_floating_point() else inputs, targets)
        total, count = task.loss(model(each.inputs), each)
        optimizer.zero_grad()
        (total / count).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        taken.losses.append((total / count).item())
        taken.norms.append(norm.item())
    taken.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return taken


def far(taken: Any, expected: Taken) -> float:
    """The largest relative difference of losses, norms, parameters and buffers."""
    assert isinstance(taken, Taken), taken
    assert taken.state.keys() == expected.state.keys()
    pairs = [
        *zip(taken.losses, expected.losses, strict=True),
        *zip(taken.norms, expected.norms, strict=True),
    ]
    apart = [abs(mine - theirs) / abs(theirs) for mine, theirs in pairs]
    for name, theirs in expected.state.items():
        mine = taken.state[name].double()
        apart.append(((mine - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=0.1)).item())
    return max(apart)
