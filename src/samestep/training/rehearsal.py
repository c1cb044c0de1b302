"""Rehearsal: one rank's steps of a job of any size, without other ranks, memory or values.

The rank's own model is built, spread and stepped by the code that trains, on tensors that have shapes alone and in a
process group that sends nothing. So what it holds and sends is counted as in a training, and what would fail there
for its shapes, its layout or its model fails here with the same message. What is decided by values, such as whether a
sliced layer still gives the same numbers, is taken to be well.

Each rank of the layout is rehearsed in turn in this process, with a process group that sends nothing and tensors
without values (`parallel.valueless`). What a step allocates, sends and computes is counted as it is taken. Ranks that
differ only along data axes hold the same shapes but for their samples, so the one with the largest micro-batches
stands for all.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed import device_mesh

from samestep.comm.mesh import rank_grid
from samestep.comm.traffic import Traffic, group_of
from samestep.data.loader import Loader, StepBatch
from samestep.data.order import Place, SampleOrder
from samestep.engines.precision import parameter_dtype
from samestep.errors import UserError, described, place_of
from samestep.job import Job
from samestep.launch.world import World
from samestep.layout import MESH_DIMENSIONS, Layout
from samestep.parallel.deferred_init import InitialModel, forget_values, new_objects_alone
from samestep.parallel.nests import tensors_in
from samestep.parallel.parallel_model import Details, Findings
from samestep.parallel.pipeline.schedule import micro_batches
from samestep.parallel.valueless import Mail, NotSentYet, Valueless
from samestep.tasks.base import Task
from samestep.training import usage as usages
from samestep.training.fit import Training, measured_step
from samestep.training.own_loop import check_lengths
from samestep.training.step_work import CountedWork, StepWork
from samestep.training.usage import Usage

_MOST_SLICES = 512  # of a global batch that are looked at
_MOST_STAGES = 3  # stages between the first and the last hold less than the first
_ASKS = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Messages of one kind along one axis of the mesh in a step."""

    kind: str
    axis: str  # such as "tensor", or "replicate+shard" of a group over both
    ranks: int  # in the group
    count: int
    sent: float  # bytes that this rank sends, by the formulas of `samestep.comm.traffic`


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a rank would hold and send in a step."""

    rank: int
    stage: int  # its place in the pipeline
    usage: Usage
    collectives: Sequence[Collectives]
    work: StepWork

    def to_json(self) -> dict[str, Any]:
        """Bytes of each kind, messages by axis, and the work of the step's operators."""
        return {
            "rank": self.rank,
            "pipeline_rank": self.stage,
            "usage_bytes": self.usage.to_json(),
            "collectives": [asdict(each) for each in self.collectives],
            "work": self.work.to_json(),
        }


def check_rehearsed(job: Job, layout: Layout) -> None:
    """Raise UserError for what can't be rehearsed."""
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
    """Take a step of some ranks of a layout, one after the other.

    Where none is named: ranks of the pipeline stages (`ranks_of_stages`) with the largest micro-batches in that step.

    Raises UserError where the ranks would, and for a model whose forward asks for values of what it has computed.
    """
    check_rehearsed(job, layout)
    job = replace(job, run=replace(job.run, sparse_rows="off"))
    with _asking_told():
        wanted = ranks_of_stages(layout, _largest_share(job, task, layout)) if ranks is None else list(ranks)
    guessing = _Ranks(job, task, layout, Mail(guesses=True))
    try:
        found = [guessing.of(rank) for rank in wanted]
    except NotSentYet:
        pass
    except UserError:
        if not guessing.mail.guessed:
            raise
    else:
        if not guessing.mail.wrong:
            return found
    exact = _Ranks(job, task, layout, Mail(guesses=False))
    return [exact.of(rank) for rank in wanted]


class _Ranks:
    """Ranks of a layout, rehearsed one after the other, each as often as it takes to know what others send it."""

    def __init__(self, job: Job, task: Task, layout: Layout, mail: Mail) -> None:
        self._job = job
        self._task = task
        self._layout = layout
        self.mail = mail
        self._findings = Findings()
        self._found: dict[int, Rehearsal] = {}

    def of(self, rank: int) -> Rehearsal:
        """Raises NotSentYet where messages are guessed, and one has nothing to be guessed by."""
        while rank not in self._found:
            try:
                self._rehearse(rank)
            except NotSentYet as missing:
                if self.mail.guesses:
                    raise
                self._hear(missing)
        return self._found[rank]

    def _hear(self, missing: NotSentYet) -> None:
        """Rehearse a rank until it has sent a message, which it may do before it has all that it waits for itself."""
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
        with _pretended_group(rank, self._layout.size), _asking_told():
            mode = Valueless(self.mail)
            self._found[rank] = _rehearse_rank(self._job, self._task, self._layout, rank, mode, self._findings)


def ranks_of_stages(layout: Layout, data_index: int = 0) -> list[int]:
    """Ranks of one pipeline: all of a short one, else the first, the last and some between, evenly spaced.

    Of the pipelines, the first one that takes slice `data_index` of a global batch.
    """
    line = rank_grid(layout).reshape(layout.pipeline, layout.data_ranks, -1)[:, data_index, 0].tolist()
    number = min(len(line), _MOST_STAGES)
    return [line[round(place * (len(line) - 1) / max(number - 1, 1))] for place in range(number)]


def _largest_share(job: Job, task: Task, layout: Layout) -> int:
    """Which slice of the measured step's batch takes most memory: samples may differ in length, and slices in number.

    Under 1F1B a stage holds the activations of at most `layout.pipeline` micro-batches in a row (Narayanan et al.
    2021, section 2.2), so the largest so many in a row are compared, by their elements.
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
    elements: dict[int, int] = {}  # by slice; of many thousands some, evenly spaced
    for index in range(0, layout.data_ranks, -(-layout.data_ranks // _MOST_SLICES)):
        (taken,) = Loader(
            samples,
            task.collate,
            order,
            place=Place(index=index, of=layout.data_ranks),
            device=torch.device("cpu"),
            dtype=torch.float32,
            start=step,
            stop=step + 1,
            micro_batch=run.micro_batch,
            micro_batches=micro_batches(layout, recipe.batch, run.micro_batch),
        )
        sizes = [sum(part.numel() for part in tensors_in(tuple(each.batch))) for each in taken.micro_batches]
        elements[index] = max(sum(sizes[first : first + layout.pipeline]) for first in range(len(sizes)))
    return max(elements, key=elements.__getitem__)


class _RehearsedTraining(Training):
    """A training whose model has no values, and no memory."""

    def __init__(
        self, job: Job, task: Task, world: World, layout: Layout, mode: Valueless, findings: Findings
    ) -> None:
        self._mode = mode
        self._findings = findings
        super().__init__(job, task, world, layout)

    def _build(self, *, recorded: bool) -> InitialModel:
        """The model, built without values where that goes, and else whole, its values forgotten."""
        try:
            with self._mode:
                built = super()._build(recorded=False)
        except Exception:  # such as weights that are read from a file; what is the model's mistake shows again
            built = super()._build(recorded=False)
        with self._mode:
            recipe = self.recipe
            forget_values(built.model, parameter_dtype(recipe.precision, master_weights=recipe.master_weights))
        return built

    def _prepare(self, built: InitialModel, details: Details) -> None:
        """Spread without values; what one rank has found out about the model the next ones are told."""
        with self._mode:
            super()._prepare(built, replace(details, findings=self._findings))

    def rehearse(self) -> tuple[Usage, Sequence[Collectives], StepWork]:
        """Take the first step, which makes the optimizer's state, and the one that a training measures."""
        session, last = self.session, self.measured_step
        batches = session.batches(
            self.samples, batch=self.recipe.batch, collate=self.task.collate, steps=last + 1, lengths=self._lengths
        )
        counted, work = _ByAxis(session.layout), CountedWork()
        usage: Usage | None = None
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
        assert usage is not None  # a job has at least a sample, and steps go over its samples again and again
        return usage, counted.found(), work.found()


def _few_of(batch: StepBatch, layout: Layout) -> StepBatch:
    """As few micro-batches as the schedule is made for: enough for what a first step makes."""
    few = 2 if layout.schedule in ("1f1b", "gpipe") else max(layout.pipeline, 2)
    return replace(batch, micro_batches=batch.micro_batches[:few])


def _rehearse_rank(job: Job, task: Task, layout: Layout, rank: int, mode: Valueless, findings: Findings) -> Rehearsal:
    """One rank's step, as that rank of a world that isn't there."""
    world = World(rank=rank, world_size=layout.size, device=torch.device("cpu"), threads=torch.get_num_threads())
    training = _RehearsedTraining(job, task, world, layout, mode, findings)
    usage, collectives, work = training.rehearse()
    stage = training.session.mesh.coordinate("pipeline")
    return Rehearsal(rank=rank, stage=stage, usage=usage, collectives=collectives, work=work)


class _ByAxis(Traffic):
    """Counts messages by kind and by the axes of the mesh along which their groups lie."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._coordinates = {
            int(rank): place.tolist() for rank, place in zip(*_places(rank_grid(layout)), strict=True)
        }
        self._axes: dict[str, tuple[str, int]] = {}  # by the group's name
        self._group = ("", 0)
        self._counts: dict[tuple[str, str, int], tuple[int, float]] = {}

    def _count(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Find the mesh axes of the message's group, then count it."""
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        given |= kwargs
        if "process_group" in given or "group_name" in given:
            group = group_of(given)
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
        """The axes along which some ranks differ, joined by "+", and how many ranks they are."""
        first, *others = (self._coordinates[rank] for rank in ranks)
        differing = [
            name
            for number, name in enumerate(MESH_DIMENSIONS)
            if any(other[number] != first[number] for other in others)
        ]
        return "+".join(differing), len(ranks)

    def found(self) -> list[Collectives]:
        """What one step sends, by kind, axis and size of the group; bytes of this rank."""
        return [
            Collectives(kind=kind, axis=axis, ranks=ranks, count=count, sent=sent)
            for (kind, axis, ranks), (count, sent) in sorted(self._counts.items())
        ]


def _places(grid: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Every rank, and its coordinates [rank, axis]."""
    return grid.flatten().tolist(), torch.ones_like(grid).nonzero()


@contextmanager
def _asking_told() -> Iterator[None]:
    """Raise UserError where a forward, a loss or an optimizer asked for a value, or failed by its own code."""
    try:
        yield
    except Exception as error:
        chain = list(_chain(error))
        asking = next((each for each in reversed(chain) if _asks_for_values(each)), None)
        place = place_of(chain[-1] if asking is None else asking)
        if asking is None and (place is None or isinstance(error, (UserError, OSError, MemoryError))):
            raise
        what = described(chain[-1] if asking is None else asking)
        why = "fails" if asking is None else "asks for the values of a tensor"
        raise UserError(
            f"plans, and dry runs with --world, take a step on shapes alone, and the job {why} in it ({what}); "
            f"{_INSTEAD[asking is not None]}"
        ) from error


# What to use where a job fails on shapes alone: by its own mistake, or since it asks for values.
_INSTEAD = {
    False: "run it in one process first, to see whether it fails there too: --layout single",
    True: "use torch.where in place of a branch and PyTorch's operators in place of NumPy's, or have the ranks run: "
    "samestep train JOB --dry-run without --world, samestep compare JOB",
}


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that led to it, the first one last."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _asks_for_values(error: BaseException) -> bool:
    # The latter is what PyTorch says of a tensor without values that is to become NumPy's.
    return isinstance(error, _ASKS) or ".numpy() is not supported" in str(error)


@contextmanager
def _pretended_group(rank: int, size: int) -> Iterator[None]:
    """A process group of so many ranks, of which this process is one and the others are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("this process is a rank already; start --dry-run --world without a launcher")
    _forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with _own_groups_alone(rank):
            yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


@contextmanager
def _own_groups_alone(rank: int) -> Iterator[None]:
    """Make no groups that the rank is not in: of thousands of ranks there are tens of thousands."""
    make = dist.new_group

    def new_group(ranks: Sequence[int] | None = None, *given: Any, **named: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return make(ranks, *given, **named)

    places: tuple[Any, ...] = (dist, device_mesh)
    for place in places:
        place.new_group = new_group
    try:
        yield
    finally:
        for place in places:
            place.new_group = make


def _forget_meshes() -> None:
    """Clear what DTensor remembers of a mesh, since another rank's is equal for it and has groups of its own."""
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
