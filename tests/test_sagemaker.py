"""SageMaker's hyperparameters and folders, as its training toolkit passes them to an entry point."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from samestep.cli import hyperparameters
from samestep.cli.main import main

pytestmark = pytest.mark.quick

# As in the documentation of the training toolkit, with this project's names.
USER_ARGS = ["--batch-size", "8", "--layout", "single", "--lr", "0.001"]
HYPERPARAMETERS = {"batch-size": 8, "lr": 0.001, "layout": "single", "sagemaker_program": "train.py"}

TEXTS = """\
  task: text-classification
  data:
    source: ${SM_CHANNEL_TRAINING}/reviews.csv
    held_out: 0.25
  model: {layers: 1, hidden: 8, heads: 2, feed_forward: 16}
"""
NUMBERS = "  task: regression\n  args: {samples: 24}\n"  # a training of a second
JOB = f"""\
recipe:
{TEXTS}\
  batch: 4
  steps: 2
run:
  folder: ${{SM_OUTPUT_DATA_DIR}}/run
  checkpoint: {{folder: "${{CHECKPOINTS}}", resume: auto}}
  log: []
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    return tmp_path / "job.yaml"


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders of a container, and the variables that say where they are."""
    root = tmp_path / "opt" / "ml"
    variables = {
        "SM_HOSTS": '["algo-1"]',
        "SM_CURRENT_HOST": "algo-1",
        "SM_CHANNEL_TRAINING": "input/data/training",
        "SM_OUTPUT_DATA_DIR": "output/data",
        "SM_MODEL_DIR": "model",
        "CHECKPOINTS": "checkpoints",
    }
    for name, value in variables.items():
        if not value.startswith(("[", "algo")):
            (root / value).mkdir(parents=True)
            value = str(root / value)
        monkeypatch.setenv(name, value)
    rows = [f"{word} {number},{word}" for number in range(8) for word in ("good", "bad")]
    text = "\n".join(["text,label", *rows]) + "\n"
    (root / "input/data/training/reviews.csv").write_text(text, encoding="utf-8")
    return root


@pytest.fixture
def printed(job: Path, container: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What --print-config shows, or the message of what was refused."""

    def show(*words: str) -> str:
        code = main(["train", str(job), "--print-config", *words])
        captured = capsys.readouterr()
        assert code == (2 if captured.err else 0)
        return captured.out + captured.err

    return show


def given(monkeypatch: pytest.MonkeyPatch, values: object) -> None:
    monkeypatch.setenv("SM_HPS", values if isinstance(values, str) else json.dumps(values))


def sources(text: str) -> dict[str, str]:
    """The lines of a printed configuration, and where each came from."""
    lines = (line.partition("  # ") for line in text.splitlines())
    return {value.strip(): source for value, _, source in lines}


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        (HYPERPARAMETERS, {"batch: 8": "batch-size", "lr: 0.001": "lr", "layout: single": "layout"}),
        ({"learning-rate": "1e-3"}, {"lr: 0.001": "learning-rate"}),
        ({"recipe.optimizer.weight-decay": 0.5}, {"weight_decay: 0.5": "recipe.optimizer.weight-decay"}),
        ({"weight_decay": 0.5}, {"weight_decay: 0.5": "weight_decay"}),
        ({"micro-batch": "2"}, {"micro_batch: 2": "micro-batch"}),
        ({"dropout": False}, {"dropout: false": "dropout"}),
        ({"recipe.data.max_length": 7}, {"max_length: 7": "recipe.data.max_length"}),
        ({"_tuning_objective_metric": "loss"}, {}),
    ],
)
def test_hyperparameters_are_laid_over_the_job_file(
    printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch, values: Mapping[str, object], lines: dict[str, str]
) -> None:
    given(monkeypatch, values)
    found = sources(printed())
    assert {line: found.get(line) for line in lines} == {
        line: f"hyperparameter {name}" for line, name in lines.items()
    }
    told = sum(source.startswith("hyperparameter") for source in found.values())
    assert told == len(lines)


def test_the_command_line_wins_over_hyperparameters(
    printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, {"lr": 0.001, "layout": "dp2"})
    found = sources(printed("--layout", "dp4", "--set", "recipe.optimizer.lr=0.5"))
    assert found["layout: dp4"] == "--layout"
    assert found["lr: 0.5"] == "--set recipe.optimizer.lr=0.5"


def test_arguments_that_sagemaker_puts_behind_the_command_are_its_hyperparameters(
    printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, HYPERPARAMETERS)
    monkeypatch.setenv("SM_USER_ARGS", json.dumps(USER_ARGS))
    found = sources(printed("--threads", "1", *USER_ARGS))
    assert found["batch: 8"] == "hyperparameter batch-size"
    assert found["threads: 1"] == "--threads"
    # Other words behind it are the user's own, and these are not known.
    assert "samestep train has no option --batch-size; use --set recipe.batch=VALUE" in printed("--batch-size", "9")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lrr": 1}, 'hyperparameter lrr: did you mean "lr"? known: '),
        ({"optimizer.lr": 1}, "hyperparameter optimizer.lr: "),
        (
            {"lr": 1, "learning_rate": 1},
            "hyperparameter lr and hyperparameter learning_rate both set recipe.optimizer.lr",
        ),
        ({"recipe.optimizer.lrr": 1}, 'hyperparameter recipe.optimizer.lrr: unknown key "recipe.optimizer.lrr"'),
        ({"batch": "many"}, "hyperparameter batch: "),
        ("{", "SM_HPS is '{', which is not JSON"),
        ("[]", "SM_HPS is '[]'; a mapping such as {\"lr\": 1e-3} is wanted"),
    ],
)
def test_wrong_hyperparameters(
    printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch, values: object, message: str
) -> None:
    given(monkeypatch, values)
    said = printed()
    assert message in said
    assert said.count("\n") == 1


def test_arguments_of_another_program_are_left_to_it() -> None:
    environ = {"SM_USER_ARGS": '["--lr","1"]'}
    launched = ["launch", "--", "train.py", "--lr", "1"]
    assert hyperparameters.without(launched, environ) == launched
    assert hyperparameters.without(["train", "job.yaml", "--lr", "1"], environ) == ["train", "job.yaml"]


def test_wrong_arguments_of_sagemaker(printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_USER_ARGS", '{"--lr": 1}')
    assert 'SM_USER_ARGS is \'{"--lr": 1}\'; a list such as ["--lr","1e-3"] is wanted' in printed()


def test_variables_in_a_job_file(
    printed: Callable[..., str], container: Path, monkeypatch: pytest.MonkeyPatch, job: Path
) -> None:
    found = printed()
    # By the variables' names: the value of one may be a secret.
    assert "source: ${SM_CHANNEL_TRAINING}/reviews.csv" in found
    assert "folder: ${SM_OUTPUT_DATA_DIR}/run" in found
    monkeypatch.delenv("SM_OUTPUT_DATA_DIR")
    assert printed() == (
        f"samestep: {job}:10: run.folder is '${{SM_OUTPUT_DATA_DIR}}/run', and the environment variable "
        "SM_OUTPUT_DATA_DIR is not set; set it, or write the value itself\n"
    )


def test_a_training_in_the_folders_of_a_container(
    job: Path, container: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (container / "input/data/training/regression.yaml").write_text(JOB.replace(TEXTS, NUMBERS), encoding="utf-8")
    job = container / "input/data/training/regression.yaml"
    given(monkeypatch, {"lr": 0.001})
    assert main(["train", str(job)]) == 0
    assert (container / "output/data/run/report.json").is_file()
    assert (container / "checkpoints/step-2").is_dir()
    # The same container starts again, as after a spot instance was taken away, and asks for more.
    given(monkeypatch, {"lr": 0.001, "steps": 3})
    assert main(["train", str(job)]) == 0
    assert (container / "checkpoints/step-3").is_dir()
    assert f"goes on from {container}/checkpoints/step-2" in capsys.readouterr().err


def test_several_containers_that_would_each_train_alone_are_refused(
    job: Path, container: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SM_HOSTS", '["algo-1","algo-2"]')
    assert main(["train", str(job)]) == 2
    assert "put `samestep launch --` before the command, so that they train it together" in capsys.readouterr().err
    assert not (container / "output/data/run").exists()
