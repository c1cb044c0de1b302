"""Mends for accelerators, and how each is undone: to show that the tests on the pretended accelerator see it.

`python tests/undone_mends.py FOLDER TASK LAYOUT` takes the steps of one of the jobs in `examples/proof` with the
samestep in a folder, and prints as JSON what is wrong.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "samestep"


@dataclass(frozen=True, kw_only=True)
class Mend:
    """A line of samestep's that was mended, and what stood there before, or might have."""

    what: str
    file: str
    now: str
    before: str
    task: str
    layout: str
    seen: str  # what the test then says, in part


MENDS = (
    Mend(
        what="tied parameters stay tied on a device that PyTorch doesn't know by name",
        file="parallel/deferred_init.py",
        now="return nullcontext() if takes_memory else _swapping(True)",
        before="return nullcontext()",
        task="language",
        layout="single",
        seen="another step",
    ),
    Mend(
        what="ranks tell each other on the CPU what their hosts have to know",
        file="comm/agree.py",
        now="return cpu if cpu in group._device_types else torch.device(device_type)",
        before="return torch.device(device_type)",
        task="text",
        layout="dp2",
        seen="waits for the device: comm/agree.py:largest",
    ),
    Mend(
        what="numbers of samples go to the device from pinned memory",
        file="parallel/exact/dropout.py",
        now='samples = moment.samples if device.type == "cpu" else moment.samples.pin_memory()',
        before="samples = moment.samples",
        task="text",
        layout="single",
        seen="waits for the device: parallel/exact/dropout.py:_sample_keys",
    ),
    Mend(
        what="the place of a dropout is a number, which nobody copies to the device",
        file="parallel/exact/dropout.py",
        now="place = self._sites[site]\n",
        before="place = torch.tensor(self._sites[site], device=device)\n",
        task="text",
        layout="single",
        seen="waits for the device: parallel/exact/dropout.py:_numbers",
    ),
    Mend(
        what="batches go to the device from pinned memory",
        file="data/loader.py",
        now='pin_memory=self._device.type != "cpu",',
        before="pin_memory=False,",
        task="regression",
        layout="single",
        seen="waits for the device: data/loader.py",
    ),
    Mend(
        what="whether gradients are clipped is not asked on the host",
        file="engines/native.py",
        now='if self._device.type != "cpu" or not has_values(coefficient) or coefficient != 1:',
        before="if coefficient != 1:",
        task="regression",
        layout="single",
        seen="waits for the device: engines/native.py:scale_and_clip",
    ),
    Mend(
        what="sums of buffers lie beside offloaded parameters",
        file="parallel/exact/buffers.py",
        now="        sums[place] = _sum(buffer)",
        before="        sums = torch.stack([*sums.unbind()[:place], _sum(buffer), *sums.unbind()[place + 1 :]])",
        task="language",
        layout="fsdp2 offload=parameters",
        seen="on the same device",
    ),
    Mend(
        what="a proof compares offloaded parameters on the device",
        file="proof.py",
        now="mine = as_real(mine).to(device)  # offloaded",
        before="mine = as_real(mine)  # offloaded",
        task="language",
        layout="fsdp2 offload=parameters",
        seen="on the same device",
    ),
)


def unmended(mend: Mend, folder: Path) -> Path:
    """A copy of samestep without a mend. Raises ValueError where it is not there."""
    copy = folder / "samestep"
    copytree(PACKAGE, copy, ignore=lambda *_: ["__pycache__"])
    file = copy / mend.file
    text = file.read_text(encoding="utf-8")
    if text.count(mend.now) != 1:
        raise ValueError(f"{mend.file} has {text.count(mend.now)} times, where one is meant: {mend.now}")
    file.write_text(text.replace(mend.now, mend.before), encoding="utf-8")
    return folder


def problem(task: str, layout: str, folder: Path, *, seconds: float) -> str | None:
    """What the samestep in a folder does wrong on the pretended accelerator; None: nothing."""
    command = [sys.executable, __file__, str(folder), task, layout]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=ROOT)
    if done.returncode:
        return done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found["problem"]


def _main(folder: str, task: str, layout: str) -> None:
    import os

    os.environ["PYTHONPATH"] = os.pathsep.join([folder, str(Path(__file__).parent)])  # of the ranks
    sys.path[:0] = [folder]
    from test_accelerator import problem_of

    import samestep

    assert Path(samestep.__file__).parent == Path(folder) / "samestep"
    print(json.dumps({"problem": problem_of(task, layout)}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
