"""What `recipe.communication` does, computed in one process in float64: a plain loop over the ranks of each step."""

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

import samestep
from samestep.data.order import DataPlace, SampleOrder

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
        self.kept: dict[Any, Any] = {}

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
        self.shared: dict[Any, Any] = {}
        self.done = 0
        self.losses: list[float] = []

    def take(self, steps: int, method: Callable[["Simulation", list[Tensors], list[float], int], None]) -> None:
        for _ in range(steps):
            sums, counts, losses = [], [], []
            for number, rank in enumerate(self.ranks):
                (share,) = self.order.shares(self.done, DataPlace(index=number, of=len(self.ranks)), None)
                loss, count, gradient = self._backward(rank.x, [] if share.zero_weight else share.samples.tolist())
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


def few_bits(largest: int) -> Callable[[Tensor], Tensor]:
    """What integers up to `largest` tell of a vector, with a scale for every 64 numbers."""

    def told(vector: Tensor) -> Tensor:
        parts = []
        for block in vector.split(64):
            scale = (block.abs().max() / largest).float()
            parts.append((block / scale).round().float() * scale)
        return torch.cat(parts).double()

    return told


def diloco(
    *,
    every: int,
    lr: float,
    momentum: float,
    parts: Sequence[Sequence[str]],
    overlap: int = 0,
    mixing: float = 0.0,
    told: Callable[[Tensor], Tensor] | None = None,
) -> Any:
    """Algorithm 1 of Douillard et al. 2023 for one part; the rounds of parts end every / parts steps apart.

    `told`: what is left of a vector that is sent.
    """

    def mean_change(run: Simulation, names: Sequence[str], weights: Sequence[float]) -> Tensors:
        begun = {name: run.shared["a"][name] for name in names}
        if told is None:
            mean = run.mean(lambda rank: rank.x, weights)
            return {name: begun[name] - mean[name] for name in names}
        changes = [told(_flat({name: begun[name] - rank.x[name] for name in names})) for rank in run.ranks]
        mean_of = sum(weight * change for weight, change in zip(weights, changes, strict=True)) / sum(weights)
        return _like(told(mean_of), begun)  # type: ignore[arg-type]

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
                change = mean_change(run, names, weights)
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


def _shares(run: Simulation, sums: list[Tensors], counts: list[float]) -> list[Tensors]:
    """Of each rank what the mean over the ranks makes the sum over the global batch / the global count."""
    return [{name: g * len(sums) / sum(counts) for name, g in each.items()} for each in sums]


def _mean_of(tensors: Sequence[Tensors]) -> Tensors:
    return {name: torch.stack([each[name] for each in tensors]).mean(0) for name in tensors[0]}


def powersgd(*, rank: int, start: int) -> Any:
    """Algorithms 1 and 2 of Vogels et al. 2019, with the Gram-Schmidt process that stands there."""

    def method(run: Simulation, sums: list[Tensors], counts: list[float], samples: int) -> None:
        shares = _shares(run, sums, counts)
        gradient = _mean_of(shares)
        if run.done > start:
            for number, (name, value) in enumerate(run.ranks[0].x.items()):
                if value.ndim < 2 or sum(value.shape) * min(rank, *value.shape) >= value.numel():
                    continue
                drawn = torch.randn(value.shape[1], rank, generator=torch.Generator().manual_seed(number))
                q = run.shared.get(("q", name), drawn.double())
                matrices = [
                    each[name] + other.kept.get(name, 0.0) for each, other in zip(shares, run.ranks, strict=True)
                ]
                p = _orthonormal(sum(matrix @ q for matrix in matrices) / len(matrices))  # type: ignore[arg-type]
                run.shared["q", name] = sum(matrix.T @ p for matrix in matrices) / len(matrices)
                gradient[name] = p @ run.shared["q", name].T
                for matrix, other in zip(matrices, run.ranks, strict=True):
                    other.kept[name] = matrix - gradient[name]
        for each in run.ranks:
            each.adam(run.clipped(gradient))

    return method


def _orthonormal(matrix: Tensor) -> Tensor:
    columns: list[Tensor] = []
    for column in matrix.T:
        for before in columns:
            column = column - (column @ before) * before
        columns.append(column / column.norm())
    return torch.stack(columns, dim=1)


def _one_bit_mean(run: Simulation, vectors: Sequence[Tensor]) -> Tensor:
    """The mean by signs and scales, with errors on both ways; a scale for each tensor's part of each chunk."""
    numbers, ranks = len(vectors[0]), len(vectors)
    chunk = 8 * -(-numbers // (8 * ranks))
    cuts = {0, numbers, *range(0, numbers, chunk)}
    at = 0
    for value in run.ranks[0].x.values():
        at += value.numel()
        cuts.add(at)
    edges = sorted(cuts)

    def told(vector: Tensor) -> Tensor:
        out = torch.empty_like(vector)
        for first, last in pairwise(edges):
            part = vector[first:last]
            scale = part.abs().mean().float().double()
            out[first:last] = torch.where(part >= 0, scale, -scale)
        return out

    total = torch.zeros(numbers, dtype=torch.float64)
    for rank, vector in zip(run.ranks, vectors, strict=True):
        whole = vector + rank.kept.get("error", 0.0)
        rank.kept["error"] = whole - told(whole)
        total += told(whole) / ranks
    total += run.shared.get("error", 0.0)
    run.shared["error"] = total - told(total)
    return told(total)


def _flat(tensors: Tensors) -> Tensor:
    return torch.cat([value.flatten() for value in tensors.values()])


def _like(vector: Tensor, tensors: Tensors) -> Tensors:
    parts = vector.split([value.numel() for value in tensors.values()])
    return {name: part.view(value.shape) for part, (name, value) in zip(parts, tensors.items(), strict=True)}


def _mixed(m: Tensors, g: Tensors) -> Tensors:
    return {name: BETAS[0] * m[name] + (1 - BETAS[0]) * g[name] for name in m}


def one_bit_adam(*, warmup: int) -> Any:
    """Algorithm 1 of Tang et al. 2021, with AdamW's corrections for bias, its decay, and numbers with v = 0 kept."""

    def method(run: Simulation, sums: list[Tensors], counts: list[float], samples: int) -> None:
        if run.done <= warmup:
            plain(run, sums, counts, samples)
            return
        gradients = [run.clipped(share) for share in _shares(run, sums, counts)]
        vectors = [_flat(_mixed(rank.m, g)) for rank, g in zip(run.ranks, gradients, strict=True)]
        m = _like(_one_bit_mean(run, vectors), run.ranks[0].m)
        for rank in run.ranks:
            rank.m = m
            rank.decay()
            for name in m:
                v = rank.v[name] / (1 - BETAS[1] ** warmup)
                step = LR / (1 - BETAS[0] ** run.done) * m[name] / (v.sqrt() + EPS)
                rank.x[name] = rank.x[name] - torch.where(v == 0, 0.0, step)

    return method


def zero_one_adam(*, renewals: Sequence[int], exchanges: Sequence[int]) -> Any:
    """Algorithm 1 of Lu et al. 2022; the steps, counted from 1, that renew the variance, and that exchange."""

    def method(run: Simulation, sums: list[Tensors], counts: list[float], samples: int) -> None:
        shares = _shares(run, sums, counts)
        if run.done in renewals:
            whole = run.clipped(_mean_of(shares))
            gradients = [whole] * len(shares)
            for rank in run.ranks:
                rank.v = {name: BETAS[1] * v + (1 - BETAS[1]) * whole[name] ** 2 for name, v in rank.v.items()}
        else:
            gradients = [run.clipped(share) for share in shares]
        unbias = 1 - BETAS[1] ** sum(step <= run.done for step in renewals)
        rate = LR / (1 - BETAS[0] ** run.done)
        run.shared["rate"] = run.shared.get("rate", 0.0) + rate
        run.shared.setdefault("a", dict(run.ranks[0].x))
        factor = {name: 1 - LR * DECAY * (value.ndim >= 2) for name, value in run.ranks[0].x.items()}
        run.shared["a"] = {name: value * factor[name] for name, value in run.shared["a"].items()}
        v = run.ranks[0].v
        divide = {name: torch.where(v[name] == 0, torch.inf, (v[name] / unbias).sqrt() + EPS) for name in v}
        for rank, gradient in zip(run.ranks, gradients, strict=True):
            rank.m = _mixed(rank.m, gradient)
            rank.decay()
            rank.x = {name: value - rate * rank.m[name] / divide[name] for name, value in rank.x.items()}
            rank.kept["u"] = rank.kept.get("u", 0.0) + rate * _flat(rank.m)
        if run.done in renewals:
            run.shared["a"] = dict(run.ranks[0].x)
        elif run.done in exchanges:
            u = _like(_one_bit_mean(run, [rank.kept["u"] for rank in run.ranks]), v)
            run.shared["a"] = {name: value - u[name] / divide[name] for name, value in run.shared["a"].items()}
            for rank in run.ranks:
                rank.x = dict(run.shared["a"])
                rank.m = {name: value / run.shared["rate"] for name, value in u.items()}
        else:
            return
        run.shared["rate"] = 0.0
        for rank in run.ranks:
            rank.kept["u"] = torch.zeros_like(_flat(v))

    return method


def begin_diloco(run: Simulation) -> None:
    run.shared["a"] = dict(run.ranks[0].x)
    run.shared["u"] = {name: torch.zeros_like(value) for name, value in run.ranks[0].x.items()}


def resized(run: Simulation, ranks: int, model: Tensors) -> None:
    """Another number of ranks, each with these parameters and the optimizer's state of rank i modulo the old number.

    A rank's own sums are dealt out to rank i modulo the new number, times new / old.
    """
    before = run.ranks
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
