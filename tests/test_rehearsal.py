"""`--dry-run --world N`: a rank's step without values, against ranks that run and against formulas."""

import json
import multiprocessing
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_tasks import Lines, Points
from tiny_models import Tiny

import samestep
from samestep.api import dry_run_layouts, rehearse_job
from samestep.cli.main import main
from samestep.errors import UserError
from samestep.job import Job, Run
from samestep.layout import Layout
from samestep.recipe import Recipe
from samestep.training import rehearsal
from samestep.training.rehearsal import Rehearsal
from samestep.training.usage import Usage

PARAMETERS = 4 * 16 + 16 + 2 * 16 + 16 * 3 + 3  # of Points: a linear layer, a norm, a linear layer


def rehearsed(layout: str, world: int, *, batch: int = 32, task: Any = None, **run: Any) -> Sequence[Rehearsal]:
    recipe = Recipe(task=task or Points(samples=4 * batch), batch=batch, steps=4)
    return rehearse_job(Job(recipe=recipe, run=Run(layout=layout, **run)), world)


Really = Mapping[str, Sequence[Usage] | str]  # by layout, what ranks that ran had

OF_POINTS = Job(recipe=samestep.Recipe(task=Points(), batch=16, steps=4), run=Run(micro_batch=4, threads=1))
LAYOUTS = ("dp2", "zero1x2", "fsdp2", "pp2")

OF_TINY = Job(recipe=samestep.Recipe(task=Tiny(name="qwen2"), batch=10, steps=4), run=Run(threads=1))
SLICED = ("tp2 sequence=split",)
OFFLOADED = ("zero1x2 offload=optimizer",)


@pytest.fixture(scope="module")
def points() -> Really:
    return dry_run_layouts(OF_POINTS, [*LAYOUTS, "cp2"])


@pytest.fixture(scope="module")
def tiny() -> Really:
    return dry_run_layouts(OF_TINY, [*SLICED, *OFFLOADED])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_is_rehearsed_to_the_byte(layout: str, points: Really) -> None:
    _assert_to_the_byte(OF_POINTS, layout, points)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", SLICED)
def test_slices_and_uneven_micro_batches_are_rehearsed_to_the_byte(layout: str, tiny: Really) -> None:
    _assert_to_the_byte(OF_TINY, layout, tiny)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["tp2", "pp2 stages=2 schedule=interleaved-1f1b"])
def test_whole_tokens_of_slices_and_several_stages_a_rank_are_rehearsed_to_the_byte(layout: str) -> None:
    _assert_to_the_byte(OF_TINY, layout, {layout: samestep.dry_run(OF_TINY.recipe, layout, threads=1)})


def _assert_to_the_byte(job: Job, layout: str, really: Really) -> None:
    for found in rehearse_job(replace(job, run=replace(job.run, layout=layout)), 2):
        usage = really[layout][found.rank]
        assert isinstance(usage, Usage)
        assert found.usage.to_json() == usage.to_json()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_stage_of_sliced_stages_is_rehearsed_as_it_runs() -> None:
    """The second stage, whose logits stay in slices, by the groups of its own rank."""
    layout = "pp2 tp2"
    recipe = samestep.Recipe(task=Tiny(name="qwen2"), batch=8, steps=4)
    really = samestep.dry_run(recipe, layout, threads=1)
    first, last = rehearse_job(Job(recipe=recipe, run=Run(layout=layout)), 4)
    assert replace(first.usage, sent={}) == replace(really[first.rank], sent={})
    assert last.usage.parameters == really[last.rank].parameters
    assert last.usage.optimizer_state == really[last.rank].optimizer_state
    assert last.usage.activations == pytest.approx(really[last.rank].activations, rel=0.03)
    for kind, sent in really[last.rank].sent.items():  # messages of shapes are a few bytes longer or shorter
        assert last.usage.sent[kind] == pytest.approx(sent, rel=0.02)


@pytest.mark.timeout(300)
def test_of_data_ranks_the_one_with_the_longest_samples_is_rehearsed() -> None:
    by_rank: dict[int, tuple[Job, Rehearsal]] = {}
    for seed in range(4):
        job = Job(recipe=samestep.Recipe(task=Lines(), batch=8, steps=4, seed=seed), run=Run(threads=1))
        (found,) = rehearse_job(replace(job, run=replace(job.run, layout="dp2")), 2)
        by_rank.setdefault(found.rank, (job, found))
        if len(by_rank) == 2:
            break
    assert by_rank.keys() == {0, 1}
    for job, found in by_rank.values():
        really = dry_run_layouts(job, ["dp2"])["dp2"]
        assert found.usage.activations == max(usage.activations for usage in really if isinstance(usage, Usage))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_replicated_pipelines_the_one_with_the_longest_micro_batches_in_a_row_is_rehearsed() -> None:
    job = Job(recipe=samestep.Recipe(task=Tiny(name="gpt2"), batch=10, steps=4), run=Run(threads=1))
    really = dry_run_layouts(job, ["dp2 pp2"])["dp2 pp2"]
    first, _ = rehearse_job(replace(job, run=replace(job.run, layout="dp2 pp2")), 4)
    assert first.usage.activations == max(usage.activations for usage in really if isinstance(usage, Usage))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", OFFLOADED)
def test_what_is_offloaded_is_rehearsed_to_the_byte(layout: str, tiny: Really) -> None:
    _assert_offloaded_to_the_byte(layout, tiny)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["dp2 offload=activations", "fsdp2 offload=activations+parameters"])
def test_offloaded_activations_are_rehearsed_to_the_byte(layout: str) -> None:
    _assert_offloaded_to_the_byte(layout, dry_run_layouts(OF_TINY, [layout]))


def _assert_offloaded_to_the_byte(layout: str, really: Really) -> None:
    (found,) = rehearse_job(replace(OF_TINY, run=replace(OF_TINY.run, layout=layout)), 2)
    usage = really[layout][found.rank]
    assert isinstance(usage, Usage)
    assert replace(found.usage, host=0) == replace(usage, host=0)
    # Buffers of the host stay; those of lengths that only other steps had are not rehearsed.
    assert 0 < found.usage.host <= usage.host


def test_a_layout_that_the_job_cannot_have_is_told_beside_those_that_are_counted(points: Really) -> None:
    assert "tokens" in str(points["cp2"])
    assert [layout for layout in LAYOUTS if isinstance(points[layout], str)] == []


@pytest.mark.timeout(120)
def test_thousands_of_replicas() -> None:
    (rank,) = rehearsed("dp", 4096, batch=4096)
    assert rank.usage.parameters == rank.usage.gradients == 4 * PARAMETERS
    by_axis = {(each.kind, each.axis): each for each in rank.collectives}
    gradients = by_axis["all-reduce", "replicate"]
    assert gradients.ranks == 4096
    # A ring sends each byte of a message 2 (n - 1) / n times. The second message has at most 8 numbers of 8 bytes.
    ring = 2 * 4095 / 4096
    assert gradients.count == 2
    assert ring * 4 * PARAMETERS < gradients.sent <= ring * (4 * PARAMETERS + 8 * 8)
    assert sum(each.sent for each in rank.collectives) == pytest.approx(rank.usage.sent_in_all, abs=10)


class Large(samestep.Task):
    """A model of 16 GB, more than a test may take."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(32768, 32768, bias=False) for _ in range(4)))

    def train_set(self) -> samestep.Samples:
        return [(torch.zeros(32768), torch.zeros(1)) for _ in range(64)]

    def loss(self, output: torch.Tensor, batch: samestep.Batch) -> tuple[torch.Tensor, torch.Tensor | int]:
        return output.square().sum(), len(output)


def _memory() -> dict[str, int]:
    """This process's memory in bytes: its address space and what of it is resident, at present and at most."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return {name: 1024 * int(kilobytes) for name, kilobytes in re.findall(r"^(Vm\w+):\s+(\d+) kB$", status, re.M)}


def _grown_by(layout: str, world: int) -> tuple[Usage, int, int]:
    """A rehearsal of `Large`, and by how much this process's address space and resident memory grew at most."""
    rehearsed("fsdp2", 2)  # with what a first rehearsal imports and starts
    before = _memory()
    (rank,) = rehearsed(layout, world, batch=64, task=Large())
    after = _memory()
    return rank.usage, after["VmPeak"] - before["VmSize"], after["VmHWM"] - before["VmRSS"]


@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from Linux's /proc")
@pytest.mark.timeout(120)
def test_nothing_is_allocated() -> None:
    context = multiprocessing.get_context("forkserver")  # a process of its own, with peaks of its own
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        usage, space, resident = pool.submit(_grown_by, "fsdp64", 64).result()
    shard = 4 * 4 * 32768**2 // 64
    assert usage.parameters == usage.gradients == shard
    # Not even a shard, of 256 MB; a layer has 4 GB. Memory that is reserved and not filled, such as that of
    # torch.zeros, is not resident, but belongs to the address space.
    assert max(space, resident) < shard


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_pipeline_of_shards_of_slices_over_4096_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "words.txt"
    text.write_text("\n".join(f"some words of line {number}" for number in range(2000)), encoding="utf-8")
    data = {"source": str(text), "length": 16, "vocabulary": 300}
    model = {"type": "llama", "layers": 8, "hidden": 64, "heads": 8, "feed_forward": 128}
    recipe = {"task": "causal-lm", "batch": 512, "steps": 4, "data": data, "model": model}
    (tmp_path / "job.yaml").write_text(json.dumps({"recipe": recipe}), encoding="utf-8")
    taken: list[int] = []  # the ranks that are rehearsed, each as often as it is
    rehearse_rank = rehearsal._rehearse_rank

    def noting(job: Job, task: samestep.Task, layout: Layout, rank: int, *rest: Any) -> Rehearsal:
        taken.append(rank)
        return rehearse_rank(job, task, layout, rank, *rest)

    monkeypatch.setattr(rehearsal, "_rehearse_rank", noting)
    out = tmp_path / "out.json"
    words = ["train", str(tmp_path / "job.yaml"), "--layout", "pp8 fsdp64 tp8", "--dry-run", "--world", "4096"]
    assert main([*words, "--json", str(out)]) == 0
    first, middle, last = json.loads(out.read_text(encoding="utf-8"))["ranks"]
    assert [each["pipeline_rank"] for each in (first, middle, last)] == [0, 4, 7]
    assert taken == [each["rank"] for each in (first, middle, last)]  # once, and no other
    for each in (first, middle, last):
        axes = {(found["axis"], found["ranks"]) for found in each["collectives"]}
        assert {("tensor", 8), ("shard", 64), ("pipeline", 2)} <= axes
    # The first of 64 shards has a row of each slice: of queries, keys, values, gate and factor (64 columns each), of
    # the projection (8) and the last product (16), and a number of each norm.
    assert middle["usage_bytes"]["parameters"] == 4 * (5 * 64 + 8 + 16 + 2)


class Asking(Points):
    """Its loss asks for a value."""

    def loss(self, output: torch.Tensor, batch: samestep.Batch) -> tuple[torch.Tensor, torch.Tensor | int]:
        loss_sum, count = super().loss(output, batch)
        return (loss_sum if loss_sum.item() > 0 else -loss_sum), count


@pytest.mark.parametrize(
    ("layout", "world", "further", "message"),
    [
        ("dp4", 8, {}, 'layout "dp4" needs 4 processes, not 8; "dp8" would use 8 processes'),
        ("dp", 0, {}, "--world is 0; it must be a whole number from 1 to"),
        ("dp64", 64, {}, "a batch of 32 leaves some of its 64 data ranks without a sample; use a batch of 64"),
        ("dp4", 4, {"engine": "deepspeed"}, 'run.engine is "deepspeed"; use engine native'),
        ("dp4", 4, {"share_replicas": True}, "use share_replicas: false"),
        ("dp4", 4, {"compile": True}, "use compile: false"),
        ("dp4", 4, {"sparse_rows": "on"}, "use sparse_rows: auto"),
        ("dp4 offload=optimizer-disk", 4, {}, "offloads to disk; use offload=optimizer"),
        ("ep4", 4, {}, "use a layout without ep"),
        ("dp4", 4, {"task": Asking()}, "or have the ranks run: samestep train JOB --dry-run without --world"),
    ],
)
def test_what_is_refused(layout: str, world: int, further: dict[str, Any], message: str) -> None:
    with pytest.raises(samestep.UserError) as caught:
        rehearsed(layout, world, **further)
    assert message in str(caught.value)
    assert not torch.distributed.is_initialized()


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, out = tmp_path / "job.yaml", tmp_path / "out.json"
    job.write_text("recipe: {task: regression, epochs: 2, batch: 64}\n")
    command = ["train", str(job), "--layout", "zero1x16", "--dry-run", "--world", "16", "--json", str(out)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "bytes of a rank in one step" in shown
    assert "messages of rank 0 in one step" in shown
    (rank,) = json.loads(out.read_text(encoding="utf-8"))["ranks"]
    assert rank["usage_bytes"]["parameters"] == 84
    assert {each["ranks"] for each in rank["collectives"]} == {16}
    assert {path.name for path in tmp_path.iterdir()} == {"job.yaml", "out.json"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world", "4"], "--world goes with --dry-run"),
        (["--dry-run", "--world", "4", "--hostfile", "hosts"], "leave out what names them"),
        (["--dry-run", "--world", "4", "--json", "none/out.json"], "there is no folder none"),
    ],
)
def test_words_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], message: str
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("recipe: {task: regression}\n")
    assert main(["train", str(job), *words]) == 2
    assert message in capsys.readouterr().err


class Untraced(torch.nn.Module):
    """A model whose forward can't run on shapes alone, or is none."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 16), torch.nn.Linear(16, 3)
        self.kind = kind

    def forward(self, points: torch.Tensor) -> Any:
        hidden = self.first(points)
        if self.kind == "branch" and hidden.sum() > 0:
            hidden = hidden * 2
        if self.kind == "numpy":
            np.tanh(hidden.detach().numpy(), out=hidden.detach().numpy())
        if self.kind == "chosen rows":
            hidden = hidden + hidden[hidden[:, 0] > 0].sum(0)
        return ("no", "tensor") if self.kind == "words" else self.last(hidden)


class UntracedTask(Points):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def model(self) -> torch.nn.Module:
        return Untraced(self.kind)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("branch", "asks for the values of a tensor.*test_rehearsal.py:.*torch.where"),
        ("numpy", "asks for the values of a tensor.*numpy.*test_rehearsal.py:.*in place of NumPy's"),
        ("chosen rows", "asks for the values of a tensor.*test_rehearsal.py:.*samestep compare"),
        ("words", "fails in it .*must be Tensor, not tuple.*--layout single"),
    ],
)
@pytest.mark.parametrize("layout", ["dp2", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_model_that_shapes_do_not_lead_through_is_told_in_one_message(kind: str, told: str, layout: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        rehearsed(layout, 2, task=UntracedTask(kind))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["pp2", "pp2 stages=2 schedule=interleaved-1f1b"])
def test_stages_of_an_encoder_and_a_decoder_are_rehearsed(layout: str) -> None:
    recipe = samestep.Recipe(task=Tiny(name="t5"), batch=8, steps=4)
    really = samestep.dry_run(recipe, layout, threads=1)
    for found in rehearse_job(Job(recipe=recipe, run=Run(layout=layout)), 2):
        assert found.usage.parameters == really[found.rank].parameters
        assert found.usage.optimizer_state == really[found.rank].optimizer_state
        assert found.usage.activations == pytest.approx(really[found.rank].activations, rel=0.01)


@pytest.mark.timeout(300)
def test_the_last_gradient_of_zero1_counts_while_its_bucket_leaves() -> None:
    recipe = samestep.Recipe(task="regression", args={"samples": 60, "held_out": 20}, batch=10, steps=4)
    really = samestep.dry_run(recipe, "zero1x2", threads=1)
    (found,) = rehearse_job(Job(recipe=recipe, run=Run(layout="zero1x2")), 2)
    assert found.usage.to_json() == really[found.rank].to_json()
