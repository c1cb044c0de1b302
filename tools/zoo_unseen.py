"""The scripts of zoo/unseen: written by somebody who had not seen the code, never tuned on, run once a release.

zoo/unseen/results.json keeps the first result of each, which is never replaced, and the latest one.
"""

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from page_parts import markdown_table, write_parts
from zoo_runs import forked

from samestep.errors import UserError
from samestep.script_proof.compare import prove
from samestep.script_proof.runs import ScriptProof

ROOT = Path(__file__).resolve().parent.parent
UNSEEN = ROOT / "zoo" / "unseen"
RESULTS = UNSEEN / "results.json"
SAME, REFUSED = "same step", "refused"
# How a result is judged, by a reader who holds it against what the script's first lines say.
JUDGED = ("named", "found", "untrue", "passed", "refused", "right", "alarm", "not judged")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the prover says of a script."""

    result: str  # a kind of fault, SAME or REFUSED
    words: str
    seconds: float = 0.0


def names(words: Sequence[str] = ()) -> list[str]:
    files = sorted([*UNSEEN.glob("fault_*.py"), *UNSEEN.glob("right_*.py")])
    return [file.stem for file in files if not words or any(word in file.stem for word in words)]


def expected(name: str) -> str:
    """What a script's first lines say that is right or wrong with it."""
    text = (UNSEEN / f"{name}.py").read_text(encoding="utf-8")
    found = re.search(r"^expected: (.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def look(name: str, *, processes: int = 2) -> Outcome:
    """Verify one script, as it is, without arguments."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="samestep-zoo-") as folder:
        proof = ScriptProof(script=(str(UNSEEN / f"{name}.py"),), processes=processes, time_limit=120)
        try:
            found = prove(proof, Path(folder) / "runs", forked).finding
        except UserError as error:
            return Outcome(result=REFUSED, words=str(error).partition("\n")[0], seconds=time.monotonic() - began)
    seconds = time.monotonic() - began
    if found is None:
        return Outcome(result=SAME, words="", seconds=seconds)
    return Outcome(result=found.kind, words=found.line, seconds=seconds)


def run(words: Sequence[str], *, processes: int, write: bool) -> int:
    """Run scripts, print what came of each, and keep it as the latest result. 1 where a right one is not."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    rows = _read()
    wrong = 0
    for name in names(words):
        outcome = look(name, processes=processes)
        wrong += (outcome.result == SAME) != name.startswith("right_")
        print(f"{name:36} {outcome.seconds:5.1f} s  {outcome.result:24} {expected(name)}", flush=True)
        row = rows.setdefault(name, {})
        result = {"result": outcome.result, "words": outcome.words, "commit": commit.stdout.strip()}
        row["first" if "first" not in row else "latest"] = result
        if write:
            RESULTS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if write:
        write_parts(UNSEEN / "README.md", {"results": table(rows), "counts": counts(rows)})
    return 1 if wrong else 0


def _read() -> dict[str, dict[str, Any]]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each script: what is right, the first result and the latest."""
    lines = [
        [f"`{name}`", expected(name), _told(row.get("first")), _told(row.get("latest"))]
        for name, row in sorted(rows.items())
    ]
    return markdown_table(("script", "what is right", "first result", "latest result"), lines, align="l")


def _told(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return ""
    judged = f" ({result['judged']})" if result.get("judged") else ""
    told = result["result"] if result["result"] in (SAME, REFUSED) else f"`{result['result']}`"
    return f"{told}{judged}"


def counts(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """How many scripts were judged how, at first and at last."""
    return markdown_table(("", "scripts", *JUDGED), list(_count(rows)))


def _count(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    for which in ("first", "latest"):
        for kind, title in (("fault_", "faults"), ("right_", "right scripts")):
            known = {name: row[which] for name, row in rows.items() if name.startswith(kind) and which in row}
            judged = [_judged(name, result) for name, result in known.items()]
            if judged:
                numbers = (str(judged.count(each)) for each in JUDGED)
                yield [f"{title}, {which} result", str(len(judged)), *numbers]


def _judged(name: str, result: Mapping[str, Any]) -> str:
    """How a result counts; one that nobody has judged yet by what is known without reading it."""
    if result.get("judged"):
        return result["judged"]
    if result["result"] == REFUSED:
        return "refused"
    if name.startswith("right_"):
        return "right" if result["result"] == SAME else "alarm"
    return "passed" if result["result"] == SAME else "not judged"
