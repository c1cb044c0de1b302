"""`samestep translate` into job files: what each format says, and what has no counterpart."""

import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from samestep.cli.main import main
from samestep.jobfile import load
from samestep.layout import Layout

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "translate"


@pytest.fixture
def translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """The text that a source becomes. It must be a job file that `train` reads."""

    def translate(source: Any, *words: str) -> str:
        file = source
        if not isinstance(source, Path):
            file = tmp_path / "source.json"
            file.write_text(source if isinstance(source, str) else json.dumps(source), encoding="utf-8")
        assert main(["translate", str(file), *words, "--output", str(tmp_path / "job.yaml")]) == 0
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


BATCH = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3}
RANKS = {"recipe.batch": 24, "run.micro_batch": 3}


def smp(**parameters: Any) -> dict[str, Any]:
    return {"smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}}


# A source, further words, what the job says (beside `unsaid` clipping and optimizer), and what a remark says.
DEEPSPEED: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "the batch identity gives the ranks": (
        {**BATCH, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}},
        "",
        {**RANKS, "run.layout": "zero1x4"},
        "gradient_clipping: not given, which is 1.0",
    ),
    "ranks that nobody says": (
        {**BATCH, "zero_optimization": {"stage": 3}},
        "",
        {**RANKS, "run.layout": "fsdp"},
        "optimizer: not in the file",
    ),
    "ranks that the command line says": (
        {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2},
        "--processes 4",
        {**RANKS, "run.layout": "dp4"},
        "",
    ),
    "micro-batch from the batch": (
        {"train_batch_size": 24, "gradient_accumulation_steps": 2},
        "--processes 4",
        {**RANKS, "run.layout": "dp4"},
        "",
    ),
    "slices and parts of tokens": (
        {**BATCH, "tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2},
        "--processes 16",
        {**RANKS, "run.layout": "dp4 cp2 tp2"},
        "",
    ),
    "a pipeline": (
        {**BATCH, "pipeline": {"stages": 2, "activation_checkpoint_interval": 1, "partition": "uniform"}},
        "",
        {**RANKS, "run.layout": "pp2 dp recompute=full"},
        "pipeline.partition = 'uniform': stages are cut by cost",
    ),
    "offload to disk": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"}}},
        "--batch 24",
        {"recipe.batch": 24, "run.layout": "zero2x offload=optimizer-disk", "run.offload_folder": "/fast"},
        "",
    ),
    "offload of parameters": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/fast"},
                "offload_optimizer": {"device": "cpu"},
            },
            "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": True},
        },
        "",
        {
            "run.layout": "fsdp recompute=full offload=activations+parameters-disk",
            "run.offload_folder": "/fast",
        },
        "",
    ),
    "fp16 over shards": (
        {**BATCH, "zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "loss_scale_window": 500}},
        "",
        {**RANKS, "recipe.precision": "fp16", "run.layout": "zero2x"},
        "samestep train: would refuse this job: .* bf16 would do",
    ),
    "autocast": (
        {**BATCH, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "tensorboard": {"enabled": False}},
        "",
        {**RANKS, "recipe.precision": "bf16", "run.tensorboard": False, "run.layout": "dp"},
        "",
    ),
    "left to transformers": (
        {"train_batch_size": "auto", "zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto"}},
        "",
        {"run.layout": "zero2x"},
        "train_batch_size = 'auto': filled in by the script",
    ),
    "Adam with nothing but its name": (
        {"optimizer": {"type": "Adam"}, "gradient_clipping": 0},
        "",
        {
            "run.layout": "dp",
            "recipe.optimizer.name": "adamw",
            "recipe.optimizer.lr": 0.001,
            "recipe.optimizer.weight_decay": 0.0,
        },
        "",
    ),
    "SGD": (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}}},
        "",
        {
            "run.layout": "dp",
            "recipe.optimizer.name": "sgd",
            "recipe.optimizer.lr": 0.1,
            "recipe.optimizer.momentum": 0.9,
            "recipe.optimizer.weight_decay": 0.0,
        },
        "dampening = 0.1: momentum has no dampening",
    ),
    "another optimizer": (
        {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}},
        "",
        {"run.layout": "dp"},
        "optimizer.type = 'Lamb': recipe.optimizer can be adamw or sgd",
    ),
    "a cosine": (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "weight_decay": 0}},
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 90, "warmup_num_steps": 9}},
        },
        "",
        {
            "run.layout": "dp",
            "recipe.steps": 90,
            "recipe.optimizer.name": "adamw",
            "recipe.optimizer.lr": 1e-4,
            "recipe.optimizer.weight_decay": 0.0,
            "recipe.schedule.warmup": 9,
            "recipe.schedule.decay": "cosine",
            "recipe.schedule.final": 1e-4,
        },
        "",
    ),
    "a linear decay from the schedule's own rate": (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 0}},
        },
        "",
        {
            "run.layout": "dp",
            "recipe.steps": 9,
            "recipe.optimizer.name": "adamw",
            "recipe.optimizer.lr": 1e-3,
            "recipe.optimizer.weight_decay": 0.0,
            "recipe.schedule.decay": "linear",
        },
        "",
    ),
    "another schedule": (
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1}}},
        "",
        {"run.layout": "dp"},
        "scheduler.params.cycle_min_lr = 1: recipe.schedule has",
    ),
    "keys that nobody knows": (
        {**BATCH, "surprise": 1, "zero_optimization": {"stage": 0, "surprise": 2}},
        "",
        {**RANKS, "run.layout": "dp"},
        r"surprise = 2.*\n(.*\n)*# - surprise = 1: no counterpart",
    ),
}

ACCELERATE: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "replicas on CPUs": (
        {"distributed_type": "MULTI_CPU", "num_processes": 2, "mixed_precision": "no"},
        "--batch 24",
        {"recipe.batch": 24, "run.layout": "dp2", "run.device": "cpu"},
        "",
    ),
    "one process": ({"distributed_type": "NO"}, "", {"run.layout": "single"}, "recipe.batch: not in the file"),
    "FSDP2 without resharding": (
        {
            "distributed_type": "FSDP",
            "num_processes": 4,
            "mixed_precision": "bf16",
            "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": False, "offload_params": True},
        },
        "",
        {"recipe.precision": "bf16", "run.layout": "zero2x4 offload=parameters"},
        "fsdp_config.fsdp_version = 2",
    ),
    "a mesh": (
        {
            "distributed_type": "FSDP",
            "num_processes": 16,
            "fsdp_config": {"fsdp_version": 2},
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 2,
                "parallelism_config_cp_size": 2,
                "parallelism_config_cp_comm_strategy": "alltoall",
            },
        },
        "",
        {"run.layout": "dp2 fsdp2 cp2 tp2"},
        "cp_comm_strategy = 'alltoall'",
    ),
    "DeepSpeed's plugin": (
        {
            "distributed_type": "DEEPSPEED",
            "num_processes": 4,
            "deepspeed_config": {
                "zero_stage": 3,
                "gradient_clipping": 0.5,
                "offload_param_device": "cpu",
                "gradient_accumulation_steps": 4,
            },
        },
        "",
        {"recipe.clip": 0.5, "run.layout": "fsdp4 offload=parameters"},
        "gradient_accumulation_steps = 4",
    ),
    "Megatron-LM": (
        {
            "distributed_type": "MEGATRON_LM",
            "num_processes": 8,
            "megatron_lm_config": {
                "megatron_lm_tp_degree": 2,
                "megatron_lm_pp_degree": 2,
                "megatron_lm_recompute_activations": True,
                "megatron_lm_use_distributed_optimizer": True,
                "megatron_lm_num_micro_batches": 4,
            },
        },
        "",
        {"run.layout": "pp2 zero1x2 tp2 recompute=selective"},
        "num_micro_batches = 4",
    ),
    "8-bit floats, and a section of another kind": (
        {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "fp8", "fsdp_config": {"x": 1}},
        "",
        {"recipe.precision": "bf16", "run.layout": "dp2"},
        "fsdp_config.x = 1: distributed_type is MULTI_GPU",
    ),
}

SAGEMAKER: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "data parallel": (
        {"distribution": {"smdistributed": {"dataparallel": {"enabled": True, "custom_mpi_options": "-x A"}}}},
        "",
        {"run.layout": "dp"},
        "custom_mpi_options",
    ),
    "torchrun's": ({"torch_distributed": {"enabled": True}}, "--processes 8", {"run.layout": "dp8"}, ""),
    "DDP": ({"pytorchddp": {"enabled": True}}, "", {"run.layout": "dp"}, ""),
    "two launchers, one of them off": (
        {"mpi": {"enabled": True, "processes_per_host": 4}, "pytorchddp": {"enabled": False}},
        "",
        {"run.layout": "dp"},
        "pytorchddp: not enabled",
    ),
    "a parameter server": (
        {"parameter_server": {"enabled": True}},
        "",
        {"run.layout": "dp"},
        "there is no parameter server",
    ),
    "stages alone": (
        smp(partitions=2, microbatches=4, pipeline="simple", optimize="memory"),
        "",
        {"run.layout": "pp2 schedule=gpipe balance=memory"},
        "microbatches = 4: run.micro_batch = samples",
    ),
    "stages, micro-batches and replicas": (
        smp(partitions=2, microbatches=4, pipeline="interleaved", optimize="speed", ddp=True),
        "--processes 8 --batch 64",
        {"recipe.batch": 64, "run.micro_batch": 4, "run.layout": "pp2 dp4 order=dp.fsdp.pp.cp.tp"},
        "",
    ),
    "letters of a placement": (
        smp(pipeline_parallel_degree=2, tensor_parallel_degree=2, ddp=True, placement_strategy="PDT", bf16=True),
        "--processes 8",
        {"recipe.precision": "bf16", "run.layout": "pp2 dp2 tp2 balance=memory"},
        "",
    ),
    "shards of part of the ranks": (
        smp(sharded_data_parallel_degree=4, sdp_gradient_clipping=1.0, activation_checkpointing=True),
        "--processes 8",
        {"recipe.clip": 1.0, "run.layout": "dp2 fsdp4 recompute=full"},
        "",
    ),
    "the second version": (
        smp(hybrid_shard_degree=2, context_parallel_degree=2, sm_activation_offloading=True, random_seed=1),
        "",
        {"run.layout": "dp fsdp2 cp2 order=dp.fsdp.pp.cp.tp offload=activations"},
        "random_seed = 1: recipe.seed says it",
    ),
}

ALL = {
    f"{form}: {name}": case
    for form, cases in {"deepspeed": DEEPSPEED, "accelerate": ACCELERATE, "sagemaker": SAGEMAKER}.items()
    for name, case in cases.items()
}


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
    ("placement", "sizes", "dimension", "groups"),
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
    placement: str, sizes: dict[str, int], dimension: str, groups: list[list[int]], translated: Any, tmp_path: Path
) -> None:
    text = translated(smp(**sizes, ddp=True, placement_strategy=placement), "--processes", "8")
    layout = said(text)["run.layout"]
    assert main(["layout", layout, "--json", str(tmp_path / "shown.json")]) == 0
    shown = json.loads((tmp_path / "shown.json").read_text(encoding="utf-8"))
    assert sorted({group["dimension"]: group["ranks"] for group in shown["groups"]}[dimension]) == groups


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
