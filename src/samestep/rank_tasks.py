"""What a rank does in each of the functions of `samestep.api`, where this process is one of a job's ranks.

Each function is called in every rank with the same job and layout, and joins the ranks' process group.
"""

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from samestep import environment
from samestep.comm.group_pool import GroupPool
from samestep.comm.shared_memory import backend as shared_memory
from samestep.door.ready import Ready
from samestep.engines import registry as engines
from samestep.engines.precision import float32_products
from samestep.errors import LayoutError, UserError
from samestep.job import Job
from samestep.launch.affinity import Binding, bind, threads_of
from samestep.launch.world import World, join
from samestep.layout import Layout
from samestep.parallel.parallel_model import Findings
from samestep.progress import phases
from samestep.script_proof.kinds import Finding
from samestep.tasks.base import Task
from samestep.torch_internals.groups import default_store
from samestep.training.fit import Training, try_out
from samestep.training.usage import Usage
from samestep.verification.bits import BitsTaken, take_bits
from samestep.verification.departure import Looked, find
from samestep.verification.proof import Proof, Reference, hold_against

T = TypeVar("T")

# How long a rank that refuses a layout waits for the others to refuse it as well.
_OTHERS_REFUSE = 10.0  # seconds
# Steps that are not timed: state and buffers are made in two of them, and bytes are counted in the third.
_UNTIMED = 3


@contextmanager
def joined(job: Job) -> Iterator[World]:
    """Join this rank's process group, with the job's transport and float32 matmul precision."""
    engine = engines.resolve(job.run.engine)
    transport = job.run.transport if engine.abilities.shared_memory else "gloo"
    group = join(
        device=job.run.device,
        threads=job.run.threads,
        cpu_backend=shared_memory.for_transport(transport),
        share_devices=job.run.transport == "gloo",
    )
    with engine.in_this_process(), float32_products(job.run.float32_matmul), group as world:
        yield world


def _title(otherwise: str, what: object) -> str:
    """What a rank's lines begin with: the command that the user called, and what of it this is."""
    return f"{phases.work(otherwise)}: {what}"


def dry_run_rank(ready: Ready) -> Sequence[Usage]:
    """On a rank: build, take one step, and report what it held."""
    with phases.running(f"dry run: {ready.layout}"), joined(ready.job) as world:
        return try_out(ready.job, ready.task, world, ready.layout)


def dry_run_rank_many(ready: Ready, layouts: Sequence[Layout]) -> list[Sequence[Usage] | str]:
    """Dry-run several layouts of one world size in turn; a refusal is returned as text."""
    usages: list[Sequence[Usage] | str] = []
    with phases.running("dry run: ranks"), joined(ready.job) as world:
        task, findings, groups = ready.task, Findings(), GroupPool()
        for number, layout in enumerate(layouts, 1):
            phases.say(f"layout {number} of {len(layouts)}, {layout}")
            attempt = partial(try_out, ready.job, task, world, layout, findings.of_model())
            usages.append(_or_refusal(attempt, groups, number, len(layouts)))
    return usages


def _or_refusal(attempt: Callable[[], T], groups: GroupPool, number: int, of: int) -> T | str:
    """Run an attempt at a layout; return its result, or why the layout was refused, by all ranks.

    A rank may be the only one to refuse: another stage's code, or its samples, may have been the reason, and the
    others wait for it. Its error is then raised, which ends all ranks, and each layout is tried with a start of its
    own; so is the only layout of a start. The attempt takes the groups of the layouts before it.
    """
    try:
        with groups.lent():
            return attempt()
    except UserError as error:
        alone = isinstance(error, LayoutError) and not error.on_every_rank
        if of == 1 or alone or not _all_refuse(number):
            raise
        return str(error)


def _all_refuse(number: int) -> bool:
    """Whether every rank refuses an attempt, within some seconds. Called by the ranks that do."""
    store, ranks = default_store(), dist.get_world_size()
    store.set(f"refused/{number}/{dist.get_rank()}", "")
    all_ranks = [f"refused/{number}/{rank}" for rank in range(ranks)]
    until = time.monotonic() + _OTHERS_REFUSE
    # Not `store.wait`, which prints warnings of its sockets when the time is over.
    while not store.check(all_ranks):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """Step time and memory of one rank."""

    seconds: float  # the median step
    usage: Usage


def time_steps(job: Job, task: Task, world: World, layout: Layout, steps: int) -> Sequence[StepTiming]:
    """Time the steps after the first ones; return all ranks' timings. Collective."""
    last = _UNTIMED + max(steps, 1)
    recipe = replace(job.recipe, steps=last, epochs=None)
    training = Training(replace(job, recipe=recipe), task, world, layout)
    seconds: list[float] = []
    began = time.perf_counter()
    for _, report in training.steps(measured=_UNTIMED - 1):
        report.loss.item()
        if world.device.type != "cpu":
            torch.accelerator.synchronize(world.device)
        now = time.perf_counter()
        seconds.append(now - began)
        began = now
    assert training.usage is not None  # guaranteed: there are timed steps after the untimed ones
    own = StepTiming(seconds=median(seconds[_UNTIMED:]), usage=training.usage)
    if world.world_size == 1 and not dist.is_initialized():
        return (own,)
    ranks: list[Any] = [None] * world.world_size
    dist.all_gather_object(ranks, own)
    return tuple(ranks)


def time_steps_rank(ready: Ready, steps: int) -> Sequence[StepTiming]:
    """On a rank: how long steps take, of all ranks (seconds)."""
    with phases.running(_title("time steps", ready.layout)), joined(ready.job) as world:
        return time_steps(ready.job, ready.task, world, ready.layout, steps)


def verify_rank(ready: Ready, steps: int, expected: Reference | None) -> Proof:
    """On a rank: hold the layout's steps against the reference, which rank 0 has."""
    with phases.running(_title("verify", ready.layout)), joined(ready.job) as world:
        expected = expected if world.rank == 0 else None
        return hold_against(ready.job, ready.task, world, ready.layout, steps, expected)


def find_rank(ready: Ready, steps: int, looked: Looked) -> Finding | None:
    """On a rank: look for the first module whose steps depart."""
    with phases.running(_title("verify", f"{ready.layout}, again")), joined(ready.job) as world:
        return find(ready.job, ready.task, world, ready.layout, steps, looked if world.rank == 0 else None)


def bits_rank(ready: Ready, steps: int, folder: Path, threads: int | None) -> BitsTaken:
    """On a rank: take ordered steps, and leave their bits in a folder."""
    with phases.running(f"verify --bits: {ready.layout}"), joined(ready.job) as world:
        fast = threads_of(ready.layout.size, threads)
        return take_bits(ready.job, ready.task, world, ready.layout, steps, folder, fast)


Proved = tuple[Proof | str, float]  # a proof, or why a layout was refused, and its seconds


def verify_rank_many(
    ready: Ready, layouts: Sequence[Layout], steps: int, expected: Reference, kept: Path
) -> list[Proved]:
    """Verify several layouts in turn. `kept`: the file in which rank 0 leaves what there is after each."""
    proofs: list[Proved] = []
    with phases.running(_title("verify", "ranks")), joined(ready.job) as world:
        groups = GroupPool()
        task, findings = ready.task, Findings()  # reading the data may take longer than a proof
        for number, layout in enumerate(layouts, 1):
            began = time.perf_counter()
            held = expected if world.rank == 0 else None
            proof = partial(hold_against, ready.job, task, world, layout, steps, held, findings.of_model())
            with phases.phase(f"layout {number} of {len(layouts)}, {layout}"):
                result = _or_refusal(proof, groups, number, len(layouts))
            proofs.append((result, time.perf_counter() - began))
            if world.rank == 0:
                kept.with_suffix(".new").write_bytes(pickle.dumps(proofs))
                kept.with_suffix(".new").replace(kept)
    return proofs


def proofs_in(kept: Path) -> list[Proved]:
    """What `verify_rank_many` has left in a folder that this process has made; nothing where it came to no proof."""
    return pickle.loads(kept.read_bytes()) if kept.exists() else []


def on_its_cores(own: Sequence[Binding], work: str | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a rank that this process started for a command, bound to the rank's cores."""
    ranks = environment.ranks()
    assert ranks is not None
    bind(own[ranks.local_rank])
    with phases.working(work):
        return function(*arguments)
