"""Job files: what is read, laid over by flags, and found beside the file."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from job_files import REVIEWS, write

from samestep import jobfile
from samestep.checkpoint.identity import LearnsFrom
from samestep.job import Job, Run
from samestep.recipe import SGD, AdamW, Evaluation, Recipe, Schedule
from samestep.training.checkpointing import Checkpoints

pytestmark = pytest.mark.quick


def test_a_job_file_gives_its_values_and_defaults_for_the_rest(tmp_path: Path) -> None:
    loaded = jobfile.load(write(tmp_path, REVIEWS))
    assert loaded.job == Job(
        recipe=Recipe(
            task="text-classification",
            data={"source": "reviews"},
            seed=3,
            batch=32,
            epochs=2,
            optimizer=SGD(lr=0.3, momentum=0.9),
            schedule=Schedule(warmup=0.1, decay="linear"),
        ),
        run=Run(layout="dp2 tp2", micro_batch=8),
        name="job",  # of the file
    )
    assert loaded.job.recipe.evaluation == Evaluation(batch=64, every=None)
    assert loaded.file == tmp_path / "job.yaml"


def test_an_optimizer_without_a_name_is_adamw(tmp_path: Path) -> None:
    file = write(tmp_path, "recipe: {task: regression, optimizer: {lr: 0.5, betas: [0.8, 0.95]}}")
    assert jobfile.load(file).job.recipe.optimizer == AdamW(lr=0.5, betas=(0.8, 0.95))


def test_a_number_may_be_written_as_an_exponent_without_a_dot(tmp_path: Path) -> None:
    """YAML 1.1 reads 3e-4 as text."""
    file = write(tmp_path, "recipe: {task: regression, optimizer: {lr: 3e-4}}")
    assert jobfile.load(file).job.recipe.optimizer.lr == 0.0003


def test_sources_name_the_line_of_every_key(tmp_path: Path) -> None:
    file = write(tmp_path, REVIEWS)
    sources = jobfile.load(file).sources
    lines = REVIEWS.splitlines()
    assert sources["recipe", "data", "source"] == f"{file}:5"
    assert sources.pop(("name",)) == "the file's name"
    for path, source in sources.items():
        assert f"{path[-1]}:" in lines[int(source.rpartition(":")[2]) - 1]


@pytest.mark.parametrize(
    ("key", "text", "read"),
    [
        ("recipe.batch", "16", lambda job: job.recipe.batch == 16),
        ("recipe.epochs", "null", lambda job: job.recipe.epochs is None),
        ("recipe.optimizer.lr", "3e-4", lambda job: job.recipe.optimizer == SGD(lr=3e-4, momentum=0.9)),
        ("recipe.optimizer", "{lr: 0.5}", lambda job: job.recipe.optimizer == SGD(lr=0.5, momentum=0.9)),
        ("recipe.optimizer.nesterov", "yes", lambda job: job.recipe.optimizer.nesterov is True),
        ("recipe.model.layers", "4", lambda job: job.recipe.model == {"layers": 4}),
        ("recipe.model.sizes.deep", "[1, 2]", lambda job: job.recipe.model == {"sizes": {"deep": [1, 2]}}),
        ("recipe.evaluation.every", "5", lambda job: job.recipe.evaluation == Evaluation(every=5)),
        ("recipe.task", "a: b: c", lambda job: job.recipe.task == "a: b: c"),  # not YAML: taken as text
        ("recipe.task", "2020-99-99", lambda job: job.recipe.task == "2020-99-99"),
        ("run.layout", "pp2 dp2", lambda job: job.run.layout == "pp2 dp2"),
    ],
)
def test_an_override_is_laid_over_the_file(tmp_path: Path, key: str, text: str, read: Any) -> None:
    file = write(tmp_path, REVIEWS)
    assert not read(jobfile.load(file).job)
    loaded = jobfile.load(file, [(key, text, "the flag")])
    assert read(loaded.job)
    assert loaded.sources[tuple(key.split("."))] == "the flag"
    assert loaded.job.recipe.data == {"source": "reviews"}  # the rest is left alone


def test_the_last_of_two_overrides_counts(tmp_path: Path) -> None:
    loaded = jobfile.load(write(tmp_path, REVIEWS), [("recipe.batch", "1", "first"), ("recipe.batch", "2", "second")])
    assert (loaded.job.recipe.batch, loaded.sources["recipe", "batch"]) == (2, "second")


def test_an_override_may_fill_a_section_that_is_empty_or_not_there(tmp_path: Path) -> None:
    file = write(tmp_path, "recipe:\n  task: regression\n  data:\n")
    loaded = jobfile.load(file, [("recipe.data.source", "x", "flag"), ("run.layout", "dp2", "flag")])
    assert (loaded.job.recipe.data, loaded.job.run.layout) == ({"source": "x"}, "dp2")


@pytest.fixture
def two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder with a job file in it, and the current folder, which is another one."""
    beside, here = tmp_path / "beside", tmp_path / "here"
    beside.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    return beside, here


def resolved(beside: Path, task: str = "x", **data: str) -> Recipe:
    values = {"recipe": {"task": task, "data": data, "model": data, "args": data}}
    return jobfile.load(write(beside, yaml.safe_dump(values))).job.recipe


def test_a_path_is_found_beside_the_job_file(two_folders: tuple[Path, Path]) -> None:
    beside, here = two_folders
    for folder in (beside, here):
        for name in ("own.py", "own.csv"):
            (folder / name).touch()
    recipe = resolved(beside, task="own.py:Own", source="own.csv")
    assert recipe.task == f"{beside}/own.py:Own"
    assert recipe.data == recipe.model == {"source": f"{beside}/own.csv"}
    assert recipe.args == {"source": "own.csv"}  # only the shipped tasks' keys are known to be paths


def test_a_path_in_a_folder_beside_the_job_file_is_found(two_folders: tuple[Path, Path]) -> None:
    beside, _ = two_folders
    (beside / "data").mkdir()
    (beside / "data" / "train.csv").touch()
    assert resolved(beside, folder="data/train.csv").data["folder"] == f"{beside}/data/train.csv"
    assert resolved(beside, folder="./data").data["folder"] == f"{beside}/data"


def test_everything_else_is_left_as_it_is(two_folders: tuple[Path, Path]) -> None:
    beside, here = two_folders
    (here / "only-here.csv").touch()
    (beside / "reviews").mkdir()
    for text in ("only-here.csv", "nowhere.csv", "reviews", f"{here}/only-here.csv", "x." + "y" * 5000):
        assert resolved(beside, source=text).data["source"] == text
    (beside / "note.csv").touch()
    assert resolved(beside, note="note.csv").data["note"] == "note.csv"  # not a key that names a file
    assert resolved(beside, task="nowhere.py:Own").task == "nowhere.py:Own"


def test_what_a_variable_holds_is_left_in_nothing_that_others_may_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", str(tmp_path / "secret"))
    points = Path(__file__).parent / "small_tasks.py"
    values = {
        "recipe": {
            "task": f"{points}:Points",
            "args": {"samples": 20},
            "model": {"note": "${PLACE}/here"},
            "batch": 10,
        },
        "run": {"device": "cpu", "threads": 1},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    recipe = jobfile.load(tmp_path / "job.yaml").job.recipe
    for each in (recipe, pickle.loads(pickle.dumps(recipe))):  # as ranks get it
        assert each.model == {"note": f"{tmp_path}/secret/here"}
        assert type(jobfile.plain(each)["model"]["note"]) is str
        assert jobfile.plain(each)["model"] == each.model
        assert jobfile.plain(each, written=True)["model"] == {"note": "${PLACE}/here"}
    session: Any = None  # of a job without checkpoints nobody asks it
    saved = Checkpoints(Job(recipe=recipe), session, tmp_path, LearnsFrom(train=[]))._recipe
    assert saved["model"] == {"note": "${PLACE}/here"}
