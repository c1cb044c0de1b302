"""Trainings of several ranks for tests of spot checks: right ones, and ones with a planted fault."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samestep.launch.world import join
from samestep_prove import SpotChecks

STEPS, EVERY = 7, 3  # recorded: 1, 4 and 7


def wrapped(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def bare(model: nn.Module) -> nn.Module:
    return model


def summing(model: nn.Module) -> nn.Module:
    replicas = DistributedDataParallel(model)

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent = dist.all_reduce(bucket.buffer(), async_op=True)
        assert sent is not None
        return sent.get_future().then(lambda future: future.value()[0])

    replicas.register_comm_hook(None, hook)
    return replicas


def ignoring(model: nn.Module) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
    return DistributedDataParallel(model)


def nothing(model: nn.Module, step: int) -> None:
    pass


def averaged(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        assert parameter.grad is not None
        parameter.grad /= dist.get_world_size()


def added(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def divided(model: nn.Module, step: int) -> None:
    averaged(model, step)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= dist.get_world_size()


def clipped(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def halved(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 0.3


def changed(model: nn.Module, step: int) -> None:
    """Rank 1 changes its first weight between two steps."""
    if step == 4 and dist.get_rank() == 1:
        with torch.no_grad():
            next(model.parameters()).add_(1e-3)


class Labelled(nn.Module):
    """Takes the labels beside the rows, as models of transformers do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        return self.inner(rows)


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training; the defaults are a right one under DDP."""

    wrap: Callable[[nn.Module], nn.Module] = wrapped
    before_step: Callable[[nn.Module, int], None] = nothing
    norm: Callable[[int], nn.Module] = nn.Identity
    own_seed: bool = False  # of the weights
    own_rate: bool = False
    own_decay: bool = False
    same_rows: bool = False
    same_draws: bool = False
    micro_batches: int = 1
    skipped: bool = False  # a backward whose gradient is set to zero, in a recorded step
    keeps_zeros: bool = False  # zero_grad(set_to_none=False)
    frozen: bool = False
    targets: Literal["none", "alike", "unlike"] = "none"  # among the model's inputs, their number on the ranks
    share: bool = False  # each rank's loss is its share of the batch's, and gradients are added up
    ends_early: bool = False

    def run(self, folder: Path) -> None:
        rank = dist.get_rank()
        torch.manual_seed(rank if self.own_seed else 0)
        inner = nn.Sequential(nn.Linear(8, 32), self.norm(32), nn.Linear(32, 3))
        inner[0].bias.requires_grad_(not self.frozen)
        model = self.wrap(inner if self.targets == "none" else Labelled(inner))
        rate, decay = 0.01 * (1 + rank * self.own_rate), 0.1 * rank * self.own_decay
        optimizer = torch.optim.AdamW(inner.parameters(), lr=rate, weight_decay=decay)
        checks = SpotChecks(folder, model, optimizer, every=EVERY, reduction="sum" if self.share else "mean")
        rows = torch.Generator().manual_seed(5 + rank * (not self.same_rows))
        torch.manual_seed(9 if self.same_draws else 9 + rank)
        for step in range(STEPS - 3 * (self.ends_early and rank == 1)):
            optimizer.zero_grad(set_to_none=not self.keeps_zeros)
            if self.skipped and step == 3:
                self._loss(model, rows).backward()
                optimizer.zero_grad(set_to_none=not self.keeps_zeros)
            for number in range(self.micro_batches):
                with self._reduced(model, last=number == self.micro_batches - 1):
                    self._loss(model, rows).backward()
            self.before_step(inner, step)
            optimizer.step()
        checks.close()

    def _reduced(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Context of a micro-batch's backward: DDP reduces after the last one."""
        return nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync()

    def _loss(self, model: nn.Module, rows: torch.Generator) -> Tensor:
        x, classes = torch.randn(8, 8, generator=rows), torch.randint(0, 3, (8,), generator=rows)
        if self.targets == "none":
            return self._share(F.cross_entropy(model(x), classes))
        left_out = 1 + dist.get_rank() * (self.targets == "unlike")
        labels = torch.where(torch.arange(8) < left_out, -100, classes)[:, None]  # [rows, 1]
        return self._share(F.cross_entropy(model(x, labels), labels[:, 0]))

    def _share(self, loss: Tensor) -> Tensor:
        return loss / dist.get_world_size() if self.share else loss


TRAININGS: Mapping[str, Training] = {
    "DDP": Training(),
    "DDP with micro-batches": Training(micro_batches=3),
    "a gradient that is not stepped": Training(skipped=True),
    "a gradient that is not stepped, kept as zeros": Training(skipped=True, keeps_zeros=True, micro_batches=2),
    "clipped": Training(before_step=clipped),
    "by hand": Training(wrap=bare, before_step=averaged),
    "shares, added up": Training(wrap=bare, before_step=added, share=True),
    "frozen": Training(frozen=True),
    "layer norm": Training(norm=nn.LayerNorm),
    "scaled otherwise": Training(before_step=halved),
    "equal draws": Training(same_draws=True),
    "targets": Training(targets="alike"),
    "unlike targets": Training(targets="unlike"),
    "summed": Training(wrap=summing),
    "summed by hand": Training(wrap=bare, before_step=added),
    "divided twice": Training(wrap=bare, before_step=divided),
    "shares, averaged": Training(share=True),
    "not reduced": Training(wrap=bare),
    "a parameter is ignored": Training(wrap=ignoring),
    "weights of each rank's own": Training(wrap=bare, before_step=averaged, own_seed=True),
    "weights are changed": Training(before_step=changed),
    "rates of each rank's own": Training(own_rate=True),
    "decay of each rank's own": Training(own_decay=True),
    "the same rows": Training(same_rows=True),
    "batch norm": Training(norm=nn.BatchNorm1d),
}


def train_all(folder: Path) -> None:
    """A rank of each training."""
    with join(device="cpu", threads=1):
        for number, training in enumerate(TRAININGS.values()):
            training.run(folder / str(number))


def train_unevenly(folder: Path) -> None:
    with join(device="cpu", threads=1):
        Training(wrap=bare, ends_early=True).run(folder)
        Training(wrap=bare, before_step=nothing).run(folder)  # started again
