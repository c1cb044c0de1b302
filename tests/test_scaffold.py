"""`samestep init`: each template is there, runs as it was written, and nothing that is there is written over."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from samestep import scaffold
from samestep.cli.main import main
from samestep.errors import UserError

NAMES = ("chat", "huggingface", "images", "language", "own", "text")
QUICK = ["--set", "run.device=cpu", "--set", "run.threads=1", "--set", "run.log=[]"]

# What the whole job of a template reaches on held-out samples at least, or at most where it is a loss of some kind.
REACHED = {
    "chat": ("token_loss", 0.0, 0.1),
    "text": ("accuracy", 0.9, 1.0),
    "images": ("accuracy", 0.9, 1.0),
    "own": ("accuracy", 0.85, 1.0),
    "language": ("perplexity", 1.0, 10.0),
    "huggingface": ("loss", 0.0, 2.0),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The job file of each template, in a folder of its own."""
    place = tmp_path_factory.mktemp("jobs")
    return {name: scaffold.write(name, place / "new" / name)[0] for name in NAMES}


def test_the_list_has_every_template_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(NAMES)
    assert all(len(line.split()) > 4 for line in lines)


def test_init_prints_the_files_and_the_next_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my-job"
    assert main(["init", "own", str(folder)]) == 0
    files, _, commands = capsys.readouterr().out.partition("\n\n")
    assert all(Path(file).is_file() for file in files.splitlines())
    names = {Path(file).relative_to(folder).as_posix() for file in files.splitlines()}
    assert {"job.yaml", "job.schema.json", "task.py", "make_data.py", "README.md", "data/points.csv"} <= names
    assert commands.splitlines() == [f"samestep {command} {folder}/job.yaml" for command in ("train", "verify")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_a_template_trains(name: str, written: dict[str, Path], tmp_path: Path) -> None:
    small = [
        "--set",
        "recipe.epochs=null",
        "--set",
        "recipe.steps=2",
        "--layout",
        "single",
        "--folder",
        str(tmp_path),
    ]
    assert main(["train", str(written[name]), *small, *QUICK]) == 0
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["steps"] == 2


@pytest.mark.timeout(300)
def test_a_task_of_ones_own_takes_the_same_step(written: dict[str, Path]) -> None:
    assert main(["verify", str(written["own"]), "--layout", "dp2", "--steps", "2", *QUICK]) == 0


def test_sample_data_are_the_same_at_every_call(written: dict[str, Path], tmp_path: Path) -> None:
    again = scaffold.write("images", tmp_path / "again")[0].parent
    first = written["images"].parent
    files = sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    assert len(files) > 200
    assert all((again / file).read_bytes() == (first / file).read_bytes() for file in files)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["init"], "init needs a template and a folder; use samestep init text my-job/"),
        (["init", "text"], "init needs a template and a folder; use samestep init text my-job/"),
        (["init", "--list", "text"], '--list prints all templates and takes none; remove "text"'),
        (["init", "txet", "new"], 'there is no template "txet"; did you mean "text"? known: chat, huggingface,'),
        (["init", "text", "full"], "full is not empty (notes.txt is in it); use a folder that is empty or not there"),
        (["init", "text", "full/notes.txt"], "full/notes.txt is a file; use a folder that is empty"),
        (["init", "text", "full/notes.txt/new"], "can't be written: Not a directory; use another folder"),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine", encoding="utf-8")
    assert main(words) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "notes.txt"]


def test_data_that_can_not_be_made_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = tmp_path / "templates" / "broken"
    template.mkdir(parents=True)
    (template / "job.yaml").write_text("# Nothing\n", encoding="utf-8")
    (template / "make_data.py").write_text("raise SystemExit('no disk')\n", encoding="utf-8")
    monkeypatch.setattr(scaffold, "_TEMPLATES", tmp_path / "templates")
    with pytest.raises(UserError, match=r"make_data\.py made no data: no disk; mend that"):
        scaffold.write("broken", tmp_path / "new")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_a_template_trains_and_is_proved_in_two_processes(
    name: str, written: dict[str, Path], tmp_path: Path
) -> None:
    """As a user runs it, in a folder elsewhere."""
    program = [sys.executable, "-m", "samestep"]
    folder = tmp_path / "run"
    subprocess.run(
        [*program, "train", str(written[name]), "--layout", "dp2", "--folder", str(folder)], cwd=tmp_path, check=True
    )
    metric, least, most = REACHED[name]
    reached = json.loads((folder / "report.json").read_text(encoding="utf-8"))["metrics"][metric]
    assert least <= reached <= most
    subprocess.run([*program, "verify", str(written[name]), "--layout", "dp2"], cwd=tmp_path, check=True)
