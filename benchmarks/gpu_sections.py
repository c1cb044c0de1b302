"""The sections of benchmarks/gpu.py. Each measures one subject in its own process, and reports what it skipped."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gpu_model import SIZES, Tokens
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import samestep
from samestep import api, jobfile
from samestep.doctor.examine import examine
from samestep.doctor.findings import ExaminationRequest
from samestep.engines.precision import float32_products
from samestep.handwritten.loop import Loop
from samestep.job import Checkpointing, Job, Run
from samestep.launch.device import accelerators, device_of, peak_memory
from samestep.launch.world import World, join
from samestep.layout import Layout
from samestep.parallel.context.block_attention import KeyValueBlock, attend, gradients
from samestep.training.fit import Training
from samestep.verification.matrix import ALL, FAST

PROOF_JOB = Path(__file__).parents[1] / "examples" / "proof" / "language.yaml"
WARM_UP, STEPS = 5, 10
NO_ACCELERATOR = "no accelerator"


@dataclass(kw_only=True)
class Section:
    """The result of a section: a table, and what was skipped."""

    titles: tuple[str, ...]
    rows: list[list[str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def there() -> bool:
    return accelerators() > 0


def _job(size: str, *, steps: int = WARM_UP + STEPS, precision: Any = "bf16", **run: Any) -> Job:
    recipe = samestep.Recipe(
        task=Tokens(SIZES[size]), batch=SIZES[size].batch, steps=steps, precision=precision, clip=1.0
    )
    return Job(recipe=recipe, run=Run(check=False, **run))


@contextmanager
def _world(job: Job) -> Iterator[World]:
    with float32_products(job.run.float32_matmul), join(device=job.run.device) as world:
        yield world


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _seconds(steps: Iterator[Any], device: torch.device, count: int = STEPS) -> float:
    """Seconds per step, between two synchronizations of the device, after the first steps."""
    for _ in range(WARM_UP):
        next(steps)
    _wait(device)
    began = time.perf_counter()
    for _ in range(count):
        next(steps)
    _wait(device)
    return (time.perf_counter() - began) / count


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A training in this process: seconds per step, the last step's loss, peak bytes."""

    seconds: float
    loss: float
    peak: int


def _timed(job: Job, *, compiled_loop: bool = False) -> Timed:
    """Time samestep's training, or the hand-written loop, whose whole model is compiled."""
    layout = Layout.parse(job.run.layout)
    with _world(job) as world:
        if world.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(world.device)
        if compiled_loop:
            loop = Loop(job.recipe, job.recipe.task, device=world.device, compile=True)
            steps: Iterator[Any] = loop.steps()
            seconds = _seconds(steps, world.device)
            loss = loop.step(next(loop.batches())[0], job.recipe.batch).loss
        else:
            taken = Training(job, job.recipe.task, world, layout).steps()
            seconds = _seconds(taken, world.device, STEPS - 1)
            loss = next(taken)[1].loss
        return Timed(seconds=seconds, loss=loss.item(), peak=peak_memory(world.device))


def doctor(_: str) -> Section:
    """The machine, and the findings of `samestep doctor`."""
    section = Section(titles=("check", "verdict", "what"))
    for finding in examine(ExaminationRequest(), limit=60):
        section.rows.append([finding.subject, finding.verdict, finding.text])
    return section


def proofs(size: str) -> Section:
    """Layouts that fit this machine, compared with one process in float64."""
    section = Section(titles=("layout", "loss", "gradient norm", "parameters", "verdict"))
    layouts = FAST if size == "tiny" else (*ALL, "cp2 attention=ring", "dp2 cp4 attention=ring")
    wanted = 2 if size == "tiny" else 8
    job = jobfile.load(PROOF_JOB, []).job
    if 0 < accelerators() < 8:  # ranks then share a device, and their messages go through the host's memory
        job = replace(job, run=replace(job.run, transport="gloo"))
    fitting = [each for each in layouts if Layout.parse(each).size <= wanted]
    section.left_out += [f"{each}: {Layout.parse(each).size} ranks" for each in layouts if each not in fitting]
    for row in api.verify_layouts(job, fitting, steps=3):
        if row.proof is None:
            section.rows.append([row.layout, "", "", "", row.reason or row.failure or ""])
            continue
        worst = row.proof.max_relative_difference
        numbers = [f"{worst[name]:.1e}" for name in ("loss", "grad_norm", "parameters")]
        section.rows.append([row.layout, *numbers, row.verdict])
    return section


def precisions(_: str) -> Section:
    """Each precision, eager and compiled: the loss compared with float32's, and the time of a step."""
    section = Section(titles=("precision", "blocks", "loss after 15 steps", "apart from fp32", "ms a step"))
    ways = [("fp32", "highest"), ("fp32", "high"), ("bf16", "highest"), ("fp16", "highest")]
    base: float | None = None
    for precision, products in ways:
        if precision == "fp16" and not there():
            section.left_out.append(f"fp16: {NO_ACCELERATOR}")
            continue
        if products == "high" and not there():
            section.left_out.append(f"TensorFloat-32: {NO_ACCELERATOR}")
            continue
        for compiled in (False, True):
            job = _job("tiny", precision=precision, compile=compiled, float32_matmul=products)
            timed = _timed(job)
            base = timed.loss if base is None else base
            name = precision if products == "highest" else "fp32, TensorFloat-32"
            apart = f"{abs(timed.loss - base) / base:.1e}"
            blocks = "compiled" if compiled else "eager"
            section.rows.append([name, blocks, f"{timed.loss:.5f}", apart, f"{timed.seconds * 1e3:.2f}"])
    return section


def attention(size: str) -> Section:
    """Flash attention compared with plain products, in bf16: the difference, and the time of forward and backward."""
    section = Section(titles=("tokens", "kernel", "apart from float64", "ms"))
    device = device_of(0)
    for tokens in (128,) if size == "tiny" else (2048, 8192):
        shape = (1, 8, tokens, 64)
        generator = torch.Generator().manual_seed(0)
        given = [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for _ in range(3)]
        exact = _attended([each.double() for each in given])
        for name, kernel in (("flash", SDPBackend.FLASH_ATTENTION), ("math", SDPBackend.MATH)):
            with sdpa_kernel(kernel):
                apart = (_attended(given).double() - exact).abs().max()
                seconds = _of_attention(given, device)
            relative = (apart / exact.abs().max()).item()
            section.rows.append([str(tokens), name, f"{relative:.1e}", f"{seconds * 1e3:.3f}"])
        relative, seconds = _of_ring(given, device)
        section.rows.append([str(tokens), "a block of a ring", f"{relative:.1e}", f"{seconds * 1e3:.3f}"])
    return section


def _of_ring(given: Sequence[torch.Tensor], device: torch.device) -> tuple[float, float]:
    """Ring attention's kernel: the difference of output and gradients from float64, and seconds of both passes."""
    query, key, value = given
    block = KeyValueBlock(query=query, key=key, value=value, causal=True, scale=query.shape[-1] ** -0.5)
    leaves = [each.double().requires_grad_() for each in given]
    exact = _attended(leaves)
    expected = [exact, *torch.autograd.grad(exact.sum(), leaves)]
    taken: list[float] = []
    found: list[torch.Tensor] = []
    for _ in range(WARM_UP + STEPS):
        _wait(device)
        began = time.perf_counter()
        attended = attend(block)
        found = [attended.output, *gradients(block, torch.ones_like(attended.output), attended)]
        _wait(device)
        taken.append(time.perf_counter() - began)
    apart = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)]
    return max(apart), median(taken[WARM_UP:])


def _attended(given: Sequence[torch.Tensor]) -> torch.Tensor:
    query, key, value = given
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def _of_attention(given: list[torch.Tensor], device: torch.device) -> float:
    taken: list[float] = []
    leaves = [each.clone().requires_grad_() for each in given]
    for _ in range(WARM_UP + STEPS):
        _wait(device)
        began = time.perf_counter()
        _attended(leaves).sum().backward()
        _wait(device)
        taken.append(time.perf_counter() - began)
    return median(taken[WARM_UP:])


def memory(size: str) -> Section:
    """The allocator's peak compared with the memory that samestep counts."""
    section = Section(titles=("model", "layout", "counted, MiB", "allocator's peak, MiB", "ratio"))
    if not there():
        section.left_out.append(f"the allocator's peak: {NO_ACCELERATOR}")
    for layout in ("single", "single recompute=full"):
        job = _job(size, steps=4, layout=layout)
        with _world(job) as world:
            if there():
                torch.accelerator.reset_peak_memory_stats(world.device)
            training = Training(job, job.recipe.task, world, Layout.parse(layout))
            for _ in training.steps(measured=2):
                pass
            assert training.usage is not None
            used = training.usage
            counted = used.parameters + used.gradients + used.optimizer_state + used.activations + used.gathered
            peak = peak_memory(world.device) if there() else 0
        shown = [f"{peak / 2**20:.0f}", f"{counted / peak:.2f}"] if peak else ["", ""]
        section.rows.append([size, layout, f"{counted / 2**20:.0f}", *shown])
    return section


def throughput(size: str) -> Section:
    """Tokens per second compared with a hand-written loop whose model is compiled, on the same device."""
    section = Section(titles=("model", "loop", "tokens/s", "of the measured peak", "times hand-written"))
    names = ("tiny",) if size == "tiny" else ("350M", "1B")
    if size == "tiny":
        section.left_out += [f"350M and 1B: {NO_ACCELERATOR}"]
    peak = _peak(device_of(0))
    for name in names:
        model = SIZES[name]
        tokens = model.batch * model.length
        hand = _timed(_job(name), compiled_loop=True)
        ours = {compiled: _timed(_job(name, compile=compiled)) for compiled in (False, True)}
        rows = [("hand-written, compiled", hand), ("samestep", ours[False]), ("samestep, compiled", ours[True])]
        for loop, timed in rows:
            share = model.batch * model.flops / timed.seconds / peak
            beside = hand.seconds / timed.seconds
            section.rows.append([name, loop, f"{tokens / timed.seconds:,.0f}", f"{share:.1%}", f"{beside:.2f}"])
    return section


def _peak(device: torch.device) -> float:
    """FLOPs per second of large matrix products in bf16."""
    size = 512 if device.type == "cpu" else 8192
    one = torch.randn(size, size, device=device).bfloat16()
    for _ in range(WARM_UP):
        torch.mm(one, one)
    _wait(device)
    began = time.perf_counter()
    for _ in range(STEPS):
        torch.mm(one, one)
    _wait(device)
    return 2 * size**3 * STEPS / (time.perf_counter() - began)


def offload(size: str) -> Section:
    """The cost of each offload, and the memory that remains on the device."""
    section = Section(titles=("model", "layout", "ms a step", "peak, MiB"))
    if not there():
        section.left_out.append(f"what offloads leave on the device: {NO_ACCELERATOR}")
    for layout in ("single", "single offload=activations", "single offload=optimizer", "single recompute=full"):
        timed = _timed(_job(size, layout=layout))
        peak = f"{timed.peak / 2**20:.0f}" if there() else ""
        section.rows.append([size, layout, f"{timed.seconds * 1e3:.1f}", peak])
    return section


def checkpoints(size: str) -> Section:
    """Seconds that a save blocks the training: for the copy, and until all is on disk."""
    section = Section(titles=("model", "saved", "seconds of standing still, a checkpoint"))
    for asynchronous in (True, False):
        with TemporaryDirectory(prefix="samestep-gpu-") as folder:
            saving = Checkpointing(every=4, folder=Path(folder) / "checkpoints", asynchronous=asynchronous)
            job = _job(size, steps=12, checkpoint=saving, folder=Path(folder) / "run", log=())
            result = api.train_job(job)
        name = "beside the steps" if asynchronous else "before the next step"
        section.rows.append([size, name, f"{result.checkpoint_seconds / 3:.3f}"])
    return section


def waits(size: str) -> Section:
    """The number of host-device synchronizations in a step, from the profiler."""
    section = Section(titles=("model", "layout", "waits a step", "which"))
    if not there():
        section.left_out.append(f"waits for the device: {NO_ACCELERATOR}")
        return section
    activities = [torch.profiler.ProfilerActivity.CPU, *_of_accelerators()]
    for layout in ("single", "single recompute=full"):
        job = _job(size, layout=layout)
        with _world(job) as world:
            steps = Training(job, job.recipe.task, world, Layout.parse(layout)).steps()
            for _ in range(WARM_UP):
                next(steps)
            _wait(world.device)
            with torch.profiler.profile(activities=activities) as profiler:
                for _ in range(STEPS):
                    next(steps)
            counts = {e.key: e.count for e in profiler.key_averages() if e.key.endswith("Synchronize")}
            _wait(world.device)
        which = ", ".join(f"{key} {count / STEPS:.1f}" for key, count in counts.items())
        section.rows.append([size, layout, f"{sum(counts.values()) / STEPS:.1f}", which])
    return section


def _of_accelerators() -> list[torch.profiler.ProfilerActivity]:
    cpu = torch.profiler.ProfilerActivity.CPU
    return [each for each in torch.profiler.supported_activities() if each is not cpu]


SECTIONS: Mapping[str, Callable[[str], Section]] = {
    "doctor": doctor,
    "proofs": proofs,
    "precisions": precisions,
    "attention": attention,
    "throughput": throughput,
    "memory": memory,
    "offload": offload,
    "checkpoints": checkpoints,
    "waits": waits,
}
