"""Runs each script of a folder as `samestep verify --script` does, and prints what came of it."""

import json
import sys
from pathlib import Path

import psutil
from zoo_runs import forked

from samestep.errors import UserError
from samestep.script_proof.compare import compare_runs
from samestep.script_proof.runs import ScriptProof, run_all


def look(file: Path) -> dict[str, object]:
    folder = file.parent / "runs" / file.stem
    proof = ScriptProof(script=(str(file),), processes=2, steps=3, time_limit=20 if file.stem != "endless" else 4)
    try:
        run_all(proof, folder, forked)
        verdict = compare_runs(folder)
    except UserError as error:
        return {"refused": str(error)}
    return {"same_step": verdict.same_step, "notes": [note.en for note in verdict.notes]}


found = {file.stem: look(file) for file in sorted(Path(sys.argv[1]).glob("*.py"))}
print(json.dumps({"found": found, "left": len(psutil.Process().children(recursive=True))}))
