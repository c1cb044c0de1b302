"""Pages for users of other libraries: the programs shown are those that are there, and both end at the same loss."""

import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from samestep.launch import local

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "examples" / "coming_from"
PAGES = {language: ROOT / "docs" / folder / "coming-from" for language, folder in (("en", "."), ("zh", "zh"))}

# Peer -> the package that its program needs, and the page that shows it.
PEERS = {
    "ddp": "torch",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "trainer": "accelerate",  # transformers' Trainer runs on it
}

# The loss of the initial weights on the same data: a training that did nothing would end at it.
UNTRAINED = {**dict.fromkeys(PEERS, 0.8086), "trainer": 0.6956}

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def program_of(peer: str, side: str) -> Path:
    return PROGRAMS / f"{peer}_{side}.py"


@pytest.mark.parametrize("language", list(PAGES))
@pytest.mark.parametrize("peer", list(PEERS))
def test_a_page_shows_the_programs_that_are_there(peer: str, language: str) -> None:
    shown = [content for _, content in BLOCK.findall((PAGES[language] / f"{peer}.md").read_text(encoding="utf-8"))]
    for side in ("before", "after"):
        assert program_of(peer, side).read_text(encoding="utf-8") in shown


def test_every_pair_has_its_page() -> None:
    pairs = {path.stem.removesuffix("_before") for path in PROGRAMS.glob("*_before.py")}
    assert pairs == set(PEERS)
    for folder in PAGES.values():
        assert {path.stem for path in folder.glob("*.md")} == {"README", *PEERS}


def final_loss(program: Path, folder: Path) -> float:
    """Run a program in two processes, by the command in its first line, and return the loss that it prints."""
    words = program.read_text(encoding="utf-8").splitlines()[0].strip('"').split()
    starts = {
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "accelerate": [sys.executable, "-m", "accelerate.commands.accelerate_cli"],
    }
    assert words[-1] == program.name
    command = [*starts[words[0]], *words[1:-1], str(program)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=170, check=False)
    # How a peer's program ends is not asked: after its last line PyTorch's own race with gloo's threads may abort it.
    # samestep's programs leave their groups without that (samestep.launch.world).
    if program.stem.endswith("_after"):
        assert done.returncode == 0, done.stderr[-3000:]
    return loss_in(done.stdout, done.stderr)


def loss_in(output: str, errors: str = "") -> float:
    found = re.findall(r"^final loss (\d+\.\d+)$", output, re.MULTILINE)
    assert len(found) == 1, output[-3000:] + errors[-3000:]
    return float(found[0])


def printed_by_a_rank(program: Path) -> str:
    """Run a program in this rank as torchrun does, and return what it prints."""
    sys.path.insert(0, str(program.parent))
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(program), run_name="__main__")
    return printed.getvalue()


def assert_same_loss(peer: str, before: float, after: float) -> None:
    assert after == pytest.approx(before, rel=2e-5)
    assert before < 0.95 * UNTRAINED[peer]  # thousands of times the difference that is allowed above


@pytest.mark.slow  # one start in ten never ends, in forked ranks that leave a group of DDP's
def test_the_programs_that_need_pytorch_alone_end_at_the_same_loss() -> None:
    """In ranks that are forked, which start in a fraction of the time that torchrun takes for its ranks."""
    before, after = (
        loss_in(local.start(printed_by_a_rank, (program_of("ddp", side),), 2)) for side in ("before", "after")
    )
    assert_same_loss("ddp", before, after)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("peer", PEERS)
def test_both_programs_end_at_the_same_loss(peer: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(PEERS[peer]) is None:
        pytest.skip(f"{PEERS[peer]} is not installed")
    before, after = (final_loss(program_of(peer, side), tmp_path) for side in ("before", "after"))
    assert_same_loss(peer, before, after)
