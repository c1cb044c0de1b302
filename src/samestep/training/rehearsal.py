"""Rehearsal: steps of single ranks of a job of any size, without other ranks, device memory or tensor values.

A rank's model is built, spread and stepped by the code that trains, on tensors without values (`parallel.valueless`)
and in a fake process group that sends nothing. What a step allocates, sends and computes is counted as in a training,
and what would fail there because of shapes, the layout or the model fails here with the same message. Checks that
depend on values, such as whether a sliced layer gives the same output, are assumed to pass.

The ranks are rehearsed one after the other in this process. Ranks that differ only along data axes hold the same
shapes but for their samples, so the one with the largest micro-batches stands for all.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from samestep.comm.group_pool import new_group_replaced
from samestep.comm.mesh import rank_grid
from samestep.comm.traffic import Traffic, group_of
from samestep.data.loader import Loader, StepBatch
from samestep.data.nests import tensors_in
from samestep.data.order import DataPlace, SampleOrder
from samestep.engines.precision import parameter_dtype
from samestep.errors import UserError, described, place_of
from samestep.job import Job
from samestep.launch.world import World
from samestep.layout import MESH_AXES, Layout
from samestep.parallel.deferred_init import InitialModel, forget_values, new_objects_alone
from samestep.parallel.parallel_model import Findings, ModelDetails
from samestep.parallel.pipeline.schedule import micro_batches
from samestep.parallel.valueless import Mail, NotSentYet, Valueless
from samestep.tasks.base import Task
from samestep.torch_internals.fakes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    fake_store,
    forget_meshes,
)
from samestep.torch_internals.operators import arguments_by_name
from samestep.training import usage as usages
from samestep.training.fit import Training, measured_step
from samestep.training.own_loop import check_lengths
from samestep.training.step_work import CountedWork, StepWork
from samestep.training.usage import Usage

_MOST_SLICES = 512  # of a global batch whose sizes are compared
_MOST_STAGES = 3  # pipeline ranks that are rehearsed; stages between the first and the last hold less than the first
_ASKS = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """The collectives of one kind along one mesh axis in a step of one rank."""

    kind: str
    axis: str  # such as "tensor", or "replicate+shard" for a group over both
    ranks: int  # in the group
    count: int
    sent: float  # bytes that this rank sends, by the formulas of `samestep.comm.traffic`


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a rank would hold, send and compute in a step."""

    rank: int
    stage: int  # pipeline rank
    usage: Usage
    collectives: Sequence[Collectives]
    work: StepWork
    micro_batches: int = 1  # of a step

    def to_json(self) -> dict[str, Any]:
        """A dict of bytes held by kind, collectives by axis, and FLOPs and bytes of operators."""
        return {
            "rank": self.rank,
            "pipeline_rank": self.stage,
            "usage_bytes": self.usage.to_json(),
            "collectives": [asdict(collective) for collective in self.collectives],
            "work": self.work.to_json(),
        }


def check_rehearsed(job: Job, layout: Layout) -> None:
    """Raise UserError for a job or layout that can't be rehearsed."""
    run, disk = job.run, next((name for name in layout.offload.split("+") if name.endswith("-disk")), None)
    refused = {
        f'run.engine is "{run.engine}"; use engine native': run.engine != "native",
        "recipe.communication is given; leave it out": job.recipe.communication is not None,
        "run.share_replicas is true; use share_replicas: false": run.share_replicas,
        "run.compile is true; use compile: false": run.compile,
        "run.sparse_rows is on; use sparse_rows: auto": run.sparse_rows == "on",
        f'layout "{layout}" offloads to disk; use offload={(disk or "").removesuffix("-disk")}': disk is not None,
        f'layout "{layout}" sends tokens to experts that values choose; use a layout without ep': layout.expert > 1,
    }
    for why, stands in refused.items():
        if stands:
            raise UserError(f"--world takes a step without values and without other ranks, and {why}")


def rehearse(job: Job, task: Task, layout: Layout, ranks: Sequence[int] | None = None) -> list[Rehearsal]:
    """Rehearse a step of `ranks` of a layout, one after the other.

    Without `ranks`, rehearses those of `ranks_of_stages` in the data slice with the largest micro-batches.

    Raises UserError where the ranks would, and for a model whose forward reads values of tensors.
    """
    check_rehearsed(job, layout)
    job = replace(job, run=replace(job.run, sparse_rows="off"))
    with _asking_explained():
        numbers = ranks_of_stages(layout, _largest_share(job, task, layout)) if ranks is None else list(ranks)
    guessing = _Ranks(job, task, layout, Mail(guesses=True))
    try:
        rehearsals = [guessing.of(rank) for rank in numbers]
    except NotSentYet:
        pass
    except UserError:
        if not guessing.mail.guessed:
            raise
    else:
        if not guessing.mail.wrong:
            return rehearsals
    exact = _Ranks(job, task, layout, Mail(guesses=False))
    return [exact.of(rank) for rank in numbers]


class _Ranks:
    """Rehearses ranks of a layout one by one, again where one needs a message that another has not sent yet."""

    def __init__(self, job: Job, task: Task, layout: Layout, mail: Mail) -> None:
        self._job = job
        self._task = task
        self._layout = layout
        self.mail = mail
        self._findings = Findings()
        self._found: dict[int, Rehearsal] = {}

    def of(self, rank: int) -> Rehearsal:
        """Rehearse a rank. Raises NotSentYet where messages are guessed, and one can't be."""
        while rank not in self._found:
            try:
                self._rehearse(rank)
            except NotSentYet as missing:
                if self.mail.guesses:
                    raise
                self._hear(missing)
        return self._found[rank]

    def _hear(self, missing: NotSentYet) -> None:
        """Rehearse the sender of a missing message until it has sent it, perhaps before it has all its own inputs."""
        while not self.mail.knows(missing.label):
            if missing.source in self._found:
                raise UserError(
                    f"--world takes the steps of ranks one by one, and rank {missing.source} never sends what "
                    "another waits for; use --dry-run without --world"
                )
            try:
                self._rehearse(missing.source)
            except NotSentYet as another:
                if not self.mail.knows(missing.label):
                    self._hear(another)

    def _rehearse(self, rank: int) -> None:
        with _pretended_group(rank, self._layout.size), _asking_explained():
            mode = Valueless(self.mail)
            self._found[rank] = _rehearse_rank(self._job, self._task, self._layout, rank, mode, self._findings)


def ranks_of_stages(layout: Layout, data_index: int = 0) -> list[int]:
    """Ranks of one pipeline: at most `_MOST_STAGES`, evenly spaced, with the first and the last.

    The pipeline is the first one of those that train on slice `data_index` of a global batch.
    """
    line = rank_grid(layout).reshape(layout.pipeline, layout.data_ranks, -1)[:, data_index, 0].tolist()
    number = min(len(line), _MOST_STAGES)
    return [line[round(place * (len(line) - 1) / max(number - 1, 1))] for place in range(number)]


def _largest_share(job: Job, task: Task, layout: Layout) -> int:
    """The data rank whose slice of the measured step's batch needs most memory, as samples may differ in length.

    Under 1F1B a stage holds the activations of at most `layout.pipeline` micro-batches in a row (Narayanan et al.
    2021, section 2.2), so slices are compared by the most elements in that many consecutive micro-batches.
    """
    if layout.data_ranks == 1:
        return 0
    recipe, run, samples = job.recipe, job.run, task.train_set()
    lengths = task.sample_lengths() if run.group_by_length else None
    order = SampleOrder(
        size=len(samples),
        batch=recipe.batch,
        seed=recipe.seed,
        lengths=None if lengths is None else check_lengths(lengths, samples, "sample_lengths"),
        virtual_ranks=recipe.virtual_ranks if run.reduction == "ordered" else None,
    )
    step = measured_step(recipe.total_steps(order.steps_per_epoch))
    elements: dict[int, int] = {}  # by slice; at most `_MOST_SLICES`, evenly spaced
    for index in range(0, layout.data_ranks, -(-layout.data_ranks // _MOST_SLICES)):
        (taken,) = Loader(
            samples,
            task.collate,
            order,
            place=DataPlace(index=index, of=layout.data_ranks),
            device=torch.device("cpu"),
            dtype=torch.float32,
            start=step,
            stop=step + 1,
            micro_batch=run.micro_batch,
            micro_batches=partial(micro_batches, layout, recipe.batch, run.micro_batch),
        )
        sizes = [sum(part.numel() for part in tensors_in(tuple(batch.batch))) for batch in taken.micro_batches]
        elements[index] = max(sum(sizes[first : first + layout.pipeline]) for first in range(len(sizes)))
    return max(elements, key=elements.__getitem__)


class _RehearsedTraining(Training):
    """A training whose tensors have no values and no memory."""

    def __init__(
        self, job: Job, task: Task, world: World, layout: Layout, mode: Valueless, findings: Findings
    ) -> None:
        self._mode = mode
        super().__init__(job, task, world, layout, findings=findings)

    def _build(self, *, recorded: bool) -> InitialModel:
        """Build the model without values; if that fails, build it with values and drop them."""
        try:
            with self._mode:
                built = super()._build(recorded=False)
        except Exception:  # such as weights read from a file; an error of the model is raised again below
            built = super()._build(recorded=False)
        with self._mode:
            recipe = self.recipe
            forget_values(built.model, parameter_dtype(recipe.precision, master_weights=recipe.master_weights))
        return built

    def _prepare(self, built: InitialModel, details: ModelDetails) -> None:
        """Spread the model without values."""
        with self._mode:
            super()._prepare(built, details)

    def rehearse(self) -> tuple[Usage, Sequence[Collectives], StepWork, int]:
        """Take the first step, which creates the optimizer's state, and measure the step that a training measures.

        Also returns the number of its micro-batches.
        """
        session, last = self.session, self.measured_step
        batches = session.batches(
            self.samples, batch=self.recipe.batch, collate=self.task.collate, steps=last + 1, lengths=self._lengths
        )
        counted, work = _ByAxis(session.layout), CountedWork()
        usage: Usage | None = None
        number = 1
        for batch in batches:
            if 0 < batch.step < last:
                continue
            take = self._take(batch if batch.step == last else _few_of(batch, session.layout), None)
            with ExitStack() as stack:
                stack.enter_context(self._mode)
                if batch.step < last:
                    take()
                else:
                    stack.enter_context(work)
                    gc.collect()
                    stack.enter_context(new_objects_alone())
                    _, usage = usages.measured(session.trainer, take, counted)
                    number = len(batch.micro_batches)
        assert usage is not None  # a job has at least one sample, and epochs repeat
        return usage, counted.found(), work.found(), number


def _few_of(batch: StepBatch, layout: Layout) -> StepBatch:
    """The batch with the fewest micro-batches that the schedule allows: enough to create the optimizer's state."""
    few = 2 if layout.schedule in ("1f1b", "gpipe") else max(layout.pipeline, 2)
    return replace(batch, micro_batches=batch.micro_batches[:few])


def _rehearse_rank(job: Job, task: Task, layout: Layout, rank: int, mode: Valueless, findings: Findings) -> Rehearsal:
    """Rehearse one rank, in a world of `layout.size` ranks of which no other exists."""
    world = World(rank=rank, world_size=layout.size, device=torch.device("cpu"), threads=torch.get_num_threads())
    training = _RehearsedTraining(job, task, world, layout, mode, findings)
    usage, collectives, work, number = training.rehearse()
    stage = training.session.mesh.coordinate("pipeline")
    return Rehearsal(rank=rank, stage=stage, usage=usage, collectives=collectives, work=work, micro_batches=number)


class _ByAxis(Traffic):
    """Counts collectives by kind and by the mesh axes that their group spans."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._coordinates = {
            int(rank): place.tolist() for rank, place in zip(*_places(rank_grid(layout)), strict=True)
        }
        self._axes: dict[str, tuple[str, int]] = {}  # by the group's name
        self._group = ("", 0)
        self._counts: dict[tuple[str, str, int], tuple[int, float]] = {}

    def _count(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Find the mesh axes of the collective's group, then count it."""
        arguments = arguments_by_name(func, args, kwargs)
        if "process_group" in arguments or "group_name" in arguments:
            group = group_of(arguments)
            if group.group_name not in self._axes:
                self._axes[group.group_name] = self._axis(dist.get_process_group_ranks(group))
            self._group = self._axes[group.group_name]
        super()._count(func, name, args, kwargs)

    def _add(self, kind: str, bytes_sent: float) -> None:
        super()._add(kind, bytes_sent)
        if bytes_sent:
            axis, ranks = self._group
            count, sent = self._counts.get((kind, axis, ranks), (0, 0.0))
            self._counts[kind, axis, ranks] = count + 1, sent + bytes_sent

    def _axis(self, ranks: Sequence[int]) -> tuple[str, int]:
        """The mesh axes along which `ranks` differ, joined by "+", and the number of ranks."""
        first, *others = (self._coordinates[rank] for rank in ranks)
        differing = [
            name for number, name in enumerate(MESH_AXES) if any(other[number] != first[number] for other in others)
        ]
        return "+".join(differing), len(ranks)

    def found(self) -> list[Collectives]:
        """The counted collectives by kind, axis and group size, with the bytes that this rank sends."""
        return [
            Collectives(kind=kind, axis=axis, ranks=ranks, count=count, sent=sent)
            for (kind, axis, ranks), (count, sent) in sorted(self._counts.items())
        ]


def _places(grid: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Every rank, and its coordinates [rank, axis]."""
    return grid.flatten().tolist(), torch.ones_like(grid).nonzero()


@contextmanager
def _asking_explained() -> Iterator[None]:
    """Turn an error of the user's forward, loss or optimizer, such as a read of a value, into UserError."""
    try:
        yield
    except Exception as error:
        chain = list(_chain(error))
        asking = next((link for link in reversed(chain) if _asks_for_values(link)), None)
        place = place_of(chain[-1] if asking is None else asking)
        if asking is None and (place is None or isinstance(error, (UserError, OSError, MemoryError))):
            raise
        what = described(chain[-1] if asking is None else asking)
        why = "fails" if asking is None else "asks for the values of a tensor"
        raise UserError(
            f"plans, and dry runs with --world, take a step on shapes alone, and the job {why} in it ({what}); "
            f"{_INSTEAD[asking is not None]}"
        ) from error


# Advice where a job fails without values: for other errors (False), and for reads of values (True).
_INSTEAD = {
    False: "run it in one process first, to see whether it fails there too: --layout single",
    True: "use torch.where in place of a branch and PyTorch's operators in place of NumPy's, or have the ranks run: "
    "samestep train JOB --dry-run without --world, samestep compare JOB",
}


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and its causes, from the last raised to the first."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _asks_for_values(error: BaseException) -> bool:
    # The message is PyTorch's for `.numpy()` of a tensor without values.
    return isinstance(error, _ASKS) or ".numpy() is not supported" in str(error)


@contextmanager
def _pretended_group(rank: int, size: int) -> Iterator[None]:
    """A fake process group of `size` ranks, of which only this process, `rank`, exists."""
    if dist.is_initialized():
        raise UserError("this process is a rank already; start --dry-run --world without a launcher")
    forget_meshes()
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=size)
    try:
        with _own_groups_alone(rank):
            yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


@contextmanager
def _own_groups_alone(rank: int) -> Iterator[None]:
    """Skip `new_group` for groups without `rank`: thousands of ranks have tens of thousands of groups."""
    make = dist.new_group

    def new_group(ranks: Sequence[int] | None = None, *arguments: Any, **named: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return make(ranks, *arguments, **named)

    with new_group_replaced(new_group):
        yield
