"""What `recipe.communication` does, computed in one process in float64: a plain loop over the ranks of each step."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

import samestep
from samestep.data.order import Place, SampleOrder

Tensors = dict[str, Tensor]
LR, BETAS, EPS, DECAY = 0.05, (0.9, 0.999), 1e-8, 0.1
OPTIMIZER = {"name": "adamw", "lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY}


class Rank:
    """One rank's parameters, Adam's two averages, and what a method keeps for it."""

    def __init__(self, parameters: Tensors) -> None:
        self.x = {name: value.clone() for name, value in parameters.items()}
        self.m = {name: torch.zeros_like(value) for name, value in parameters.items()}
        self.v = copy.deepcopy(self.m)
        self.t = 0
        self.weight = 0.0
        self.kept: dict[str, Any] = {}

    def decay(self) -> None:
        for name, value in self.x.items():
            if value.ndim >= 2:
                self.x[name] = value * (1 - LR * DECAY)

    def adam(self, gradient: Tensors) -> None:
        """Algorithm 2 of Loshchilov & Hutter 2019, biases and norms without decay."""
        self.t += 1
        self.decay()
        for name, g in gradient.items():
            self.m[name] = BETAS[0] * self.m[name] + (1 - BETAS[0]) * g
            self.v[name] = BETAS[1] * self.v[name] + (1 - BETAS[1]) * g**2
            m = self.m[name] / (1 - BETAS[0] ** self.t)
            v = self.v[name] / (1 - BETAS[1] ** self.t)
            self.x[name] = self.x[name] - LR * m / (v.sqrt() + EPS)


class Simulation:
    """The training of a task on some ranks. A method is a function of this object, called after each backward."""

    def __init__(self, task: samestep.Task, *, ranks: int, batch: int, clip: float | None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = task.model().double()
        start = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.task, self.clip = task, clip
        self.samples: Any = task.train_set()
        self.order = SampleOrder(size=len(self.samples), batch=batch, seed=seed)
        self.ranks = [Rank(start) for _ in range(ranks)]
        self.shared: dict[str, Any] = {}
        self.done = 0
        self.losses: list[float] = []

    def take(self, steps: int, method: Callable[["Simulation", list[Tensors], list[float], int], None]) -> None:
        for _ in range(steps):
            sums, counts, losses = [], [], []
            for number, rank in enumerate(self.ranks):
                (share,) = self.order.shares(self.done, Place(index=number, of=len(self.ranks)), None)
                loss, count, gradient = self._backward(rank.x, [] if share.lent else share.samples.tolist())
                sums.append(gradient)
                counts.append(count)
                losses.append(loss)
            self.losses.append(sum(losses) / sum(counts))
            samples = len(self.order.global_batch(self.done))
            self.done += 1
            method(self, sums, counts, samples)

    def _backward(self, parameters: Tensors, chosen: Sequence[int]) -> tuple[float, float, Tensors]:
        if not chosen:
            return 0.0, 0.0, {name: torch.zeros_like(value) for name, value in parameters.items()}
        batch = samestep.Batch(*nn_collate([self.samples[number] for number in chosen]))
        leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
        loss, count = self.task.loss(functional_call(self.model, leaves, (batch.inputs.double(),)), batch)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        return loss.item(), float(count), dict(zip(leaves, gradients, strict=True))

    def clipped(self, gradient: Tensors) -> Tensors:
        norm = torch.sqrt(sum((g**2).sum() for g in gradient.values()))  # type: ignore[arg-type]
        factor = min(1.0, self.clip / (norm.item() + 1e-6)) if self.clip is not None else 1.0
        return {name: g * factor for name, g in gradient.items()}

    def mean(self, of: Callable[[Rank], Tensors], weights: Sequence[float] | None = None) -> Tensors:
        weights = weights or [1.0] * len(self.ranks)
        total = sum(weights)
        return {
            name: sum(weight / total * of(rank)[name] for weight, rank in zip(weights, self.ranks, strict=True))
            for name in self.ranks[0].x
        }  # type: ignore[return-value]


def nn_collate(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(targets)


def plain(run: Simulation, sums: list[Tensors], counts: list[float], samples: int) -> None:
    whole = {name: sum(each[name] for each in sums) / sum(counts) for name in sums[0]}
    for rank in run.ranks:
        rank.adam(run.clipped(whole))  # type: ignore[arg-type]


def half(dtype: torch.dtype) -> Any:
    """For two ranks: each sends half of its share of sum / samples in 16 bits."""

    def method(run: Simulation, sums: list[Tensors], counts: list[float], samples: int) -> None:
        a, b = ({name: (g / samples).to(dtype) for name, g in each.items()} for each in sums)
        whole = {name: (a[name] + b[name]).double() * (samples / sum(counts)) for name in a}
        for rank in run.ranks:
            rank.adam(run.clipped(whole))

    return method


def _local_steps(run: Simulation, sums: list[Tensors], counts: list[float]) -> None:
    for rank, gradient, count in zip(run.ranks, sums, counts, strict=True):
        rank.adam(run.clipped({name: g / max(1.0, count) for name, g in gradient.items()}))


def local_sgd(*, every: int, start: int = 0) -> Any:
    def method(run: Simulation, sums: list[Tensors], counts: list[float], samples: int) -> None:
        _local_steps(run, sums, counts)
        for rank, count in zip(run.ranks, counts, strict=True):
            rank.weight += count
        if run.done <= start or run.done % every == 0:
            mean = run.mean(lambda rank: rank.x, [rank.weight for rank in run.ranks])
            for rank in run.ranks:
                rank.x, rank.weight = dict(mean), 0.0

    return method


def diloco(
    *, every: int, lr: float, momentum: float, parts: Sequence[Sequence[str]], overlap: int = 0, mixing: float = 0.0
) -> Any:
    """Algorithm 1 of Douillard et al. 2023 for one part; the parts' rounds end every / parts steps after each other."""

    def method(run: Simulation, sums: list[Tensors], counts: list[float], samples: int) -> None:
        if "a" not in run.shared:
            raise AssertionError("begin() comes first")
        _local_steps(run, sums, counts)
        for number, names in enumerate(parts):
            weights = [rank.kept.get(number, 0.0) + count for rank, count in zip(run.ranks, counts, strict=True)]
            due, change = run.shared.get(("due", number), (None, None))
            if due == run.done:
                for name in names:
                    u = run.shared["u"][name] = momentum * run.shared["u"][name] + change[name]
                    run.shared["a"][name] = run.shared["a"][name] - lr * (change[name] + momentum * u)
                    for rank in run.ranks:
                        keep = mixing if overlap else 0.0
                        rank.x[name] = keep * rank.x[name] + (1 - keep) * run.shared["a"][name]
            if run.done % every == every * number // len(parts):
                mean = run.mean(lambda rank: rank.x, weights)
                change = {name: run.shared["a"][name] - mean[name] for name in names}
                run.shared["due", number] = (run.done + overlap, change)
                weights = [0.0] * len(run.ranks)
                if overlap == 0:
                    for name in names:
                        u = run.shared["u"][name] = momentum * run.shared["u"][name] + change[name]
                        run.shared["a"][name] = run.shared["a"][name] - lr * (change[name] + momentum * u)
                        for rank in run.ranks:
                            rank.x[name] = run.shared["a"][name]
            for rank, weight in zip(run.ranks, weights, strict=True):
                rank.kept[number] = weight

    return method


def begin_diloco(run: Simulation) -> None:
    run.shared["a"] = dict(run.ranks[0].x)
    run.shared["u"] = {name: torch.zeros_like(value) for name, value in run.ranks[0].x.items()}


def resized(run: Simulation, ranks: int, weights: Sequence[float] | None = None) -> None:
    """Another number of ranks: the parameters are the mean, the optimizer's state that of rank i modulo the old number.

    A rank's own sums are dealt out to rank i modulo the new number, times new / old.
    """
    before, model = run.ranks, run.mean(lambda rank: rank.x, weights)
    factor = ranks / len(before)
    run.ranks = [copy.deepcopy(before[number % len(before)]) for number in range(ranks)]
    for number, rank in enumerate(run.ranks):
        rank.x = dict(model)
        rank.weight = factor * sum(each.weight for each in before[number::ranks])
        for key in before[0].kept:
            rank.kept[key] = factor * sum(each.kept[key] for each in before[number::ranks])


def apart(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest relative difference of two models' parameters."""
    return max(
        ((found[name].double() - value).abs().max() / value.abs().max().clamp(min=1e-3)).item()
        for name, value in wanted.items()
    )


