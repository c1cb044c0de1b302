"""What `verify --script` says of odd_training.py, for each kind that is asked for: JSON, by kind.

A kind may be followed by how rounding is measured: places:micro-batches. The kind "module" is the kind "long" of
the script as a module, in float64 and in micro-batches; "modules" is the kind "long" with --modules that matches no
parameter.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from zoo_runs import forked

from samestep.errors import UserError
from samestep.script_proof.compare import prove
from samestep.script_proof.runs import ScriptProof

SCRIPT = Path(__file__).with_name("odd_training.py")
os.chdir(SCRIPT.parent)  # where Python finds the module
found = {}
for kind in sys.argv[1:]:
    with TemporaryDirectory() as place:
        name, _, noise = kind.partition(":")
        limit = 3 if kind in ("endless", "waits") else 60
        asked = ScriptProof(script=(str(SCRIPT), name), steps=4, time_limit=limit, noise=noise or "order")
        module = replace(asked, script=("-m", SCRIPT.stem, "long"), dtype="float64", noise="micro-batches")
        unnamed = replace(asked, script=(str(SCRIPT), "long"), modules="*.nowhere")
        proof = {"module": module, "modules": unnamed}.get(name, asked)
        try:
            found[kind] = prove(proof, Path(place) / "runs", forked).to_json()
        except UserError as error:
            found[kind] = str(error)
print(json.dumps(found))
