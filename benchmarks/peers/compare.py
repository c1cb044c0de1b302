"""Compares Lightning Fabric and transformers' Trainer with plain PyTorch and samestep: one job, in one table.

pip install lightning "samestep[accelerate]" -c constraints.txt
python benchmarks/peers/compare.py examples/reviews.yaml --processes 2 --repeats 3 --json peers.json
"""

import importlib.util
import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from samestep.comparison.compare import compare_job
from samestep.comparison.methods import ComparedMethod, MethodStart
from samestep.comparison.terminal import print_comparison
from samestep.display.page import Words
from samestep.jobfile import load

PRECISIONS = frozenset({"fp32", "bf16"})
PACKAGES = {"lightning": "lightning", "transformers": "transformers", "accelerate": "samestep[accelerate]"}


def peer(name: str, title: str, script: str) -> ComparedMethod:
    """A method whose ranks torchrun starts."""
    program = str(Path(__file__).with_name(script))

    def command(job: Path, folder: Path, processes: int) -> Sequence[str]:
        ranks = ["--standalone", f"--nproc-per-node={processes}"]
        return [sys.executable, "-m", "torch.distributed.run", *ranks, program, str(job), "--folder", str(folder)]

    start = MethodStart(name="torchrun", command=command, precisions=PRECISIONS, compiles=False)
    return ComparedMethod(name=name, title=Words(title, title), engine=name, layout="dp{n}", start=start)


PEERS = (
    peer("fabric", "Lightning Fabric", "fabric.py"),
    peer("hf-trainer", "Hugging Face Trainer", "hf_trainer.py"),
)


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, help="train so many steps instead of the job's")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every figure of every repeat to a file")
    options = parser.parse_args()
    missing = [command for module, command in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise SystemExit(f"not installed: pip install {' '.join(missing)} -c constraints.txt")
    job = load(options.job).job
    if options.steps is not None:
        job = replace(job, recipe=replace(job.recipe, steps=options.steps, epochs=None))
    found = compare_job(
        job,
        methods=["single", "ddp-torchrun", f"dp{options.processes}", *PEERS],
        processes=options.processes,
        repeats=options.repeats,
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found.to_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print_comparison(found)
    return 0 if found.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
