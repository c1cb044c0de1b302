"""What the files of a run tell: how it ended, whether it learned, and where its time and memory went."""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from samestep.doctor.findings import DoctorFinding, ok, problem, warning
from samestep.doctor.plan_and_run import STEP, PlanTerm, furthest, terms
from samestep.doctor.run_files import RunFiles, number, read_run
from samestep.run_folder import FAULTS_FILE, METRICS_FILE, PLAN_FILE, REPORT_FILE
from samestep.sizes import binary_size


def end(run: RunFiles) -> Iterator[DoctorFinding]:
    """Check the report, which is the last file that a run writes."""
    steps = len(run.steps.values)
    last = run.steps.values[-1].get("step") if steps else None
    reached = f"the last step written is {last}" if steps else "no step was written"
    if run.report_error is not None:
        text = f"{REPORT_FILE} can't be read: {run.report_error}"
        yield problem("end", text, f"remove it and train again; {METRICS_FILE} has the steps")
    elif run.report is not None:
        yield ok("end", f"the run came to its end, {run.report.get('steps', steps)} steps", last_step=last)
    elif run.may_be_running:
        yield ok("end", f"the run may still be going on: {reached}, {run.seconds_ago:.0f} s ago", last_step=last)
    elif run.faults.values:
        text = f"the run ended early: there is no {REPORT_FILE}; {reached}"
        yield problem("end", text, f"see the faults below ({FAULTS_FILE}), and what it printed", last_step=last)
    elif not steps:
        yield problem(
            "end",
            f"the run ended early: there is no {REPORT_FILE}, and no step was written",
            "look at what it printed: a signal (Ctrl-C) leaves no word here, and a step is written once the next is "
            "taken; samestep train JOB.yaml --dry-run takes three steps",
        )
    else:
        yield problem(
            "end",
            f"the run ended early: there is no {REPORT_FILE}; {reached}",
            "look at what it printed; without a word there, a signal (Ctrl-C) may have ended it, or the system "
            "(dmesg tells when memory ran out)",
            last_step=last,
        )


def steps(run: RunFiles) -> Iterator[DoctorFinding]:
    """Check the step numbers for gaps and repetitions, and the file for truncated lines."""
    numbers = [int(step) for line in run.steps.values if math.isfinite(step := number(line.get("step")))]
    values: dict[str, Any] = {"written": len(numbers)}
    if run.steps.unreadable:
        places = ", ".join(map(str, run.steps.unreadable[:5]))
        yield warning(
            "steps",
            f"{METRICS_FILE}: line {places} can't be read; the process was ended while it wrote",
            "remove the line; the others hold",
            lines=list(run.steps.unreadable),
        )
    if not numbers:
        return
    first, last = min(numbers), max(numbers)
    missing = sorted(set(range(first, last + 1)) - set(numbers))
    repeated = len(numbers) - len(set(numbers))
    if missing:
        text = f"{len(missing)} steps are missing between {first} and {last}, the first of them {missing[0]}"
        remedy = f"the file was cut or edited, or several runs wrote to {run.folder}: give each a folder of its own"
        yield problem("steps", text, remedy, missing=missing[:100], **values)
    if run.report is not None and number(run.report.get("steps")) > last + 1:
        text = f"the report says {run.report['steps']} steps, and the last that was written is {last}"
        yield problem("steps", text, "the file was cut: the disk may have been full", **values)
    elif repeated:
        text = f"{first} to {last}; {repeated} were taken twice, as after a restart from a checkpoint"
        yield ok("steps", text, "fewer are with a smaller run.checkpoint.every", repeated=repeated, **values)
    elif not missing:
        yield ok("steps", f"{first} to {last}, none missing", **values)


def faults(run: RunFiles) -> Iterator[DoctorFinding]:
    """Report the recorded faults: first failing rank, step and reason; one for each start."""
    if run.faults.unreadable:
        text = f"{FAULTS_FILE}: {len(run.faults.unreadable)} lines can't be read"
        yield warning("faults", text, "the process was ended while it wrote; the other lines hold")
    for line in run.faults.values:
        survived = run.finished or line.get("goes_on_at") is not None
        yield (warning if survived else problem)("fault", _sentence(line), _remedy(line), fault=dict(line))
    if run.faults.there and not run.faults.values and not run.faults.unreadable:
        yield ok("faults", "none")


def _sentence(line: Mapping[str, Any]) -> str:
    """Describe a fault in one line: rank and step, cause, cost."""
    where = " in ".join(f"{name} {line[name]}" for name in ("rank", "step") if line.get(name) is not None)
    kind = str(line.get("cause") or line.get("fault") or "")
    last = str(line.get("reason") or "").strip().rpartition("\n")[2]
    why = ": ".join(dict.fromkeys(part for part in (kind, last if not line.get("cause") else "") if part))
    text = ": ".join(part for part in (where, why or "no reason was given") if part)
    if line.get("goes_on_at") is None:
        return text
    lost, seconds = line.get("steps_lost"), number(line.get("seconds"))
    text += f"; went on at step {line['goes_on_at']}"
    text += f", {lost} steps lost" if lost is not None else ""
    return text + (f", {seconds:.1f} s until the next was taken" if seconds == seconds else "")


_LESS_MEMORY = "more sharding (fsdp2), recompute=full, a smaller run.micro_batch, or fewer ranks a host"

_KILLED = "if the kernel did it (dmesg tells), memory ran out, and less of it helps; else see the scheduler's limits"

# Remedies, by a word in a fault's reason; the first that is there counts.
_REMEDIES = {
    "run.grace_period": "a longer run.grace_period, if the scheduler allows it, or a smaller run.checkpoint.every",
    "run.checkpoint.max_failures": "room on that disk, or run.checkpoint.fallback_folder on another one",
    "exit code 0": "look for sys.exit(), os._exit() and quit() in the task's code and in what it calls",
    "stopped \\(sigstop\\)": "look for what stops it: kill -STOP, a debugger, or a read from a terminal",
    "memory ran out, of which": "a larger limit for the group (--mem of Slurm, --memory of docker), or less memory",
    "sigbus": "more room in /dev/shm: docker run --shm-size=8g; fewer run.workers",
    "out of memory": _LESS_MEMORY,
    "can't allocate": _LESS_MEMORY,
    "memoryerror": _LESS_MEMORY,
    "oom": _LESS_MEMORY,
    "not finite": "a lower learning rate, recipe.clip: 1.0, recipe.precision: fp32; look at the samples of that step",
    "nan": "a lower learning rate, recipe.clip: 1.0, recipe.precision: fp32; look at the samples of that step",
    "hung": "look at that rank's stack in the reason, at its host, and at the network: samestep doctor --hosts ...",
    "hang": "look at that rank's stack in the reason, at its host, and at the network: samestep doctor --hosts ...",
    "sigkill": _KILLED,
    "kill": _KILLED,
    "no space": "remove old runs and checkpoints, or write elsewhere with run.folder",
}


def _remedy(line: Mapping[str, Any]) -> str:
    """Find the remedy for a fault, by the words in its reason."""
    text = " ".join(str(line.get(name) or "") for name in ("cause", "fault", "reason")).lower()
    remedies = (remedy for words, remedy in _REMEDIES.items() if re.search(rf"\b{words}", text))
    return next(remedies, f"the whole reason stands in {FAULTS_FILE}")


def checkpoints(run: RunFiles) -> Iterator[DoctorFinding]:
    """Report checkpoints that were never completed; they are never loaded."""
    left = run.unfinished_checkpoints
    if left and not run.may_be_running:
        yield warning(
            "checkpoints",
            f"{len(left)} unfinished: {', '.join(left[:5])}; the run was ended while it saved",
            "remove them when the run is over: they take room, and nothing loads them",
            unfinished=list(left),
        )


_ENOUGH = 20  # steps to tell a trend
_TENTH = 10
_FEW = 8  # samples that are named


def loss(run: RunFiles) -> Iterator[DoctorFinding]:
    """Check for losses that are not finite, did not fall, or rose."""
    lines = run.steps.values
    bad: list[Any] = [line.get("step") for line in lines if not math.isfinite(number(line.get("loss")))]
    if bad:
        # Steps with such a file were handled: skipped, or left out after a rollback.
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


def gradients(run: RunFiles) -> Iterator[DoctorFinding]:
    """Check for non-finite gradient norms at finite losses: skipped steps, or spoiled weights."""
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


def evaluations(run: RunFiles) -> Iterator[DoctorFinding]:
    """Check for metrics that are not finite, or never change."""
    lines = run.evaluations.values
    if not lines:
        return
    for name in sorted({name for line in lines for name in line} - {"step"}):
        if (finding := _metric(name, [line for line in lines if name in line])) is not None:
            yield finding
    yield ok("evaluations", f"{len(lines)}, the last at step {lines[-1].get('step')}", count=len(lines))


def _metric(name: str, lines: Sequence[Mapping[str, Any]]) -> DoctorFinding | None:
    """Return a finding for a metric that is not finite, or the same in all evaluations; else None."""
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


_WAITING = 0.2  # of the time, from which the loader is worth a remedy
_SLOW = 3.0  # times the median
_LOST = 0.05  # of the time
_ENOUGH_STEPS = 5  # steps
_WARM_UP = 3  # the first steps make buffers and optimizer state, or compile
_FULL = 0.9  # of the machine's memory


def data(run: RunFiles) -> Iterator[DoctorFinding]:
    """Check the share of time that ranks waited for samples."""
    waited, worked = run.numbers("data_seconds")[_WARM_UP:], run.numbers("step_seconds")[_WARM_UP:]
    if min(len(waited), len(worked)) < _ENOUGH_STEPS or sum(waited) + sum(worked) == 0:
        return
    share = sum(waited) / (sum(waited) + sum(worked))
    text = f"{share:.0%} of the time is spent waiting for samples"
    if share > _WAITING:
        remedy = "run.workers: 2 or more loads in the background; prepare samples once, or keep them on a nearer disk"
        yield warning("data", text, remedy, share=share)
    else:
        yield ok("data", text, share=share)


def slow_steps(run: RunFiles) -> Iterator[DoctorFinding]:
    """Find steps that took far longer than the others, and the share of time lost to them."""
    timed = [(line.get("step"), number(line.get("step_seconds"))) for line in run.steps.values[_WARM_UP:]]
    timed = [(step, seconds) for step, seconds in timed if seconds == seconds]
    if len(timed) < _ENOUGH_STEPS:
        return
    median = statistics.median(seconds for _, seconds in timed)
    slow = [(step, seconds) for step, seconds in timed if seconds > _SLOW * median]
    lost = sum(seconds - median for _, seconds in slow) / max(sum(seconds for _, seconds in timed), 1e-12)
    values: dict[str, Any] = {
        "median_seconds": median,
        "slow_steps": [step for step, _ in slow[:100]],
        "share_lost": lost,
    }
    if slow and lost > _LOST:
        step, seconds = max(slow, key=lambda pair: pair[1])
        yield warning(
            "slow steps",
            f"{len(slow)} of {len(timed)} took more than {_SLOW:g} times the median ({median:.3g} s), "
            f"{lost:.0%} of the time; the worst, step {step}, {seconds:.3g} s",
            "look at what else runs on the hosts, at saving and at the disk in those steps; in a period of its own "
            "it is Python's garbage collection or an epoch's begin",
            **values,
        )
    else:
        yield ok("slow steps", f"none to speak of; the median is {median:.3g} s", **values)


def slow_ranks(run: RunFiles) -> Iterator[DoctorFinding]:
    """Report the slow ranks that report.json names."""
    report = run.report or {}
    slow, seconds = report.get("slow_ranks"), report.get("own_step_seconds")
    if not isinstance(slow, list) or not isinstance(seconds, list) or len(seconds) < 2:
        return
    times = [number(value) for value in seconds]
    named = [f"rank {rank} ({times[rank]:.3g} s)" for rank in slow if isinstance(rank, int) and rank < len(times)]
    values: dict[str, Any] = {"slow_ranks": slow, "own_step_seconds": seconds}
    usual = statistics.median(times)
    if named:
        text = f"{', '.join(named[:5])} a step without waiting for others; the median of all is {usual:.3g} s"
        remedy = "look at what else runs on its host: samestep doctor there; all want the same cores and memory"
        yield warning("slow ranks", text, remedy, **values)
    else:
        yield ok("slow ranks", f"none; the median is {usual:.3g} s a step", **values)


def memory(run: RunFiles) -> Iterator[DoctorFinding]:
    """Compare the ranks' peak memory with this machine's, for a run on the CPU."""
    report = run.report or {}
    peaks, total = report.get("peak_memory_bytes"), psutil.virtual_memory().total
    if not isinstance(peaks, list) or report.get("device") != "cpu":
        return
    held = sum(value for value_ in peaks if (value := number(value_)) == value)
    text = f"the ranks held {binary_size(held)} at their peaks; this machine has {binary_size(total)}"
    if held > _FULL * total:
        remedy = "if it ran here: more sharding (fsdp), recompute=full, a smaller run.micro_batch, or fewer ranks"
        yield warning("memory", text, remedy, held_bytes=held, total_bytes=total)
    else:
        yield ok("memory", text, held_bytes=held, total_bytes=total)


_OFF_SECONDS, _OFF_BYTES = 0.1, 0.03  # of what was measured, from which a plan is off

_CORRECTED = {
    "computing": "samestep plan JOB.yaml --measure corrects the rates by steps; look at what else ran here",
    "messages and waiting": "samestep plan JOB.yaml --comm FILE takes what samestep comm --json FILE measures",
}


def plan(run: RunFiles) -> Iterator[DoctorFinding]:
    """Compare the run with the plan that chose its layout, and name the term with the largest error."""
    if run.plan is None or run.report is None:
        return
    try:
        rows = terms(run.plan, run.report, run.numbers("step_seconds"))
    except (KeyError, TypeError, ValueError, AttributeError):
        yield warning("plan", f"{PLAN_FILE} is not what a plan writes", "remove it; the run itself does not need it")
        return
    values: dict[str, Any] = {term.name: [term.planned, term.measured] for term in rows}
    step = next((term for term in rows if term.name == STEP), None)
    if step is not None:
        part = furthest(rows, "s")
        text = f"a step {_both_values(step)}"
        if part is not None and step.error is not None and abs(step.error) > _OFF_SECONDS:
            yield warning(
                "plan",
                f"{text}; off most: {part.name}, {_both_values(part)}",
                _CORRECTED[part.name],
                **values,
            )
        else:
            yield ok("plan", text, **values)
    held = [term for term in rows if term.unit == "B"]
    whole = sum(term.measured for term in held) or 1.0
    part = furthest(held, "B")
    if part is not None and abs(part.planned - part.measured) / whole > _OFF_BYTES:
        remedy = "tell it with the job file: what is counted without values should be what ranks hold"
        yield warning("plan", f"memory off most: {part.name}, {_both_values(part)}", remedy, **values)


def _both_values(term: PlanTerm) -> str:
    if term.unit == "s":
        return f"{term.planned:.3g} s planned, {term.measured:.3g} s measured"
    return f"{binary_size(term.planned)} planned, {binary_size(term.measured)} measured"


CHECKS: Mapping[str, Callable[[RunFiles], Iterable[DoctorFinding]]] = {
    "end": end,
    "steps": steps,
    "faults": faults,
    "checkpoints": checkpoints,
    "loss": loss,
    "gradients": gradients,
    "evaluations": evaluations,
    "data": data,
    "slow steps": slow_steps,
    "slow ranks": slow_ranks,
    "memory": memory,
    "plan": plan,
}


def read(folder: Path) -> Iterator[DoctorFinding]:
    """Check a run. Raises UserError if the folder holds none."""
    run = read_run(folder)
    for check in CHECKS.values():
        yield from check(run)
