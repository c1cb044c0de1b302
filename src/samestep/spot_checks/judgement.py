"""What ranks' records say of each step: the first difference of every kind, what to look at, and what wasn't seen."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from samestep.display.page import Words
from samestep.errors import UserError
from samestep.recording.differences import common_module
from samestep.script_proof.kinds import Finding
from samestep.spot_checks.fingerprints import Fingerprint, mean_of
from samestep.spot_checks.records import CheckedStep, Fingerprints, read

Ranks = Sequence[CheckedStep]  # what all ranks noted of one step, in the order of ranks

_ROUNDING = 1e-2  # of a gradient, relative: a mean over ranks in bfloat16 is within it
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
    findings: dict[str, Finding] = {}
    for ranks in whole:
        for finding in _of_step(ranks, first=ranks is whole[0]):
            findings.setdefault(finding.kind, finding)
    missing = [(at, ranks) for at, ranks in recorded.items() if len(ranks) < world]
    return SpotVerdict(
        steps=len(whole),
        ranks=world,
        findings=list(findings.values()),
        notes=[*_missing(missing, world), *_to_look_at(whole)],
        not_compared=list(_not_compared(whole)),
    )


def _of_step(ranks: Ranks, *, first: bool) -> Iterator[Finding]:
    """The differences of one step, in the order in which one causes the next."""
    step = ranks[0].step
    apart = _apart(ranks, "before", _EQUAL)
    if apart:
        kind = "weights-not-broadcast" if first and step == 1 else "weights-drift"
        yield _finding(kind, step, "weights", apart, ranks[0].before)
    yield from _samples(ranks)
    yield from _settings(ranks)
    yield from _gradients(ranks)
    if not apart and not _apart(ranks, "reduced", _EQUAL):
        after = _apart(ranks, "after", _EQUAL)
        if after:
            yield _finding("ranks-differ", step, "weights", after, ranks[0].after)
    buffers = _apart(ranks, "buffers", _EQUAL)
    if buffers:
        statistics = {name for name in buffers if any(name.startswith(f"{one}.") for one in ranks[0].batch_norms)}
        if statistics:
            some = {name: buffers[name] for name in statistics}
            yield _finding("local-batch-statistics", step, "buffers", some, ranks[0].buffers)
        if others := {name: value for name, value in buffers.items() if name not in statistics}:
            yield _finding("buffers-differ", step, "buffers", others, ranks[0].buffers)


def _finding(
    kind: str, step: int, what: str, apart: Mapping[str, float], among: Mapping[str, Any], **facts: Any
) -> Finding:
    module = common_module(list(apart)) if len(apart) < len(among) else None
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
    """Settings of the optimizer that ranks have not alike."""
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


def _gradients(ranks: Ranks) -> Iterator[Finding]:
    """Whether the reduced gradients are the mean, or the sum, of what each rank's own loss gives."""
    names = [name for name in ranks[0].reduced if _known(ranks, name)]
    if not names:
        return
    step, world = ranks[0].step, len(ranks)
    factor = _factor(ranks, names)
    others = {name: rest for name in names if (rest := _rest(ranks, name, factor)) > _ROUNDING}
    own = {name: rest for name, rest in others.items() if _is_own(ranks, name, factor)}
    if own:
        kind = "not-reduced" if len(own) == len(names) else "parameter-not-reduced"
        yield _finding(kind, step, "gradient", own, names_of(names))
    rest = {name: value for name, value in others.items() if name not in own}
    if rest:
        yield _finding("reduced-otherwise", step, "gradient", rest, names_of(names), ratio=factor / _usual(ranks))
    if len(others) == len(names):
        return
    ratio = factor / _usual(ranks)
    if _close(ratio, world):
        yield _finding("summed", step, "gradient", {"": world - 1.0}, {"": None}, ratio=float(world), by=world)
    elif _close(ratio, 1 / world):
        facts = {"ratio": 1 / world, "by": world}
        yield _finding("divided-twice", step, "gradient", {"": 1 - 1 / world}, {"": None}, **facts)


def names_of(names: Sequence[str]) -> dict[str, None]:
    return dict.fromkeys(names)


def _known(ranks: Ranks, name: str) -> bool:
    """Whether all ranks have this gradient, finite, and some rank's loss gives one that isn't 0."""
    reduced = [step.reduced.get(name) for step in ranks]
    own = [step.own[name] for step in ranks if name in step.own]
    if not own or not all(one is not None and one.finite for one in [*reduced, *own]):
        return False
    return any(one.norm > 0 for one in own)


def _own(ranks: Ranks, name: str) -> list[Fingerprint]:
    """Each rank's own gradient; 0 where its samples don't use the parameter."""
    known = next(step.own[name] for step in ranks if name in step.own)
    zero = Fingerprint(numbers=(0.0,) * len(known.numbers), norm=0.0)
    return [step.own.get(name, zero) for step in ranks]


def _usual(ranks: Ranks) -> float:
    """The ratio of a right reduced gradient to the mean of ranks' own."""
    times = len(ranks) if ranks[0].reduction == "sum" else 1
    return times * ranks[0].clipped / ranks[0].scale


def _factor(ranks: Ranks, names: Sequence[str]) -> float:
    """The ratio of reduced gradients to the mean of ranks' own that most parameters have."""
    usual, world = _usual(ranks), len(ranks)
    candidates = [usual, usual * world, usual / world, usual * ranks[0].scale]
    ratios = [ratio for name in names if (ratio := _ratio(ranks, name)) is not None]
    if ratios:
        candidates.append(median(ratios))
    fitting = [sum(_rest(ranks, name, factor) <= _ROUNDING for name in names) for factor in candidates]
    return candidates[fitting.index(max(fitting))]


def _ratio(ranks: Ranks, name: str) -> float | None:
    mean, reduced = mean_of(_own(ranks, name)), ranks[0].reduced[name]
    squares = math.fsum(value * value for value in mean.numbers)
    if squares == 0:
        return None
    return math.fsum(a * b for a, b in zip(mean.numbers, reduced.numbers, strict=True)) / squares


def _rest(ranks: Ranks, name: str, factor: float) -> float:
    """What is left of a reduced gradient without so many times the mean, on the rank where it is most."""
    mean = _times(mean_of(_own(ranks, name)), factor)
    return max(step.reduced[name].distance(mean) for step in ranks)


def _is_own(ranks: Ranks, name: str, factor: float) -> bool:
    """Whether each rank has its own gradient, times the factor of the others, or scaled and clipped as usual."""
    own = _own(ranks, name)
    factors = (factor, ranks[0].clipped / ranks[0].scale, *(step.clipped / step.scale for step in ranks))
    return any(
        all(step.reduced[name].distance(_times(one, each)) <= _ROUNDING for step, one in zip(ranks, own, strict=True))
        for each in factors
    )


def _times(fingerprint: Fingerprint, factor: float) -> Fingerprint:
    numbers = tuple(factor * value for value in fingerprint.numbers)
    return Fingerprint(numbers=numbers, norm=abs(factor) * fingerprint.norm)


def _close(ratio: float, to: float) -> bool:
    return abs(ratio / to - 1) < _ROUNDING


def _missing(missing: Sequence[tuple[tuple[int, int], Mapping[int, CheckedStep]]], world: int) -> Iterator[Words]:
    if missing:
        (_, step), ranks = missing[0]
        absent = ", ".join(str(rank) for rank in range(world) if rank not in ranks)
        yield Words(
            f"step {step} was recorded by {len(ranks)} of {world} ranks (not by {absent}): they ended there, or take "
            "other numbers of steps",
            f"第 {step} 步只有 {len(ranks)}/{world} 个 rank 有记录（缺 {absent}）：它们在那里结束，或步数不同",
        )


def _to_look_at(whole: Sequence[Ranks]) -> Iterator[Words]:
    """What may be right or not, which only who wrote the training knows."""
    for ranks in whole:
        for name in ranks[0].counts:
            counts = [step.counts.get(name, 0) for step in ranks]
            if len(set(counts)) > 1 and name != "rows":
                yield Words(
                    f"ranks have unlike numbers of targets ({name}: {', '.join(map(str, counts))} in step "
                    f"{ranks[0].step}): right if each rank's loss is divided by the number of all ranks, a mean of "
                    "means if by its own",
                    f"各 rank 的目标数不同（{name}：第 {ranks[0].step} 步为 {', '.join(map(str, counts))}）："
                    "若损失除以所有 rank 的总数则正确，若各自除以自己的数目则是平均的平均",
                )
                break
        else:
            continue
        break
    if whole and all(len({step.random_state for step in ranks}) == 1 for ranks in whole):
        yield Words(
            "all ranks' random generators are in the same state: dropout, noise or augmentation drawn from them are "
            "alike on unlike samples",
            "所有 rank 的随机数生成器状态相同：由它们抽取的 dropout、噪声或增强在不同样本上是一样的",
        )
    for ranks in whole:
        ratio = _unexplained(ranks)
        if ratio is not None:
            yield Words(
                f"gradients are {ratio:.4g} times what they should be of ranks' own in step {ranks[0].step}, all of "
                "them alike: scaled or clipped otherwise than by PyTorch's clip_grad_norm_ and the GradScaler",
                f"第 {ranks[0].step} 步的所有梯度都是应有值的 {ratio:.4g} 倍：可能由 clip_grad_norm_ 和 GradScaler "
                "之外的方式缩放或裁剪",
            )
            return


def _unexplained(ranks: Ranks) -> float | None:
    """A ratio of all gradients that neither clipping nor the number of ranks explains."""
    names = [name for name in ranks[0].reduced if _known(ranks, name)]
    if not names:
        return None
    factor = _factor(ranks, names)
    ratio = factor / _usual(ranks)
    if any(_rest(ranks, name, factor) > _ROUNDING for name in names):
        return None
    known = (1.0, float(len(ranks)), 1 / len(ranks), ranks[0].scale)
    return None if any(_close(ratio, one) for one in known) else ratio


def _not_compared(whole: Sequence[Ranks]) -> Iterator[Words]:
    yield Words("steps that were not recorded", "没有记录的步")
    yield Words("with one process", "与单个进程的比较")
    parts = max((ranks[0].left_out for ranks in whole), default=0)
    if parts:
        yield Words(f"{parts} parameters of which each rank holds a part", f"各 rank 只持有一部分的 {parts} 个参数")
    if whole and not any(step.rows for ranks in whole for step in ranks):
        yield Words("samples: the model was called with no tensors", "样本：模型的输入不是张量")
