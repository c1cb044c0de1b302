"""Words of other tools: what each is called here exists, and messages about keys, options and commands say it."""

import argparse
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from job_files import refusal, write

from samestep.cli.main import COMMANDS, _parser, main
from samestep.cli.suggestions import subparsers
from samestep.job import Job
from samestep.synonyms import COMMANDS as OTHER_COMMANDS
from samestep.synonyms import SYNONYMS, plain
from samestep.tasks.causal_lm import DecoderModel, LanguageData

pytestmark = pytest.mark.quick


def keys_of(schema: type[Any], path: str = "") -> Iterator[str]:
    """Every dotted key that may stand below a dataclass; of a choice of sections those of each."""
    hints = get_type_hints(schema)
    for field in fields(schema):
        here = f"{path}.{field.name}".lstrip(".")
        yield here
        for inner in dataclasses_in(hints[field.name]):
            yield from keys_of(inner, here)


def dataclasses_in(hint: Any) -> Iterator[type[Any]]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for argument in get_args(hint):
        yield from dataclasses_in(argument)


KEYS = {
    *keys_of(Job),
    *keys_of(LanguageData, "recipe.data"),
    *keys_of(DecoderModel, "recipe.model"),
}


def all_flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from parser._option_string_actions
    for inner in subparsers(parser).values():
        yield from all_flags(inner)


def test_every_key_and_option_that_the_table_names_exists() -> None:
    flags = set(all_flags(_parser()))
    for word, meaning in SYNONYMS.items():
        assert word == plain(word)
        assert meaning.key is None or meaning.key in KEYS, word
        assert set(meaning.options) <= flags, word
        assert meaning.key or meaning.options or meaning.note, word


def test_every_command_that_the_table_names_exists() -> None:
    names = {command.__name__.rpartition(".")[2] for command in COMMANDS}
    for other, words in OTHER_COMMANDS.items():
        assert other not in names
        first, *rest = words.split()
        assert first in names or first in all_flags(_parser())
        if first == "checkpoint":
            assert rest[0] in subparsers(subparsers(_parser())[first])


def said(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words.split()) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("samestep: ")
    assert told.err.count("\n") == 1
    return told.err.removeprefix("samestep: ").rstrip()


OPTIONS = {
    "train x.yaml --layuot dp2": "samestep train has no option --layuot; did you mean --layout? ",
    "verify x.yaml --setps 3": "samestep verify has no option --setps; did you mean --steps? ",
    "checkpoint convert a b --shard-sise 4GB": "samestep checkpoint convert has no option --shard-sise; did you mean "
    "--shard-size? ",
    "train x.yaml --lr 1": "no option --lr; use --set recipe.optimizer.lr=VALUE",
    "verify x.yaml --learning-rate=1": "no option --learning-rate; use --set recipe.optimizer.lr=VALUE",
    "tune x.yaml --Batch-Size 3": "no option --Batch-Size; use --set recipe.batch=VALUE, the samples",
    "train x.yaml --recipe.batch=3": "samestep train has no option --recipe.batch; use --set recipe.batch=VALUE",
    "train x.yaml --micro_batch 3": "samestep train has no option --micro_batch; use --micro-batch",
    "train x.yaml --gradient-accumulation-steps 3": "here it is --micro-batch, a rank accumulates",
    "train x.yaml --nproc-per-node 2": "no option --nproc-per-node; here it is --processes, of a",
    "train x.yaml -np 2": "samestep train has no option -np; here it is --processes",
    "launch --nproc_per_node 2 train.py": "samestep launch has no option --nproc_per_node; here it is --num-procs",
    "launch --nproc_per_node=2 train.py": "samestep launch has no option --nproc_per_node; here it is --num-procs",
    "launch --num-processes 2 train.py": "samestep launch has no option --num-processes; here it is --num-procs",
    "launch --master_port 2 train.py": "samestep launch has no option --master_port; use --master-port",
    "launch --nnodes 2 train.py": "samestep launch has no option --nnodes; here it is --num-nodes",
    "launch --lr 3 train.py": "options of the program stand behind it: samestep launch -- train.py --lr VALUE",
    "comm --transport gloo": "samestep comm has no option --transport; it is one of samestep comm demo; ",
    "check x.yaml --world 8": "no option --world; it is one of samestep train; `samestep check --help`",
    "train x.yaml --log_interval 8": "every step stands in metrics.jsonl",
    "train x.yaml --dry": "no option --dry; here it is --dry-run",
    "train x.yaml --print": "no option --print; did you mean --print-config or --print-variables? ",
    "train x.yaml --acept-data-change": "no option --acept-data-change; did you mean --accept-data-change? ",
    "train --config x.yaml": "no option --config; the job file stands by itself, without an option before it",
    "train x.yaml --overwrite": "samestep train has no option --overwrite; here it is --force",
    "compare x.yaml --overwrite_output_dir": "has no option --overwrite_output_dir; here it is --force",
    "launch --standalone x.py": "no option --standalone; hosts meet in a store of samestep's own, and without hosts ",
    "launch --rdzv-backend c10d x.py": "no option --rdzv-backend; hosts meet in a store of samestep's own",
    "launch --rdzv-endpoint a:29500 x.py": "no option --rdzv-endpoint; here it is --master-addr",
    "train x.yaml --rai auto": "no option --rai; did you mean --ray? ",
    "train x.yaml --lay auto": "no option --lay; did you mean --layout? ",
    "train x.yaml --foo auto": "samestep train has no option --foo; `samestep train --help` lists those that it has",
    "launch --ray= x.py": "argument --ray: the value is empty; write one, or leave the option out; ",
    "launch --include= x.py": "argument --include: the value is empty; ",
    "train x.yaml --place=": "argument --place: the value is empty; ",
    "train x.yaml more": 'samestep train takes no "more"; `samestep train --help` says what it takes',
    "trian x.yaml": 'samestep has no command "trian"; did you mean "train"? there are init, translate, train, ',
    "--verbose 3 train": "samestep has no option --verbose; there is nothing to set",
    "run x.yaml": 'samestep has no command "run"; samestep train does that; there are ',
    "export a b": 'samestep has no command "export"; samestep checkpoint export does that; ',
    "checkpoint verfiy a": 'samestep checkpoint has no command "verfiy"; did you mean "verify"? there are list, ',
}


@pytest.mark.parametrize("words", OPTIONS)
def test_an_unknown_option_or_command_is_answered_by_the_one_that_is_meant(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert OPTIONS[words] in said(words, capsys)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("jobs/first.yml", "jobs/first.yaml"),
        ("jobs/first", "jobs/first.yaml"),
        ("jobs/frist.yaml", "jobs/first.yaml"),
    ],
)
def test_a_missing_job_file_is_answered_by_the_one_that_is_there(
    name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    (tmp_path / meant).write_text("recipe: {task: regression}\n", encoding="utf-8")
    assert said(f"train {name}", capsys) == f'no job file {name}; did you mean "{meant}"?'
    assert said("train jobs/other.yaml", capsys) == "no job file jobs/other.yaml"


FILES = {
    "train.py": "samestep launch -- train.py starts it as ranks, samestep verify --script train.py proves its step",
    "train.ipynb": "train.ipynb is a notebook; write its task into a .py file",
    "job.toml": "job.toml is TOML, and job files are YAML",
    "ds.json": "ds.json has no recipe, so it is no job file; samestep translate ds.json makes one",
    "jobs": "jobs is a folder; a job file, such as jobs/first.yaml is wanted",
}


@pytest.mark.parametrize("name", FILES)
def test_another_file_than_a_job_file_is_answered_by_what_takes_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}', encoding="utf-8")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/first.yaml").write_text("recipe: {task: regression}\n", encoding="utf-8")
    for command in ("train", "verify", "check"):
        assert FILES[name] in said(f"{command} {name}", capsys)
    if name == "ds.json":  # as it was told
        assert main(["translate", "ds.json"]) == 0


def test_a_job_file_in_json_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.json"
    file.write_text('{"recipe": {"task": "regression", "batch": 8}}', encoding="utf-8")
    assert main(["train", str(file), "--print-config"]) == 0
    assert "batch: 8" in capsys.readouterr().out


KEYS_SAID = {
    "recipe: {task: regression, learning_rate: 1}": 'unknown key "recipe.learning_rate"; here it is '
    "recipe.optimizer.lr",
    "recipe: {task: regression, optimizer: {lrate: 1}}": 'unknown key "recipe.optimizer.lrate"; here it is '
    "recipe.optimizer.lr",
    "recipe: {task: regression, weight_decay: 1}": "here it is recipe.optimizer.weight_decay",
    "recipe: {task: regression, gradient_accumulation_steps: 2}": "here it is run.micro_batch, a rank accumulates",
    "recipe: {task: regression, per_device_train_batch_size: 2}": "here it is recipe.batch, which is of all ranks",
    "recipe: {task: regression}\nrun: {report_to: wandb}": "here it is run.log",
    "recipe: {task: regression, bfloat16: true}": "here it is recipe.precision, fp64, fp32, bf16 or fp16",
    "recipe: {task: regression}\nbatch_size: 3": 'unknown key "batch_size"; here it is recipe.batch',
    "recipe: {task: regression}\nrun: {tensor_parallel_size: 3}": "here it is run.layout, with the part tpN",
    "recipe: {task: regression}\nrun: {steps: 3}": 'unknown key "run.steps"; here it is recipe.steps',
    "recipe: {task: regression, workers: 3}": 'unknown key "recipe.workers"; here it is run.workers',
}


@pytest.mark.parametrize("text", KEYS_SAID)
def test_a_key_of_another_tool_is_answered_by_what_it_is_called_here(text: str, tmp_path: Path) -> None:
    message = refusal(write(tmp_path, text))
    assert KEYS_SAID[text] in message
    assert "known:" not in message


@pytest.mark.parametrize("key", ["lr", "learning_rate", "recipe.learning_rate", "optimizer.lr"])
def test_a_flag_with_such_a_key_is_answered_too(key: str, tmp_path: Path) -> None:
    assert "here it is recipe.optimizer.lr" in refusal(write(tmp_path, "recipe: {task: regression}"), (key, "3"))


@pytest.mark.parametrize(
    ("value", "name"), [("bfloat16", "bf16"), ("torch.float32", "fp32"), ("16-mixed", "fp16"), ("double", "fp64")]
)
def test_a_precision_of_another_tool_is_answered_by_its_name_here(
    value: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"recipe: {{task: regression, steps: 2, precision: '{value}'}}\n", encoding="utf-8")
    assert main(["train", str(file)]) == 2
    assert f"recipe.precision is '{value}'; here it is {name}" in capsys.readouterr().err
    assert main(["train", str(file), "--set", f"recipe.precision={name}", "--print-config"]) == 0
