"""Run the zoo: every script of zoo/ alone and split, and whether `samestep verify --script` finds what is wrong."""

import argparse
import ast
import importlib.util
import json
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import zoo_seeds
import zoo_tables
import zoo_unseen
from zoo_runs import forked

from samestep.errors import UserError
from samestep.recording.record import RunRecord
from samestep.script_proof.compare import Verdict, losses_of, prove
from samestep.script_proof.runs import ScriptProof, ScriptStart, make_start

ROOT = Path(__file__).resolve().parent.parent
ZOO = ROOT / "zoo"


@dataclass(frozen=True, kw_only=True)
class Animal:
    """One script, and what its first lines say of it."""

    name: str
    title: str
    report: str | None  # the public thread whose fault it has; None: it is right
    kind: str | None
    module: str | None
    options: argparse.Namespace  # of verify

    @property
    def right(self) -> bool:
        return self.kind is None


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What came of one script."""

    animal: Animal
    seconds: float
    verdict: Verdict | None
    refused: str | None  # why it could not be judged
    shown: bool | None = None  # whether the final loss is farther from one process's than other seeds' are

    @property
    def kind(self) -> str | None:
        return self.verdict.finding.kind if self.verdict is not None and self.verdict.finding is not None else None

    @property
    def module(self) -> str | None:
        found = self.verdict.finding if self.verdict is not None else None
        return found.module if found is not None else None

    @property
    def found(self) -> bool:
        return self.kind is not None

    @property
    def kind_right(self) -> bool:
        return self.refused is None and self.kind == self.animal.kind

    @property
    def module_right(self) -> bool:
        wanted = self.animal.module
        return wanted is None or (self.module or "").startswith(wanted)


def animals(words: Sequence[str] = ()) -> list[Animal]:
    """The scripts of the zoo, or those whose names hold one of some words."""
    files = sorted([*ZOO.glob("fault_*.py"), *ZOO.glob("right_*.py")])
    return [_read(file) for file in files if not words or any(word in file.stem for word in words)]


def missing(animal: Animal) -> list[str]:
    """The packages that a script imports and that aren't installed."""
    tree = ast.parse((ZOO / f"{animal.name}.py").read_text(encoding="utf-8"))
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    # pieces.py imports what few scripts need in the functions that they call.
    modules += ["deepspeed"] * (animal.options.engine == "deepspeed")
    packages = {module.partition(".")[0] for module in modules} - {file.stem for file in ZOO.glob("*.py")}
    if "samestep" in packages and importlib.util.find_spec("samestep.api") is None:  # the prover alone is installed
        return ["samestep"]
    return sorted(package for package in packages if importlib.util.find_spec(package) is None)


def _read(file: Path) -> Animal:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    title, _, rest = text.partition("\n")
    fields = dict(re.findall(r"^(\w+): (.*)$", rest, re.MULTILINE))
    return Animal(
        name=file.stem,
        title=title,
        report=fields.get("report"),
        kind=fields.get("kind"),
        module=fields.get("module"),
        options=_options().parse_args(shlex.split(fields.get("verify", ""))),
    )


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", default="")
    parser.add_argument("--alone")
    parser.add_argument("--then")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--dropout", action="store_true")
    return parser


def look(animal: Animal, *, processes: int = 2, seed: int = 0, steps: int = 10) -> Seen:
    """Verify one script."""
    with tempfile.TemporaryDirectory(prefix="samestep-zoo-") as folder:
        proof = _proof(animal, Path(folder), seed=seed, processes=processes, steps=steps)
        began = time.monotonic()
        verdict, refused = None, None
        try:
            verdict = prove(proof, Path(folder) / "runs", forked)
        except UserError as error:
            refused = str(error)
        return Seen(animal=animal, seconds=time.monotonic() - began, verdict=verdict, refused=refused)


def _proof(animal: Animal, folder: Path, *, seed: int, processes: int, steps: int) -> ScriptProof:
    file, given = str(ZOO / f"{animal.name}.py"), animal.options
    thirds = ("--thirds",) if processes % 3 == 0 else ()
    common = ("--seed", str(seed), "--saved", str(folder / f"state-{seed}.pt"), *thirds)

    def command(text: str | None) -> tuple[str, ...] | None:
        return (file, *shlex.split(text), *common) if text is not None else None

    return ScriptProof(
        script=command(given.script) or (),
        alone=command(given.alone),
        then=command(given.then),
        processes=processes,
        engine=given.engine,
        steps=steps,
        dropout=given.dropout,
        time_limit=120,
    )


_SEEDS = (0, 1, 2, 3, 4)
_EPOCHS = 10


def shown_by_loss(seen: Seen) -> bool:
    """Whether a user who looks at the loss curve would have seen the fault.

    The mean loss of the last eight steps of the split run, in units of its first one, is held against that of the run
    alone with five seeds: it shows where it is farther from their mean than two standard deviations. The runs have
    ten epochs; resumptions are judged by the runs that were compared.
    """
    assert seen.verdict is not None
    with tempfile.TemporaryDirectory(prefix="samestep-zoo-") as folder:
        starts = [_start(seen.animal, Path(folder), seed=seed) for seed in _SEEDS]
        if seen.animal.options.then is None:
            starts.append(_start(seen.animal, Path(folder), seed=0, ranks=2))
        forked(starts, _proof(seen.animal, Path(folder), seed=0, processes=2, steps=10))
        losses = [losses_of(RunRecord.read(start.place)) for start in starts]
    ends = [_end(each) for each in losses[: len(_SEEDS)]]
    split = losses[len(_SEEDS)] if len(losses) > len(_SEEDS) else seen.verdict.losses["split"]
    if not all(map(isfinite, ends)):
        return False  # one process's losses say nothing either
    return not abs(_end(split) - fmean(ends)) <= 2 * stdev(ends)


def _end(losses: Sequence[float]) -> float:
    return fmean(losses[-8:]) / losses[0]


def _start(animal: Animal, folder: Path, *, seed: int, ranks: int = 1) -> ScriptStart:
    """A whole run of which no tensors are written."""
    proof = _proof(animal, folder, seed=seed, processes=ranks, steps=10)
    settings = replace(proof.settings, steps=None, modules="-")
    command = proof.alone if ranks == 1 and proof.alone is not None else proof.script
    return make_start(proof, folder, f"{ranks}-{seed}", (*command, "--epochs", str(_EPOCHS)), settings, ranks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only scripts whose names hold one of these")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write what came of each script to a file")
    parser.add_argument("--losses", action="store_true", help="also hold final losses against those of other seeds")
    parser.add_argument("--write", action="store_true", help="write the tables of the docs, with --losses")
    parser.add_argument("--unseen", action="store_true", help="run zoo/unseen instead; --write keeps the results")
    parser.add_argument("--seeds", type=int, help="run the right scripts under so many seeds; --json keeps the runs")
    given = parser.parse_args()
    if given.seeds is not None:
        if given.json is None:
            parser.error("--seeds keeps its runs in a file: pass --json FILE")
        return _under_seeds(given.names, processes=given.processes, seeds=given.seeds, file=given.json)
    if given.unseen:
        return zoo_unseen.run(given.names, processes=given.processes, write=given.write)
    seen = []
    for animal in animals(given.names):
        if lacking := missing(animal):
            print(f"left   {animal.name:34} needs {', '.join(lacking)}", flush=True)
            continue
        seen.append(look(animal, processes=given.processes, seed=given.seed))
        if (given.losses or given.write) and not animal.right and seen[-1].verdict is not None:
            seen[-1] = replace(seen[-1], shown=shown_by_loss(seen[-1]))
        print(line(seen[-1]), flush=True)
    summary = count(seen)
    if given.write:
        zoo_tables.write(ROOT, seen)
    print(", ".join(f"{name}: {value}" for name, value in summary.items()))
    if given.json is not None:
        given.json.write_text(json.dumps([to_json(each) for each in seen], indent=2) + "\n", encoding="utf-8")
    return 0 if all(each.found != each.animal.right and each.refused is None for each in seen) else 1


def _under_seeds(names: Sequence[str], *, processes: int, seeds: int, file: Path) -> int:
    """Run the right scripts under many seeds."""
    right = {each.name: each for each in animals(names) if each.right and not missing(each)}

    def judged(at: zoo_seeds.SeededRun) -> dict[str, Any]:
        seen = look(right[at.name], processes=at.processes, seed=at.seed)
        result = zoo_seeds.REFUSED if seen.refused is not None else seen.kind or zoo_seeds.SAME
        finding = seen.verdict.finding if seen.verdict is not None else None
        words = seen.refused or (finding.line if finding is not None else "")
        return {"result": result, "words": words, "seconds": round(seen.seconds, 1)}

    return zoo_seeds.run(list(right), processes=processes, seeds=seeds, file=file, look=judged)


def line(seen: Seen) -> str:
    mark = "ok" if seen.kind_right and (seen.module_right or seen.animal.right) else "WRONG"
    told = seen.refused or f"{seen.kind or 'same step'}" + (f" at {seen.module}" if seen.module else "")
    wanted = "" if mark == "ok" else f"   (should be {seen.animal.kind or 'same step'} {seen.animal.module or ''})"
    return f"{mark:6} {seen.animal.name:34} {seen.seconds:5.1f} s  {told}{wanted}"


def count(seen: Sequence[Seen]) -> dict[str, str]:
    faults = [each for each in seen if not each.animal.right]
    right = [each for each in seen if each.animal.right]
    placed = [each for each in faults if each.animal.module is not None]
    return {
        "faults found": f"{sum(each.found for each in faults)} of {len(faults)}",
        "kind right": f"{sum(each.kind_right for each in faults)} of {len(faults)}",
        "module right": f"{sum(each.found and each.module_right for each in placed)} of {len(placed)}",
        "false alarms": f"{sum(each.found or each.refused is not None for each in right)} of {len(right)}",
    }


def to_json(seen: Seen) -> Mapping[str, Any]:
    return {
        "name": seen.animal.name,
        "report": seen.animal.report,
        "wanted": {"kind": seen.animal.kind, "module": seen.animal.module},
        "kind": seen.kind,
        "module": seen.module,
        "refused": seen.refused,
        "shown_by_loss": seen.shown,
        "seconds": seen.seconds,
        "losses": dict(seen.verdict.losses) if seen.verdict is not None else None,
    }


if __name__ == "__main__":
    sys.exit(main())
