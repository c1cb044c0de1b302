"""What `verify --script` says of odd_training.py, for each kind that is asked for: JSON, by kind.

A kind may be followed by how rounding is measured: places:micro-batches.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from zoo_runs import forked

from samestep.errors import UserError
from samestep.script_proof.compare import compare_runs
from samestep.script_proof.runs import ScriptProof, run_all

SCRIPT = Path(__file__).with_name("odd_training.py")
found = {}
for kind in sys.argv[1:]:
    with TemporaryDirectory() as place:
        name, _, noise = kind.partition(":")
        limit = 3 if kind == "endless" else 60
        proof = ScriptProof(script=(str(SCRIPT), name), steps=4, time_limit=limit, noise=noise or "order")
        try:
            run_all(proof, Path(place) / "runs", forked)
            found[kind] = compare_runs(Path(place) / "runs").to_json()
        except UserError as error:
            found[kind] = str(error)
print(json.dumps(found))
