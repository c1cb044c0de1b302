"""The verdict on the line of the file that it is about: GitHub's lines of a log, and SARIF."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.recording.store import events
from samestep.script_proof.compare import Verdict
from samestep.script_proof.kinds import KINDS, Finding
from samestep.script_proof.runs import SPLIT
from samestep.version import VERSION

Place = tuple[str, int]

# Which call of the script made what differs; of kinds that are not of that call, by the kind's own name.
_CALLS = {
    "samples": ("samples", "forward"),
    "initial weights": ("forward",),
    "gradient": ("gradient",),
    "buffers": ("forward",),
    "random numbers": ("forward",),
    "evaluation": ("evaluation", "forward"),
    "clip-before-reduction": ("clip", "gradient"),
    "clip-local-norm": ("clip", "gradient"),
    "clip-each-micro-batch": ("clip", "gradient"),
}


def place_of(finding: Finding, folder: Path) -> Place | None:
    """The line of the script's call that a finding is about, by what rank 0 of the split run recorded."""
    recorded = events(folder / SPLIT / "rank-0")
    places = {event["what"]: (event["file"], event["line"]) for event in recorded if event["event"] == "place"}
    calls = _CALLS.get(finding.kind) or _CALLS.get(finding.what) or ("step",)
    return next((places[call] for call in (*calls, "step") if call in places), None)


def github(verdict: Verdict, script: str, place: Place | None) -> str:
    """The line that GitHub shows in the file: https://docs.github.com/actions, workflow commands."""
    if verdict.finding is None:
        alone = "one" if verdict.alone == 1 else verdict.alone
        steps = f"{verdict.processes} processes take the steps of {alone}, {verdict.steps} compared"
        return f"::notice title=the same step::{_escaped(f'{script}: {steps}')}"
    where = f"file={_property(place[0])},line={place[1]}," if place is not None else ""
    return f"::error {where}title=not the same step: {verdict.finding.kind}::{_escaped(verdict.finding.line)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def sarif(verdict: Verdict, place: Place | None) -> Mapping[str, Any]:
    """The verdict as SARIF 2.1.0, which code scanning shows; no result where it is the same step."""
    driver = {
        "name": "samestep-prove",
        "version": VERSION,
        "rules": [{"id": kind, "shortDescription": {"text": words.en}} for kind, words in KINDS.items()],
    }
    results = [_result(verdict.finding, place)] if verdict.finding is not None else []
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _result(finding: Finding, place: Place | None) -> Mapping[str, Any]:
    result = {"ruleId": finding.kind, "level": "error", "message": {"text": finding.line}}
    if place is None:
        return result
    file, line = place
    location = {"artifactLocation": {"uri": Path(file).as_posix()}, "region": {"startLine": line}}
    return {**result, "locations": [{"physicalLocation": location}]}
