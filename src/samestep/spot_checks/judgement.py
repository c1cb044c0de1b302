"""What ranks' records say of each step: the first difference of every kind, what to look at, and what wasn't seen."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.display.page import Words
from samestep.errors import UserError
from samestep.recording.differences import common_module
from samestep.script_proof.kinds import Finding
from samestep.spot_checks.records import CheckedStep, Fingerprints, Ranks, read
from samestep.spot_checks.reduction import Reduction, judge_reduction

_EQUAL = 1e-5  # of weights, relative: ranks that step by equal gradients have equal ones


@dataclass(frozen=True, kw_only=True)
class SpotVerdict:
    """What the records of a folder say."""

    steps: int  # that all ranks have recorded
    ranks: int
    findings: Sequence[Finding]  # the first of each kind
    notes: Sequence[Words]
    not_compared: Sequence[Words]

    @property
    def right(self) -> bool:
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        return {
            "right": self.right,
            "steps": self.steps,
            "ranks": self.ranks,
            "findings": [finding.to_json() | {"kind": finding.kind} for finding in self.findings],
            "notes": [note.en for note in self.notes],
            "not_compared": [what.en for what in self.not_compared],
        }


def judge(folder: Path) -> SpotVerdict:
    """Judge the records in a folder. Raises UserError where there are none, or none of several ranks."""
    recorded = read(folder)
    world = max(step.world_size for ranks in recorded.values() for step in ranks.values())
    if world == 1:
        raise UserError(
            f"--spot-checks {folder}: one rank trained, and ranks are compared with one another; record a training "
            "of several, or make SpotChecks after the process group"
        )
    whole = [[ranks[rank] for rank in range(world)] for ranks in recorded.values() if len(ranks) == world]
    reductions = [judge_reduction(ranks) for ranks in whole]
    findings: dict[str, Finding] = {}
    for ranks, reduction in zip(whole, reductions, strict=True):
        for finding in _of_step(ranks, reduction, first=ranks is whole[0]):
            findings.setdefault(finding.kind, finding)
    notes = (
        _missing([(step, ranks) for (_, step), ranks in recorded.items() if len(ranks) < world], world),
        _unlike_targets(whole),
        _equal_generators(whole),
        _unexplained_ratio(whole, reductions),
    )
    return SpotVerdict(
        steps=len(whole),
        ranks=world,
        findings=list(findings.values()),
        notes=[note for note in notes if note is not None],
        not_compared=list(_not_compared(whole)),
    )


def _of_step(ranks: Ranks, reduction: Reduction | None, *, first: bool) -> Iterator[Finding]:
    """The differences of one step, in the order in which one causes the next."""
    step = ranks[0].step
    apart = _apart(ranks, "before", _EQUAL)
    if apart:
        kind = "weights-not-broadcast" if first and step == 1 else "weights-drift"
        yield _finding(kind, step, "weights", apart, of=len(ranks[0].before))
    yield from _samples(ranks)
    yield from _settings(ranks)
    if reduction is not None:
        yield from _gradients(step, reduction)
    if not apart and not _apart(ranks, "reduced", _EQUAL):
        after = _apart(ranks, "after", _EQUAL)
        if after:
            yield _finding("ranks-differ", step, "weights", after, of=len(ranks[0].after))
    buffers = _apart(ranks, "buffers", _EQUAL)
    prefixes = tuple(f"{name}." for name in ranks[0].batch_norms)
    statistics = {name: value for name, value in buffers.items() if name.startswith(prefixes)}
    others = {name: value for name, value in buffers.items() if name not in statistics}
    for kind, some in (("local-batch-statistics", statistics), ("buffers-differ", others)):
        if some:
            yield _finding(kind, step, "buffers", some, of=len(ranks[0].buffers))


def _finding(kind: str, step: int, what: str, apart: Mapping[str, float], *, of: int, **facts: Any) -> Finding:
    """A finding about some tensors, `of` so many; `apart`: how far each is."""
    module = common_module(list(apart)) if len(apart) < of else None
    return Finding(kind=kind, step=step, what=what, relative=max(apart.values()), module=module, facts=facts)


def _apart(ranks: Ranks, what: str, limit: float) -> dict[str, float]:
    """The tensors of which some rank has another one than rank 0, and how far they are apart."""
    tensors: Fingerprints = getattr(ranks[0], what)
    apart: dict[str, float] = {}
    for name, of_first in tensors.items():
        others = [getattr(step, what).get(name) for step in ranks[1:]]
        distance = max((of_first.distance(other) for other in others if other is not None), default=0.0)
        if distance > limit:
            apart[name] = distance
    return apart


def _samples(ranks: Ranks) -> Iterator[Finding]:
    """Whether all ranks train on the same rows."""
    rows = [set(step.rows) for step in ranks]
    if rows[0] and all(other == rows[0] for other in rows[1:]):
        count = sum(len(step.rows) for step in ranks)
        facts = {"samples": len(rows[0]), "rows": count}
        yield Finding(kind="same-samples", step=ranks[0].step, what="samples", relative=math.nan, facts=facts)


def _settings(ranks: Ranks) -> Iterator[Finding]:
    """Settings of the optimizer that differ between ranks."""
    for place, group in enumerate(ranks[0].settings):
        for name, value in group.items():
            values = [
                step.settings[place].get(name, math.nan) if place < len(step.settings) else math.nan for step in ranks
            ]
            if any(other != value for other in values):
                if name == "lr":
                    kind, facts = "learning-rate-differs", {"rates": values}
                else:
                    kind, facts = "settings-differ", {"name": name, "values": values}
                apart = max(abs(other - value) for other in values) / (abs(value) or 1.0)
                yield Finding(kind=kind, step=ranks[0].step, what="settings", relative=apart, facts=facts)


def _gradients(step: int, reduction: Reduction) -> Iterator[Finding]:
    """Whether the reduced gradients are the mean, or the sum, of what each rank's own loss gives."""
    count, world, ratio = reduction.parameters, reduction.world, reduction.ratio
    if reduction.own:
        kind = "not-reduced" if len(reduction.own) == count else "parameter-not-reduced"
        yield _finding(kind, step, "gradient", reduction.own, of=count)
    if reduction.others:
        yield _finding("reduced-otherwise", step, "gradient", reduction.others, of=count, ratio=ratio)
    if len(reduction.own) + len(reduction.others) == count:
        return
    for kind, factor in (("summed", float(world)), ("divided-twice", 1 / world)):
        if reduction.is_near(factor):
            facts = {"ratio": factor, "by": world}
            yield Finding(kind=kind, step=step, what="gradient", relative=abs(factor - 1), facts=facts)


def _missing(missing: Sequence[tuple[int, Mapping[int, CheckedStep]]], world: int) -> Words | None:
    """The note on the first step that some rank has not recorded."""
    if not missing:
        return None
    step, ranks = missing[0]
    absent = ", ".join(str(rank) for rank in range(world) if rank not in ranks)
    return Words(
        f"step {step} was recorded by {len(ranks)} of {world} ranks (not by {absent}): they ended before it, or take "
        "fewer steps",
        f"第 {step} 步只有 {len(ranks)}/{world} 个 rank 有记录（缺 {absent}）：它们在此之前结束，或步数更少",
    )


def _unlike_targets(whole: Sequence[Ranks]) -> Words | None:
    """The note on the first step in which ranks have different numbers of targets."""
    for ranks in whole:
        for name in ranks[0].counts:
            counts = [step.counts.get(name, 0) for step in ranks]
            if len(set(counts)) > 1 and name != "rows":
                listed = ", ".join(map(str, counts))
                return Words(
                    f"ranks have different numbers of targets ({name}: {listed} in step {ranks[0].step}): right if "
                    "each rank's loss is divided by the number on all ranks; a mean of means if by its own",
                    f"各 rank 的目标数不同（{name}：第 {ranks[0].step} 步为 {listed}）："
                    "若损失除以所有 rank 的总数则正确，若各自除以自己的数目则是平均的平均",
                )
    return None


def _equal_generators(whole: Sequence[Ranks]) -> Words | None:
    """The note that all ranks draw the same random numbers, in every recorded step."""
    if not whole or any(len({step.random_state for step in ranks}) > 1 for ranks in whole):
        return None
    return Words(
        "the random generators of all ranks are in the same state, so that dropout, noise and augmentation are equal "
        "on different samples",
        "所有 rank 的随机数生成器状态相同：由它们抽取的 dropout、噪声或增强在不同样本上是一样的",
    )


def _unexplained_ratio(whole: Sequence[Ranks], reductions: Sequence[Reduction | None]) -> Words | None:
    """The note on the first step whose gradients are all scaled by something that was not recorded."""
    for ranks, reduction in zip(whole, reductions, strict=True):
        if reduction is not None and not reduction.is_explained:
            return Words(
                f"all gradients are {reduction.ratio:.4g} times what they should be in step {ranks[0].step}: they "
                "are scaled or clipped by something else than PyTorch's clip_grad_norm_ and the GradScaler",
                f"第 {ranks[0].step} 步的所有梯度都是应有值的 {reduction.ratio:.4g} 倍：可能由 clip_grad_norm_ 和 "
                "GradScaler 之外的方式缩放或裁剪",
            )
    return None


def _not_compared(whole: Sequence[Ranks]) -> Iterator[Words]:
    yield Words("steps that were not recorded", "没有记录的步")
    yield Words("with one process", "与单个进程的比较")
    parts = max((ranks[0].left_out for ranks in whole), default=0)
    if parts:
        yield Words(f"{parts} parameters of which each rank holds a part", f"各 rank 只持有一部分的 {parts} 个参数")
    if whole and not any(step.rows for ranks in whole for step in ranks):
        yield Words("samples: the model was called with no tensors", "样本：模型的输入不是张量")
