"""Whatever is handed over is answered in one message within ten seconds of the processor: 2,000 mutated inputs.

SAMESTEP_FUZZ is how many of each kind are tried, and SAMESTEP_FUZZ_SEED the first seed, to try others than CI does.
"""

import itertools
import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fuzzing import (
    WORDS,
    TookTooLongError,
    bytes_of,
    command,
    json_of,
    limited,
    mapping_of,
    structure_of,
    text_of,
    written,
)
from places import BATCH, LSF, OPEN_MPI, Here, at
from resuming import job_of, train_all
from safetensors.torch import save_file
from small_tasks import Points

import samestep
from samestep.data.text import read_csv, read_jsonl, read_tsv
from samestep.errors import UserError
from samestep.job import Checkpointing
from samestep.job_plan.machine import message_rates
from samestep.launch import forwarded_env
from samestep.synonyms import SYNONYMS

ROOT = Path(__file__).resolve().parent.parent
FIRST = int(os.environ.get("SAMESTEP_FUZZ_SEED", "0"))
FEW = int(os.environ.get("SAMESTEP_FUZZ", "0"))

JOBS = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "examples").glob("*.yaml"))]

SMALL = """\
recipe:
  task: regression
  args: {samples: 64, held_out: 8, features: 4}
  batch: 16
  steps: 4
  optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
  schedule: {warmup: 0.25, decay: linear}
  evaluation: {every: 2, batch: 8}
run:
  layout: dp2
  device: cpu
  check: false
  checkpoint: {every: 2, keep: 2}
"""

TRANSLATED: Mapping[str, Any] = {
    "ds.json": {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
        "gradient_clipping": 1.0,
        "pipeline": {"stages": 2},
        "tensor_parallel": {"autotp_size": 2},
        "activation_checkpointing": {"cpu_checkpointing": True},
    },
    "accelerate.yaml": {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False},
        "parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 2},
        "mixed_precision": "bf16",
        "num_processes": 4,
        "num_machines": 1,
        "dynamo_config": {"dynamo_backend": "INDUCTOR"},
    },
    "megatron.yaml": {
        "distributed_type": "MEGATRON_LM",
        "megatron_lm_config": {"megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 2},
        "deepspeed_config": {"zero_stage": 3},
        "num_processes": 8,
    },
    "sagemaker.json": {
        "smdistributed": {
            "modelparallel": {
                "enabled": True,
                "parameters": {"partitions": 2, "microbatches": 4, "tensor_parallel_degree": 2, "ddp": True},
            }
        },
        "mpi": {"enabled": True, "processes_per_host": 8},
    },
}
TORCHRUN = "OMP_NUM_THREADS=4 torchrun --nnodes=2 --nproc-per-node=4 --max-restarts=3 train.py --lr 3e-4"

LAYOUTS = ("pp2 dp2 tp2 recompute=full", "zero1x4 offload=activations+optimizer", "3d", "cp2 ep2 fsdp2 order=spread")

PLACES: Mapping[str, Mapping[str, str]] = {
    "slurm": BATCH,
    "lsf": LSF,
    "open mpi": OPEN_MPI,
    "torchrun": {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a",
                 "MASTER_PORT": "29500", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"},
    "kubernetes": {"PET_NNODES": "1:4", "PET_NPROC_PER_NODE": "auto", "PET_RDZV_ENDPOINT": "job-worker-0:23456",
                   "PET_RDZV_ID": "x", "HOSTNAME": "job-worker-1", "MASTER_ADDR": "m", "MASTER_PORT": "23456",
                   "RANK": "1", "WORLD_SIZE": "4"},
    "sagemaker": {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-1", "SM_NUM_GPUS": "0",
                  "SM_NUM_CPUS": "8", "SM_HPS": '{"lr": 0.1}', "SM_USER_ARGS": '["--lr","0.1"]'},
    "pbs": {"PBS_JOBID": "7.server", "PBS_NODEFILE": "/nowhere", "PBS_ENVIRONMENT": "PBS_BATCH"},
    "horovod": {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "2",
                "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
                "HOROVOD_GLOO_RENDEZVOUS_PORT": "1234", "HOROVOD_HOSTNAME": "a"},
}  # fmt: skip

COMM = {
    "fits": [
        {"collective": "all-reduce", "bytes_per_second": 1e9, "latency_seconds": 1e-5, "ranks": 2},
        {"collective": "broadcast", "bytes_per_second": 1e9, "latency_seconds": 1e-5, "ranks": 2},
    ]
}

TEXTS = "text,label\n" + "".join(f'"a text, number {number}",{number % 3}\n' for number in range(12))

Fuzzed = Callable[[random.Random, Path], object]
KINDS: dict[str, tuple[int, Fuzzed]] = {}


def kind(count: int) -> Callable[[Fuzzed], Fuzzed]:
    """A kind of inputs, of which `make test-slow` tries so many."""

    def take(function: Fuzzed) -> Fuzzed:
        KINDS[function.__name__] = count, function
        return function

    return take


def told(call: Callable[[], object]) -> None:
    """Call a reader, which may raise UserError."""
    try:
        with limited():
            call()
    except UserError as error:
        message = str(error)
    else:
        return
    assert len(message) < 60_000


@kind(300)
def job_text(chance: random.Random, place: Path) -> None:
    command(["train", str(written(chance, place / "job.yaml", chance.choice([*JOBS, SMALL]))), "--print-config"])


@kind(300)
def job_structure(chance: random.Random, place: Path) -> None:
    values = structure_of(chance, yaml.safe_load(chance.choice([*JOBS, SMALL])))
    file = place / "job.yaml"
    file.write_text(yaml.safe_dump(values) if chance.random() < 0.7 else json.dumps(values), encoding="utf-8")
    command(["train", str(file), "--print-config"])


@kind(60)
def job_checked(chance: random.Random, place: Path) -> None:
    """All checks of a small job before ranks would start, and what two of them would hold."""
    values = structure_of(chance, yaml.safe_load(SMALL))
    (place / "job.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    command(["train", str(place / "job.yaml"), "--dry-run", "--world", "2"])


@kind(250)
def override(chance: random.Random, place: Path) -> None:
    (place / "job.yaml").write_text(SMALL, encoding="utf-8")
    keys = ("recipe.batch", "recipe.optimizer.lr", "run.threads", "run.layout", "recipe.groups", "run.inject", "x")
    key = chance.choice((*keys, *SYNONYMS)) if chance.random() < 0.8 else text_of(chance, "recipe.optimizer.lr")
    value = chance.choice(WORDS) if chance.random() < 0.5 else text_of(chance, "{name: sgd, lr: 0.1, betas: [1, 2]}")
    command(["train", str(place / "job.yaml"), "--print-config", "--set", f"{key}={value}"])


@kind(200)
def layout(chance: random.Random, place: Path) -> None:
    words = [text_of(chance, chance.choice(LAYOUTS))]
    if chance.random() < 0.3:
        words += [chance.choice(("--processes", "--batch")), chance.choice(WORDS)]
    command(["layout", *words])


@kind(300)
def translate(chance: random.Random, place: Path) -> None:
    name = chance.choice(list(TRANSLATED))
    file, values = place / name, TRANSLATED[name]
    if name.endswith(".json"):
        file.write_text(json_of(chance, values), encoding="utf-8", errors="surrogatepass")
    elif chance.random() < 0.5:
        file.write_text(yaml.safe_dump(structure_of(chance, values)), encoding="utf-8")
    else:
        written(chance, file, yaml.safe_dump(values))
    to = chance.choice(
        ([], ["--to", "deepspeed"], ["--to", "accelerate"], ["--processes", "8"], ["--batch", "999999"])
    )
    command(["translate", str(file), *to])


@kind(30)
def translate_command(chance: random.Random, place: Path) -> None:
    command(["translate", str(written(chance, place / "start.txt", TORCHRUN))])


@kind(40)
def translate_job(chance: random.Random, place: Path) -> None:
    (place / "job.yaml").write_text(yaml.safe_dump(structure_of(chance, yaml.safe_load(SMALL))), encoding="utf-8")
    command(["translate", str(place / "job.yaml"), "--to", chance.choice(("deepspeed", "accelerate"))])


@kind(80)
def plan_rows(chance: random.Random, place: Path) -> None:
    if chance.random() < 0.5:
        rows = json.loads((ROOT / "benchmarks/published/steps.json").read_text(encoding="utf-8"))
        text = json_of(chance, chance.sample(rows, 2))
        (place / "rows.json").write_text(text, encoding="utf-8", errors="surrogatepass")
        command(["plan", "--rows", str(place / "rows.json")])
        return
    text = (ROOT / "benchmarks/published/vtrain_single.csv").read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    written(chance, place / "rows.csv", lines[0] + "".join(chance.sample(lines[1:], 2)))
    command(["plan", "--rows", str(place / "rows.csv"), "--gpu", "a100"])


@kind(150)
def hostfile(chance: random.Random, place: Path) -> None:
    file = written(chance, place / "hosts", "worker-1 slots=4\nworker-2:2\n[::1] slots=1 max_slots=2\n# none\n")
    command(["hosts", "--hostfile", str(file)])


@kind(400)
def variables(chance: random.Random, place: Path) -> None:
    told(lambda: at(mapping_of(chance, PLACES[chance.choice(list(PLACES))]), host=Here()))


@kind(60)
def variables_file(chance: random.Random, place: Path) -> None:
    file = written(chance, place / "env", "NCCL_DEBUG=INFO\n# none\nNAME='a b'\n")
    told(lambda: list(forwarded_env.read_file(file)))


@kind(60)
def comm_file(chance: random.Random, place: Path) -> None:
    (place / "comm.json").write_text(json_of(chance, COMM), encoding="utf-8", errors="surrogatepass")
    told(lambda: message_rates(place / "comm.json"))


@kind(120)
def data_file(chance: random.Random, place: Path) -> None:
    if chance.random() < 0.7:
        file = written(chance, place / "texts.csv", TEXTS if chance.random() < 0.7 else TEXTS.replace(",", ";"))
        told(lambda: (read_csv if chance.random() < 0.6 else read_tsv)(file))
    else:
        lines = "\n".join(json.dumps({"text": "a text", "label": number % 2}) for number in range(6))
        told(lambda: read_jsonl(written(chance, place / "texts.jsonl", lines)))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint, and the weights of it in safetensors and an index of them."""
    place = tmp_path_factory.mktemp("checkpoints")
    recipe = samestep.Recipe(task=Points(), batch=32, steps=2)
    train_all([job_of(recipe, "single", place / "run", checkpoint=Checkpointing(every=2))])
    save_file({"weight": torch.ones(3, 4), "bias": torch.zeros(4)}, place / "model.safetensors")
    index = {"metadata": {}, "weight_map": {"weight": "model.safetensors", "bias": "model.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return place


def of_checkpoint(chance: random.Random, place: Path, given: Path) -> None:
    """A checkpoint's folder with a changed file; some as of format 1, which has no sum that would show the change."""
    folder = place / "checkpoint"
    shutil.copytree(next((given / "run/checkpoints").iterdir()), folder)
    file = chance.choice(sorted(file for file in folder.iterdir() if file.is_file()))
    if file.suffix == ".json" and chance.random() < 0.9:
        values = json.loads(file.read_text(encoding="utf-8"))
        values = {**structure_of(chance, values), "format": 1} if isinstance(values, dict) else values
        if chance.random() < 0.8:
            values.pop("sum", None)
        file.write_text(json.dumps(values, default=str), encoding="utf-8")
    else:
        file.write_bytes(bytes_of(chance, file.read_bytes()))
    command(["checkpoint", chance.choice(("verify", "list", "inspect")), str(folder)])


def of_safetensors(chance: random.Random, place: Path, given: Path) -> None:
    """A file of safetensors with a changed header, or an index of several."""
    for file in given.glob("model*"):
        shutil.copy(file, place)
    file = place / "model.safetensors"
    if chance.random() < 0.3:
        index = json.loads((place / "model.safetensors.index.json").read_text(encoding="utf-8"))
        (place / "model.safetensors.index.json").write_text(
            json_of(chance, index), encoding="utf-8", errors="surrogatepass"
        )
        file = place / "model.safetensors.index.json"
    else:
        content = file.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        text = json_of(chance, header).encode("utf-8", "surrogatepass")
        length = len(text) if chance.random() < 0.8 else chance.choice((0, 1, 2**40, 2**64 - 1))
        changed = struct.pack("<Q", length) + text + content[8 + size :]
        file.write_bytes(changed if chance.random() < 0.8 else bytes_of(chance, content))
    if chance.random() < 0.5:
        command(["checkpoint", "inspect", str(file)])
    else:
        command(["checkpoint", "convert", str(file), str(place / "out.pt")])


@kind(80)
def words_of_a_command(chance: random.Random, place: Path) -> None:
    """Options of commands that start nothing, with words that nobody means."""
    (place / "job.yaml").write_text(SMALL, encoding="utf-8")
    first = chance.choice(
        (["layout", "dp2"], ["hosts"], ["translate", str(place / "job.yaml")], ["checkpoint", "list", str(place)],
         ["plan", "--model", "llama-3-8b", "--gpu", "h100", "--devices", "8"], ["init"],
         ["train", str(place / "job.yaml"), "--print-config"], ["launch", "--print-variables"],
         ["doctor", str(place)], ["verify", str(place / "job.yaml"), "--print-config"])
    )  # fmt: skip
    flags = ("--processes", "--batch", "--json", "--svg", "--top", "--seq", "--devices", "--node-size", "--threads",
             "--global-batch", "--num-procs", "--num-nodes", "--steps", "--world", "--seed", "--folder", "--hostfile",
             "--include", "--exclude", "--nodes", "--master-port", "--price", "--network", "--bind", "--output",
             "--best", "--micro-batch", "--checkpoint-every", *(f"--{word}" for word in SYNONYMS))  # fmt: skip
    more = [word for _ in range(chance.randint(1, 3)) for word in (chance.choice(flags), chance.choice(WORDS))]
    before = Path.cwd()
    os.chdir(place)
    try:
        command([*first, *more])
    finally:
        os.chdir(before)


@kind(60)
def run_folder(chance: random.Random, place: Path) -> None:
    """A run's folder with changed files, as the doctor reads it."""
    steps = "".join(json.dumps({"step": step, "loss": 1.0, "step_seconds": 0.1}) + "\n" for step in range(4))
    (place / "metrics.jsonl").write_text(text_of(chance, steps), encoding="utf-8", errors="surrogatepass")
    report = {"step_seconds": 0.1, "layout": "dp2", "world_size": 2, "metrics": {"loss": 1.0}, "restarts": []}
    (place / "report.json").write_text(json_of(chance, report), encoding="utf-8", errors="surrogatepass")
    (place / "plan.json").write_text(
        json_of(chance, {"seconds_by_cause": {"a": 1.0}, "usage_bytes": [{"parameters": 1}]}),
        encoding="utf-8",
        errors="surrogatepass",
    )
    command(["doctor", str(place)])


def tried(function: Fuzzed, name: str, seed: int, place: Path) -> None:
    folder = place / f"{name}-{seed}"
    folder.mkdir()
    try:
        function(random.Random(f"{name} {seed}"), folder)
    except BaseException as error:
        error.add_note(f"kind {name}, seed {seed}")
        raise
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", KINDS)
def test_a_mutated_input_is_answered_in_one_message(name: str, tmp_path: Path) -> None:
    count, function = KINDS[name]
    for seed in range(FIRST, FIRST + (FEW or count)):
        tried(function, name, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("function", [of_checkpoint, of_safetensors])
def test_a_mutated_checkpoint_is_answered_in_one_message(
    function: Callable[[random.Random, Path, Path], None], checkpoints: Path, tmp_path: Path
) -> None:
    for seed in range(FIRST, FIRST + (FEW or 100)):
        tried(lambda chance, place: function(chance, place, checkpoints), function.__name__, seed, tmp_path)


def test_an_input_that_computes_or_waits_too_long_is_stopped() -> None:
    """And one that waits for its turn on a busy machine isn't: 0.3 s by the clock are no seconds of the processor."""
    with limited(0.1, 9):
        time.sleep(0.3)
    with pytest.raises(TookTooLongError, match="SIGPROF"), limited(0.1, 9):
        for _ in itertools.count():  # in Python: its handlers of signals don't run within one call of a function in C
            pass
    with pytest.raises(TookTooLongError, match="SIGALRM"), limited(9, 0.1):
        time.sleep(9)


@pytest.mark.parametrize("name", KINDS)
def test_a_few_mutated_inputs_of_each_kind_are_answered(name: str, tmp_path: Path) -> None:
    """A part of the above, in every run of the tests."""
    count, function = KINDS[name]
    for seed in range(min(15, count // 8)):
        tried(function, name, seed, tmp_path)
