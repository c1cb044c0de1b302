"""Files that commands write: what is there already is replaced with --force alone, and is told of before any work."""

from pathlib import Path

import pytest

from samestep.cli.main import main

pytestmark = pytest.mark.quick

LAYOUT = ("layout", "dp2 tp2")
# A command that could write the file, up to the option that names it; all are refused before they do anything else.
WRITERS = [
    (*LAYOUT, "--json"),
    (*LAYOUT, "--svg"),
    ("check", "job.yaml", "--json"),
    ("verify", "job.yaml", "--json"),
    ("verify", "--script", "train.py", "--report"),
    ("compare", "job.yaml", "--report"),
    ("tune", "job.yaml", "--write"),
    ("train", "job.yaml", "--dry-run", "--json"),
    ("evaluate", "job.yaml", "--checkpoint", "runs", "--json"),
    ("predict", "job.yaml", "--checkpoint", "runs", "--output"),
    ("plan", "--model", "llama-3-8b", "--gpu", "h100", "--devices", "8", "--report"),
    ("comm", "--plot"),
    ("comm", "support", "--json"),
    ("hosts", "--json"),
    ("doctor", "--json"),
    ("drill", "job.yaml", "--json"),
    ("checkpoint", "list", "runs", "--json"),
    ("translate", "ds_config.json", "--output"),
]
JOB = """
recipe:
  task: regression
  data: {source: spirals}
  model: {type: mlp}
  steps: 1
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    (tmp_path / "train.py").write_text("", encoding="utf-8")


@pytest.mark.parametrize("words", WRITERS, ids=" ".join)
def test_a_file_that_is_there_is_not_replaced(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    Path("kept").write_text("figures of last year\n", encoding="utf-8")
    assert main([*words, "kept"]) == 2
    told = capsys.readouterr().err
    assert f"{words[-1]} kept: this file is there already; use --force to replace it" in told
    assert Path("kept").read_text(encoding="utf-8") == "figures of last year\n"


def test_force_replaces_it() -> None:
    Path("shown.json").write_text("figures of last year\n", encoding="utf-8")
    assert main([*LAYOUT, "--json", "shown.json", "--force"]) == 0
    assert Path("shown.json").read_text(encoding="utf-8").startswith("{")


def test_two_outputs_are_two_files(capsys: pytest.CaptureFixture[str]) -> None:
    Path("link").symlink_to("page")
    assert main([*LAYOUT, "--svg", "page", "--json", "link", "--force"]) == 2
    assert "--json link: --svg writes the same file; give each its own" in capsys.readouterr().err
    assert main([*LAYOUT, "--svg", "/dev/null", "--json", "/dev/null"]) == 0


def test_an_empty_file_and_one_that_is_not_there_need_no_force() -> None:
    Path("empty.json").touch()
    for name in ("empty.json", "new.json"):
        assert main([*LAYOUT, "--json", name]) == 0
        assert Path(name).read_text(encoding="utf-8").startswith("{")


@pytest.mark.parametrize(
    ("name", "told"), [(".", "--json .: this is a folder"), ("none/x.json", "there is no folder none")]
)
def test_force_does_not_make_folders(name: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAYOUT, "--json", name, "--force"]) == 2
    assert told in capsys.readouterr().err
