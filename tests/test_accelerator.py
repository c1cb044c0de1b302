"""Layouts on a pretended accelerator: the step of one process, no devices mixed, no wait that isn't meant."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from on_the_device import on_device

from samestep import jobfile
from samestep.job import Job
from samestep.launch import local
from samestep.layout import Layout
from samestep.recipe import AdamW, Average, Group, NamedOptimizer
from samestep.verification.matrix import ALL

# Ranks compute in Python what an accelerator computes by itself.
pytestmark = pytest.mark.timeout(1100)

JOBS = Path(__file__).parents[1] / "examples" / "proof"
TASKS = ("text", "language", "images", "regression")

# Beside those of the matrix.
LAYOUTS = (*ALL, "pp2 cp2", "pp2 tp2 sequence=split")

# Where a step may wait for the device once all is warm, and why. What reads a tensor's value on the host (.item(),
# .tolist(), bool(), nonzero()), or copies from or to memory that is not pinned, anywhere else fails these tests.
MAY_WAIT = {
    "parallel/exact/dropout.py:_answer": "the model's own call: transformers looks whether a mask masks anything",
    "parallel/exact/dropout.py:run": "the model's own call: transformers looks whether positions begin anew",
    "parallel/loss/vocabulary.py:__torch_function__": "PyTorch's loss of sliced logits writes a number where a "
    "mask says; CUDA fills by the mask, other devices look for its places",
    "parallel/loss/chunked_logits.py:_of_chunk": "the same, of a chunk of the sliced logits",
    "backward": "DistributedDataParallel takes what gloo gives, here the same memory seen on the CPU",
}


def _jobs(
    tasks: Sequence[str], layouts: Sequence[str], recipe: Mapping[str, Any] | None = None, **run: Any
) -> Iterator[tuple[str, Job]]:
    for task in tasks:
        job = jobfile.load(JOBS / f"{task}.yaml", []).job
        job = replace(job, recipe=replace(job.recipe, **(recipe or {})))
        for layout in layouts:
            yield f"{task}: {layout}", replace(job, run=replace(job.run, layout=layout, threads=1, **run))


def _assert_right(
    tasks: Sequence[str], layouts: Sequence[str], recipe: Mapping[str, Any] | None = None, **run: Any
) -> None:
    done = on_device(dict(_jobs(tasks, layouts, recipe, **run)))
    problems = {name: each.problem(MAY_WAIT) for name, each in done.items()}
    wrong = [f"{name}: {problem}" for name, problem in problems.items() if problem is not None]
    assert not wrong, "\n".join(wrong)  # in lines of their own, which undone_mends.py looks for
    assert any(each.refused is None for each in done.values())


def problem_of(task: str, layout: str) -> str | None:
    """What is wrong with a job under a layout; None: nothing. Offloads wait: the CPU takes part in each step."""
    (done,) = on_device(dict(_jobs([task], [layout]))).values()
    found = done.problem(MAY_WAIT)
    offloads = Layout.parse(layout).offload != "none"
    return None if found is not None and offloads and found.startswith("waits for the device") else found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", pytest.param("cp2", marks=pytest.mark.slow)])
def test_shards_and_tokens_take_the_same_step_and_wait_nowhere(layout: str) -> None:
    # Embeddings that are tied to the output, gradients that are summed after backward, parameters that are gathered.
    sizes = {"layers": 2, "hidden": 32, "heads": 8, "key_value_heads": 4, "feed_forward": 48}
    _assert_right(["language"], [layout], {"model": {"type": "llama", "tied": True, **sizes}})


def _asked(
    name: str, layouts: Sequence[str], recipe: Mapping[str, Any], *, task: str = "language", **run: Any
) -> Any:
    return pytest.param(task, layouts, recipe, run, id=name, marks=pytest.mark.slow)


MUON = NamedOptimizer(name="torch.optim.Muon", lr=0.02, args={"momentum": 0.9})
MATRICES = Group(parameters=("*layers*",), dims=2, optimizer=MUON)


@pytest.mark.parametrize(
    ("task", "layouts", "recipe", "run"),
    [
        _asked("batch-norm", ["dp2", "fsdp2"], {"model": {"norm": "batch"}}, task="images"),
        _asked("ordered", ["dp2", "zero2x2"], {}, reduction="ordered"),
        _asked("muon", ["zero1x2", "fsdp2"], {"groups": (MATRICES,)}),
        _asked("8bit", ["zero1x2", "fsdp2"], {"optimizer": AdamW(state="8bit")}),
        _asked("average", ["zero1x2", "fsdp2"], {"average": Average(decay=0.9)}),
        _asked("micro-batches", ["fsdp2", "tp2", "cp2"], {}, micro_batch=2),
    ],
)
def test_what_a_job_may_ask_for_waits_nowhere(
    task: str, layouts: Sequence[str], recipe: Mapping[str, Any], run: Mapping[str, Any]
) -> None:
    _assert_right([task], layouts, recipe, **run)


@pytest.mark.slow
def test_logits_in_chunks_take_the_same_step_and_wait_nowhere() -> None:
    _assert_right(["language"], ["single", "dp2", "fsdp2", "tp2", "pp2"], loss_chunk=50)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_every_layout_takes_the_same_step_and_waits_nowhere(task: str) -> None:
    _assert_right([task], LAYOUTS)


@pytest.mark.slow
def test_offloaded_parameters_go_to_other_stages_from_the_device() -> None:
    # Ranks that give one broadcast tensors of unlike devices wait for each other in two back ends.
    (job,) = dict(_jobs(["language"], ["pp2 fsdp2 offload=parameters"])).values()
    assert local.start(_devices_of_whole_state, (job,), 4) == ["pretend"]


def _devices_of_whole_state(job: Job) -> list[str]:
    """The kinds of devices from and to which whole parameters are broadcast, on all ranks."""
    import os

    import pretended_device
    import torch.distributed as dist

    from samestep.launch.world import join
    from samestep.tasks.registry import resolve
    from samestep.training.fit import Training

    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # each rank sees its own device alone
    pretended_device.install()
    kinds: set[str] = set()
    broadcast = dist.broadcast

    def noted(tensor: Any, *rest: Any, **named: Any) -> Any:
        kinds.add(tensor.device.type)
        return broadcast(tensor, *rest, **named)

    with join(threads=1) as world:
        group: Any = dist.group.WORLD
        group.bound_device_id = None  # gloo can't split a group as NCCL does where one is bound to its device
        training = Training(job, resolve(job.recipe), world, Layout.parse(job.run.layout))
        dist.broadcast = noted
        training.session.trainer.state_to_write(kept=world.rank == 0)
        dist.broadcast = broadcast
        everyone: list[Any] = [None] * world.world_size
        dist.all_gather_object(everyone, kinds)
    return sorted(set().union(*everyone))


def test_a_step_that_is_logged_is_read_without_a_wait_for_the_next_one() -> None:
    built, read, values = local.start(_read_out, (), 1)
    assert (built, values) == ([], (1.5, 2.5, {"first": 0.5}))
    assert read == ["training/loop.py:values (synchronize)"]


def _read_out() -> tuple[list[str], list[str], object]:
    """Where a readout waits while it is made and while it is read, and what it gives."""
    import pretended_device
    import torch

    from samestep.engines.base import StepReport
    from samestep.training.loop import Readout

    pretended_device.install()
    loss, norm, first = (torch.tensor(value).to(pretended_device.NAME) for value in (1.5, 2.5, 0.5))
    report = StepReport(loss=loss, grad_norm=norm, lr=0.1, terms={"first": first})
    with pretended_device.WAITS.noted() as built:
        readout = Readout(report)
    with pretended_device.WAITS.noted() as read:
        values = readout.values()
    return built, read, values


def test_the_pretended_device_is_as_strict_as_a_real_one() -> None:
    assert local.start(_strict, (), 1) == []


def _strict() -> list[str]:
    """What the device lets pass or doesn't note, though it should."""
    import pretended_device
    import torch

    pretended_device.install()
    device = torch.device(pretended_device.NAME, 0)
    on_cpu = torch.arange(6.0)
    numbers = on_cpu.to(device)
    index, pinned = torch.tensor([1, 2]), torch.ones(6).pin_memory()
    waits = {
        "item": lambda: numbers.sum().item(),
        "tolist": lambda: numbers.tolist(),
        "bool": lambda: bool(numbers.sum() > 0),
        "a mask": lambda: numbers[numbers > 2],
        "nonzero": lambda: numbers.nonzero(),
        "to the CPU": lambda: numbers.cpu(),
        "to the device": lambda: torch.tensor([1.0], device=device),
        "not pinned": lambda: on_cpu.to(device, non_blocking=True),
        "an index on the CPU": lambda: numbers[index],
    }
    goes_on = {
        "pinned": lambda: pinned.to(device, non_blocking=True),
        "arithmetic": lambda: (numbers * 2 + 1).sum(),
        "zeros": lambda: torch.zeros(3, device=device),
    }
    wrong: list[str] = []
    for calls, expected in ((waits, True), (goes_on, False)):
        for name, call in calls.items():
            with pretended_device.WAITS.noted() as places:
                call()
            if bool(places) is not expected:
                wrong.append(f"{name}: {places}")
    for name, mix in {"sum": lambda: numbers + on_cpu, "product": lambda: torch.dot(numbers, on_cpu)}.items():
        try:
            mix()
        except RuntimeError:
            continue
        wrong.append(f"{name} of two devices")
    if not torch.equal(
        (numbers.view(2, 3).t() @ numbers.view(2, 3)).cpu(), on_cpu.view(2, 3).t() @ on_cpu.view(2, 3)
    ):
        wrong.append("another product")
    if not torch.empty(2, device=device).isnan().all():
        wrong.append("numbers in memory that was never written")
    return wrong
