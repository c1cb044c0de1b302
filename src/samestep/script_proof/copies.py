"""What no optimizer holds: averaged and copied weights, weights changed between steps, scalers, random states."""

from collections.abc import Sequence

from samestep.recording.differences import RoundingLimits, TensorDifference
from samestep.recording.record import RunRecord
from samestep.script_proof.kinds import Finding


def held_finding(
    number: int,
    tensors: Sequence[TensorDifference],
    limits: RoundingLimits,
    split: RunRecord,
    *,
    continued: int | None,
) -> Finding | None:
    """Find copies of the weights, as they are before a step, that are others on ranks or than alone.

    `continued`: the number of steps after which the script was started again.
    """
    there = [tensor for tensor in tensors if not tensor.missing]
    on_ranks = [tensor for tensor in there if tensor.ranks_apart > limits.of(tensor.name)]
    departing = [tensor for tensor in there if tensor.apart > limits.of(tensor.name)]
    departing = on_ranks or departing
    if not departing:
        return None
    worst = max(departing, key=lambda tensor: max(tensor.apart, tensor.ranks_apart))
    kind = "copies-differ"
    if not on_ranks:
        kind = (
            "copy-not-updated"
            if number and all(_stays(split, number, tensor) for tensor in departing)
            else "copy-differs"
        )
        kind = "copy-lost" if number == continued else kind
    copy, _, name = worst.name.partition("/")
    return Finding(
        kind=kind,
        step=number + 1 if number else 0,
        what="copied weights",
        relative=worst.ranks_apart if on_ranks else worst.apart,
        module=name if len(departing) == 1 else None,
        facts={"copy": copy},
    )


def _stays(split: RunRecord, number: int, tensor: TensorDifference) -> bool:
    first, now = split.joined(0, "held", tensor.name), split.joined(number, "held", tensor.name)
    return first is not None and now is not None and first.value.equal(now.value)


def changed_finding(number: int, alone: RunRecord, split: RunRecord) -> Finding | None:
    """Find weights that only some processes have changed between two steps."""
    own = sorted(alone.step(number)[0].values.get("changed", ()))
    split_names = {name: split.names.get(name, name) for name in own}
    ranks = [sorted(step.values.get("changed", ())) for step in split.step(number)]
    whole = not any(tensor.pieces for name in own[:1] if (tensor := split.joined(number, "after", name)) is not None)
    unlike = [rank for rank, names in enumerate(ranks) if names != ranks[-1]]
    facts: dict[str, object] = {}
    if unlike and whole:
        who = [rank for rank, names in enumerate(ranks) if names]
        facts["who"] = "rank " + ", ".join(map(str, who))
    elif sorted(split_names.values()) != ranks[0] and bool(own) != bool(ranks[0]):
        facts["who"] = "split" if ranks[0] else "alone"
    else:
        return None
    return Finding(kind="weights-changed", step=number + 1, what="weights before the step", relative=1.0, facts=facts)


def scaler_finding(number: int, alone: RunRecord, split: RunRecord, *, continued: int | None) -> Finding | None:
    """Find a scale of gradients that is another one."""
    alone_scale = alone.step(number)[0].values.get("scale")
    for step in split.step(number):
        split_scale = step.values.get("scale")
        if alone_scale and split_scale and alone_scale != split_scale:
            kind = "scaler-state-lost" if continued is not None and number >= continued else "scaler-differs"
            facts = {"split": split_scale, "alone": alone_scale}
            relative = abs(split_scale - alone_scale) / alone_scale
            return Finding(kind=kind, step=number + 1, what="gradient scaler", relative=relative, facts=facts)
    return None


def random_states_finding(split: RunRecord, continued: int | None) -> Finding | None:
    """Find generators that are equal on all ranks after a resumption, and were not before."""
    if continued is None or not 0 < continued < split.steps or len(split.ranks) < 2:
        return None
    before, after = (
        {step.forwards[0]["random"] for step in split.step(number) if step.forwards}
        for number in (continued - 1, continued)
    )
    if len(after) > 1 or len(before) < 2:
        return None
    return Finding(kind="random-states-equal", step=continued + 1, what="random numbers", relative=1.0)
