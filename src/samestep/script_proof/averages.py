"""Weights that a script averages over its ranks: after each step, or after several of their own (Local SGD)."""

from dataclasses import replace

import torch

from samestep.recording.record import RunRecord
from samestep.script_proof.kinds import Finding

_UNITS = 64.0  # of rounding, in which an average may differ from that of the recorded weights


def averaged_steps(run: RunRecord) -> frozenset[int]:
    """Steps after which all ranks go on with the mean of their weights, which differ after the step itself.

    The last step can't show it: it counts where all before it do.
    """
    averaged = {number for number in range(run.steps - 1) if _is_averaged(run, number)}
    if run.steps > 1 and len(averaged) == run.steps - 1:
        averaged.add(run.steps - 1)
    return frozenset(averaged)


def _is_averaged(run: RunRecord, number: int) -> bool:
    """Whether the weights that ranks have made in a step were replaced by their mean before the next one."""
    later = run.step(number + 1)
    changed = [set(step.values.get("changed", ())) for step in later]
    if len(changed) < 2 or not all(changed):
        return False
    apart = False
    for name in set.intersection(*changed):
        made, gone_on = (run.joined(at, kind, name) for at, kind in ((number, "after"), (number + 1, "before")))
        if made is None or gone_on is None or len(made.copies) < 2:
            return False
        mean = torch.stack([*made.copies]).mean(dim=0)
        most = _UNITS * torch.finfo(run.dtype()).eps * max(1e-30, mean.abs().max().item())
        if any((copy - mean).abs().max().item() > most for copy in gone_on.copies):
            return False
        apart = apart or not all(copy.equal(made.copies[0]) for copy in made.copies)
    return apart


def averaging_finding(number: int, finding: Finding, averaged: frozenset[int]) -> Finding:
    """Say of a finding that it comes of averages of the weights, in place of the gradients."""
    if number in averaged and finding.kind in ("update-differs", "gradients-differ", "optimizer-state-lost"):
        return replace(finding, kind="weights-averaged", facts={})
    later = min((candidate for candidate in averaged if candidate > number), default=None)
    if later is not None and finding.kind == "not-reduced":
        return replace(finding, kind="local-steps", facts={"count": later - number + 1})
    return finding
