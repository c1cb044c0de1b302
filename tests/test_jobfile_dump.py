"""Job files written back: the source of every value, and the same job once more."""

import os
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from job_files import REVIEWS, write

from samestep import jobfile

pytestmark = pytest.mark.quick

DUMPED = """\
recipe:
  task: text-classification  # job.yaml:3
  data:
    source: reviews          # job.yaml:5
  model: {}                  # default
  args: {}                   # default
  seed: 3                    # job.yaml:6
  batch: 32                  # --batch 32
  virtual_ranks: 8           # default
  steps: null                # default
  epochs: 2                  # job.yaml:8
  optimizer:
    name: sgd                # job.yaml:9
    lr: 0.3                  # job.yaml:9
    momentum: 0.5            # --set recipe.optimizer={momentum: 0.5}
    nesterov: false          # default
    weight_decay: 0.0        # default
    decay_all: false         # default
  groups: []                 # default
  schedule:
    warmup: 0.1              # job.yaml:11
    hold: 0.0                # default
    decay: linear            # job.yaml:12
    final: 0.0               # default
    power: 1.0               # default
    cycles: 1                # default
    function: null           # default
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


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
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
                "lr": st.floats(1.2e-38, 1),
                "weight_decay": st.floats(0, 0.9),
                "decay_all": st.booleans(),
            },
        ),
        "clip": st.none() | st.floats(1.2e-38, 1e9),
        "precision": st.sampled_from(["fp64", "fp32", "bf16", "fp16"]),
    },
)
RUNS = st.fixed_dictionaries({}, optional={"layout": TEXT, "folder": st.none() | TEXT})


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


def test_the_dump_writes_a_repeated_value_out_in_full(tmp_path: Path) -> None:
    file = write(tmp_path, "recipe:\n  task: x\n  data: {days: [&day 2020-01-31, *day]}\n")
    assert "days: [2020-01-31, 2020-01-31] " in jobfile.dump(jobfile.load(file))
