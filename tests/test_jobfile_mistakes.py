"""Job files that are refused: the one line that each mistake gives."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from job_files import REVIEWS, refusal, write

from samestep import jobfile
from samestep.job import Job
from samestep.recipe import Recipe

pytestmark = pytest.mark.quick


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
            "job.yaml:3: not YAML: expected a single document in the stream, but found another document; "
            "keep one, without ---",
        ),
        ("recipe:\n  data: {since: 2020-99-01}\n", "job.yaml:2: not YAML: 2020-99-01: month must be in 1..12"),
        (
            "recipe:\n  task: !!python/name:os.system x\n",
            "job.yaml:2: not YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/name:os.system'",
        ),
        (
            "recipe:\n  data: &a {again: *a}\n",
            "job.yaml:2: the section of &a contains itself by *a; write it out",
        ),
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
            "name: ../up",
            "job.yaml:3: name is '../up'; it should be the name of one folder, without / and of at most 240 bytes",
        ),
        (
            "name: ''",
            "job.yaml:3: name is ''; it should be the name of one folder, without / and of at most 240 bytes",
        ),
        ("~: 2", f'job.yaml:3: unknown key "None"; known: {keys_of(Job)}'),
        (
            "  optimizer:\n    lrr: 1",
            'job.yaml:4: unknown key "recipe.optimizer.lrr"; did you mean "lr"? '
            "known: betas, decay_all, eps, lr, name, state, weight_decay",
        ),
        (
            "  optimizer:\n    name: sgd\n    betas: [0.9, 0.9]",
            'job.yaml:5: unknown key "recipe.optimizer.betas"; '
            "known: decay_all, lr, momentum, name, nesterov, weight_decay",
        ),
        (
            "  optimizer: {adamw: 1}",  # also the name of an optimizer, which is part of pydantic's location
            'job.yaml:3: unknown key "recipe.optimizer.adamw"; '
            "known: betas, decay_all, eps, lr, name, state, weight_decay",
        ),
        (
            "  schedule: {warm: 1}",
            'job.yaml:3: unknown key "recipe.schedule.warm"; did you mean "warmup"? known: cycles, decay, final, '
            "function, hold, power, warmup",
        ),
        ("  data: {1: 2}", 'job.yaml:3: recipe.data.1: the key 1 should be text; write it as "1"'),
        # types
        ("  batch: many", "job.yaml:3: recipe.batch is 'many'; it should be a whole number"),
        ("  batch: 2.5", "job.yaml:3: recipe.batch is 2.5; it should be a whole number"),
        ("  batch: [1]", "job.yaml:3: recipe.batch is [1]; it should be a whole number"),
        ("  batch: yes", "job.yaml:3: recipe.batch is true; it should be a number"),
        ("  batch:", "job.yaml:3: recipe.batch is empty; it should be a whole number"),
        ("  clip: off", "job.yaml:3: recipe.clip is false; it should be a number, or null for none"),
        ("  clip: none", "job.yaml:3: recipe.clip is 'none'; it should be a number, or null for none"),
        ("  dropout: maybe", "job.yaml:3: recipe.dropout is 'maybe'; it should be true or false"),
        ("  data: [1]", "job.yaml:3: recipe.data is [1]; it should be a section of keys and values"),
        (
            "  optimizer: sgd",
            "job.yaml:3: recipe.optimizer is 'sgd'; it should be a section of keys and values, such as {name: sgd}",
        ),
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
        ("  optimizer: {betas: [null, 0.9]}", "job.yaml:3: recipe.optimizer.betas.0 is empty; it should be a number"),
        ("  groups: [null]", "job.yaml:3: recipe.groups.0 is empty; it should be a section of keys and values"),
        ("run: {cut_at: [null]}", "job.yaml:3: run.cut_at.0 is empty; it should be text"),
        (
            "  optimizer: {name: adam}",
            'job.yaml:3: recipe.optimizer.name: name is "adam"; did you mean "adamw"? known: adamw, sgd, or such as '
            "torch.optim.Muon",
        ),
        (
            "  optimizer: {name: }",
            "job.yaml:3: recipe.optimizer.name: name should be adamw, sgd, or an optimizer such as torch.optim.Muon",
        ),
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
        (
            "batch",
            "3",
            '"batch" must be a dotted key below recipe or run, such as recipe.optimizer.lr; here it is recipe.batch',
        ),
        (
            "checkpoint.every",
            "3",
            '"checkpoint.every" must be a dotted key below recipe or run, such as recipe.optimizer.lr; here it is '
            "run.checkpoint.every",
        ),
        (
            "recipe.task",
            "",
            "recipe.task is empty; it should be the name of a task, file.py:ClassName, or a samestep.Task",
        ),
        ("name", "a/b", "name is 'a/b'; it should be the name of one folder, without / and of at most 240 bytes"),
        ("recipe", "{}", '"recipe" must be a dotted key below recipe or run, such as recipe.optimizer.lr'),
        ("job.batch", "3", '"job.batch" must be a dotted key below recipe or run, such as recipe.optimizer.lr'),
        (
            "recipe..lr",
            "3",
            '"recipe..lr" must be a dotted key below recipe or run, such as recipe.optimizer.lr; here it is '
            "recipe.optimizer.lr",
        ),
        ("recipe.task.x", "3", '"task" in "recipe.task.x" is \'text-classification\', which has no keys of its own'),
        ("recipe.seed.x.y", "3", '"seed" in "recipe.seed.x.y" is 3, which has no keys of its own'),
        ("recipe.bach", "3", f'unknown key "recipe.bach"; did you mean "batch"? known: {RECIPE_KEYS}'),
        ("recipe.batch", "0", "recipe.batch is 0; it should be greater than 0"),
        ("recipe.optimizer.lr", "[1", "recipe.optimizer.lr is '[1'; it should be a number"),
        ("recipe.evaluation", "{batch: 0}", "recipe.evaluation.batch is 0; it should be greater than 0"),
        ("recipe.optimizer", "{lr: 1, lr: 2}", 'key "lr" stands twice; keep one of them'),
        ("run.layout.x", "3", '"layout" in "run.layout.x" is \'dp2 tp2\', which has no keys of its own'),
    ],
)
def test_a_wrong_override_is_named_by_its_flag(tmp_path: Path, key: str, value: str, expected: str) -> None:
    text = refusal(write(tmp_path, REVIEWS), (key, value))
    assert text == f"--set {key}={value}: {expected}"


@pytest.mark.parametrize("key", ["9" * 5000, "²", "٣"])
def test_a_key_of_odd_digits_is_an_unknown_key(tmp_path: Path, key: str) -> None:
    text = refusal(write(tmp_path, REVIEWS), (f"recipe.{key}", "null"))
    assert f'unknown key "recipe.{key[:20]}' in text


def test_a_number_that_no_float_holds_is_told_so(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, REVIEWS), ("recipe.optimizer.lr", "1" + "0" * 400))
    assert text.endswith("it should be a number of fewer digits")


@pytest.mark.parametrize(
    ("section", "overrides", "left", "remarks"),
    [
        (
            "optimizer: {lr: 1.0e-3, betas: [0.9, 0.99], eps: 1.0e-6}",
            [("recipe.optimizer.name", "sgd"), ("recipe.optimizer.momentum", "0.5")],
            {"name": "sgd", "lr": 1e-3, "momentum": 0.5},
            ["recipe.optimizer has no betas (job.yaml:3), eps (job.yaml:3), which is left out"],
        ),
        (
            "optimizer: {name: sgd, momentum: 0.5}",
            [("recipe.optimizer", "{name: torch.optim.Adam, args: {eps: 0.1}}")],
            {"name": "torch.optim.Adam", "args": {"eps": 0.1}},
            ["recipe.optimizer has no momentum (job.yaml:3), which is left out"],
        ),
        (
            "communication: {kind: powersgd, rank: 2, start: 3}",
            [("recipe.communication.kind", "local-sgd")],
            {"kind": "local-sgd", "start": 3},
            ["recipe.communication has no rank (job.yaml:3), which is left out"],
        ),
        ("optimizer: {eps: 1.0e-6}", [("recipe.optimizer.name", "adamw")], {"name": "adamw", "eps": 1e-6}, []),
    ],
)
def test_an_override_of_the_kind_leaves_out_what_the_new_kind_lacks(
    section: str, overrides: list[tuple[str, str]], left: dict[str, Any], remarks: list[str], tmp_path: Path
) -> None:
    file = write(tmp_path, f"recipe:\n  task: regression\n  {section}\n")
    loaded = jobfile.load(file, [(key, value, f"--set {key}") for key, value in overrides])
    made = jobfile.plain(loaded.job)["recipe"][section.partition(":")[0]]
    assert left.items() <= made.items()
    said = [remark.replace(f"{tmp_path}/", "").partition(": ")[2] for remark in loaded.remarks]
    assert said == remarks


@pytest.mark.parametrize(
    "overrides", [[("recipe.optimizer.betas", "[0.9, 0.99]")], [("recipe.optimizer.betaz", "1")]]
)
def test_a_flag_with_a_key_that_the_kind_lacks_is_refused_whatever_the_order(
    overrides: list[tuple[str, str]], tmp_path: Path
) -> None:
    job = write(tmp_path, "recipe:\n  task: regression\n  optimizer: {lr: 1.0e-3}\n")
    kind = ("recipe.optimizer.name", "sgd")
    for several in ([kind, *overrides], [*overrides, kind]):
        assert f'unknown key "{overrides[0][0]}"' in refusal(job, *several)


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


@pytest.mark.parametrize("name", [".", "n" * 245, "a\nb", " "])
def test_a_file_whose_name_no_run_can_have_is_read(tmp_path: Path, name: str) -> None:
    file = tmp_path / f"{name}.yaml"
    file.write_text("recipe: {task: regression}\n", encoding="utf-8")
    assert jobfile.load(file).job.name == "job"
