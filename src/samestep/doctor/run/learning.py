"""Whether a run learned: its losses, its gradients, its evaluations."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from samestep.doctor.finding import Finding, ok, problem, warning
from samestep.doctor.run.files import RunFiles, number

_ENOUGH = 20  # steps to tell a trend
_TENTH = 10
_FEW = 8  # samples that are named


def loss(run: RunFiles) -> Iterator[Finding]:
    """Losses that are no numbers, that did not fall, or that rose."""
    lines = run.steps.values
    bad: list[Any] = [line.get("step") for line in lines if not math.isfinite(number(line.get("loss")))]
    if bad:
        # Of steps with such a file the supervision took care: they were skipped, or the run rolled back.
        left_out = run.finished and all(step in run.samples for step in bad)
        text = f"not finite at step {bad[0]}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
        if bad[0] in run.samples:
            text += f", with samples {', '.join(map(str, run.samples[bad[0]][:_FEW]))}"
            text += " ..." if len(run.samples[bad[0]]) > _FEW else ""
        yield (warning if left_out else problem)(
            "loss",
            text + ("; left out" if left_out else ""),
            "a lower learning rate or a longer warm-up, recipe.clip: 1.0, recipe.precision: fp32 or bf16; look at "
            "the samples of that step",
            steps=bad[:100],
        )
    losses = run.numbers("loss")
    if len(losses) < _ENOUGH:
        return
    part = max(3, len(losses) // _TENTH)
    first, last = statistics.median(losses[:part]), statistics.median(losses[-part:])
    values: dict[str, Any] = {"first": first, "last": last}
    text = f"from {first:.4g} to {last:.4g} (medians of {part} steps)"
    change = (last - first) / max(abs(first), 1e-12)
    if change > 0.1:
        remedy = "a lower learning rate, a longer warm-up, recipe.clip: 1.0"
        yield problem("loss", f"rose: {text}", remedy, **values)
    elif change > -0.01:
        remedy = "another learning rate, ten times more or less; look whether labels belong to their samples"
        yield warning("loss", f"did not fall: {text}", remedy, **values)
    else:
        yield ok("loss", f"fell {text}", **values)


def gradients(run: RunFiles) -> Iterator[Finding]:
    """Gradient norms that are no numbers where the loss is one: skipped steps, or spoiled weights."""
    bad = [
        line.get("step")
        for line in run.steps.values
        if math.isfinite(number(line.get("loss")))
        and "grad_norm" in line
        and not math.isfinite(number(line["grad_norm"]))
    ]
    if bad:
        yield warning(
            "gradients",
            f"{len(bad)} steps with a norm that is not finite, the first {bad[0]}",
            "under fp16 a few are meant, and skipped; elsewhere recipe.precision: fp32 and a lower learning rate",
            steps=bad[:100],
        )


def evaluations(run: RunFiles) -> Iterator[Finding]:
    """Metrics that are no numbers, or that stay what they were."""
    lines = run.evaluations.values
    if not lines:
        return
    for name in sorted({name for line in lines for name in line} - {"step"}):
        if (finding := _metric(name, [line for line in lines if name in line])) is not None:
            yield finding
    yield ok("evaluations", f"{len(lines)}, the last at step {lines[-1].get('step')}", count=len(lines))


def _metric(name: str, lines: Sequence[Mapping[str, Any]]) -> Finding | None:
    values = [number(line[name]) for line in lines]
    bad = [line.get("step") for line, value in zip(lines, values, strict=True) if not math.isfinite(value)]
    if bad:
        text = f"{name} is not finite at step {bad[0]}"
        return warning("evaluations", text, "see the loss above; a class without a held-out sample has no score")
    if len(values) >= 3 and len(set(values)) == 1:
        text = f"{name} is {values[0]:.4g} in all {len(values)} evaluations"
        remedy = "the model may answer the same to everything: another learning rate, and look at the labels"
        return warning("evaluations", text, remedy)
    return None
