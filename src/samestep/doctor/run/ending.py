"""How a run ended: whether it came to its end, which steps it wrote down, and what it left half done."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from samestep.doctor.finding import Finding, ok, problem, warning
from samestep.doctor.run.files import FAULTS_FILE, METRICS_FILE, RunFiles, number
from samestep.training.result import REPORT_FILE


def end(run: RunFiles) -> Iterator[Finding]:
    """The report, which is written last."""
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
    elif not steps:
        yield problem(
            "end",
            f"the run ended before its first step: there is no {REPORT_FILE}, and no step was written",
            "look at what it printed; samestep train JOB.yaml --dry-run finds out in three steps",
        )
    else:
        told = f"see the faults below ({FAULTS_FILE})" if run.faults.values else "look at what it printed"
        yield problem(
            "end",
            f"the run ended early: there is no {REPORT_FILE}; {reached}",
            f"{told}; without a word there, the system may have killed it (dmesg tells when memory ran out)",
            last_step=last,
        )


def steps(run: RunFiles) -> Iterator[Finding]:
    """The numbers of the steps: gaps, repetitions, lines that were cut."""
    numbers = [int(step) for line in run.steps.values if (step := number(line.get("step"))) == step]
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


def faults(run: RunFiles) -> Iterator[Finding]:
    """What the supervision wrote down: the rank that failed first, its step, and why; one line for each start."""
    if run.faults.unreadable:
        text = f"{FAULTS_FILE}: {len(run.faults.unreadable)} lines can't be read"
        yield warning("faults", text, "the process was ended while it wrote; the other lines hold")
    for line in run.faults.values:
        survived = run.finished or line.get("goes_on_at") is not None
        yield (warning if survived else problem)("fault", _told(line), _remedy(line), fault=dict(line))
    if run.faults.there and not run.faults.values and not run.faults.unreadable:
        yield ok("faults", "none")


def _told(line: Mapping[str, Any]) -> str:
    where = " in ".join(f"{name} {line[name]}" for name in ("rank", "step") if line.get(name) is not None)
    kind = str(line.get("cause") or line.get("fault") or "")
    last = str(line.get("reason") or "").strip().rpartition("\n")[2]
    why = ": ".join(dict.fromkeys(each for each in (kind, last if not line.get("cause") else "") if each))
    text = ": ".join(each for each in (where, why or "no reason was given") if each)
    if line.get("goes_on_at") is None:
        return text
    lost, seconds = line.get("steps_lost"), number(line.get("seconds"))
    text += f"; went on at step {line['goes_on_at']}"
    text += f", {lost} steps lost" if lost is not None else ""
    return text + (f", {seconds:.1f} s until the next was taken" if seconds == seconds else "")


_LESS_MEMORY = "more sharding (fsdp2), recompute=full, a smaller run.micro_batch, or fewer ranks a host"

# What helps, by a word in what the supervision says of a fault.
_REMEDIES = {
    "out of memory": _LESS_MEMORY,
    "can't allocate": _LESS_MEMORY,
    "memoryerror": _LESS_MEMORY,
    "oom": _LESS_MEMORY,
    "not finite": "a lower learning rate, recipe.clip: 1.0, recipe.precision: fp32; look at the samples of that step",
    "nan": "a lower learning rate, recipe.clip: 1.0, recipe.precision: fp32; look at the samples of that step",
    "hung": "look at that rank's stack in the reason, at its host, and at the network: samestep doctor --hosts ...",
    "hang": "look at that rank's stack in the reason, at its host, and at the network: samestep doctor --hosts ...",
    "sigkill": "the system ends so when memory runs out (dmesg tells), and a scheduler at its limit",
    "kill": "the system ends so when memory runs out (dmesg tells), and a scheduler at its limit",
    "no space": "remove old runs and checkpoints, or write elsewhere with run.folder",
}


def _remedy(line: Mapping[str, Any]) -> str:
    said = " ".join(str(line.get(name) or "") for name in ("cause", "fault", "reason")).lower()
    found = (remedy for words, remedy in _REMEDIES.items() if re.search(rf"\b{words}", said))
    return next(found, f"the whole reason stands in {FAULTS_FILE}")


def checkpoints(run: RunFiles) -> Iterator[Finding]:
    """Folders of checkpoints that were never completed. Nothing loads them."""
    left = run.unfinished_checkpoints
    if left and not run.may_be_running:
        yield warning(
            "checkpoints",
            f"{len(left)} unfinished: {', '.join(left[:5])}; the run was ended while it saved",
            "remove them when the run is over: they take room, and nothing loads them",
            unfinished=list(left),
        )
