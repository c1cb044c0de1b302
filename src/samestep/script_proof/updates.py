"""Updates: weights before and after a step, the optimizer's settings, and buffers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from samestep.recording.differences import RoundingLimits, TensorDifference, common_module
from samestep.recording.record import RankStep, RunRecord, piece_of
from samestep.script_proof.kinds import Finding

_RELATIVE = 1e-6  # of settings, which are computed in Python


def initial_finding(
    tensors: Sequence[TensorDifference], limits: RoundingLimits, alone: RunRecord, split: RunRecord
) -> Finding | None:
    """Weights with which the first step begins."""
    copies = [tensor for tensor in tensors if limits.ranks_exceeded(tensor)]
    departing = [tensor for tensor in tensors if limits.exceeded(tensor)]
    missing = [tensor.name for tensor in tensors if tensor.missing]
    shapes = {name: held for name in missing if (held := split.joined(0, "after", name)) is not None}
    if shapes:
        name, joined = next(iter(shapes.items()))
        whole = alone.joined(0, "before", name)
        facts = {"split": tuple(joined.value.shape), "alone": tuple(whole.value.shape) if whole is not None else ()}
        return replace(_weights("other-shape", tensors, list(shapes), math.inf), facts=facts)
    if missing:
        return _weights("not-in-optimizer", tensors, missing, math.inf)
    if copies:
        names = [tensor.name for tensor in copies]
        return _weights("weights-not-broadcast", tensors, names, max(tensor.ranks_apart for tensor in copies))
    if not departing:
        return None
    names = [tensor.name for tensor in departing]
    worst = max(tensor.apart for tensor in departing)
    alone_dtypes, split_dtypes = (_dtypes(run, "before") for run in (alone, split))
    if alone_dtypes and split_dtypes and alone_dtypes != split_dtypes:
        facts = {"alone": ", ".join(sorted(alone_dtypes)), "split": ", ".join(sorted(split_dtypes))}
        return replace(_weights("other-dtype", tensors, names, worst), facts=facts)
    first_ranks_only = all(_rank_0_agrees(alone, split, name) for name in names)
    return _weights("weights-not-broadcast" if first_ranks_only else "other-initial-weights", tensors, names, worst)


def _dtypes(run: RunRecord, kind: str) -> set[str]:
    return {place["dtype"] for step in run.step(0) for place in step.tensors.get(kind, {}).values()}


def unfilled_finding(runs: Sequence[RunRecord]) -> Finding | None:
    """Find weights that nobody has given values, of modules that only got memory: the recorder marks it with NaN."""
    for run in runs:
        if not any(rank.emptied for rank in run.ranks):
            continue
        values = {name: run.joined(0, "before", name) for name in run.tensor_names(0, "before")}
        empty = [name for name, joined in values.items() if joined is not None and joined.value.isnan().any()]
        if empty:
            module = common_module(empty) if len(empty) < len(values) else None
            facts = {"count": len(empty)}
            return Finding(
                kind="not-initialised", step=0, what="initial weights", relative=math.inf, module=module, facts=facts
            )
    return None


def further_finding(finding: Finding, alone: RunRecord, split: RunRecord) -> Finding:
    """Say of gradients that differ, for no known reason, that the split run trains parameters that are new."""
    alone_names = {split.names.get(name, name) for name in alone.tensor_names(0, "after")}
    further = [name for name in split.tensor_names(0, "after") if name not in alone_names]
    if not further or finding.kind not in _UNEXPLAINED:
        return finding
    names = ", ".join(further[:_NAMES_SHOWN]) + (", ..." if len(further) > _NAMES_SHOWN else "")
    facts = {"count": len(further), "names": names}
    return replace(finding, kind="further-parameters", module=common_module(further), facts=facts)


_UNEXPLAINED = frozenset(
    {"gradients-differ", "some-gradients-scaled", "backward-differs", "loss-of-own-rows", "forward-differs"}
)
_NAMES_SHOWN = 4


def _rank_0_agrees(alone: RunRecord, split: RunRecord, name: str) -> bool:
    """Whether rank 0's shards of a parameter are those of the run alone, and other ranks' are not."""
    whole, parts = alone.joined(0, "before", name), split.joined(0, "before", name)
    if whole is None or parts is None or not parts.pieces:
        return False
    held = [(rank, value, piece_of(whole.value, place)) for rank, place, value in parts.pieces if value.numel()]
    first = [value.reshape(-1).equal(expected.reshape(-1)) for rank, value, expected in held if rank == 0]
    return all(first) and bool(held)


def _weights(kind: str, tensors: Sequence[TensorDifference], names: Sequence[str], relative: float) -> Finding:
    """Build a finding about initial weights, with the module if it is a single one."""
    module = common_module(names) if len(names) < len(tensors) else None
    return Finding(kind=kind, step=0, what="initial weights", relative=relative, module=module)


def settings_finding(number: int, alone: RunRecord, split: RunRecord) -> Finding | None:
    """The optimizer's settings of each parameter in one step: learning rate, decay, betas, ..."""
    if (own := _rates_of_ranks(number, split)) is not None:
        return own
    alone_settings, split_settings = alone.step(number)[0].settings, _settings(split.step(number))
    split_settings = {
        name: split_settings[split_name]
        for name in alone_settings
        if (split_name := split.names.get(name, name)) in split_settings
    }
    unlike: dict[str, list[str]] = {}
    for name, options in alone_settings.items():
        for option, value in options.items():
            other = split_settings.get(name, {}).get(option, value)
            if not _equal(value, other):
                unlike.setdefault(option, []).append(name)
    for option in sorted(unlike, key=lambda option: (option != "lr", option != "weight_decay")):
        names = unlike[option]
        a, s = alone_settings[names[0]][option], split_settings[names[0]][option]
        if option == "lr":
            return _learning_rate(
                number, alone, split, names[0], a, s, names if len(names) < len(alone_settings) else None
            )
        if option == "weight_decay":
            facts = {"alone": a, "split": s, "count": len(names)}
            return _setting("weight-decay", number, names, alone_settings, _relative(a, s), **facts)
        if option in SETTINGS:
            return _setting(
                "optimizer-setting", number, names, alone_settings, _relative(a, s), name=option, alone=a, split=s
            )
    return None


def _rates_of_ranks(number: int, split: RunRecord) -> Finding | None:
    """Find learning rates that differ between ranks."""
    rates = [
        next((options["lr"] for options in step.settings.values() if "lr" in options), None)
        for step in split.step(number)
    ]
    given_rates = [rate for rate in rates if rate is not None]
    if not given_rates or all(_equal(rate, given_rates[0]) for rate in given_rates):
        return None
    facts = {"rates": ", ".join(f"{rate:.4g}" for rate in given_rates)}
    relative = _relative(min(given_rates), max(given_rates))
    return Finding(
        kind="learning-rate-differs", step=number + 1, what="learning rate", relative=relative, facts=facts
    )


# Settings of PyTorch's optimizers that decide about the update; others, such as `foreach`, are how it is computed.
SETTINGS = (
    "weight_decay",
    "betas",
    "eps",
    "momentum",
    "dampening",
    "nesterov",
    "alpha",
    "centered",
    "amsgrad",
    "maximize",
    "rho",
)


def _settings(steps: Sequence[RankStep]) -> dict[str, Mapping[str, Any]]:
    """Merge the settings of all ranks, since some may hold no part of a parameter."""
    settings: dict[str, Mapping[str, Any]] = {}
    for step in reversed(steps):
        settings |= step.settings
    return settings


def _equal(a: Any, b: Any) -> bool:
    """Whether two settings are the same, up to rounding of numbers."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) <= _RELATIVE * max(abs(a), abs(b)) + 1e-15
    return a == b


def _relative(a: Any, b: Any) -> float:
    """The relative difference of two settings; 1 for what are no numbers."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) / max(abs(a), abs(b), 1e-300)
    return 1.0


def _setting(
    kind: str, number: int, names: Sequence[str], all_names: Mapping[str, Any], relative: float, **facts: Any
) -> Finding:
    """A finding about an optimizer's setting."""
    module = common_module(names) if len(names) < len(all_names) else None
    what = "learning rate" if kind in ("schedule-steps", "learning-rate", "learning-rate-scaled") else "optimizer"
    return Finding(kind=kind, step=number + 1, what=what, relative=relative, module=module, facts=facts)


def _learning_rate(
    number: int, alone: RunRecord, split: RunRecord, name: str, a: float, s: float, names: Sequence[str] | None
) -> Finding:
    """Classify a learning rate: a schedule that is stepped too often, a common factor, or something else."""
    alone_rates = _rates(alone, name)
    split_rates = _rates(split, split.names.get(name, name))
    facts: dict[str, Any] = {"alone": a, "split": s}
    module = common_module(names) if names is not None else None
    kind, more = "learning-rate", {}
    usual = {
        options.get("lr")
        for own_name, options in alone.step(number)[0].settings.items()
        if own_name not in (names or ())
    }
    if names is not None and s in usual:
        return Finding(
            kind="other-group",
            step=number + 1,
            what="optimizer",
            relative=_relative(a, s),
            module=module,
            facts=facts,
        )
    ranks = len(split.ranks)
    micro_batches = len(split.step(number)[0].losses)
    for by in dict.fromkeys((ranks, micro_batches, ranks * micro_batches)):
        if by > 1 and any(_times_as_fast(alone_rates, split_rates, by, begun) for begun in range(by)):
            kind, more = "schedule-steps", {"by": by}
            break
    else:
        ratios = [one / other for one, other in zip(split_rates, alone_rates, strict=False) if other]
        if a and all(_equal(ratio, s / a) for ratio in ratios):
            kind, more = "learning-rate-scaled", {"ratio": s / a}
    return Finding(
        kind=kind,
        step=number + 1,
        what="learning rate",
        relative=_relative(a, s),
        module=module,
        facts={**facts, **more},
    )


def _times_as_fast(alone_rates: Sequence[float], split_rates: Sequence[float], by: int, begun: int) -> bool:
    """Whether the split run's schedule takes `by` steps for one of the other's, after `begun` of them."""
    pairs = [
        (split_rates[at], alone_rates[at * by + begun])
        for at in range(len(split_rates))
        if at * by + begun < len(alone_rates)
    ]
    return len(pairs) > 1 and all(_equal(one, other) for one, other in pairs)


def follows_samples(own: RunRecord, split: RunRecord, by: int) -> bool:
    """Whether the split run has, after as many samples, the rates of one process with batches `by` times smaller."""
    name = next(iter(own.step(0)[0].settings), None)
    if name is None:
        return False
    own_rates, split_rates = _rates(own, name), _rates(split, split.names.get(name, name))
    pairs = [(split_rates[at], own_rates[at * by]) for at in range(len(split_rates)) if at * by < len(own_rates)]
    return len(pairs) > 1 and all(_equal(one, other) for one, other in pairs)


def schedule_finding(own: RunRecord, split: RunRecord, by: int) -> Finding | None:
    """Find a schedule that is longer than the training, whose steps are fewer the more ranks there are.

    `own`: the run alone with its own batches, of which it takes `by` times as many. Trainings of a set number of
    steps have as many of them alone, and are right.
    """
    name = next(iter(own.step(0)[0].settings), None)
    if name is None or by < 2 or own.steps <= split.steps:
        return None
    if any(rank.end.get("how") != "ended" for rank in split.ranks):
        return None
    own_rates, split_rates = _rates(own, name), _rates(split, split.names.get(name, name))
    if len(split_rates) < split.steps:
        return None
    last = split_rates[-1]
    goes_down = len(split_rates) > 1 and last < split_rates[-2] and last > ENDED * max(split_rates)
    if not goes_down or not all(map(_equal, own_rates, split_rates)):
        return None
    facts = {"split": split.steps, "alone": own.steps, "rate": last}
    relative = last / max(split_rates)
    return Finding(kind="schedule-length", step=split.steps, what="learning rate", relative=relative, facts=facts)


def end_not_seen(own: RunRecord, split: RunRecord) -> bool:
    """Whether a run was stopped while its rates go down, as they do in one process that has smaller batches.

    Either the training has a set number of steps, or the schedule's length ignores the number of ranks.
    """
    name = next(iter(own.step(0)[0].settings), None)
    if name is None or all(rank.end.get("how") == "ended" for rank in split.ranks):
        return False
    own_rates, split_rates = _rates(own, name), _rates(split, split.names.get(name, name))
    down = len(split_rates) > 1 and 0 < split_rates[-1] < split_rates[-2]
    return down and len(own_rates) >= len(split_rates) and all(map(_equal, own_rates, split_rates))


ENDED = 0.01  # of the largest rate: a schedule that goes down so far is at its end


def ends_with_training(run: RunRecord) -> bool:
    """Whether a run that was not stopped has a schedule that goes down to its end."""
    name = next(iter(run.step(0)[0].settings), None)
    rates = _rates(run, name) if name is not None else [1.0]
    # The last step's rate is one step before the schedule's end.
    return len(rates) > 1 and rates[-1] - max(0.0, rates[-2] - rates[-1]) <= ENDED * max(rates)


def rate_ends(run: RunRecord) -> int | None:
    """The step, from 1, from which on a rate that was not 0 is 0, with steps after it; None if there is none."""
    name = next(iter(run.step(0)[0].settings), None)
    rates = _rates(run, name) if name is not None else []
    last = max((number for number, rate in enumerate(rates) if rate), default=len(rates))
    return last + 2 if last + 2 < len(rates) else None


def _rates(run: RunRecord, name: str) -> list[float]:
    """A parameter's learning rates, up to the step from which on no optimizer has it, as where all are made anew."""
    rates = []
    for number in range(run.steps):
        settings = _settings(run.step(number)).get(name)
        if settings is None:
            break
        rates.append(float(settings.get("lr", 0.0)))
    return rates


COARSE = 0.01  # of a gradient: where rounding moves it by more, an update says nothing of its own


def update_finding(
    number: int,
    tensors: Sequence[TensorDifference],
    limits: RoundingLimits,
    alone: RunRecord,
    split: RunRecord,
    *,
    gradients: float,
) -> Finding | None:
    """Weights after a step whose gradients were the same, up to `gradients`, relative.

    AdamW makes a whole step of a number whose sign is rounding, so gradients that are known coarsely, as those of
    bfloat16, say nothing of the update; the optimizer's settings are compared all the same.
    """
    own = [tensor for tensor in tensors if not tensor.missing and limits.ranks_exceeded(tensor)]
    departing = [tensor for tensor in tensors if limits.exceeded(tensor)]
    if (setting := settings_finding(number, alone, split)) is not None:
        return setting
    if own:
        worst = max(tensor.ranks_apart for tensor in own)
        without = [str(rank) for rank, record in enumerate(split.ranks) if number not in record.loaded]
        if 0 < len(without) < len(split.ranks):
            finding = _parameters("optimizer-state-differs", number, tensors, own, worst)
            return replace(finding, facts={"ranks": ", ".join(without)})
        return _parameters("ranks-differ", number, tensors, own, worst)
    if not departing:
        return None
    worst = max(tensor.apart for tensor in departing)
    loaded = [at for rank in split.ranks for at in rank.loaded]
    if continued(split) and number in (continued(split), *loaded):
        return _parameters("optimizer-state-lost", number, tensors, departing, worst)
    if gradients > COARSE:
        return None
    return _parameters("update-differs", number, tensors, departing, worst)


def continued(split: RunRecord) -> int | None:
    """Return the number of steps after which the script was started again and resumed; None if it wasn't."""
    folders = [step.folder for step in split.ranks[0].steps]
    return next((number for number, folder in enumerate(folders) if folder != folders[0]), None)


def _parameters(
    kind: str,
    number: int,
    tensors: Sequence[TensorDifference],
    departing: Sequence[TensorDifference],
    relative: float,
) -> Finding:
    """A finding about parameters after a step."""
    names = [tensor.name for tensor in departing]
    module = common_module(names) if len(names) < len(tensors) else None
    return Finding(kind=kind, step=number + 1, what="parameters", relative=relative, module=module)


def buffer_finding(number: int, tensors: Sequence[TensorDifference], limits: RoundingLimits) -> Finding | None:
    """Buffers after a step, such as running statistics."""
    own = [tensor for tensor in tensors if limits.ranks_exceeded(tensor)]
    departing = [tensor for tensor in tensors if limits.exceeded(tensor)]
    changed = own or departing
    if not changed:
        return None
    names = [tensor.name for tensor in changed]
    relative = max(tensor.ranks_apart if own else tensor.apart for tensor in changed)
    return Finding(
        kind="buffers-differ" if own else "buffer",
        step=number + 1,
        what="buffers",
        relative=relative,
        module=common_module(names),
    )
