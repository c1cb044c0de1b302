"""`samestep translate`: what is wrong in a source is told in one message."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from samestep.cli.main import main

pytestmark = pytest.mark.quick


def smp(**parameters: Any) -> str:
    """The distribution dictionary of a job with SageMaker's model parallel."""
    return json.dumps({"smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}})


FILES = {
    "ds.json": '{"train_batch_size": 8, "zero_optimization": {"stage": 1}}',
    "broken.json": '{"train_batch_size": 8\n "zero_optimization": {}}',
    "twice.json": '{"train_batch_size": 8, "train_batch_size": 9}',
    "other.json": '{"learning_rate": 8}',
    "two.json": '{"train_batch_size": 8, "distributed_type": "NO"}',
    "list.json": "[1, 2]",
    "empty.json": " \n",
    "text.txt": "echo nothing\n",
    "broken.yaml": "distributed_type: [NO\n",
    "twice.yaml": "distributed_type: NO\nnum_processes: 1\nnum_processes: 2\n",
    "calls.py": "distribution = {'mpi': {'enabled': bool(1)}}\n",
    "job.yaml": "recipe: {task: regression}\n",
    "identity.json": (
        '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}'
    ),
    "stage.json": '{"zero_optimization": {"stage": 4}}',
    "zero_list.json": '{"train_batch_size": 8, "zero_optimization": []}',
    "zero_text.json": '{"train_batch_size": 8, "zero_optimization": ""}',
    "large.json": (
        '{"train_batch_size": 999999999, "train_micro_batch_size_per_gpu": 500000000, '
        '"gradient_accumulation_steps": 4}'
    ),
    "half.json": '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}',
    "word.json": '{"train_batch_size": "many"}',
    "section.json": '{"optimizer": "AdamW"}',
    "beta.json": '{"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.5]}}}',
    "kind.yaml": "distributed_type: TPU\n",
    "ranks.yaml": "distributed_type: FSDP\nnum_processes: 4\nparallelism_config: {tp_size: 3}\n",
    "hosts.yaml": "distributed_type: MULTI_GPU\nnum_processes: 3\nnum_machines: 2\n",
    "letters.json": smp(partitions=2, placement_strategy="DPX"),
    "names.json": smp(partitions=2, pipeline_parallel_degree=4),
    "schedule.json": smp(partitions=2, pipeline="interleavd"),
    "both.json": json.dumps({"smdistributed": {n: {"enabled": True} for n in ("dataparallel", "modelparallel")}}),
    "elsewhere.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n",
    "two.sh": "torchrun a.py\ntorchrun b.py\n",
}

# The words after `translate`, and what the one message says.
MISTAKES = {
    "": r"nothing to translate; write a FILE",
    "no.json": r"no file no\.json; a command is translated behind --",
    ".": r"\. is a folder",
    "latin.json": r"latin\.json is not UTF-8: byte 0 is 0xe9",
    "empty.json": r"empty\.json is empty",
    "broken.json": r"broken\.json:2: not JSON: Expecting ',' delimiter at column 2",
    "twice.json": r"twice\.json: key 'train_batch_size' stands twice",
    "broken.yaml": r"broken\.yaml:2: not YAML",
    "twice.yaml": r'twice\.yaml:3: key "num_processes" stands twice, first in twice\.yaml:2; keep one of them',
    "calls.py": r"calls\.py: a Python dictionary that is more than a literal",
    "other.json": r"other\.json is none of these: an accelerate YAML, a DeepSpeed JSON, .*--from says",
    "list.json": r"list\.json is none of these",
    "text.txt": r"text\.txt is none of these",
    "two.json": r"two\.json could be accelerate or deepspeed; --from says which",
    "list.json --from deepspeed": r"list\.json: the file is \[1, 2\]; it should be a section",
    "ds.json --from deepsped": r'--from is "deepsped"; did you mean "deepspeed"\?',
    "ds.json --from torchrun": r"ds\.json: a command of words is wanted",
    "ds.json --to horovod": r'--to is "horovod"; known: accelerate, deepspeed, job',
    "job.yaml": r"job\.yaml is a job file already; use --to accelerate or --to deepspeed",
    "- --from job --to deepspeed": r"standard input: a job is read from a file",
    "- ds.json": r"standard input and more are given \(ds\.json\)",
    "ds.json torchrun": r"the file ds\.json and more are given \(torchrun\)",
    "ds.json --processes 0": r'--processes: "0" is out of range',
    "ds.json --processes 3": r"train_batch_size is 8, and .*3 data ranks = 3 does not divide it.*batch of 6 or 9",
    "ds.json --batch 9": r"train_batch_size is 8, and --batch says 9",
    "ds.json --output ds.json": r"--output is ds\.json, the file that is translated",
    "ds.json --output no/where": r"--output no/where: there is no folder no",
    "ds.json --to deepspeed": r'layout "zero1x": fsdp \(shard\) has no size and the number of processes is not known',
    "identity.json": r"train_batch_size is 10, and .* 2 x gradient_accumulation_steps 2 = 4 does not divide it",
    "stage.json": r"zero_optimization\.stage 4; it can be 0, 1, 2 or 3",
    "zero_list.json": r"zero_optimization is \[\]; it should be a section",
    "zero_text.json": r"zero_optimization is ''; it should be a section",
    "large.json": r"2000000000 does not divide it; .* so make their product smaller",
    "-- torchrun": r"the command line: torchrun: the following arguments are required: training_script",
    "-- python": r"no file python; a command is translated behind --",
    "half.json": r"enables fp16 and bf16; use one of them",
    "word.json": r"word\.json: train_batch_size is 'many'; it should be a whole number of 1 or more",
    "section.json": r"optimizer is 'AdamW'; it should be a section",
    "beta.json": r"beta\.json: recipe\.optimizer\.betas\.1 is 1\.5; it should be less than 1",
    "kind.yaml": r"distributed_type is TPU; use NO, MULTI_CPU, FSDP",
    "ranks.yaml": r"num_processes is 4, and the sizes make 3; use 3",
    "hosts.yaml": r"num_processes is 3, which 2 machines \(num_machines\) don't share evenly",
    "elsewhere.yaml": r"deepspeed_config_file is ds\.json, which says the rest; use samestep translate ds\.json",
    "letters.json": r"placement_strategy is 'DPX'; use cluster, spread or an order of the letters D, P and T",
    "names.json": r"pipeline_parallel_degree is 4 and partitions is 2; they mean the same",
    "schedule.json": r"parameters\.pipeline is 'interleavd'; did you mean \"interleaved\"\?",
    "both.json": r"smdistributed\.dataparallel and smdistributed\.modelparallel are both enabled",
    "two.sh": r"2 lines call torchrun or .*; one is wanted",
    "-- torchrun --nnodes=x train.py": r"--nnodes is x; use a number such as 2",
    "-- torchrun --nproc-per-node=0 train.py": r"--nproc-per-node is 0; use a number such as 2",
    "-- torchrun --what train.py": r"torchrun: .*",
    "-- python train.py": r"the command line is none of these",
    "-- OMP_NUM_THREADS=no torchrun train.py": r"OMP_NUM_THREADS is 'no'; a whole number from 1 to 1,024 is wanted",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_told_in_one_message(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.json").write_bytes(b"\xe9")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(FILES["ds.json"]))
    assert main(["translate", *words.split()]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("samestep: ")
    assert told.err.count("\n") == 1
    assert re.search(MISTAKES[words], told.err), told.err
