"""Services that get a run's numbers: what each is told, what is refused before a rank starts, and failures later."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from small_tasks import Points

import samestep
from samestep.errors import UserError
from samestep.job import Log
from samestep.loggers import LOGGERS
from samestep.loggers.base import LoggedRun, Logger
from samestep.loggers.registry import check_loggers

pytestmark = pytest.mark.quick


class Recorded(Logger):
    """Writes each call as a line of a file."""

    def __init__(self, settings: Log, run: LoggedRun) -> None:
        self._file = Path(settings.args["file"])
        self._fails_at = settings.args.get("fails_at")
        if settings.args.get("closed"):
            raise RuntimeError("the service is closed\nsee its page")
        self.identity = run.identity or "first"
        self._line("open", run.name, run.first_step, self.identity, run.config["recipe"]["batch"])

    @classmethod
    def check(cls, settings: Log, environ: Mapping[str, str]) -> None:
        if "file" not in settings.args:
            raise UserError("run.log has recorded, and args has no file")

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        if step == self._fails_at:
            raise ConnectionError("the line is cut")
        self._line("numbers", step, sorted(values))

    def text(self, step: int, name: str, text: str) -> None:
        self._line("text", step, name, text)

    def close(self, *, failed: bool) -> None:
        self._line("close", failed)

    def _line(self, *values: Any) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of a logger named recorded."""
    monkeypatch.setitem(LOGGERS, "json", f"{__name__}:Recorded")  # called as a package that is there
    return tmp_path / "lines"


def lines_of(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def train(folder: Path, *log: Log, steps: int = 3, **run: Any) -> samestep.TrainResult:
    recipe = samestep.Recipe(
        task=Points(samples=16, held_out=8), batch=8, steps=steps, evaluation=samestep.Evaluation(every=2)
    )
    return samestep.train(recipe, folder=folder, device="cpu", check=False, log=log, **run)


STEP = ["train/grad_norm", "train/loss", "train/lr"]


def test_a_logger_gets_every_step_and_evaluation(recorded: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", Log(kind="json", args={"file": str(recorded)}))
    opened, *others = lines_of(recorded)
    assert opened == ["open", "Points", 0, "first", 8]
    assert [entry[:2] for entry in others if entry[0] == "numbers"] == [
        ["numbers", step] for step in (0, 1, 2, 2, 3)
    ]  # steps from 0; evaluations after 2 and 3 steps
    assert [entry[2] for entry in others if entry[0] == "numbers"].count(STEP) == 3
    assert others[-1] == ["close", False]


def test_a_resumed_training_goes_on_with_the_record(recorded: Path, tmp_path: Path) -> None:
    log = Log(kind="json", args={"file": str(recorded)})
    run: dict[str, Any] = {"checkpoint": samestep.Checkpointing(every=2, resume="auto")}
    train(tmp_path / "run", log, steps=2, **run)
    assert json.loads((tmp_path / "run" / "loggers.json").read_text(encoding="utf-8")) == {"json": "first"}
    (tmp_path / "run" / "loggers.json").write_text('{"json": "the service\'s name"}', encoding="utf-8")
    train(tmp_path / "run", log, steps=4, **run)
    assert [entry for entry in lines_of(recorded) if entry[0] == "open"][1][2:4] == [2, "the service's name"]


def test_a_logger_that_fails_is_left_out_and_the_training_goes_on(
    recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = train(tmp_path / "run", Log(kind="json", args={"file": str(recorded), "fails_at": 1}))
    assert result.steps == 3
    assert "run.log: json failed: ConnectionError: the line is cut; the training goes on without it" in (
        capfd.readouterr().err
    )
    assert [entry[:2] for entry in lines_of(recorded)[1:]] == [["numbers", 0]]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 3


def test_one_that_cannot_be_opened_ends_the_training_before_its_first_step(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"run\.log: json can't be opened: RuntimeError: the service is closed; repair"
    ):
        train(tmp_path / "run", Log(kind="json", args={"file": str(recorded), "closed": True}))
    train(tmp_path / "run", Log(kind="json", args={"file": str(recorded)}))


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ([Log(kind="wandbb")], 'run.log has "wandbb"; did you mean "wandb"'),
        ([Log(kind="tensorboard"), Log(kind="tensorboard")], "run.log has tensorboard twice; name it once"),
        ([Log(kind="json")], "run.log has recorded, and args has no file"),
    ],
)
def test_what_cannot_be_meant_is_refused(recorded: Path, log: list[Log], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_loggers(log, {})


@pytest.mark.parametrize(
    "written", ["tensorboard", ["tensorboard"], [{"kind": "tensorboard"}], {"kind": "tensorboard"}]
)
def test_a_name_alone_or_in_a_list_is_a_logger(written: Any) -> None:
    assert samestep.Run(log=written).log == (Log(kind="tensorboard"),)


@pytest.mark.parametrize("written", [True, [3], [{"project": "reviews"}], [{"kind": "wandb", "projct": "reviews"}]])
def test_what_is_no_logger_is_refused(written: Any) -> None:
    with pytest.raises(UserError, match=r"run\.log|kind|projct|log"):
        samestep.Run(log=written)


SERVICES = {
    "wandb": {"mode": "offline"},
    "mlflow": {"tracking_uri": "file://FOLDER/mlruns"},
    "trackio": {},
    "swanlab": {"mode": "offline"},
}
PROGRAM = """
import json, sys, samestep
from samestep.job import Log
from samestep.tasks.regression import Regression

if __name__ == "__main__":
    folder, kind, args = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    recipe = samestep.Recipe(task=Regression(samples=32), batch=8, steps=STEPS)
    checkpoint = samestep.Checkpointing(every=2, resume="auto")
    log = [Log(kind=kind, args=args)]
    samestep.train(recipe, folder=folder, device="cpu", check=False, log=log, checkpoint=checkpoint)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(700)
@pytest.mark.parametrize("kind", SERVICES)
def test_a_service_is_written_to_without_a_network(kind: str, tmp_path: Path) -> None:
    """Twice, the second time resumed; what fails is told on stderr, and nothing is."""
    pytest.importorskip(kind)
    args = json.dumps(SERVICES[kind]).replace("FOLDER", str(tmp_path))
    environ = {**os.environ, "HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio"), "no_proxy": "*"}
    environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # the database is not in mlflow-skinny
    for steps in (2, 4):
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.replace("STEPS", str(steps)), encoding="utf-8")
        words = [sys.executable, str(program), str(tmp_path / "run"), kind, args]
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert "the training goes on without it" not in done.stderr
        assert json.loads((tmp_path / "run" / "loggers.json").read_text(encoding="utf-8"))[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wandb", "swanlab"])
def test_a_service_without_a_key_is_refused(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(kind)
    environ = {"HOME": str(tmp_path)}
    with pytest.raises(UserError, match=f"run.log has {kind}, and there is no key for it"):
        check_loggers([Log(kind=kind)], environ)
    check_loggers([Log(kind=kind, args={"mode": "offline"})], environ)
    check_loggers([Log(kind=kind)], {**environ, f"{kind.upper()}_API_KEY": "k"})
