"""Compare the records of a script alone, alone again, and split: the first difference, compared with the noise.

Order of looking: the initial weights, then step by step samples, gradients, updates and buffers. Each is judged only
where what comes before it is the same: with other samples gradients must differ, and say nothing. A difference counts
from a multiple of the noise on, which a second run alone shows: the same samples with rows in another order, so the
same sums with another rounding.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from samestep.display.page import Words
from samestep.errors import UserError
from samestep.recording.differences import (
    RoundingLimits,
    TensorDifference,
    common_module,
    compare_tensors,
    limits_of,
    overall,
)
from samestep.recording.record import RunRecord, with_names_of
from samestep.script_proof.averages import averaged_steps, averaging_finding
from samestep.script_proof.copies import changed_finding, held_finding, random_states_finding, scaler_finding
from samestep.script_proof.draws import JOINED, ONE, SAME, UNLIKE, own_draw
from samestep.script_proof.evaluation import joined_finding, own_share_finding
from samestep.script_proof.follow import order_finding
from samestep.script_proof.gradients import StepPair, gradient_finding
from samestep.script_proof.kinds import Finding
from samestep.script_proof.own_gradients import STEPS, OwnJudgement, judge_by_own
from samestep.script_proof.runs import (
    AGAIN,
    ALONE,
    OWN,
    ROUNDING_AT_MOST,
    SPLIT,
    ScriptProof,
    Starter,
    gave_no_measure,
    launched,
    measure_in_halves,
    run_all,
    run_to_end,
)
from samestep.script_proof.sampling import Sampling, check_steps, evaluation_finding, keys_of, rows_in_step, sampling
from samestep.script_proof.start_notes import group_note, no_evaluation, not_compared, start_notes
from samestep.script_proof.states import state_finding
from samestep.script_proof.updates import (
    COARSE,
    buffer_finding,
    continued,
    end_not_seen,
    ends_with_training,
    follows_samples,
    further_finding,
    initial_finding,
    rate_ends,
    schedule_finding,
    settings_finding,
    unfilled_finding,
    update_finding,
)


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """Relative differences of both runs in one step, and the noise."""

    step: int  # from 1
    loss: float | None
    gradient: float
    parameters: float
    gradient_noise: float
    parameters_noise: float
    modules: Mapping[str, float]  # the gradient's difference, by module
    learns: bool = True  # whether any gradient is not zero
    noise: float = 0.0  # of all gradients as one


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a proof."""

    processes: int
    alone: int = 1  # processes of the run that they are compared with
    steps: int  # that were compared
    finding: Finding | None
    noise: Mapping[str, float]  # largest measured noise of gradients and of parameters
    curve: Sequence[StepNumbers] = ()
    notes: Sequence[Words] = ()
    not_compared: Sequence[Words] = ()
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)  # a step: alone, again, split

    @property
    def same_step(self) -> bool:
        return self.finding is None

    def to_json(self) -> dict[str, Any]:
        """Relative differences, and noise, of each step."""
        return {
            "same_step": self.same_step,
            "processes": self.processes,
            "alone_processes": self.alone,
            "steps": self.steps,
            "kind": self.finding.kind if self.finding is not None else None,
            "words": self.finding.words.en if self.finding is not None else None,
            "first_difference": self.finding.to_json() if self.finding is not None else None,
            "noise": dict(self.noise),
            "notes": [note.en for note in self.notes],
            "not_compared": [what.en for what in self.not_compared],
            "losses": {name: list(values) for name, values in self.losses.items()},
            "curve": [
                {
                    "step": point.step,
                    "loss": point.loss,
                    "gradient": point.gradient,
                    "parameters": point.parameters,
                    "gradient_noise": point.gradient_noise,
                    "parameters_noise": point.parameters_noise,
                    "modules": dict(point.modules),
                }
                for point in self.curve
            ],
        }


# A departure that looks like none of the known faults, and is this small (relative), may be rounding that the run
# alone again did not happen to meet, and that the training magnifies.
_DOUBTFUL = ("gradients-differ", "backward-differs", "loss-of-own-rows", "forward-differs", "update-differs")
_DOUBTFUL_BELOW = 0.05
IN_FLOAT64 = "float64"  # the folder of the runs that decide then


def prove(proof: ScriptProof, folder: Path, starter: Starter = launched) -> Verdict:
    """Run a proof in a new folder, and compare its runs; a doubtful verdict is checked in float64.

    Raises UserError where a run fails or does not end, or where they can't be compared.
    """
    run_all(proof, folder, starter)
    verdict = compare_runs(folder, dropout=proof.dropout)
    finding = verdict.finding
    if finding is not None and finding.kind == "schedule-length":
        return _with_whole_schedule(verdict, proof, folder, starter)
    if finding is None:
        return _with_end_of_schedule(verdict, proof, folder, starter)
    if proof.dtype is not None or RunRecord.read(folder / ALONE).dtype() == torch.float64:
        return verdict
    if finding.kind not in _DOUBTFUL or not finding.relative < _DOUBTFUL_BELOW:
        return verdict
    return _checked(verdict, finding, proof, folder, starter)


def _with_whole_schedule(verdict: Verdict, proof: ScriptProof, folder: Path, starter: Starter) -> Verdict:
    """Keep the finding if the schedule ends where one process alone ends; else it has no end, or a later one."""
    steps = 2 * proof.processes * max(1, verdict.steps)
    try:
        whole = run_to_end(proof, folder, starter, steps)
    except UserError:
        return replace(verdict, finding=None)
    return verdict if ends_with_training(whole) else replace(verdict, finding=None)


def _with_end_of_schedule(verdict: Verdict, proof: ScriptProof, folder: Path, starter: Starter) -> Verdict:
    """Run to the end a training that was stopped while its rates go down, if it has few steps.

    One process that takes smaller batches has the same rates: that may be right, or the schedule is too long.
    """
    if not (folder / OWN).is_dir():
        return verdict
    own, split = RunRecord.read(folder / OWN), RunRecord.read(folder / SPLIT)
    by = rows_in_step(split, 0) // max(1, rows_in_step(own, 0))
    names = with_names_of(split, own).names
    if by < 2 or not end_not_seen(own, replace(split, names=names)):
        return verdict
    steps = _TO_THE_END * max(1, verdict.steps)
    try:
        whole = replace(run_to_end(proof, folder, starter, steps, split=True), names=names)
        alone = run_to_end(proof, folder, starter, by * whole.steps + 1)
    except UserError:
        return verdict
    finding = schedule_finding(alone, whole, by)
    if finding is not None and ends_with_training(alone):
        return replace(verdict, finding=finding, not_compared=[])
    if any(rank.end.get("how") != "ended" for rank in whole.ranks):
        return replace(verdict, not_compared=[*verdict.not_compared, _END_OF_SCHEDULE])
    return verdict


_TO_THE_END = 3  # times as many steps as were compared
_END_OF_SCHEDULE = Words(
    "whether the learning rate's schedule ends with the training: it goes down by steps alike on one process, which "
    "takes more of them",
    "学习率调度是否与训练同时结束：单个进程步数更多，而它每步的学习率相同",
)


def _checked(verdict: Verdict, finding: Finding, proof: ScriptProof, folder: Path, starter: Starter) -> Verdict:
    """Return the verdict in float64 if it is clear there; else the given one, with a note on the attempt.

    Code that computes in bfloat16 anyway rounds halves of a batch differently from the whole: in float64 they differ
    by nothing that could explain a departure.
    """
    place = folder / IN_FLOAT64
    exactly = replace(proof, dtype="float64")
    try:
        run_all(exactly, place, starter)
        exact = compare_runs(place, dropout=proof.dropout)
    except UserError as error:
        return replace(verdict, notes=[*verdict.notes, _NOT_IN_FLOAT64.format(error=str(error).partition("\n")[0])])
    facts = {"step": finding.step, "what": finding.what, "relative": finding.relative}
    in_float64 = RunRecord.read(place / ALONE).dtype() == torch.float64
    if in_float64 and _is_clear(exact):
        return replace(exact, notes=[*exact.notes, _ROUNDING.format(**facts)])
    if in_float64 and exact.noise["gradient"] < _EXACT:
        return replace(verdict, notes=[*verdict.notes, _ALSO_IN_FLOAT64])
    if proof.noise == "order" and measure_in_halves(exactly, place, starter):
        halved = compare_runs(place, dropout=proof.dropout)
        if _is_clear(halved):
            return replace(halved, notes=[*halved.notes, _ROUNDING_OF_HALVES.format(**facts)])
    unchanged = _NOT_IN_FLOAT64.format(error="--dtype float64 changes nothing")
    return replace(verdict, notes=[*verdict.notes, _ALSO_IN_FLOAT64 if in_float64 else unchanged])


_EXACT = 1e-10  # of a gradient: all that the script computes is in float64


def _is_clear(verdict: Verdict) -> bool:
    """Whether the steps are the same, or differ for a known reason."""
    return verdict.finding is None or verdict.finding.kind not in _DOUBTFUL


_NOT_IN_FLOAT64 = Words(
    "the difference is small and looks like no known fault; float64 could not tell whether it is rounding: {error}",
    "差异很小，也不像任何已知的错误；用 float64 没能查明它是不是舍入：{error}",
)
_ALSO_IN_FLOAT64 = Words(
    "in float64 the runs differ too: the difference is not rounding",
    "用 float64 时两次运行也不同：这不是舍入",
)
_ROUNDING = Words(
    "these are runs in float64: in the script's own precision the runs are {relative:.2g} apart from step {step} on "
    "({what}), more than the noise that was measured; that is rounding",
    "这些运行使用 float64：以脚本自己的精度，两次运行从第 {step} 步起相差 {relative:.2g}（{what}），超过测得的噪声；"
    "这是舍入",
)

_ROUNDING_OF_HALVES = Words(
    "the script computes in a type of few bits, whatever --dtype says: compared with rows in the other order the "
    "runs are {relative:.2g} apart from step {step} on ({what}), and compared with a model that is called with each "
    "half of a batch, as ranks are, that is rounding",
    "无论 --dtype 如何，脚本都用位数较少的类型计算：与行序相反的运行相比，两次运行从第 {step} 步起相差 {relative:.2g}"
    "（{what}）；与像各 rank 那样用半个批调用模型的运行相比，这是舍入",
)


def compare_runs(folder: Path, *, dropout: bool = False) -> Verdict:
    """The verdict on the runs in a folder. Raises UserError where they can't be compared: what to pass instead."""
    alone, again, split = (RunRecord.read(folder / name) for name in (ALONE, AGAIN, SPLIT))
    if (folder / f"{SPLIT}-then").is_dir():
        split = split.then(RunRecord.read(folder / f"{SPLIT}-then"))
    check_steps(alone, split)
    own = RunRecord.read(folder / OWN) if (folder / OWN).is_dir() else None
    order = order_finding(folder / OWN, folder / SPLIT, split) if own is not None else None
    named = with_names_of(split, alone)
    named = replace(named, averaged=averaged_steps(named))
    verdict = _Comparison(
        alone=alone,
        again=again,
        split=named,
        dropout=dropout,
        own=own,
        order=order,
        whole=gave_no_measure(folder, "halves"),
        placed=gave_no_measure(folder, "reversed"),
    ).verdict()
    if continued(split) and verdict.finding is not None and verdict.finding.kind in _BY_DRAWS:
        _check_draws(folder / SPLIT)
    return replace(
        verdict,
        notes=[
            *verdict.notes,
            *start_notes(folder / ALONE, folder / SPLIT),
            *group_note(folder / SPLIT, verdict.finding.kind if verdict.finding is not None else None),
        ],
        not_compared=[*verdict.not_compared, *not_compared(folder / SPLIT, split)],
    )


_BY_DRAWS = frozenset({"forward-differs", "gradients-differ", "loss-of-own-rows", "backward-differs"})


def _check_draws(split: Path) -> None:
    """Raise UserError where a resumed run differs, and its ranks draw numbers that one process was not given."""
    if (name := own_draw(split)) is not None:
        raise UserError(
            f"each rank draws random numbers of its own as it trains ({name}), and one process can't be given those "
            "of a run that --then resumes: its steps differ by them; prove the script without --then, where it is "
            "given them"
        )


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    alone: RunRecord
    again: RunRecord
    split: RunRecord
    dropout: bool
    own: RunRecord | None = None  # the run alone with its own batches, if `alone` was given the split run's
    whole: bool = False  # the model can't be called with half batches, by which rounding is measured
    placed: bool = False  # a sample's place in its batch matters
    order: tuple[int, Finding] | None = None  # first step of the split run whose samples are wrong, and the finding

    def verdict(self) -> Verdict:
        """Find the first difference, and compute the curve of all steps."""
        samples = self._sampling()
        steps = min(self.alone.steps, self.split.steps)
        numbers: list[StepNumbers] = []
        finding = self._initial()
        limits: dict[str, RoundingLimits] = {}
        for number in range(steps if samples.mistake is None else 0):
            first, shown = self._step(number, limits, judged=finding is None and number < samples.same)
            numbers.append(shown)
            finding = finding or first
            if finding is None and number == samples.same:
                finding = samples.finding
        if finding is None and samples.mistake is None:
            finding = samples.finding or self._rest()
        if finding is None and samples.mistake is not None:
            finding = self._without_samples()
            own = (
                judge_by_own(self.alone, self.split)
                if finding is None and samples.drawn
                else OwnJudgement(judged=False)
            )
            finding = finding or own.finding or self._settings_of_steps(own)
            if finding is None and not own.judged:
                raise UserError(f"{samples.mistake}{self._judged_without()}")
        if finding is None:
            self._check_losses(numbers)
            self._check_noise(numbers)
        return Verdict(
            processes=len(self.split.ranks),
            alone=len(self.alone.ranks),
            steps=steps,
            finding=finding,
            noise={
                "gradient": max((step.gradient_noise for step in numbers), default=0.0),
                "parameters": max((step.parameters_noise for step in numbers), default=0.0),
            },
            curve=numbers,
            notes=[
                *self._notes(samples),
                *self._schedule_note(finding),
                *_slow_note(finding),
                *_blunt_note(numbers),
                *_coarse_note(limits.get("gradient")),
            ],
            not_compared=[_SAMPLES] if finding is None and samples.mistake is not None else [],
            losses={name: losses_of(run) for name, run in self._runs().items()},
        )

    def _settings_of_steps(self, own: OwnJudgement) -> Finding | None:
        """Compare learning rates and other settings, which need no samples."""
        steps = range(min(self.alone.steps, self.split.steps) if own.judged else 0)
        findings = (settings_finding(number, self.alone, self.split) for number in steps)
        return next((finding for finding in findings if finding is not None), None)

    def _sampling(self) -> Sampling:
        """Compare the samples: up to which step they are the same, and what is wrong from there on."""
        samples = sampling(self.alone, self.split, self.again, prescribed=self.own is not None)
        if samples.mistake is None and samples.finding is None and (unlike := self._unlike_draws()) is not None:
            return replace(
                samples,
                mistake=f"each rank draws random numbers of its own that are not by samples ({unlike['name']}, shape "
                f"{tuple(unlike['shape'])}, before step {unlike['after'] + 1}): one process has one such draw",
            )
        if self.order is not None and samples.mistake is None and self.order[0] < samples.same:
            return Sampling(same=self.order[0], finding=self.order[1], seen=samples.seen)
        return samples

    def _judged_without(self) -> str:
        """What could be judged where steps can't be compared."""
        return (
            f"; what could be judged: in {self.split.steps} steps all {len(self.split.ranks)} ranks have the same "
            "gradients, weights and buffers as one another, which does not show that they are right"
        )

    def _check_noise(self, steps: Sequence[StepNumbers]) -> None:
        """Raise UserError where nothing could depart: what was measured is no rounding."""
        noise = steps[0].noise if steps and self._compares_gradients else 0.0
        if noise > ROUNDING_AT_MOST:
            raise UserError(
                f"two runs alone that should differ by rounding have gradients {noise:.2g} apart in step 1: "
                "against that no difference of the split run could be seen; pass --dtype float64 if the script "
                "computes in few bits, or seed what it draws at random"
            )

    def _check_losses(self, steps: Sequence[StepNumbers]) -> None:
        """Raise UserError for steps that are the same because nothing is learned in them."""
        seen = all(step.losses for run in (self.alone, self.split) for step in run.step(0))
        values = [value for run in (self.alone, self.split) for value in losses_of(run)]
        if steps and seen and not any(values) and not any(step.learns for step in steps):
            raise UserError(
                f"every loss that the script gave to backward in {len(steps)} steps is 0, and so is every gradient, "
                "alone and split: such steps are the same whatever is wrong; use one whose loss depends on the "
                "model, such as with labels that are not all -100"
            )

    def _runs(self) -> dict[str, RunRecord]:
        return {ALONE: self.alone, AGAIN: self.again, SPLIT: self.split}

    @property
    def _compares_gradients(self) -> bool:
        return self._redrawn() or not (self.dropout and self._drops())

    def _redrawn(self) -> bool:
        """Whether the run alone was given everything that the ranks drew."""
        redrawn = self.alone.ranks[0].redrawn
        return (
            bool(redrawn)
            and not self.split.ranks[0].masked
            and all(draw["how"] in (JOINED, SAME, ONE) for draw in redrawn)
        )

    def _unlike_draws(self) -> Mapping[str, Any] | None:
        """The first random numbers that are each rank's own, and not by rows, so that one process can't have them."""
        steps = min(self.alone.steps, self.split.steps)
        redrawn = self.alone.ranks[0].redrawn
        return next((draw for draw in redrawn if draw["how"] == UNLIKE and draw["after"] < steps), None)

    def _drops(self) -> bool:
        return any(step.values["dropout"] for step in self.split.step(0))

    def _initial(self) -> Finding | None:
        """Compare the weights before the first step. Raises UserError for unseeded ones."""
        if (empty := unfilled_finding((self.alone, self.split))) is not None:
            return empty
        tensors = compare_tensors(0, "before", self.alone, self.split, self.again)
        limits = limits_of(tensors, self.alone.dtype())
        if tensors and max(tensor.noise for tensor in tensors) > 1e-3:
            # Ranks of one run have the same weights or not, however far two runs are apart.
            still = [replace(tensor, noise=0.0) for tensor in tensors]
            finding = initial_finding(still, limits_of(still, self.alone.dtype()), self.alone, self.split)
            if finding is not None and finding.kind == "weights-not-broadcast":
                return finding
            raise UserError(
                "two runs alone begin with different weights: the script draws them from an unseeded generator; "
                "call torch.manual_seed before the model is made, or pass --seed 0"
            )
        return initial_finding(tensors, limits, self.alone, self.split)

    def _step(
        self, number: int, bounds: dict[str, RoundingLimits], *, judged: bool
    ) -> tuple[Finding | None, StepNumbers]:
        """Compare one step; return the first difference if `judged`, and the step's numbers."""
        dtype = self.alone.dtype()
        tensors = {}
        for kind in ("gradient", "after", "buffer", "held"):
            tensors[kind] = compare_tensors(number, kind, self.alone, self.split, self.again)
            bounds[kind] = limits_of(tensors[kind], dtype, bounds.get(kind))
        finding = self._judge(number, tensors, bounds) if judged and self._compares_gradients else None
        return finding, StepNumbers(
            step=number + 1,
            loss=_loss_apart(self.alone, self.split, number),
            gradient=overall(tensors["gradient"]),
            parameters=overall(tensors["after"]),
            gradient_noise=max((tensor.noise for tensor in tensors["gradient"]), default=0.0),
            parameters_noise=max((tensor.noise for tensor in tensors["after"]), default=0.0),
            modules=_modules(tensors["gradient"]),
            noise=overall([replace(tensor, apart=tensor.noise) for tensor in tensors["gradient"]]),
            learns=any(tensor.alone > 0 or tensor.split_square > 0 for tensor in tensors["gradient"]),
        )

    def _judge(
        self, number: int, tensors: Mapping[str, Sequence[TensorDifference]], limits: Mapping[str, RoundingLimits]
    ) -> Finding | None:
        """Judge a step's gradients, update and buffers; None if all differences are noise."""
        pair = StepPair(
            number=number,
            alone=self.alone.step(number),
            split=self.split.step(number),
            tensors=tensors["gradient"],
            limits=limits["gradient"],
            usual_micro_batches=self._usual_micro_batches(),
        )
        resumed = continued(self.split)
        keys = keys_of(self.alone, self.split)
        finding = (
            held_finding(number, tensors["held"], limits["held"], self.split, continued=resumed)
            or (None if self.split.averaged else changed_finding(number, self.alone, self.split))
            or scaler_finding(number, self.alone, self.split, continued=resumed)
            or gradient_finding(pair, keys)
            or update_finding(
                number, tensors["after"], limits["after"], self.alone, self.split, gradients=limits["gradient"].common
            )
            or buffer_finding(number, tensors["buffer"], limits["buffer"])
        )
        if finding is None:
            return None
        finding = further_finding(finding, self.alone, self.split)
        finding = averaging_finding(number, finding, self.split.averaged)
        return self._explained(number, finding)

    def _explained(self, number: int, finding: Finding) -> Finding:
        """A finding about gradients, or what modules have carried over from the step before and differs already."""
        for at in range(max(0, number - 1), number + 1):
            states = compare_tensors(at, "state", self.alone, self.split, self.again)
            of_states = state_finding(at, states, limits_of(states, self.alone.dtype()), finding)
            if of_states is not None:
                return of_states
        return finding

    def _usual_micro_batches(self) -> int:
        counts = [len(step.losses) for step in self.split.ranks[0].steps]
        return max(set(counts), key=counts.count)

    def _without_samples(self) -> Finding | None:
        """With different samples in both runs, compare the ranks of the split run with each other."""
        for number in range(self.split.steps):
            for kind, name, what in (
                ("gradient", "not-reduced", "gradient"),
                ("after", "ranks-differ", "parameters"),
                ("buffer", "buffers-differ", "buffers"),
            ):
                tensors = compare_tensors(number, kind, self.split, self.split, None)
                limits = limits_of(tensors, self.split.dtype())
                own = [tensor.name for tensor in tensors if limits.ranks_exceeded(tensor)]
                if own:
                    worst = max(tensor.ranks_apart for tensor in tensors)
                    unlike = self._unlike_draws()
                    if kind != "buffer" and unlike is not None and unlike["after"] <= number:
                        facts = {"name": unlike["name"], "shape": tuple(unlike["shape"])}
                        return Finding(kind="own-draws", step=number + 1, what=what, relative=worst, facts=facts)
                    if kind == "gradient" and len(own) <= 0.9 * len(tensors):
                        name = "parameter-not-reduced"
                    module = common_module(own) if len(own) < len(tensors) else None
                    return Finding(kind=name, step=number + 1, what=what, relative=worst, module=module)
        return None

    def _rest(self) -> Finding | None:
        """Compare what is left if every step was the same: evaluation, dropout, number of steps."""
        finding = evaluation_finding(self.alone, self.split, keys_of(self.alone, self.split))
        if finding is None:
            finding = joined_finding(self.alone, self.again, self.split) or own_share_finding(self.split)
        if finding is None and (
            (self.dropout and self._equal_draws()) or self._equal_noise() or self._equal_samples()
        ):
            return Finding(kind="equal-draws", step=1, what="random numbers", relative=1.0)
        if finding is None and self._drops():
            resumed = continued(self.split) or next(iter(self.split.ranks[0].loaded), None)
            finding = random_states_finding(self.split, resumed)
        ends = [run.ranks[0].end.get("how") for run in (self.alone, self.split)]
        if finding is None and self.alone.steps != self.split.steps and ends == ["ended", "ended"]:
            facts = {"alone": self.alone.steps, "split": self.split.steps}
            number = min(self.alone.steps, self.split.steps)
            relative = abs(self.split.steps / self.alone.steps - 1)
            return Finding(kind="steps-differ", step=number + 1, what="steps", relative=relative, facts=facts)
        if finding is None and self.own is not None:
            by = rows_in_step(self.split, 0) // max(1, rows_in_step(self.own, 0))
            finding = schedule_finding(self.own, self.split, by)
        return finding

    def _equal_noise(self) -> bool:
        """Whether what ranks draw by rows, which the run alone was given joined, is the same on all of them."""
        joined = [draw for draw in self.alone.ranks[0].redrawn if draw["how"] == JOINED]
        return bool(joined) and all(draw["equal"] for draw in joined)

    def _equal_samples(self) -> bool:
        """Whether data sets draw at random, with generators that are in the same state on all ranks."""
        first = [next((sample for sample in rank.samples if sample["drawn"]), None) for rank in self.split.ranks]
        drawn = [sample for sample in first if sample is not None]
        if len(drawn) < len(first) or len({sample["index"] for sample in drawn}) < 2:
            return False
        return all(sample["drawn"] == drawn[0]["drawn"] for sample in drawn)

    def _equal_draws(self) -> bool:
        """Whether all ranks, if there is dropout, begin their first forward with the same generator state."""
        states = {step.forwards[0]["random"] for step in self.split.step(0) if step.forwards}
        return len(self.split.ranks) > 1 and len(states) == 1 and self._drops()

    def _ranks_have_equal_losses(self) -> bool:
        """Whether all ranks had the same losses in every step."""
        ranks = [[loss["value"] for step in rank.steps for loss in step.losses] for rank in self.split.ranks]
        return len(ranks) > 1 and any(ranks[0]) and all(losses == ranks[0] for losses in ranks)

    def _notes(self, sampled: Sampling) -> Iterator[Words]:
        """Notes on how the runs were made comparable, and on what could not be compared."""
        yield from self._notes_on_samples(sampled)
        yield from self._notes_on_variants()
        apart = _loss_apart(self.alone, self.split, 0)
        if apart is not None and apart > 1e-3:
            yield Words(
                "losses given to backward differ by {apart:.3g} in step 1 (mean over ranks)",
                "第 1 步传给 backward 的损失相差 {apart:.3g}（各 rank 的平均）",
            ).format(apart=apart)
        lost = [number for number, rank in enumerate(self.split.ranks) if not rank.end]
        if lost or not self.alone.ranks[0].end:
            yield Words(
                "the script left without an end that Python knows, as by os._exit: {who}",
                "脚本没有正常结束（例如 os._exit）：{who}",
            ).format(who=", ".join([f"rank {number}" for number in lost] or ["alone"]))
        yield from self._notes_on_steps()
        if sampled.drawn:
            yield _BY_OWN.format(steps=STEPS)
        else:
            yield _MEASURED.get(self.again.ranks[0].variant, _MEASURED["as-is"])

    def _notes_on_steps(self) -> Iterator[Words]:
        """Notes on what no step shows, and on steps that train nothing."""
        if not any(rank.evaluations for rank in self.alone.ranks):
            yield no_evaluation(self.split)
        for run in (self.alone, self.split):
            values = losses_of(run)
            bad = next((number for number, value in enumerate(values) if not math.isfinite(value)), None)
            if bad is not None:
                which = ("alone", "单独运行") if run is self.alone else ("split", "切分运行")
                yield Words(
                    f"the loss is not finite from step {bad + 1} on, {which[0]}",
                    f"{which[1]}的损失从第 {bad + 1} 步起不是有限值",
                )
        if (ended := rate_ends(self.split)) is not None:
            yield Words(
                "the learning rate is 0 from step {step} on, before the end: these steps train nothing",
                "学习率从第 {step} 步起为 0，而训练尚未结束：之后的步骤什么也没有训练",
            ).format(step=ended)

    def _notes_on_samples(self, sampled: Sampling) -> Iterator[Words]:
        """Notes on the samples that were seen, and on those that the single process was given."""
        if not sampled.seen:
            yield Words(
                "no samples were seen: no model that is an nn.Module was called with tensors before the first step",
                "没有看到样本：第一步之前没有以张量调用任何 nn.Module 模型",
            )
            if self._ranks_have_equal_losses():
                yield Words(
                    "the losses of all ranks are equal in every step: they may all train on the same samples",
                    "所有 rank 的损失在每一步都相等：它们可能都在用相同的样本训练",
                )
        if self.own is not None and not sampled.drawn:
            alone, split = (rows_in_step(run, 0) for run in (self.own, self.split))
            yield Words(
                "one process takes other samples by itself ({alone} rows in step 1, all ranks {split}): it was given "
                "those of the split run, batch by batch",
                "单个进程自己取的样本不同（第 1 步 {alone} 行，全部 rank 共 {split} 行）：已逐批使用切分运行的样本",
            ).format(alone=alone, split=split)

    def _notes_on_variants(self) -> Iterator[Words]:
        """Notes on the runs by which rounding was measured, and on dropout."""
        if self.whole:
            yield Words(
                "the model can't be called with a half of its batch: it returns other things than tensors with its "
                "rows, or what it makes of a row depends on the others; rounding was measured with rows in the "
                "opposite order",
                "模型不能用半个批来调用：它返回的不全是按行排列的张量，或者一行的结果依赖其他行；因此改用相反的行序来测量舍入",
            )
        if self.placed:
            yield Words(
                "with its rows in the opposite order one process makes other results of the same sample: its place "
                "in the batch matters, and rounding was measured by moved weights",
                "行的顺序相反时，单个进程对同一样本得出不同的结果：样本在批里的位置有影响，因此改用移动权重来测量舍入",
            )
        if self._drops() and not self.dropout:
            yield Words(
                "dropout was off in all runs; --dropout leaves it on, and looks at random numbers alone",
                "所有运行都关闭了 dropout；--dropout 保留它，只检查随机数",
            )
            if self._equal_draws():
                yield Words(
                    "with dropout all ranks would draw the same masks: their generators are equal",
                    "打开 dropout 时，所有 rank 会抽到相同的掩码：它们的生成器相同",
                )

    def _schedule_note(self, finding: Finding | None) -> Iterator[Words]:
        """A schedule that is stepped for each rank may be meant to follow samples, as Accelerate's does.

        Others differ since one process, with its own smaller batches, would take more steps.
        """
        if finding is None or self.own is None:
            return
        if finding.kind == "learning-rate":
            yield Words(
                "a script may count its schedule's steps by its own batch size and the number of processes; where it "
                "does, pass --alone with the batch size of all ranks together",
                "脚本可能按自己的批大小和进程数计算调度的步数；如果是这样，请用 --alone 给出全部 rank 合起来的批大小",
            )
        if finding.kind != "schedule-steps":
            return
        if rate_ends(self.split) is None and follows_samples(self.own, self.split, finding.facts["by"]):
            yield Words(
                "after as many samples the learning rate is that of one process with its own, smaller batches: the "
                "schedule follows samples, not steps",
                "看过同样多的样本之后，学习率与单个进程用自己较小的批次时相同：调度器跟随的是样本数，而不是步数",
            )


_SAMPLES = Words(
    "samples, which each rank draws for itself, and whether a loss is a mean over them",
    "样本（每个 rank 各自抽取），以及损失是否为样本的平均",
)
_BY_OWN = Words(
    "the samples of a step can't be those of one process, and hardly any comes twice: judged by what each rank's own "
    "loss gives, of which the gradients of the first {steps} steps must be the mean, by the ranks' weights and "
    "buffers beside one another, and by the settings of each step beside those of one process",
    "一步的样本不可能与单个进程的相同，也几乎没有重复的样本：判断依据是前 {steps} 步的梯度是否为各 rank 自己的损失"
    "所给梯度的平均，各 rank 之间的权重和 buffer，以及每一步的设置与单个进程是否相同",
)
_MEASURED: Mapping[str, Words] = {
    "reversed": Words(
        "judged by a second run alone with the rows of each batch in the opposite order: its distance is the noise",
        "判断依据：第二次单独运行时每个批的行序相反，两者的差距就是噪声",
    ),
    "moved": Words(
        "judged by a second run alone from weights moved by one unit in the last place: its distance is the noise",
        "判断依据：第二次单独运行的初始权重移动了末位一个单位，两者的差距就是噪声",
    ),
    "halves": Words(
        "judged by a second run alone that calls its model with each half of a batch: its distance is the noise",
        "判断依据：第二次单独运行时用半个批调用模型，两者的差距就是噪声",
    ),
    "as-is": Words(
        "judged by a second run alone: its distance is the noise",
        "判断依据：第二次单独运行，两者的差距就是噪声",
    ),
}
_BLUNT = 0.01  # of a gradient


_SLOW = 1e-3  # of a rate


def _slow_note(finding: Finding | None) -> Iterator[Words]:
    """What a rate that is a little other says of the rest of the training."""
    if finding is not None and finding.kind == "learning-rate" and finding.relative < _SLOW:
        yield Words(
            "the rates are {relative:.1g} of one apart in step {step}, which changes little; where they come from "
            "schedules of unlike lengths, they go further apart with each step",
            "第 {step} 步的学习率相差 {relative:.1g}，影响很小；如果原因是调度长度不同，之后每一步会相差更多",
        ).format(relative=finding.relative, step=finding.step)


def _blunt_note(steps: Sequence[StepNumbers]) -> Iterator[Words]:
    """Training may magnify rounding from step to step, until nothing can be concluded from it."""
    blunt = next((step.step for step in steps if step.gradient_noise > _BLUNT), None)
    if blunt is not None and blunt > 1:
        yield Words(
            "from step {step} on rounding alone moves a gradient by more than a hundredth: the training magnifies "
            "it, and only the steps before say much; --dtype float64 says more, where the script allows it",
            "从第 {step} 步起，仅舍入就使某个梯度移动百分之一以上：训练在放大舍入，只有之前的步骤能说明问题；"
            "脚本允许时，--dtype float64 能说明更多",
        ).format(step=blunt)


def _coarse_note(gradients: RoundingLimits | None) -> Iterator[Words]:
    """What is not reported where gradients are known coarsely."""
    if gradients is not None and gradients.common > COARSE:
        yield Words(
            "rounding leaves gradients known to {coarse:.1g}, relative: the optimizer's settings are compared, and "
            "an update that departs for another reason is not reported; --dtype float64 says more, where the script "
            "allows it",
            "舍入使梯度只精确到相对 {coarse:.1g}：优化器的设置仍会比较，但因其他原因而不同的更新不会报告；"
            "脚本允许时，--dtype float64 能说明更多",
        ).format(coarse=gradients.common)


def losses_of(run: RunRecord) -> list[float]:
    """Each step's loss, as given to backward: summed over micro-batches, the mean over ranks."""
    return [
        math.fsum(loss["value"] for step in run.step(number) for loss in step.losses) / len(run.ranks)
        for number in range(run.steps)
    ]


def _loss_apart(alone: RunRecord, split: RunRecord, number: int) -> float | None:
    """The relative difference of the losses given to backward, averaged over ranks."""
    values = []
    for run in (alone, split):
        if number >= run.steps or not run.step(number)[0].losses:
            return None
        values.append(math.fsum(loss["value"] for step in run.step(number) for loss in step.losses) / len(run.ranks))
    return abs(values[1] - values[0]) / max(abs(values[0]), 1e-300)


def _modules(tensors: Sequence[TensorDifference]) -> dict[str, float]:
    """The largest difference of a parameter's gradient, by the module that has the parameter."""
    apart: dict[str, float] = {}
    for tensor in tensors:
        name = tensor.name.rpartition(".")[0] or tensor.name
        apart[name] = max(apart.get(name, 0.0), min(tensor.apart, torch.finfo(torch.float32).max))
    return apart
