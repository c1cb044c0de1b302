"""Runs the script alone on the split run's batches, if its own have other sizes or another order.

A script whose batch size is per rank, or whose sampler depends on the number of processes, is compared without any
change: the second run alone is given, batch by batch, what all ranks together trained on. Errors in the samples
themselves are then searched for in the split run.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.recording.record import RunRecord
from samestep.script_proof.batches import Iteration, iterations
from samestep.script_proof.draws import draws
from samestep.script_proof.kinds import Finding
from samestep.script_proof.sampling import check_steps, sampling, sharers_of


@dataclass(frozen=True, kw_only=True)
class Following:
    """How to start the run alone once more."""

    folder: str | None  # of the split run; None: batches can't be replayed
    times: int  # factor on the batch sizes of these samplers, so that DataLoaders have the lengths of a rank's
    widened: tuple[int, ...]
    together: int = 0  # micro-batches of the split run, of all ranks, in one of the run alone; 0: one of each rank
    redraw: str | None = None  # the split run, if it draws random numbers


def following(alone: Path, split: Path) -> Following | None:
    """Return how to follow the split run; None if steps are comparable already, or nothing can be replayed."""
    own, others = RunRecord.read(alone), RunRecord.read(split)
    check_steps(own, others)
    # Ranks that share samples draw for the same ones.
    drawn, compared = draws(split) and sharers_of(others) == 1, sampling(own, others, own)
    explained = compared.finding is not None and (compared.finding.kind == "same-samples" or not drawn)
    if explained or (compared.mistake is None and not drawn):
        return None
    together = _together(own, others)
    batches = _batches(alone, split, together)
    if batches is None:
        return Following(folder=None, times=1, widened=(), together=together, redraw=str(split)) if drawn else None
    return replace(batches, redraw=str(split) if drawn else None)


def _together(alone: RunRecord, split: RunRecord) -> int:
    """Return how many of all ranks' micro-batches are in one of the run alone; 0: one of each rank."""
    ranks, parts, whole = len(split.ranks), len(split.step(0)[0].losses), len(alone.step(0)[0].losses)
    if not parts or not whole or parts == whole or ranks * parts % whole:
        return 0
    return ranks * parts // whole


def _batches(alone: Path, split: Path, together: int) -> Following | None:
    """Return how to give one process the split run's batches; None if that isn't possible."""
    own, others = iterations(alone), iterations(split)
    shared = sorted(own.keys() & others.keys())  # one process gets less far in the same number of steps
    if not shared or any(own[number].size != others[number].size for number in shared):
        return None
    first = shared[0]
    if not own[first].joined or not others[first].joined:
        return None
    times, rest = divmod(len(others[first].grouped(together)[0]), max(1, len(own[first].joined[0])))
    samplers = [own[number].made for number in shared]
    made = tuple({sampler for sampler in samplers if sampler is not None})
    times = times if times > 1 and not rest else 1
    return Following(folder=str(split), times=times, widened=made, together=together)


def order_finding(own: Path, split: Path, steps: RunRecord) -> tuple[int, Finding] | None:
    """What is wrong with the order of the split run's samples, and the number of the step, from 0.

    `own`: the folder of the run alone with batches of its own, which says what is usual: a sampler that draws with
    replacement repeats samples there too.
    """
    alone, split_iterations = iterations(own), iterations(split)
    batches_of_a_step = max(1, len(steps.step(0)[0].losses))
    begun = 0
    previous: Iteration | None = None
    for number in sorted(split_iterations):
        for at, finding in _wrong(split_iterations[number], previous, alone, number):
            step = (begun + at) // batches_of_a_step
            if step < steps.steps:
                count, kind = finding
                total = len(split_iterations[number].joined[at])
                facts = {"count": count}
                return step, Finding(kind=kind, step=step + 1, what="samples", relative=count / total, facts=facts)
        begun += len(split_iterations[number].joined)
        previous = split_iterations[number]
    return None


def _wrong(
    one: Iteration, previous: Iteration | None, alone: Mapping[int, Iteration], number: int
) -> Iterator[tuple[int, tuple[int, str]]]:
    """Yield the number of the first wrong batch, with the number of samples and the kind of error."""
    own = alone.get(number)
    if own is not None and not _repeats(own):
        repeats = _repeats(one)
        if repeats:
            at = min(repeats)
            last = one.ended and at == len(one.joined) - 1
            yield at, (repeats[at], "padded-sampler" if last else "repeated-samples")
    if previous is None or previous.size != one.size or len(one.joined) < 2:
        return
    shared = min(len(one.joined), len(previous.joined))
    before = alone.get(number - 1)
    unlike_alone = own is not None and before is not None and own.joined[:1] != before.joined[:1]
    if unlike_alone and one.joined[:shared] == previous.joined[:shared]:
        yield 0, (len(one.joined[0]), "same-order-each-epoch")


def _repeats(one: Iteration) -> dict[int, int]:
    """Count, by batch number, the samples that have occurred before."""
    seen: Counter[int] = Counter()
    repeats: dict[int, int] = {}
    for at, batch in enumerate(one.joined):
        again = sum(count - 1 for count in Counter(batch).values()) + sum(seen[index] > 0 for index in set(batch))
        if again:
            repeats[at] = again
        seen.update(batch)
    return repeats
