"""Every number that a user can give has limits: fields of jobs and settings, options of commands, arguments."""

import argparse
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from annotated_types import Le, Lt
from job_files import refusal, write
from pydantic.dataclasses import is_pydantic_dataclass

import samestep
from samestep import api, door, durations, jobfile
from samestep.cli.main import _parser, main
from samestep.cli.suggestions import subparsers
from samestep.communication import PowerSGD
from samestep.errors import LayoutError, UserError
from samestep.job import Job
from samestep.launch import device, rank_entry
from samestep.layout import Layout
from samestep.limits import WholeNumber, check_whole, divisors, read_whole
from samestep.plausibility import implausible, shortened
from samestep.tasks import TASKS
from samestep.variables import Variables

pytestmark = pytest.mark.quick

SOURCE = Path(samestep.__file__).parent


def schemas() -> Iterator[type[Any]]:
    """Every pydantic dataclass of the source: sections of jobs, settings of engines, data and models of tasks."""
    seen: set[int] = set()
    for file in sorted(SOURCE.rglob("*.py")):
        if "pydantic.dataclasses import dataclass" not in file.read_text(encoding="utf-8"):
            continue
        module = importlib.import_module("samestep." + ".".join(file.relative_to(SOURCE).with_suffix("").parts))
        for value in vars(module).values():
            if isinstance(value, type) and is_pydantic_dataclass(value) and id(value) not in seen:
                seen.add(id(value))
                yield value


def numbers_in(hint: Any, limited: bool = False) -> Iterator[bool]:
    """Whether each int and float of a type hint has an upper limit around it."""
    if hint in (int, float):
        yield limited
    elif get_origin(hint) is Annotated:
        inner, *others = get_args(hint)
        bounds = [each for each in others if isinstance(each, (Le, Lt))]
        bounds += [each for other in others for each in getattr(other, "metadata", ()) if isinstance(each, (Le, Lt))]
        yield from numbers_in(inner, limited or bool(bounds))
    elif get_origin(hint) in (typing.Union, UnionType, tuple, list):
        for argument in get_args(hint):
            yield from numbers_in(argument, limited)


def test_every_number_of_a_schema_has_an_upper_limit() -> None:
    found = 0
    for schema in schemas():
        hints = get_type_hints(schema, include_extras=True)
        for field in fields(schema):
            limited = list(numbers_in(hints[field.name]))
            found += len(limited)
            assert all(limited), f"{schema.__name__}.{field.name}"
    assert found > 60


def test_every_number_of_a_shipped_task_has_an_upper_limit() -> None:
    for path in TASKS.values():
        task = pkgutil.resolve_name(path)
        hints = get_type_hints(task.__init__, include_extras=True)
        for name in inspect.signature(task).parameters:
            assert all(numbers_in(hints.get(name))), f"{path}: {name}"


def options_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        yield f"{parser.prog} {'/'.join(action.option_strings) or action.dest}", action
    for inner in subparsers(parser).values():
        yield from options_of(inner)


def test_every_option_that_is_a_number_has_limits() -> None:
    found = 0
    for name, action in (*options_of(_parser()), *options_of(rank_entry._parser())):
        assert action.type not in (int, float), name
        if isinstance(action.type, WholeNumber):
            found += 1
            assert 0 <= action.type.least < action.type.most <= 2**32, name
            with pytest.raises(argparse.ArgumentTypeError, match=f"{action.type.most:,}"):
                action.type(str(action.type.most + 1))
            assert action.type(str(action.type.most)) == action.type.most
        elif action.type is durations.seconds:
            found += 1
    assert found > 40
    with pytest.raises(argparse.ArgumentTypeError, match="to 366 days"):
        durations.seconds("367d".replace("d", "") + "00000")


NUMBERS = {
    "run: {workers: 1000000}": "run.workers is 1000000; it should be less than or equal to 256",
    "run: {threads: 1000000000}": "run.threads is 1000000000; it should be less than or equal to 1024",
    "run: {processes: 2000000}": "it should be less than or equal to 1048576",
    "run: {max_restarts: 1000000}": "it should be less than or equal to 10000",
    "run: {hang_limit: 1e-9}": "seconds above 0, or a time such as 90s, 10m or 1h, from 100 ms to 366 days",
    "run: {hang_limit: 0.01}": "from 100 ms to 366 days",
    "run: {grace_period: 10000h}": "from 100 ms to 366 days",
    "run: {inject: {rank: 0, step: 0, fault: slow, seconds: 1e-9}}": "from 1 ms to 366 days",
    "run: {profile: 1}": "run.profile is 1; it should be true, or a section such as {steps: 5}",
    "run: {checkpoint: {resume: yes}}": "is true; it should be never, auto, last, or the path of a checkpoint",
    "run: {checkpoint: {every: 0}}": "is 0; it should be greater than 0, or a time such as 90s, 10m or 1h",
    "run: {folder: None}": "run.folder is 'None'; it should be null, or ./None for a file of that name",
    "run: {processes: None}": "run.processes is 'None'; it should be a whole number, or null for none",
    "run: {bucket_mb: 1e9}": "it should be less than or equal to 65536",
    "run: {checkpoint: {keep: 0}}": "it should be greater than 0",
    "run: {checkpoint: {every: 10000000000}}": "it should be less than or equal to 1000000000",
    "run: {inject: {rank: -1, step: 0, fault: kill}}": "it should be greater than or equal to 0",
    "run: {micro_batch: 1e400}": "it should be a whole number",
}
RECIPES = {
    "batch: 1000000000000": "recipe.batch is 1000000000000; it should be less than or equal to 1000000000",
    f"batch: {'9' * 5000}": "99...: no int of YAML",
    f"batch: {'9' * 300}": "it should be less than or equal to 1000000000",
    "batch: .inf": "it should be a finite number",
    "seed: -1": "it should be greater than or equal to 0",
    f"seed: {2**70}": "it should be less than 4294967296",
    "optimizer: {lr: 1e30}": "it should be less than or equal to 10000",
    "optimizer: {lr: 1e400}": "it should be a finite number",
    "optimizer: {betas: [0.9, 1.0]}": "it should be less than 1",
    "optimizer: {weight_decay: -1}": "it should be greater than or equal to 0",
    "optimizer: {lr: 1.0e-320}": "it should be at least 1.2e-38",
    "optimizer: {eps: 1.0e-60}": "it should be at least 1.2e-38",
    "clip: 1.0e-40": "it should be at least 1.2e-38",
    "clip: None": "recipe.clip is 'None'; it should be a number, or null for none",
    "seed: None": "recipe.seed is 'None'; it should be a whole number",
    "batch: 1e2": "recipe.batch is '1e2'; it should be a whole number, such as 100",
    "steps: 1.5e1": "recipe.steps is '1.5e1'; it should be a whole number, such as 15",
    "optimizer: {eps: 10}": "it should be less than or equal to 1",
    "optimizer: {name: sgd, momentum: 1}": "it should be less than 1",
    "clip: 0": "it should be greater than 0",
    "early_stop: {metric: loss, patience: 0}": "it should be greater than 0",
    "adapter: {dropout: 1.0}": "it should be less than 1",
    "adapter: {rank: 100000000}": "it should be less than or equal to 1048576",
    "epochs: 100000000": "it should be less than or equal to 1000000",
    "virtual_ranks: 100000000": "it should be less than or equal to 65536",
    "communication: {kind: powersgd, rank: 100000000}": "it should be less than or equal to 1048576",
    "average: {decay: 1}": "it should be less than 1",
}


@pytest.mark.parametrize("text", [*NUMBERS, *RECIPES])
def test_a_number_beyond_its_limits_is_refused_with_the_limit(text: str, tmp_path: Path) -> None:
    job = f"recipe:\n  task: regression\n  {text}\n" if text in RECIPES else f"recipe: {{task: regression}}\n{text}\n"
    message = refusal(write(tmp_path, job))
    assert {**NUMBERS, **RECIPES}[text] in message
    assert "\n" not in message
    assert len(message) < 300


MISREAD = {
    "batch: 1:30": "1:30 is the number 90 in YAML 1.1; write 90, or a text in quotes",
    "batch: -1:30:00": "-1:30:00 is the number -5400 in YAML 1.1",
    "batch: 010": "010 is the number 8 in YAML 1.1; write 8, 10, or a text in quotes",
    "seed: 0_1": "0_1 is the number 1 in YAML 1.1",
    "batch: 1__0": "1__0 is the number 10 in YAML 1.1",
    "clip: 1:30.5": "1:30.5 is the number 90.5 in YAML 1.1",
    "data: {any: {depth: [1, 12:00]}}": "12:00 is the number 720 in YAML 1.1",
    "batch: on": "recipe.batch is true; it should be a number",
    "optimizer: {lr: no}": "recipe.optimizer.lr is false; it should be a number",
}


@pytest.mark.parametrize("text", MISREAD)
def test_a_number_that_yaml_reads_otherwise_than_it_looks_is_refused(text: str, tmp_path: Path) -> None:
    assert MISREAD[text] in refusal(write(tmp_path, f"recipe:\n  task: regression\n  {text}\n"))


@pytest.mark.parametrize(
    ("text", "value"), [("1_000", 1000), ("0x10", 16), ("1e1", None), ('"12"', 12), ("12.0", 12), ("0b11", 3)]
)
def test_numbers_that_can_mean_one_thing_are_read(text: str, value: int | None, tmp_path: Path) -> None:
    job = f"recipe: {{task: regression, batch: {text}, data: {{at: '12:00', code: \"010\"}}}}"
    if value is None:
        assert "it should be a whole number" in refusal(write(tmp_path, job))
    else:
        assert jobfile.load(write(tmp_path, job)).job.recipe.batch == value


# Settings that are allowed one by one.
TOGETHER = {
    "steps: 10, schedule: {warmup: 11}": "recipe.schedule.warmup is 11 steps, and the training has 10",
    "steps: 10, groups: [{parameters: '*', schedule: {warmup: 20}}]": "recipe.groups.0.schedule.warmup is 20 steps",
    "steps: 10, communication: {kind: one-bit-adam, warmup: 10}": "recipe.communication.warmup is 10, and",
    "steps: 10, communication: {kind: powersgd}": "recipe.communication.start is 10, and recipe.steps is 10, so",
    "steps: 10, communication: {kind: local-sgd, start: 30}": "recipe.communication.start is 30, and recipe.steps",
    "steps: 10, evaluation: {every: 20, at_end: false}": "so nothing would be evaluated; use 10 or less",
    "steps: 10, evaluation: {every: 10}, early_stop: {metric: loss}": "early_stop would look at no evaluation before",
    "optimizer: {lr: 10, weight_decay: 0.1}": "recipe.optimizer.weight_decay is 0.1 and lr is 10; ",
    "optimizer: {name: sgd, lr: 2, weight_decay: 0.9}": "use a weight_decay below 0.5",
    "schedule: {final: 0.1}": "recipe.schedule.final is 0.1 and decay is none, which keeps the rate",
}


@pytest.mark.parametrize("text", TOGETHER)
def test_settings_that_can_not_be_meant_together_are_refused(text: str, tmp_path: Path) -> None:
    message = refusal(write(tmp_path, f"recipe:\n  {{task: regression, {text}}}\n"))
    assert TOGETHER[text] in message
    assert message.startswith("job.yaml:2: ")


# What the messages of `TOGETHER` tell to do.
MENDED = {
    "steps: 10, schedule: {warmup: 11}": ("steps: 10, schedule: {warmup: 10}", "steps: 10, schedule: {warmup: 0.1}"),
    "steps: 10, groups: [{parameters: '*', schedule: {warmup: 20}}]": (
        "steps: 10, groups: [{parameters: '*', schedule: {warmup: 10}}]",
    ),
    "steps: 10, communication: {kind: one-bit-adam, warmup: 10}": (
        "steps: 10, communication: {kind: one-bit-adam, warmup: 9}",
    ),
    "steps: 10, communication: {kind: powersgd}": ("steps: 10, communication: {kind: powersgd, start: 9}",),
    "steps: 10, communication: {kind: local-sgd, start: 30}": (
        "steps: 10, communication: {kind: local-sgd, start: 9}",
    ),
    "steps: 10, evaluation: {every: 20, at_end: false}": (
        "steps: 10, evaluation: {every: 10, at_end: false}",
        "steps: 10, evaluation: {every: 20, at_end: true}",
    ),
    "steps: 10, evaluation: {every: 10}, early_stop: {metric: loss}": (
        "steps: 10, evaluation: {every: 9}, early_stop: {metric: loss}",
        "steps: 10, evaluation: {every: 10}",
    ),
    "optimizer: {lr: 10, weight_decay: 0.1}": ("optimizer: {lr: 10, weight_decay: 0.0999}",),
    "optimizer: {name: sgd, lr: 2, weight_decay: 0.9}": ("optimizer: {name: sgd, lr: 2, weight_decay: 0.499}",),
    "schedule: {final: 0.1}": ("schedule: {final: 0.1, decay: cosine}", "schedule: {}"),
}


def test_what_the_messages_tell_is_taken(tmp_path: Path) -> None:
    assert MENDED.keys() == TOGETHER.keys()
    for text in (text for mended in MENDED.values() for text in mended):
        jobfile.load(write(tmp_path, f"recipe:\n  {{task: regression, {text}}}\n"))


# The same where the number of steps follows from the data: 64 samples in batches of 16, 2 epochs.
OF_THE_DATA = {
    "recipe.schedule.warmup": ("9", "is 9 steps, and the training has 8, so", "8"),
    "recipe.groups": ("[{parameters: '*', schedule: {warmup: 9}}]", ".0.schedule.warmup is 9 steps", "[]"),
    "recipe.communication": (
        "{kind: powersgd}",
        ".start is 10, and the training has 8 steps, so it would never begin",
        "{kind: powersgd, start: 7}",
    ),
    "run.checkpoint.memory": ("8", "is 8 and the training has 8 steps, so no copy would be made", "7"),
}


@pytest.mark.parametrize("key", OF_THE_DATA)
def test_they_are_held_against_the_steps_that_the_data_give(key: str, tmp_path: Path) -> None:
    wrong, message, mended = OF_THE_DATA[key]
    (tmp_path / "report.json").write_text("{}", encoding="utf-8")  # of an earlier run, which nothing removes
    args = "args: {samples: 64, held_out: 8}, batch: 16, epochs: 2"
    run = f"{{layout: dp2, device: cpu, check: false, folder: {tmp_path}, overwrite: true, max_restarts: 1}}"
    file = write(tmp_path, f"recipe: {{task: regression, {args}}}\nrun: {run}\n")
    with pytest.raises(UserError) as caught:
        api.train_job(jobfile.load(file, [(key, wrong, "--set")]).job)
    assert key in str(caught.value)
    assert message in str(caught.value)
    assert (tmp_path / "report.json").exists()
    door.check(jobfile.load(file, [(key, mended, "--set")]).job)


def test_a_shortened_recipe_has_nothing_that_would_begin_after_its_end(tmp_path: Path) -> None:
    text = (
        "recipe: {task: regression, steps: 1000, schedule: {warmup: 100}, evaluation: {every: 50, at_end: false}, "
        "early_stop: {metric: loss}, communication: {kind: powersgd, start: 60}}"
    )
    job = jobfile.load(write(tmp_path, text)).job
    short = Job(recipe=shortened(job.recipe, 20), run=job.run)
    assert short.recipe.steps == 20
    assert list(implausible(short)) == []


def test_what_is_built_in_python_is_refused_in_one_message(tmp_path: Path) -> None:
    for make, message in (
        (lambda: samestep.Recipe(task="x", batch=0), "Recipe: batch is 0; it should be greater than 0"),
        (
            lambda: samestep.Recipe(task=3),
            "Recipe: task is 3; it should be the name of a task, file.py:ClassName, or",
        ),
        (lambda: samestep.Recipe(), "Recipe: task is missing"),  # type: ignore[call-arg]
        (lambda: samestep.Recipe("x"), "Recipe('x'): its fields are given by name, as NAME=VALUE"),  # type: ignore
        (
            lambda: samestep.Recipe(task="x", optimizer={"lr": -1}, seed=-1),  # type: ignore[arg-type]
            "Recipe: seed is -1; it should be greater than or equal to 0\n"
            "Recipe: optimizer.lr is -1; it should be greater than 0",
        ),
        (lambda: samestep.AdamW(lr=-1), "AdamW: lr is -1; it should be greater than 0"),
        (
            lambda: samestep.Checkpointing(every="soon"),
            "Checkpointing: every is 'soon'; it should be a whole number, or a time such as 90s, 10m or 1h",
        ),
        (lambda: PowerSGD(rank=0), "PowerSGD: rank is 0; it should be greater than 0"),
        (lambda: replace(samestep.Run(), threads=0), "Run: threads is 0; it should be greater than 0"),
        (
            lambda: samestep.train(samestep.Recipe(task="x"), layut="dp2"),
            'unknown key "run.layut"; did you mean "layout"?',
        ),
    ):
        with pytest.raises(UserError) as caught:
            make()
        assert str(caught.value).startswith(message)
    for call in (samestep.train, samestep.verify, samestep.dry_run, samestep.check):
        with pytest.raises(UserError) as caught:
            call("job.yaml")  # type: ignore[arg-type]
        assert (
            "recipe is 'job.yaml'; it should be a section of keys and values, in Python a samestep.Recipe ("
            in str(caught.value)
        )
    # As the message says.
    job = jobfile.load(write(tmp_path, "recipe: {task: regression, batch: 8}\n")).job
    assert samestep.Job(recipe=job.recipe).recipe.batch == 8


def test_python_is_held_to_the_same() -> None:
    with pytest.raises(UserError, match=r"^Run: workers is 1000; it should be less than or equal to 256$"):
        samestep.Run(workers=1000)
    with pytest.raises(UserError, match=r"recipe.schedule.warmup is 11 steps"):
        samestep.train(samestep.Recipe(task="regression", steps=3, schedule=samestep.Schedule(warmup=11)))
    for steps in (0, -1, 10**10, 2.5, True, "3"):
        with pytest.raises(UserError, match=r"steps is .*; it must be a whole number from 1 to 1,000,000,000"):
            samestep.verify(samestep.Recipe(task="regression"), steps=steps)  # type: ignore[arg-type]


def test_a_layout_of_more_ranks_than_any_cluster_has_is_refused() -> None:
    for text in ("dp2000000", "dp999999999 tp999999999"):
        with pytest.raises(LayoutError, match=r"has size \d+; it must be a whole number from 1 to 1,048,576"):
            Layout.parse(text)
    with pytest.raises(LayoutError, match=r"its sizes make [\d,]+ processes; use 1,048,576 or fewer"):
        Layout.parse("dp1024 tp1024 pp2")


def test_more_ranks_than_this_host_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"2,000 processes on this host; use 1024 or fewer"):
        device.check_ranks_here(2000)
    monkeypatch.setattr(device, "available_memory", lambda: 4 * 2**30)
    with pytest.raises(
        UserError, match=r"100 processes on this host need 9\.8 GiB of memory at least, and 4 GiB are"
    ):
        device.check_ranks_here(100)
    device.check_ranks_here(40)


def test_numbers_of_variables_have_limits() -> None:
    for text in ("99999999999", "9" * 5000):
        with pytest.raises(UserError, match=r"PORT is .*; a whole number"):
            Variables({"PORT": text}).number("PORT", 1, 65535)
    assert Variables({"PORT": "65535"}).number("PORT", 1, 65535) == 65535


@pytest.mark.parametrize("text", ["", "x", "1.0", "1e3", "٣", "1_0", "--1", "9" * 41, "0x1"])
def test_what_is_no_whole_number_is_read_as_none(text: str) -> None:
    assert read_whole(text) is None
    with pytest.raises(UserError):
        check_whole("n", text)


@pytest.mark.parametrize("number", [1, 2, 12, 97, 2**20, 999_999_937, 10**9])
def test_divisors_are_all_and_quick(number: int) -> None:
    found = divisors(number)
    assert all(number % size == 0 for size in found)
    assert found == sorted(set(found))
    if number < 10**5:
        assert found == [size for size in range(1, number + 1) if number % size == 0]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "words",
    [
        "plan --model llama-3-8b --gpu h100 --devices 1000000 --top 1",
        "plan --model llama-3-8b --gpu h100 --devices 8 --global-batch 1000000000 --top 1",
        "translate JOB --to deepspeed",
        "layout dp1000000",
    ],
)
def test_the_largest_numbers_take_no_time(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write(tmp_path, "recipe: {task: regression, batch: 1000000000}\nrun: {layout: dp2}\n")
    assert main(words.replace("JOB", str(job)).split()) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err
