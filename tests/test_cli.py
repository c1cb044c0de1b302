"""The command line: quick help, one message for a mistake before any process starts, tables, files, exit codes."""

import json
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mistakes
import pytest

from samestep.cli.main import COMMANDS, main

TESTS = Path(__file__).parent

FILES = {
    "good.yaml": "recipe: {task: regression, batch: 64, steps: 2}\nrun: {device: cpu}\n",
    "texts.yaml": (
        "recipe:\n"
        "  task: text-classification\n"
        "  data: {source: texts.csv, vocabulary: 64}\n"
        "  model: {layers: 1, hidden: 8, heads: 2}\n"
        "  batch: 4\n"
        "run: {device: cpu}\n"
    ),
    "texts.csv": "text,label\n" + "".join(f"text number {number},{number % 2}\n" for number in range(40)),
    "own.yaml": "recipe: {task: own_tasks.py:Nothing, batch: 4}\nrun: {device: cpu}\n",
    "own_tasks.py": (
        "import samestep\n"
        "class Nothing(samestep.Task):\n"
        "    def model(self):\n"
        "        from torch import nn\n"
        "        return nn.Linear(1, 1)\n"
        "    def train_set(self):\n"
        "        return []\n"
        "    def loss(self, output, batch):\n"
        "        return output.sum(), len(output)\n"
    ),
    "broken.yaml": "recipe: {task: broken_task.py:Task, batch: 4}\n",
    "broken_task.py": "import samestep\n\nimport there_is_no_such_module\n",
    "list.yaml": "recipe: [task\n",
    "unknown_key.yaml": "recipe:\n  task: regression\n  bacth: 64\n",
    "wrong_type.yaml": "recipe:\n  task: regression\n  batch: many\n",
    "unknown_task.yaml": "recipe: {task: regresion}\n",
    "empty.csv": "text,label\n",
    "out_of_range.csv": "text,label\none,0\ntwo,1\nthree,7\n",
    "held_out.csv": "text,label\none,0\ntwo,2\n",
    "file": "something\n",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with job files, data and tasks, good ones and bad ones."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.csv").write_bytes("text,label\ncaf\xe9,0\n".encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class StartedError(Exception):
    """A process was started."""


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*arguments: Any, **options: Any) -> None:
        raise StartedError

    monkeypatch.setattr("samestep.launch.local.start", start)
    monkeypatch.setattr("samestep.launch.local.train", start)


# The arguments, and what the one message says: what is wrong, and where that can be said, what would do.
MISTAKES = {
    "no job file": ("train no.yaml", r"no job file no\.yaml"),
    "not YAML": ("train list.yaml", r"list\.yaml:2: not YAML: expected ',' or ']'"),
    "unknown key": ("train unknown_key.yaml", r'_key\.yaml:3: unknown key "recipe\.bacth"; did you mean "batch"\?'),
    "wrong type": ("train wrong_type.yaml", r"_type\.yaml:3: recipe\.batch is 'many'; it should be a whole number"),
    "unknown task": ("train unknown_task.yaml", r'recipe\.task is "regresion"; did you mean "regression"\?'),
    "unknown engine": ("train good.yaml --engine nativ", r'run\.engine is "nativ"; did you mean "native"\?'),
    "layout that can't be read": ("train good.yaml --layout dq2", r'"dq2" is not a part of a layout; write parts'),
    "more processes than asked": (
        "train good.yaml --layout dp4 --processes 2",
        r'layout "dp4" needs 4 processes, not 2; "dp2" would use 2 processes',
    ),
    "processes that don't divide": (
        "train good.yaml --layout tp2|dp --processes 3",
        r'layout "tp2 dp" was given 3 processes, .* no multiple of the 2 .*; use 2, 4 or 6',
    ),
    "an axis that an engine does not split": (
        "train good.yaml --layout dp2 --engine data-parallel",
        r'layout "dp2": engine "data-parallel" does not split replicate yet; it splits nothing; use layout single',
    ),
    "an offload of what is not sharded": (
        "train good.yaml --layout dp2|offload=parameters",
        r"offload=parameters is for shards of parameters; use fsdp2 or zero2x2",
    ),
    "fewer samples than ranks": (
        "train good.yaml --layout dp4 --set recipe.batch=3",
        r"a batch of 3 leaves some of its 4 data ranks without a sample; use a batch of 4 or more",
    ),
    "an option of an axis that is not there": (
        "train good.yaml --layout dp2|stages=2",
        r'layout "dp2 stages=2": stages=2 is of pp \(pipeline\), and the layout has none; write such as pp2 beside',
    ),
    "half precision on a CPU": (
        "train good.yaml --layout dp2 --set recipe.precision=fp16",
        r"recipe\.precision is fp16, .* bf16 or fp32",
    ),
    "empty data file": (
        "train texts.yaml --layout dp2 --set recipe.data.source=empty.csv",
        r"empty\.csv has no samples",
    ),
    "empty data set of one's own": ("train own.yaml", r"the data set is empty"),
    "label out of range": (
        "train texts.yaml --layout dp2 --set recipe.data.source=out_of_range.csv",
        r"out_of_range\.csv:4: label 7 would make 8 classes for 3 samples",
    ),
    "held-out label out of range": (
        "train texts.yaml --layout dp2 --set recipe.data.eval_source=held_out.csv",
        r"held_out\.csv:3: label 2 is out of range of the 2 classes that .* has; use 0 to 1",
    ),
    "data that isn't UTF-8": (
        "train texts.yaml --layout dp2 --set recipe.data.source=latin.csv",
        r"latin\.csv is not UTF-8: byte 14 is 0xe9; save it as UTF-8",
    ),
    "task file that fails": (
        "train broken.yaml --layout dp2",
        r"broken_task\.py fails to import: .*'there_is_no_such_module', at .*broken_task\.py:3",
    ),
    "--set without a value": ("train good.yaml --set recipe.batch", r"--set recipe\.batch: write KEY=VALUE"),
    "no steps": (
        "verify good.yaml --layout dp2 --steps 0",
        r'argument --steps: "0" is out of range; use a whole number from 1 to 1,000,000,000',
    ),
    "steps that are no number": (
        "verify good.yaml --steps few",
        r'argument --steps: "few" is no whole number; use a whole number from 1 to 1,000,000,000',
    ),
    "--json in no folder": (
        "verify good.yaml --layout dp2 --json nowhere/proof.json",
        r"--json nowhere/proof\.json: there is no folder nowhere",
    ),
    "--json that is a folder": ("verify good.yaml --layout dp2 --json .", r"--json \.: this is a folder"),
    "--folder that is a file": (
        "train good.yaml --layout dp2 --folder file",
        r"run\.folder is file: file is a file; use a folder, or a new path",
    ),
    "--folder below a file": ("train good.yaml --layout dp2 --folder file/run", r"run\.folder is file/run: file is"),
    "no threads": ("train good.yaml --threads 0", r"--threads: run\.threads is 0; it should be greater than 0"),
    "unknown flag": (
        "train good.yaml --what",
        r"samestep train has no option --what; `samestep train --help` lists those that it has",
    ),
    "unknown flag before a command": (
        "comm --transport gloo",
        r"samestep comm has no option --transport; it is one of samestep comm demo; `samestep comm",
    ),
    "unknown command": ("trian good.yaml", r'no command "trian"; did you mean "train"\?'),
    "no job": ("train", r"the following arguments are required: JOB\.yaml; `samestep train --help` says"),
}


def arguments_of(text: str) -> list[str]:
    """The words of a command; a bar stands for a space inside one of them."""
    return [word.replace("|", " ") for word in text.split()]


def check_message(errors: str, message: str) -> None:
    assert errors.startswith("samestep: ")
    assert errors.count("\n") == 1
    assert "Traceback" not in errors
    assert re.search(message, errors), errors


def test_a_batch_of_more_samples_than_there_are_is_told_before_processes_start(
    place: Path, no_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "good.yaml", "--layout", "dp2", "--folder", "run", "--set"]
    for batch, told in ((100000, True), (8, False)):
        with pytest.raises(StartedError):
            main([*words, f"recipe.batch={batch}"])
        error = capsys.readouterr().err
        assert (f"samestep: recipe.batch is {batch}, and there are " in error) == told, error


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_one_message_before_any_process_starts(
    mistake: str, place: Path, no_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    command, message = MISTAKES[mistake]
    there = set(place.rglob("*"))
    assert main(arguments_of(command)) == 2
    told = capsys.readouterr()
    check_message(told.err, message)
    assert told.out == ""
    assert {path for path in place.rglob("*") if "__pycache__" not in path.parts} == there


@pytest.mark.parametrize("command", ["train good.yaml --layout dp2", "verify texts.yaml --layout dp2"])
def test_a_good_job_would_start_processes(command: str, place: Path, no_process: None) -> None:
    """What the test above watches is what starts them."""
    with pytest.raises(StartedError):
        main(arguments_of(command))


@pytest.mark.parametrize(
    "mistake", ["unknown flag", pytest.param("empty data set of one's own", marks=pytest.mark.slow)]
)
def test_a_mistake_ends_the_program_with_2(mistake: str, place: Path) -> None:
    """Before PyTorch is imported, and after."""
    command, message = MISTAKES[mistake]
    words = [sys.executable, "-m", "samestep", *arguments_of(command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=150, check=False, cwd=place)
    assert done.returncode == 2
    assert done.stdout == ""
    check_message(done.stderr, message)


def test_an_empty_data_set_is_told_before_anything_is_made(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "own.yaml", "--layout", "dp2"]) == 2
    check_message(capfd.readouterr().err, "the data set is empty")
    assert not (place / "runs").exists()


def test_two_mistakes_in_a_file_are_told_together(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "two.yaml").write_text("recipe:\n  task: regression\n  batch: many\n  sed: 1\n", encoding="utf-8")
    assert main(["train", "two.yaml"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("samestep: two.yaml:3: recipe.batch is 'many'")
    assert second.startswith('two.yaml:4: unknown key "recipe.sed"')


@pytest.mark.parametrize(("rank", "waits"), [("0", []), ("1", [2.0])])
def test_ranks_that_do_not_tell_a_mistake_leave_the_first_time_to_tell_it(
    place: Path, rank: str, waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(place / "nowhere.yaml")]) == 2
    assert slept == waits
    assert ("no job file" in capsys.readouterr().err) == (rank == "0")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_is_there_at_once(arguments: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "samestep", *arguments], capture_output=True, check=True, text=True
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    packages = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "samestep" in packages
    assert not packages & {"torch", "numpy", "pydantic", "yaml", "rich", "psutil", "safetensors", "transformers"}

    def seconds(*command: str) -> float:
        """Of a processor's time, which tests beside this one don't lengthen."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    modules = "argparse, dataclasses, importlib.metadata, inspect, json, pathlib, subprocess, typing"
    taken = [(seconds("-m", "samestep", *arguments), seconds("-c", f"import {modules}")) for _ in range(3)]
    assert min(ours for ours, _ in taken) < 5 * min(theirs for _, theirs in taken)


def test_without_a_command_the_help_is_printed_with_every_command_in_a_group(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    alone = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert alone == capsys.readouterr().out
    groups = dict(re.findall(r"^([a-z ]+):\n((?:  .*\n)+)", alone, re.MULTILINE))
    rows = {title: re.findall(r"^  (\w+) ", text, re.MULTILINE) for title, text in groups.items()}
    assert rows.keys() >= {"train and check", "look", "clusters"}
    names = [command.__name__.rpartition(".")[2] for command in COMMANDS]
    assert [name for title in ("train and check", "look", "clusters") for name in rows[title]] == names


@pytest.mark.parametrize("arguments", [["--help"], ["verify", "--help"]])
def test_help_loads_nothing_heavy(arguments: Sequence[str]) -> None:
    program = (
        "import sys; from samestep.cli.main import main\n"
        f"try: main({list(arguments)!r})\n"
        "except SystemExit: print(*sys.modules, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines())
    assert "samestep.cli.verify" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "tokenizers", "numpy", "pydantic", "rich", "yaml"})


def test_print_config_says_where_each_value_came_from(
    place: Path, no_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    there = set(place.rglob("*"))
    command = "train good.yaml --layout dp2 --set recipe.optimizer.lr=0.5 --threads 3 --print-config"
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    for line in (
        "batch: 64 # good.yaml:1",
        "device: cpu # good.yaml:2",
        "layout: dp2 # --layout",
        "threads: 3 # --threads",
        "lr: 0.5 # --set recipe.optimizer.lr=0.5",
        "seed: 0 # default",
        "name: good # the file's name",
    ):
        assert line in [" ".join(written.split()) for written in printed.splitlines()]
    assert set(place.rglob("*")) == there


def test_verify_prints_and_writes_its_proof(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = "verify good.yaml --layout dp2 --steps 3 --json proof.json --force"
    assert main(command.split()) == 0
    done = capfd.readouterr()
    proof = json.loads((place / "proof.json").read_text(encoding="utf-8"))
    differences, as_built = proof.pop("max_relative_difference"), proof.pop("as_built")
    assert as_built["same"] is True
    assert proof.pop("nonfinite") == []
    by_step = proof.pop("by_step")
    assert {name: (len(values), max(values)) for name, values in by_step.items()} == {
        name: (2, differences[name]) for name in ("loss", "grad_norm")
    }
    told = {"layout": "dp2", "dtype": "float64", "steps": 2, "tolerance": 1e-10, "same_step": True}
    nothing = {"communication": None, "rounding": None, "departure": None, "noise": None, "beyond": {}}
    assert proof == {**told, **nothing}
    assert differences.keys() == {"loss", "grad_norm", "parameters", "metrics"}
    assert max(differences.values()) < 1e-10
    assert "dp2 versus one process, 2 steps in float64" in done.out
    assert done.out.startswith("dp2 takes the same step as one process\n")
    assert "\ntolerance 1e-10; worst parameter: " in done.out
    assert done.err == ""


def test_verify_ends_with_1_where_the_step_is_another(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        sys.modules["samestep.engines"].ENGINES, "forgetful", f"{mistakes.__name__}:ForgottenSchedule"
    )
    command = "verify good.yaml --engine forgetful --set recipe.schedule.decay=linear --json proof.json --force"
    assert main(command.split()) == 1
    proof = json.loads((place / "proof.json").read_text(encoding="utf-8"))
    assert proof["same_step"] is False
    assert proof["max_relative_difference"]["parameters"] > 1e-10
    assert "does NOT take the same step as one process" in capsys.readouterr().out


def test_train_prints_a_table_with_a_row_a_class(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = f"recipe: {{task: '{TESTS}/scored_task.py:Scored', batch: 16, epochs: 4}}\nrun: {{device: cpu}}\n"
    (place / "scored.yaml").write_text(job, encoding="utf-8")
    assert main(["train", "scored.yaml", "--details"]) == 0
    printed = capsys.readouterr().out
    metrics = json.loads((place / "runs/scored/report.json").read_text(encoding="utf-8"))["metrics"]
    rows = [re.findall(r"[^│┃\s][^│┃]*[^│┃\s]|[^│┃\s]", line) for line in printed.splitlines()]
    assert ["class", "precision", "recall", "f1"] in rows
    for name in ("class 0", "class 1", "class 2"):
        assert [name, *(f"{metrics[metric][name]:.3f}" for metric in ("precision", "recall", "f1"))] in rows
        assert [name, *map(str, metrics["confusion_matrix"][name])] in rows
    assert ["accuracy", f"{metrics['accuracy']:.4f}"] in rows
    assert "files: runs/scored\n" in printed
    assert "bytes of a rank in one step" in printed
    assert "report.json has more" not in printed


def next_command(printed: str) -> list[str]:
    """The words of the command that a training names at its end, as its last line."""
    (line,) = printed.splitlines()[-1:]
    assert line.startswith("next: samestep "), line
    return shlex.split(line)[2:]


def test_a_training_ends_with_its_losses_and_a_command_that_runs(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", "recipe.steps=3", "--threads", "1", "--set", "recipe.optimizer={name: sgd, lr: 0.001}"]
    assert main(["train", "good.yaml", *words, "--no-check"]) == 0
    printed = capfd.readouterr().out
    losses = [
        json.loads(line)["loss"] for line in (place / "runs/good/metrics.jsonl").read_text("utf-8").splitlines()
    ]
    for name, loss in (("loss at start", losses[0]), ("loss at end", losses[-1])):
        assert re.search(rf"{name} +│ {loss:.4f} ", printed)
    assert "report.json has more: bytes of each rank (--details prints them)\n" in printed
    command = next_command(printed)
    assert command == [
        "verify",
        "good.yaml",
        "--threads",
        "1",
        *words[:2],
        *words[4:],
        "--no-check",
        "--layout",
        "dp2",
    ]
    assert main([*command, "--report", "proof.html"]) == 0
    assert "dp2 versus one process, 3 steps in float64" in capfd.readouterr().out
    assert "dp2: the same step" in (place / "proof.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("word", ["recipe.batch=1 --layout single", "recipe.communication={kind:|bf16} --layout dp2"])
def test_where_no_step_can_be_proved_the_next_command_looks_at_the_run(
    word: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "good.yaml", "--set", *arguments_of(word), "--threads", "1", "--no-check"]) == 0
    command = next_command(capfd.readouterr().out)
    assert command == ["doctor", "runs/good"]
    assert main(command) == 0


def test_names_are_printed_as_they_are(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets and colons mean colours and pictures to the library that draws tables."""
    texts = [f"text number {number},{'[/red]' if number % 2 else ':bug:'}" for number in range(80)]
    (place / "texts.csv").write_text("\n".join(["text,label", *texts]), encoding="utf-8")
    assert main(["train", "texts.yaml", "--details", "--folder", f"long/{'x' * 100}"]) == 0
    printed = capsys.readouterr().out
    # A row of one table, a row and a column of the other.
    assert printed.count("[/red]") == printed.count(":bug:") == 3
    assert f"files: long/{'x' * 100}\n" in printed
