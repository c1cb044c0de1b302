"""`samestep translate` into job files: what each format says, and what has no counterpart."""

import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from translatable import ALL, smp

from samestep.cli.main import main
from samestep.jobfile import load
from samestep.layout import Layout

pytestmark = pytest.mark.quick

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "translate"


@pytest.fixture
def translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """The text that a source becomes. It must be a job file that `train` reads."""

    def translate(source: Any, *words: str) -> str:
        file = source
        if not isinstance(source, Path):
            file = tmp_path / "source.json"
            file.write_text(source if isinstance(source, str) else json.dumps(source), encoding="utf-8")
        assert main(["translate", str(file), *words, "--output", str(tmp_path / "job.yaml"), "--force"]) == 0
        capsys.readouterr()
        assert main(["train", str(tmp_path / "job.yaml"), "--print-config"]) == 0
        assert capsys.readouterr().err == ""
        return (tmp_path / "job.yaml").read_text(encoding="utf-8")

    return translate


def said(text: str) -> dict[str, Any]:
    """The keys of a job file, dotted, without the task, which no source says."""
    job = yaml.safe_load(text)
    assert job["recipe"].pop("task") == "my_task.py:MyTask"
    return dict(flat(job))


def flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@pytest.mark.parametrize("name", ALL)
def test_a_source_becomes_a_job(name: str, translated: Any) -> None:
    source, words, expected, remark = ALL[name]
    text = translated(source, *words.split())
    assert said(text) == expected
    if remark:
        assert re.search(remark, text.partition("# Without a key here:")[2]), text


def test_a_python_dictionary_and_yaml_say_the_same_as_json(translated: Any) -> None:
    wanted = said(translated(smp(partitions=2, ddp=True)))
    python = (
        "distribution = {  # of the estimator\n    'smdistributed': {'modelparallel': {'enabled': True,\n"
        "        'parameters': {'partitions': 2, 'ddp': True,}}},\n}\n"
    )
    assert said(translated(python)) == wanted
    assert said(translated(yaml.safe_dump(smp(partitions=2, ddp=True)))) == wanted


# What AWS's page on ranks gives for 8 ranks: (data, pipeline, tensor) rank of each, or the groups of a model.
@pytest.mark.parametrize(
    ("placement", "sizes", "axis", "groups"),
    [
        ("cluster", {"partitions": 2}, "pipeline", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("spread", {"partitions": 2}, "pipeline", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("cluster", {"partitions": 2}, "replicate", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("DPT", {"partitions": 2, "tensor_parallel_degree": 2}, "tensor", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("DPT", {"partitions": 2, "tensor_parallel_degree": 2}, "pipeline", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("DPT", {"partitions": 2, "tensor_parallel_degree": 2}, "replicate", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_ranks_stand_where_the_placement_puts_them(
    placement: str, sizes: dict[str, int], axis: str, groups: list[list[int]], translated: Any, tmp_path: Path
) -> None:
    text = translated(smp(**sizes, ddp=True, placement_strategy=placement), "--processes", "8")
    layout = said(text)["run.layout"]
    assert main(["layout", layout, "--json", str(tmp_path / "shown.json"), "--force"]) == 0
    shown = json.loads((tmp_path / "shown.json").read_text(encoding="utf-8"))
    assert sorted({group["axis"]: group["ranks"] for group in shown["groups"]}[axis]) == groups


COMMANDS = {
    "torchrun --nproc-per-node=4 --nnodes=2 train.py --lr 1": ({"run.layout": "dp8"}, "train.py --lr 1"),
    "torchrun --standalone --nproc_per_node gpu train.py": ({"run.layout": "dp"}, "--nproc-per-node = 'gpu'"),
    "torchrun --nnodes=1:4 --nproc-per-node=2 train.py": ({"run.layout": "dp"}, "--nnodes = '1:4'"),
    "OMP_NUM_THREADS=3 NAME=x python -m torch.distributed.launch --nproc_per_node=2 --use_env train.py": (
        {"run.layout": "dp2", "run.threads": 3},
        "NAME=x: set it just so",
    ),
    "/opt/bin/torchrun --max-restarts=3 -m package.train": ({"run.layout": "single"}, "--max-restarts = 3"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_becomes_a_job(command: str, translated: Any, capsys: pytest.CaptureFixture[str]) -> None:
    expected, remark = COMMANDS[command]
    over_lines = command.replace(" --", " \\\n  --")
    text = translated(f"#!/bin/sh\ncd work  # there\n{over_lines}\n")
    assert said(text) == expected
    assert remark in text
    assert "cd work: another command" in text
    assert main(["translate", "--", *command.split()]) == 0
    assert said(capsys.readouterr().out) == expected


def leaves(section: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(section, Mapping):
        for key, value in section.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


def without(section: Any, path: tuple[str, ...]) -> Any:
    inner = without(section[path[0]], path[1:]) if path[1:] else None
    return {key: inner if key == path[0] else value for key, value in section.items() if key != path[0] or path[1:]}


# What a tool takes where nothing is said, so that it says nothing.
DEFAULTS = {
    "ds_config.json": {"fp16.enabled", "fp16.initial_scale_power", "scheduler.params.warmup_min_lr"},
    "accelerate.yaml": {
        "compute_environment",
        "use_cpu",
        "fsdp_config.fsdp_offload_params",
    },
    "sagemaker.json": {
        "smdistributed.modelparallel.parameters.ddp",  # shards of the optimizer's state are over replicas anyway
        "smdistributed.modelparallel.parameters.pipeline",
    },
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_no_key_of_a_source_is_passed_over_in_silence(name: str, translated: Any) -> None:
    """Without it the job, or what is said about it, would be another."""
    source = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))
    whole = translated(source)
    silent = set()
    for path in leaves(source):
        try:
            changed = translated(without(source, path)) != whole
        except AssertionError:  # refused without it
            changed = True
        if not changed:
            silent.add(".".join(path))
    assert silent == DEFAULTS[name]


def test_the_examples(translated: Any) -> None:
    deepspeed = load_text(translated(EXAMPLES / "ds_config.json"))
    assert deepspeed.run.layout == "zero2x4 offload=optimizer"
    assert (deepspeed.recipe.batch, deepspeed.run.micro_batch, deepspeed.recipe.clip) == (64, 8, 1.0)
    assert load_text(translated(EXAMPLES / "accelerate.yaml")).run.layout == "dp2 fsdp4 recompute=full"
    sagemaker = load_text(translated(EXAMPLES / "sagemaker.json", "--processes", "8", "--batch", "64")).run
    assert Layout.parse(sagemaker.layout) == Layout.parse("pp2 zero1x2 tp2 order=cp.tp.pp.dp.fsdp")
    assert sagemaker.micro_batch == 8  # 64 samples over 2 data ranks in 4 micro-batches


def load_text(text: str) -> Any:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        (Path(folder) / "job.yaml").write_text(text, encoding="utf-8")
        return load(Path(folder) / "job.yaml").job


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"train_batch_size": 8, "zero_optimization": {"stage": 1}}'))
    assert main(["translate", "-"]) == 0
    assert said(capsys.readouterr().out) == {"recipe.batch": 8, "run.layout": "zero1x"}


@pytest.mark.parametrize("page", ["docs/translate.md", "docs/zh/translate.md"])
def test_the_pages_show_what_is_printed(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES.parent.parent)
    assert main(["translate", "examples/translate/ds_config.json"]) == 0
    assert f"```text\n{capsys.readouterr().out}```\n" in Path(page).read_text(encoding="utf-8")
