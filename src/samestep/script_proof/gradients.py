"""Gradients: what a difference of gradients looks like, where samples and weights were the same.

Ratios tell the mistake: gradients that are the known ones times a constant are summed in place of averaged (the
number of ranks), divided twice (its inverse), or weighed by counts of other ranks; what a constant doesn't explain
(`rest`) comes from other samples, masks or missing messages.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from samestep.recording.differences import RoundingLimits, TensorDifference, common_module, together
from samestep.recording.forward import Keys, ModuleDifference, ModulesCompared, compare_modules
from samestep.recording.record import RankStep
from samestep.script_proof.kinds import Finding

# Largest remainder, after subtracting a multiple, at which the difference counts as that multiple.
_REST = 0.02
_NEAR = 0.01  # tolerance for a ratio to be an integer


@dataclass(frozen=True, kw_only=True)
class StepPair:
    """One step of both runs, with the differences of its gradients."""

    number: int
    alone: Sequence[RankStep]
    split: Sequence[RankStep]
    tensors: Sequence[TensorDifference]
    limits: RoundingLimits
    forward_eps: float | None = None  # of forwards; None: the common limit of gradients
    usual_micro_batches: int = 0  # of the split run's steps; 0: not known

    @property
    def forward_limit(self) -> float:
        return self.limits.common if self.forward_eps is None else self.forward_eps

    @property
    def departing(self) -> list[TensorDifference]:
        return [tensor for tensor in self.tensors if self.limits.exceeded(tensor)]

    @property
    def worst(self) -> float:
        return max((tensor.apart for tensor in self.departing if math.isfinite(tensor.apart)), default=math.inf)

    @property
    def micro_batches(self) -> int:
        return max(len(step.losses) for step in self.split)

    def finding(self, kind: str, names: Sequence[str] | None = None, **facts: object) -> Finding:
        """Build a finding of this step, with the module if only some tensors depart."""
        module = common_module(names) if names is not None and len(names) < len(self.tensors) else None
        return Finding(
            kind=kind, step=self.number + 1, what="gradient", relative=self.worst, module=module, facts=facts
        )


def gradient_finding(pair: StepPair, keys: Keys | None) -> Finding | None:
    """Classify the difference of a step's gradients; None if there is none."""
    apart = _ranks_apart(pair)
    if apart is not None:
        return apart
    if not pair.departing:
        return None
    missing = [tensor.name for tensor in pair.departing if tensor.missing]
    if missing:
        return pair.finding("missing-gradient", missing)
    if (zero := _zero(pair)) is not None:
        return zero
    modules = _modules(pair, keys)
    forward = modules.first
    if forward is not None and "BatchNorm" in forward.kind:
        return _of_forward("local-batch-statistics", pair, forward)
    finding = _clipped(pair) or _mean_without_targets(pair) or _short_group(pair) or _scaled(pair)
    finding = finding or _mean_of_means(pair) or _lost_micro_batches(pair)
    if finding is not None:
        return finding
    return _of_forwards(pair, forward) if forward is not None else _after_forward(pair, modules)


def _zero(pair: StepPair) -> Finding | None:
    """Find a step in which one of both runs has no gradient but zeros."""
    alone_square, split_square = (
        sum(tensor.square for tensor in pair.tensors),
        sum(tensor.split_square for tensor in pair.tensors),
    )
    if (alone_square == 0) == (split_square == 0):
        return None
    kind = "zero-alone" if alone_square == 0 else "zero-split"
    return Finding(kind=kind, step=pair.number + 1, what="gradient", relative=math.inf)


def _modules(pair: StepPair, keys: Keys | None) -> ModulesCompared:
    if keys is None:
        return ModulesCompared(first=None, some=False)
    return compare_modules(pair.alone, pair.split, keys, eps=pair.forward_limit)


def _of_forward(kind: str, pair: StepPair, module: ModuleDifference, **facts: object) -> Finding:
    """Build a finding about a module's output."""
    return Finding(
        kind=kind, step=pair.number + 1, what="forward", relative=module.relative, module=module.module, facts=facts
    )


def _of_forwards(pair: StepPair, module: ModuleDifference) -> Finding:
    """Say of a module that makes something else of a sample what its ranks got otherwise."""
    waiting = [rank for rank, step in enumerate(pair.split) if not step.values["groups"]]
    if waiting and pair.number:
        stepping = next(rank for rank in range(len(pair.split)) if rank not in waiting)
        ranks = ", ".join(map(str, waiting))
        return _of_forward("weights-not-sent", pair, module, ranks=ranks, of=stepping)
    alone, split = _lengths(pair.alone), _lengths(pair.split)
    if alone and split and alone != split and not module.in_parts:
        return _of_forward("padding-matters", pair, module, alone=_told(alone), split=_told(split))
    return _of_forward("forward-differs", pair, module)


def _lengths(steps: Sequence[RankStep]) -> list[int]:
    """The first sizes of the rows of a step's inputs, such as how many tokens."""
    shapes = {
        tuple(shape) for step in steps for forward in step.forwards for shape in forward.get("shapes", {}).values()
    }
    return sorted({shape[0] for shape in shapes if shape})


def _told(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths))


def _after_forward(pair: StepPair, modules: ModulesCompared) -> Finding:
    """Say of gradients that differ, where no module's output does, as much as is known."""
    alone, split = _targets(pair.alone), _targets(pair.split)
    if 0 < split < alone * (1 - _EXACT):
        return pair.finding("lost-targets", alone=alone, split=split)
    names = [tensor.name for tensor in sorted(pair.departing, key=lambda tensor: -tensor.apart)]
    losses = _losses_of(pair)
    if not modules.some or losses is None:
        return pair.finding("gradients-differ", names)
    alone_loss, split_loss = losses
    parts = max(1, pair.micro_batches)
    apart = min(abs(split_loss - by * alone_loss) / max(abs(by * alone_loss), 1e-300) for by in (1, parts, 1 / parts))
    if apart <= pair.limits.common:
        return pair.finding("backward-differs", names, apart=apart)
    return pair.finding("loss-of-own-rows", names, alone=alone_loss, split=split_loss)


_EXACT = 1e-9  # relative: sums of whole numbers, or of weights, in float64


def _targets(steps: Sequence[RankStep]) -> float:
    """How many targets the losses of a step count: a mean's divisor."""
    return sum(loss["targets"] or 0 for step in steps for loss in step.losses)


def _ranks_apart(pair: StepPair) -> Finding | None:
    """Find parameters whose gradients differ between ranks."""
    own = [tensor.name for tensor in pair.tensors if not tensor.missing and pair.limits.ranks_exceeded(tensor)]
    if not own:
        return None
    relative = max(tensor.ranks_apart for tensor in pair.tensors if tensor.name in own)
    if len(own) > 0.9 * len(pair.tensors):
        return Finding(kind="not-reduced", step=pair.number + 1, what="gradient", relative=relative)
    return Finding(
        kind="parameter-not-reduced",
        step=pair.number + 1,
        what="gradient",
        relative=relative,
        module=common_module(own),
    )


def _clipped(pair: StepPair) -> Finding | None:
    """Find clipping at the wrong time, or by the wrong norm."""
    alone_clips, split_clips = pair.alone[0].clips, pair.split[0].clips
    if not alone_clips and not split_clips:
        return _shards_scaled_apart(pair)
    if alone_clips and not split_clips:
        total, rest = together(pair.tensors)
        clipped = any(clip["norm"] is not None and clip["norm"] > clip["limit"] for clip in alone_clips)
        return pair.finding("not-clipped") if clipped and total > 1 and rest < _REST else None
    if len(split_clips) > max(1, len(alone_clips)) and split_clips[0]["after"] < len(pair.split[0].losses):
        return pair.finding("clip-each-micro-batch", count=len(split_clips))
    norms = [step.clips[-1]["norm"] for step in pair.split if step.clips]
    if None not in norms and len(norms) > 1 and max(norms) - min(norms) > 1e-3 * max(norms):
        told = ", ".join(f"{norm:.3g}" for norm in norms)
        shards = any(tensor.of_ranks for tensor in pair.tensors)
        return pair.finding("clip-local-norm" if shards else "clip-before-reduction", norms=told)
    return _shards_scaled_apart(pair)


def _shards_scaled_apart(pair: StepPair) -> Finding | None:
    """Find shards that each rank has scaled by a factor of its own."""
    ratios: dict[int, list[float]] = {}
    for tensor in pair.tensors:
        for rank, (ratio, rest) in enumerate(tensor.of_ranks):
            if len(tensor.of_ranks) == len(pair.split) and rest < _REST and ratio > 0:
                ratios.setdefault(rank, []).append(ratio)
    if len(ratios) < 2 or any(max(of_ranks) - min(of_ranks) > _NEAR * max(of_ranks) for of_ranks in ratios.values()):
        return None
    means = [sum(of_ranks) / len(of_ranks) for of_ranks in ratios.values()]
    if max(means) - min(means) <= 2 * _NEAR * max(means):
        return None
    return pair.finding("clip-local-norm", norms=", ".join(f"x {mean:.3g}" for mean in means))


def _scaled(pair: StepPair) -> Finding | None:
    """Find gradients, all or some, that are a multiple of the right ones."""
    ratio, rest = together(pair.tensors)
    ranks, micro_batches = len(pair.split), pair.micro_batches
    if rest < _REST and abs(ratio - 1) > _NEAR:
        return _multiple(pair, _before_clipping(pair, ratio), ranks, micro_batches)
    departing = pair.departing
    others = [tensor for tensor in pair.tensors if tensor not in departing]
    if not others or abs(together(others)[0] - 1) > _NEAR:
        return None
    ratio, rest = together(departing)
    if rest < _REST and abs(ratio - 1) > _NEAR:
        return pair.finding("some-gradients-scaled", [tensor.name for tensor in departing], ratio=ratio)
    return None


def _before_clipping(pair: StepPair, ratio: float) -> float:
    """The ratio of gradients before they were clipped, if clipping by the recorded norms made this one of it."""
    clips = [step.clips[-1] for step in (pair.alone[0], pair.split[0]) if step.clips]
    if len(clips) != 2 or not all(clip["norm"] for clip in clips):
        return ratio
    alone, split = (clip["norm"] for clip in clips)
    clipped = min(split, clips[1]["limit"]) / min(alone, clips[0]["limit"])
    return split / alone if _is(ratio, clipped) else ratio


def _multiple(pair: StepPair, ratio: float, ranks: int, micro_batches: int) -> Finding:
    """Attribute a ratio to the number of ranks or of micro-batches; if both are equal, the losses decide."""
    # One process with as many micro-batches would not divide by them either. Twice may well be the ranks' alone, as
    # where an engine divides that is not there with one process.
    accumulated = micro_batches > 1 and (ratio < 1 or len(pair.alone[0].losses) != micro_batches)
    losses = _loss_ratio(pair)
    by_micro = accumulated and (_is(ratio, micro_batches) or _is(ratio, 1 / micro_batches))
    if by_micro and not (_is(ratio, ranks) or _is(ratio, 1 / ranks)):
        return pair.finding("accumulation-divisor", ratio=ratio, by=micro_batches)
    if by_micro and losses is not None and _is(losses, ratio):
        return pair.finding("accumulation-divisor", ratio=ratio, by=micro_batches)
    if _is(ratio, ranks):
        return pair.finding("summed", ratio=ratio, by=ranks)
    if _is(ratio, 1 / ranks):
        return pair.finding("divided-twice", ratio=ratio, by=ranks)
    if accumulated and any(_is(ratio, other) for other in (ranks / micro_batches, micro_batches / ranks)):
        return pair.finding("accumulation-divisor", ratio=ratio, by=micro_batches)
    if losses is not None and _between(ratio, losses):
        # Clipping, which an engine may not report, has reduced the larger of both.
        if accumulated and _is_of(losses, micro_batches):
            return pair.finding("accumulation-divisor", ratio=losses, by=micro_batches)
        if _is_of(losses, ranks):
            return pair.finding("summed" if losses > 1 else "divided-twice", ratio=losses, by=ranks)
    return pair.finding("gradients-scaled", ratio=ratio)


def _between(ratio: float, losses: float) -> bool:
    """Whether a ratio of gradients lies between that of the losses and 1."""
    return min(1.0, losses) < ratio < max(1.0, losses)


def _is_of(ratio: float, number: int) -> bool:
    return _is(ratio, number) or _is(ratio, 1 / number)


def _is(ratio: float, number: float) -> bool:
    return abs(ratio - number) <= _NEAR * number


def _losses_of(pair: StepPair) -> tuple[float, float] | None:
    """The losses that both runs gave to backward: the mean over ranks. None where there is none."""
    if not pair.alone[0].losses or not any(step.losses for step in pair.split):
        return None
    alone_loss = sum(loss["value"] for loss in pair.alone[0].losses)
    return alone_loss, sum(loss["value"] for step in pair.split for loss in step.losses) / len(pair.split)


def _loss_ratio(pair: StepPair) -> float | None:
    """The split run's losses as a multiple of the run alone's."""
    losses = _losses_of(pair)
    return losses[1] / losses[0] if losses is not None and losses[0] else None


def counts_of(step: RankStep) -> list[dict[str, float]]:
    """Return the possible divisors of each backward of a step: rows, targets, and counts of the inputs."""
    of_ranks = []
    begun = 0
    for loss in step.losses:
        counts: dict[str, float] = {}
        for forward in step.forwards[begun : loss["after"]]:
            for name, count in forward["counts"].items():
                counts[name] = counts.get(name, 0) + count
        if loss["targets"] is not None:  # the loss of a job doesn't say how many it has
            counts["targets"] = loss["targets"]
        begun = loss["after"]
        of_ranks.append(counts)
    return of_ranks


def _mean_without_targets(pair: StepPair) -> Finding | None:
    """Find a mean of means with parts that have nothing to divide by: the others' gradients look divided."""
    parts = [counts for step in pair.split for counts in counts_of(step)]
    names = {name for counts in parts for name in counts}
    values = [[counts.get(name, 0) for counts in parts] for name in names]
    return _mean_of_means(pair) if any(min(numbers) == 0 < max(numbers) for numbers in values) else None


def _short_group(pair: StepPair) -> Finding | None:
    """Find a step of fewer micro-batches than others, whose losses are divided by the usual number."""
    now = pair.micro_batches
    ratio, rest = together(pair.tensors)
    if not 0 < now < pair.usual_micro_batches or rest >= _REST or not _is(ratio, now / pair.usual_micro_batches):
        return None
    return pair.finding("accumulation-divisor", ratio=ratio, by=now)


def _mean_of_means(pair: StepPair) -> Finding | None:
    """Find counts with which the weighted mean of the split run's losses is the loss alone, unlike their plain mean.

    Losses are compared up to a common factor, since with accumulation a backward may get a part of its loss.
    """
    parts = [(loss["value"], counts) for step in pair.split for loss, counts in _losses(step)]
    whole = [(loss["value"], counts) for loss, counts in _losses(pair.alone[0])]
    names = [name for name in parts[0][1] if all(name in counts for _, counts in (*parts, *whole))] if parts else []
    if len(parts) < 2 or not whole:
        return None
    factor = len(pair.split[0].losses) if _divided(pair) else 1
    for name in sorted(names, key=lambda name: (name == "rows", name != "targets")):
        weights = [counts[name] for _, counts in parts]
        if min(weights) == max(weights) or not any(weights):
            continue
        alone = _weighted(whole) if len(whole) == 1 else _by_count(whole, name)
        explained = factor * _by_count(parts, name)
        plain = factor * sum(value for value, _ in parts) / len(parts)
        if alone and abs(explained - alone) < 1e-3 * abs(alone) and abs(explained - alone) < 0.2 * abs(plain - alone):
            return pair.finding("mean-of-means", name=name, counts=", ".join(f"{weight:.6g}" for weight in weights))
    return None


def _losses(step: RankStep) -> list[tuple[Mapping[str, float], dict[str, float]]]:
    return list(zip(step.losses, counts_of(step), strict=True))


def _weighted(whole: Sequence[tuple[float, Mapping[str, float]]]) -> float:
    return sum(value for value, _ in whole)


def _by_count(parts: Sequence[tuple[float, Mapping[str, float]]], name: str) -> float:
    """The mean of values weighted by one of their counts; 0 where nothing counts."""
    total = sum(counts[name] for _, counts in parts)
    return sum(value * counts[name] for value, counts in parts) / total if total else 0.0


def _divided(pair: StepPair) -> bool:
    """Whether micro-batches divide their losses: then their sum is about the loss alone."""
    ratio = _loss_ratio(pair)
    return pair.micro_batches > 1 and ratio is not None and 0.5 < ratio < 2.0


def _lost_micro_batches(pair: StepPair) -> Finding | None:
    """Find much smaller gradients in a step of several micro-batches: some of them are missing."""
    if pair.micro_batches < 2:
        return None
    ratio, _ = together(pair.tensors)
    return pair.finding("lost-micro-batches") if 0 < ratio < 0.75 else None
