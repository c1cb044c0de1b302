"""Job files: what is read, what is written back, and the one line that each mistake gives."""

import os
import re
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from samestep import jobfile
from samestep.errors import UserError
from samestep.job import Job, Run
from samestep.recipe import SGD, AdamW, Evaluation, Recipe, Schedule

REVIEWS = """\
# a comment
recipe:
  task: text-classification
  data:
    source: reviews
  seed: 3
  batch: 32
  epochs: 2
  optimizer: {name: sgd, lr: 3e-1, momentum: 0.9}
  schedule:
    warmup: 0.1
    decay: linear
run:
  layout: dp2 tp2
  micro_batch: 8
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "job.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def refusal(file: Path, *overrides: tuple[str, str]) -> str:
    """The message with which a job file is refused, without the folder it stands in."""
    with pytest.raises(UserError) as caught:
        jobfile.load(file, [(key, value, f"--set {key}={value}") for key, value in overrides])
    return str(caught.value).replace(f"{file.parent}{os.sep}", "")


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


DUMPED = """\
recipe:
  task: text-classification  # job.yaml:3
  data:
    source: reviews          # job.yaml:5
  model: {}                  # default
  args: {}                   # default
  seed: 3                    # job.yaml:6
  batch: 32                  # --batch 32
  steps: null                # default
  epochs: 2                  # job.yaml:8
  optimizer:
    name: sgd                # job.yaml:9
    lr: 0.3                  # job.yaml:9
    momentum: 0.5            # --set recipe.optimizer={momentum: 0.5}
    nesterov: false          # default
    weight_decay: 0.0        # default
    decay_all: false         # default
  schedule:
    warmup: 0.1              # job.yaml:11
    decay: linear            # job.yaml:12
    final: 0.0               # default
"""


def test_the_dump_names_the_source_of_every_value(tmp_path: Path) -> None:
    flags = [("recipe.batch", "32", "--batch 32")]
    flags += [("recipe.optimizer", "{momentum: 0.5}", "--set recipe.optimizer={momentum: 0.5}")]
    text = jobfile.dump(jobfile.load(write(tmp_path, REVIEWS), flags))
    assert text.replace(f"{tmp_path}{os.sep}", "").startswith(DUMPED)
    for line in text.splitlines():  # a section has no source of its own, everything else has
        assert (" # " in line) != line.endswith(":")


def test_the_dump_names_the_line_of_a_merged_or_repeated_section(tmp_path: Path) -> None:
    text = """\
recipe:
  task: regression
  data: &common
    first: 1
    second: {deep: 2}
  model:
    <<: *common
    second: {own: 3}
  args: *common
"""
    loaded = jobfile.load(write(tmp_path, text))
    assert loaded.job.recipe.model == {"first": 1, "second": {"own": 3}}
    dumped = jobfile.dump(loaded).replace(f"{tmp_path}{os.sep}", "")
    said = re.findall(r"^ +(\w+): (\d) +# job\.yaml:(\d)$", dumped, re.MULTILINE)
    data, model = [("first", "1", "4"), ("deep", "2", "5")], [("first", "1", "4"), ("own", "3", "8")]
    assert said == data + model + data


def test_of_several_merged_sections_the_first_counts(tmp_path: Path) -> None:
    text = "recipe:\n  task: x\n  data: &a\n    k: 1\n  args: &b\n    k: 2\n    z: 3\n  model:\n    <<: [*a, *b]\n"
    loaded = jobfile.load(write(tmp_path, text))
    assert loaded.job.recipe.model == {"k": 1, "z": 3}
    assert [loaded.sources["recipe", "model", key][-2:] for key in ("k", "z")] == [":4", ":7"]


def test_an_override_is_the_source_of_everything_in_it(tmp_path: Path) -> None:
    loaded = jobfile.load(write(tmp_path, REVIEWS), [("recipe.data", "{a: {b: {c: 1}}}", "the flag\nin two lines")])
    assert re.search(r"^ +c: 1 +# the flag in two lines$", jobfile.dump(loaded), re.MULTILINE)
    assert re.search(r"^ +source: reviews +# .*:5$", jobfile.dump(loaded), re.MULTILINE)


TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | st.dates()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.integers() | st.booleans(), inner, max_size=3)
    ),
    max_leaves=8,
)
SECTIONS = st.dictionaries(TEXT, VALUES, max_size=3)
RECIPES = st.fixed_dictionaries(
    {"task": TEXT, "data": SECTIONS, "model": SECTIONS},
    optional={
        "seed": st.integers(0, 2**32 - 1),
        "batch": st.integers(1, 10**9),
        "steps": st.none() | st.integers(1, 10**9),
        "optimizer": st.fixed_dictionaries(
            {},
            optional={
                "name": st.sampled_from(["adamw", "sgd"]),
                "lr": st.floats(0, exclude_min=True, allow_infinity=False),
                "weight_decay": st.floats(0, allow_infinity=False),
                "decay_all": st.booleans(),
            },
        ),
        "clip": st.none() | st.floats(1e-300, 1e300),
        "precision": st.sampled_from(["fp64", "fp32", "bf16", "fp16"]),
    },
)
RUNS = st.fixed_dictionaries(
    {}, optional={"layout": TEXT, "folder": st.none() | TEXT.filter(lambda text: "\0" not in text)}
)


@given(recipe=RECIPES, run=RUNS)
def test_the_dump_loads_back_to_the_same_job(
    recipe: dict[str, Any], run: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("jobs")
    loaded = jobfile.load(write(folder, yaml.safe_dump({"recipe": recipe, "run": run})))
    assert loaded.job.recipe.data.keys() == recipe["data"].keys()
    dumped = jobfile.dump(loaded)
    again = jobfile.load(write(folder, dumped))
    assert again.job == loaded.job
    assert types_in(again.job.recipe.model) == types_in(loaded.job.recipe.model)  # 1, 1.0 and True are equal


def types_in(value: Any) -> Any:
    if isinstance(value, dict):
        return {(key, type(key)): types_in(inner) for key, inner in value.items()}
    return [types_in(inner) for inner in value] if isinstance(value, list) else type(value)


@pytest.mark.parametrize(
    "value",
    [
        "3e-4",
        "yes",
        "null",
        "",
        "a: b",
        "- x",
        "#no",
        "two\nlines",
        "\n",
        "\x85",
        "\u2028",
        " padded ",
        "'\"",
        "1_000",
        "2020-01-01",
        "中文",
        "...",
    ],
)
def test_a_text_that_looks_like_something_else_stays_text(tmp_path: Path, value: str) -> None:
    loaded = jobfile.load(write(tmp_path, yaml.safe_dump({"recipe": {"task": "x", "data": {value: [value]}}})))
    assert loaded.job.recipe.data == {value: [value]}
    again = jobfile.load(write(tmp_path, jobfile.dump(loaded)))
    assert again.job.recipe.data == {value: [value]}


def test_a_date_stays_a_date_and_a_numbered_key_a_number(tmp_path: Path) -> None:
    file = write(tmp_path, "recipe:\n  task: x\n  data:\n    since: 2020-01-31\n    labels: {0: bad, 1: good}\n")
    loaded = jobfile.load(file)
    dumped = jobfile.dump(loaded)
    assert jobfile.load(write(tmp_path, dumped)).job.recipe.data == {
        "since": date(2020, 1, 31),
        "labels": {0: "bad", 1: "good"},
    }
    assert re.search(r"^ +0: bad +# .*:5$", dumped, re.MULTILINE)


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
    for text in ("only-here.csv", "nowhere.csv", "reviews", f"{here}/only-here.csv", "x." + "y" * 5000, "a\0.csv"):
        assert resolved(beside, source=text).data["source"] == text
    (beside / "note.csv").touch()
    assert resolved(beside, note="note.csv").data["note"] == "note.csv"  # not a key that names a file
    assert resolved(beside, task="nowhere.py:Own").task == "nowhere.py:Own"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "missing.yaml") == "no job file missing.yaml"
    (tmp_path / "folder").mkdir()
    assert refusal(tmp_path / "folder") == "folder is a folder; a job file is wanted"
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file" / "job.yaml").endswith("can't be read: Not a directory")
    (tmp_path / "latin.yaml").write_bytes("recipe:\n  task: caf\xe9\n".encode("latin-1"))
    assert refusal(tmp_path / "latin.yaml") == "latin.yaml is not UTF-8: byte 19 is 0xe9; save it as UTF-8"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "job.yaml is empty; a job file has a recipe: section"),
        ("# nothing but this\n", "job.yaml is empty; a job file has a recipe: section"),
        ("- a\n- b\n", "job.yaml:1: not a job file; it must have a recipe: section"),
        ("# a list\n\nhello\n", "job.yaml:3: not a job file; it must have a recipe: section"),
        (
            "recipe:\n\ttask: x\n",
            r"job.yaml:2: not YAML: found character '\t' that cannot start any token; indent with spaces",
        ),
        ("recipe:\n  task: [x\n", "job.yaml:3: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("recipe:\n  task: a: b\n", "job.yaml:2: not YAML: mapping values are not allowed here"),
        ("recipe:\n  task: *x\n", "job.yaml:2: not YAML: found undefined alias 'x'"),
        ("recipe:\n  task: \a\n", "job.yaml:2: not YAML: character 0x7 can't stand in it"),
        ("recipe:\n  data: {[1]: 2}\n", "job.yaml:2: not YAML: found unhashable key"),
        (
            "recipe:\n  task: x\n---\nrecipe:\n",
            "job.yaml:3: not YAML: expected a single document in the stream, but found another document",
        ),
        ("recipe:\n  data: {since: 2020-99-01}\n", "job.yaml:2: not YAML: 2020-99-01: month must be in 1..12"),
        (
            "recipe:\n  task: !!python/name:os.system x\n",
            "job.yaml:2: not YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/name:os.system'",
        ),
        ("recipe:\n  data: &a {again: *a}\n", "job.yaml: not a job file; its sections are nested without end"),
        (
            "recipe:\n  batch: 1\n  task: x\n  batch: 2\n",
            'job.yaml:4: key "recipe.batch" stands twice, first in job.yaml:2; keep one of them',
        ),
        ("recipe: {}\nrecipe: {}\n", 'job.yaml:2: key "recipe" stands twice, first in job.yaml:1; keep one of them'),
    ],
)
def test_a_file_that_is_no_job_file_is_refused_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    assert refusal(write(tmp_path, text)) == expected


def keys_of(section: type) -> str:
    return ", ".join(sorted(field.name for field in fields(section)))


RECIPE_KEYS = keys_of(Recipe)
BOTH_LENGTHS = (
    "recipe.epochs: steps and epochs are both given; give one of them, and leave the other out or make it null"
)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # keys
        ("  bach: 3", f'job.yaml:3: unknown key "recipe.bach"; did you mean "batch"? known: {RECIPE_KEYS}'),
        ("  1: 3", f'job.yaml:3: unknown key "recipe.1"; known: {RECIPE_KEYS}'),
        ("runs: {}", f'job.yaml:3: unknown key "runs"; did you mean "run"? known: {keys_of(Job)}'),
        ("1: 2", f'job.yaml:3: unknown key "1"; known: {keys_of(Job)}'),
        (
            "  optimizer:\n    lrr: 1",
            'job.yaml:4: unknown key "recipe.optimizer.lrr"; did you mean "lr"? '
            "known: betas, decay_all, eps, lr, name, weight_decay",
        ),
        (
            "  optimizer:\n    name: sgd\n    betas: [0.9, 0.9]",
            'job.yaml:5: unknown key "recipe.optimizer.betas"; '
            "known: decay_all, lr, momentum, name, nesterov, weight_decay",
        ),
        (
            "  optimizer: {adamw: 1}",  # also the name of an optimizer, which is part of pydantic's location
            'job.yaml:3: unknown key "recipe.optimizer.adamw"; known: betas, decay_all, eps, lr, name, weight_decay',
        ),
        (
            "  schedule: {warm: 1}",
            'job.yaml:3: unknown key "recipe.schedule.warm"; did you mean "warmup"? known: decay, final, warmup',
        ),
        ("  data: {1: 2}", 'job.yaml:3: recipe.data.1: the key 1 should be text; write it as "1"'),
        # types
        ("  batch: many", "job.yaml:3: recipe.batch is 'many'; it should be a whole number"),
        ("  batch: 2.5", "job.yaml:3: recipe.batch is 2.5; it should be a whole number"),
        ("  batch: [1]", "job.yaml:3: recipe.batch is [1]; it should be a whole number"),
        ("  batch: yes", "job.yaml:3: recipe.batch is true; it should be a number"),
        ("  batch:", "job.yaml:3: recipe.batch is empty; it should be a whole number"),
        ("  clip: off", "job.yaml:3: recipe.clip is false; it should be a number"),
        ("  clip: none", "job.yaml:3: recipe.clip is 'none'; it should be a number"),
        ("  dropout: maybe", "job.yaml:3: recipe.dropout is 'maybe'; it should be true or false"),
        ("  data: [1]", "job.yaml:3: recipe.data is [1]; it should be a section of keys and values"),
        ("  optimizer: adamw", "job.yaml:3: recipe.optimizer is 'adamw'; it should be a section of keys and values"),
        ("  optimizer:", "job.yaml:3: recipe.optimizer is empty; it should be a section of keys and values"),
        ("run:", "job.yaml:3: run is empty; it should be a section of keys and values"),
        ("run:\n  layout: 3", "job.yaml:4: run.layout is 3; it should be text"),
        ("run:\n  folder: 3", "job.yaml:4: run.folder is 3; it should be a path"),
        ("  optimizer: {betas: 0.5}", "job.yaml:3: recipe.optimizer.betas is 0.5; it should be a list"),
        # values
        ("  batch: 0", "job.yaml:3: recipe.batch is 0; it should be greater than 0"),
        ("  seed: -1", "job.yaml:3: recipe.seed is -1; it should be greater than or equal to 0"),
        ("  seed: 4294967296", "job.yaml:3: recipe.seed is 4294967296; it should be less than 4294967296"),
        ("  clip: 0", "job.yaml:3: recipe.clip is 0; it should be greater than 0"),
        ("  optimizer:\n    lr: -1", "job.yaml:4: recipe.optimizer.lr is -1; it should be greater than 0"),
        ("  optimizer:\n    lr: .nan", "job.yaml:4: recipe.optimizer.lr is nan; it should be a finite number"),
        ("  optimizer:\n    lr: .inf", "job.yaml:4: recipe.optimizer.lr is inf; it should be a finite number"),
        (
            "  optimizer:\n    betas:\n    - 0.9\n    - 1.5",
            "job.yaml:6: recipe.optimizer.betas.1 is 1.5; it should be less than 1",
        ),
        (
            "  optimizer: {betas: [0.5, 0.6, 0.7]}",
            "job.yaml:3: recipe.optimizer.betas is [0.5, 0.6, 0.7]; it should have at most 2 items",
        ),
        ("  optimizer: {betas: [0.5]}", "job.yaml:3: recipe.optimizer.betas is [0.5]; its item 2 is missing"),
        (
            "  optimizer: {name: adam}",
            "job.yaml:3: recipe.optimizer.name is 'adam'; did you mean \"adamw\"? known: adamw, sgd",
        ),
        ("  optimizer: {name: }", "job.yaml:3: recipe.optimizer.name is empty; known: adamw, sgd"),
        (
            "  precision: fp8",
            "job.yaml:3: recipe.precision is 'fp8'; it should be 'fp64', 'fp32', 'bf16' or 'fp16'",
        ),
        ("  evaluation:\n    batch: 0", "job.yaml:4: recipe.evaluation.batch is 0; it should be greater than 0"),
        ("run:\n  workers: -2", "job.yaml:4: run.workers is -2; it should be greater than or equal to 0"),
        # values that don't go together
        ("  steps: 1\n  epochs: 2", f"job.yaml:4: {BOTH_LENGTHS}"),
        (
            "  optimizer:\n    name: sgd\n    nesterov: true",
            "job.yaml:5: recipe.optimizer.nesterov: nesterov needs a momentum above 0",
        ),
        (
            "  schedule:\n    warmup: 1.5",
            "job.yaml:4: recipe.schedule.warmup: warmup is 1.5; "
            "below 1 it is a fraction of all steps, else a whole number of them",
        ),
        # several at once, each in a line of its own
        (
            "  batch: 0\nrun:\n  layout: 3",
            "job.yaml:3: recipe.batch is 0; it should be greater than 0\n"
            "job.yaml:5: run.layout is 3; it should be text",
        ),
    ],
)
def test_a_mistake_is_named_with_its_line_its_key_and_what_would_do(
    tmp_path: Path, lines: str, expected: str
) -> None:
    assert refusal(write(tmp_path, f"recipe:\n  task: regression\n{lines}\n")) == expected


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert refusal(write(tmp_path, "run: {layout: dp2}\n")) == "job.yaml: recipe is missing"
    assert refusal(write(tmp_path, "\nrecipe: {batch: 2}\n")) == "job.yaml:2: recipe.task is missing"


def test_a_long_value_is_cut_short(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, f"recipe: {{task: x, batch: {'many' * 100}}}\n"))
    assert "recipe.batch is 'manymany" in text
    assert len(text) < 150


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("batch", "3", '"batch" must be a dotted key below recipe or run, such as recipe.optimizer.lr'),
        ("recipe", "{}", '"recipe" must be a dotted key below recipe or run, such as recipe.optimizer.lr'),
        ("job.batch", "3", '"job.batch" must be a dotted key below recipe or run, such as recipe.optimizer.lr'),
        ("recipe..lr", "3", '"recipe..lr" must be a dotted key below recipe or run, such as recipe.optimizer.lr'),
        ("recipe.task.x", "3", '"task" in "recipe.task.x" is \'text-classification\', which has no keys of its own'),
        ("recipe.seed.x.y", "3", '"seed" in "recipe.seed.x.y" is 3, which has no keys of its own'),
        ("recipe.bach", "3", f'unknown key "recipe.bach"; did you mean "batch"? known: {RECIPE_KEYS}'),
        ("recipe.batch", "0", "recipe.batch is 0; it should be greater than 0"),
        ("recipe.optimizer.lr", "[1", "recipe.optimizer.lr is '[1'; it should be a number"),
        ("recipe.evaluation", "{batch: 0}", "recipe.evaluation.batch is 0; it should be greater than 0"),
        ("run.layout.x", "3", '"layout" in "run.layout.x" is \'dp2 tp2\', which has no keys of its own'),
    ],
)
def test_a_wrong_override_is_named_by_its_flag(tmp_path: Path, key: str, value: str, expected: str) -> None:
    text = refusal(write(tmp_path, REVIEWS), (key, value))
    assert text == f"--set {key}={value}: {expected}"


def test_a_flag_that_does_not_go_together_with_the_file_names_the_line_to_change(tmp_path: Path) -> None:
    assert refusal(write(tmp_path, REVIEWS), ("recipe.steps", "5")) == f"job.yaml:8: {BOTH_LENGTHS}"
    loaded = jobfile.load(tmp_path / "job.yaml", [("recipe.steps", "5", ""), ("recipe.epochs", "null", "")])
    assert (loaded.job.recipe.steps, loaded.job.recipe.epochs) == (5, None)


def test_a_wrong_item_of_an_overridden_list_is_named_by_the_flag(tmp_path: Path) -> None:
    file = write(tmp_path, "recipe:\n  task: x\n  optimizer:\n    betas:\n    - 0.9\n    - 0.99\n")
    for flag in (("recipe.optimizer.betas", "[0.9, 1.5]"), ("recipe.optimizer", "{betas: [0.9, 1.5]}")):
        assert refusal(file, flag) == (
            f"--set {flag[0]}={flag[1]}: recipe.optimizer.betas.1 is 1.5; it should be less than 1"
        )


def test_the_dump_writes_a_repeated_value_out_in_full(tmp_path: Path) -> None:
    file = write(tmp_path, "recipe:\n  task: x\n  data: {days: [&day 2020-01-31, *day]}\n")
    assert "days: [2020-01-31, 2020-01-31] " in jobfile.dump(jobfile.load(file))
