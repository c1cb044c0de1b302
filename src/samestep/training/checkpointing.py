"""A training's checkpoints: which one it resumes from, and after which steps it saves one.

Copies in memory outlive the ranks: the last complete one is kept while the next is made.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed import ProcessGroup

from samestep import environment
from samestep.checkpoint.attempts import Tolerance
from samestep.checkpoint.compatibility import Base, changes, check_shared
from samestep.checkpoint.folder import best_of, found_in, prune
from samestep.checkpoint.identity import Identity, LearnsFrom
from samestep.checkpoint.info import Info
from samestep.checkpoint.load import CheckpointLoader, open_newest
from samestep.checkpoint.peer_memory import Neighbours
from samestep.checkpoint.save import Saver, total_bytes
from samestep.comm.mesh import new_group
from samestep.durations import parse_duration
from samestep.engines.base import Checkpointed
from samestep.errors import CheckpointError, NotSavedError
from samestep.fault_tolerance.lease import Held
from samestep.job import Checkpointing, Job
from samestep.jobfile import plain
from samestep.progress import phases
from samestep.recipe import EarlyStop
from samestep.run_folder import CHECKPOINTS, name_of, step_of
from samestep.training.earlier_run import forget
from samestep.training.early_stop import EarlyStopper
from samestep.training.evaluation import scalars
from samestep.training.learned_from import ACCEPT, looked, refuse_other_data, told
from samestep.training.session import Session
from samestep.training.state import base_of, load_state, save_state, saved_pieces


class MemoryCopies:
    """Checkpoints in a folder in each host's memory; of several hosts, each also keeps a copy of another's part."""

    def __init__(self, session: Session, place: Path, every: int) -> None:
        """`place`: folder in the host's memory; `every`: steps between two copies."""
        self._session = session
        self._every: int | None = every  # None: copies have ended, as memory is full
        self._place = place
        group = new_group(range(session.world.world_size), backend="gloo")
        ranks = environment.ranks()
        self._neighbours = Neighbours.find(group, ranks.local_rank if ranks is not None else 0)
        self._saver = Saver(
            place,
            group,
            asynchronous=True,
            durable=False,
            neighbours=self._neighbours,
            saved=lambda *_: prune(place, keep=1),
        )

    def due(self, done: int) -> bool:
        """Whether a copy is due after `done` steps; the same on every rank."""
        return self._every is not None and done % self._every == 0

    def save(self, save_into: Callable[[Saver], None]) -> None:
        """Make a copy; if memory is full, warn and make no more copies."""
        self._unless_full(lambda: save_into(self._saver))

    def prepare(self) -> None:
        self._unless_full(self._saver.prepare)

    def wait(self) -> None:
        """Wait until the last copy is complete."""
        self._unless_full(self._saver.wait)

    def _unless_full(self, act: Callable[[], None]) -> None:
        """Call `act`; on CheckpointError (memory is full), warn and make no more copies."""
        try:
            act()
        except CheckpointError as error:  # the same on all ranks
            self._every = None
            self._session.warn(f"{error}; the training goes on without copies in memory, restarts with the disk's")

    @property
    def waited_seconds(self) -> float:
        return self._saver.waited_seconds

    def newer(self, on_disk: CheckpointLoader | None, group: ProcessGroup) -> CheckpointLoader | None:
        """The copy in memory if it is complete and newer than the checkpoint on disk; else the one on disk."""
        try:
            if not self._neighbours.gather(self._place, partial(self._saver.together, where=self._place)):
                return on_disk
            opened = open_newest((self._place,), group, lambda _: None, summed=False)
        except CheckpointError as error:  # the same on all ranks
            self._session.warn(f"{error}; the last checkpoint is taken")
            return on_disk
        if opened is None or (on_disk is not None and on_disk.info.step >= opened.info.step):
            return on_disk
        return opened


class Checkpoints:
    """Saves and resumes one training according to the job's `run.checkpoint`; does nothing without it."""

    def __init__(
        self,
        job: Job,
        session: Session,
        folder: Path,
        learns: LearnsFrom,
        memory: Path | None = None,
        held: Held | None = None,
    ) -> None:
        """`folder` is the run's; `memory` a folder in the host's memory, for copies that restarts resume from.

        `learns`: what is compared at a resume, beside the recipe. `held`: the leases of the training's folders, on
        the rank that writes there.
        """
        self._recipe: dict[str, Any] = plain(job.recipe, written=True)
        if not isinstance(job.recipe.task, str):
            self._recipe["task"] = type(job.recipe.task).__name__  # an object's repr contains its address
        self._session = session
        self._job, self._run_folder, self._begun = job, folder, False
        self._settings = job.run.checkpoint
        self._last: int | None = None  # step of the last checkpoint
        self._base: Base | None = None  # frozen parameters that are not saved
        self._learns = learns
        self._identity: Identity | None = None  # of what the training learns from
        self.early_stop = EarlyStopper(job.recipe.early_stop)  # its state is saved as well
        self._best: float | None = None  # the best value of the job's metric
        if self._settings is None:
            return
        trainer = session.trainer
        assert isinstance(trainer, Checkpointed)  # by the engine's abilities, which were checked
        self._trainer = trainer
        self._best_metric, self._lowest = _best_of(self._settings, job.recipe.early_stop)
        self._folder = self._settings.folder or folder / CHECKPOINTS
        self._group = new_group(range(session.world.world_size), backend="gloo")
        tolerance = Tolerance(
            most=self._settings.max_failures,
            key="run.checkpoint.max_failures",
            fallback=self._settings.fallback_folder,
            warn=session.warn,
        )
        self._saver = Saver(
            self._folder,
            self._group,
            asynchronous=self._settings.asynchronous,
            saved=self._keep_some,
            tolerance=tolerance,
            held=held,
        )
        assert self._saver.tally is not None
        self._tally = self._saver.tally
        self._every = _Every(self._settings)
        self._memory = None
        if memory is not None and (every := self._settings.memory) is not None:
            self._memory = MemoryCopies(session, memory, every)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for checkpoints that are being written, unless this rank failed."""
        # After a failure other ranks may be gone; an incomplete checkpoint is never loaded.
        if self._settings is not None and error is None:
            with phases.status(lambda: "writing the last checkpoint"):
                try:
                    self._saver.wait()
                except NotSavedError as failure:  # a signal ends the training, or a loss that isn't finite
                    self._session.warn(str(failure))
                if self._memory is not None:
                    self._memory.wait()

    def resume(self, steps_per_epoch: int) -> int:
        """Load the checkpoint that the job names, and return its step; 0 for a new training.

        Raises CheckpointError where there is none, or it is of another training.
        """
        self._steps_per_epoch = steps_per_epoch
        if self._settings is None:
            return 0
        for place in self._saver.places:
            check_shared(place, self._group)
        only_trained = self._settings.only_trained
        if only_trained or (only_trained is None and self._session.adapter is not None):
            self._base = base_of(self._trainer, self._session.adapter, self._group)
        step = self._resumed(self._settings.resume)
        self._saver.prepare(needs=self._bytes_needed(), strict=step == 0)
        if self._memory is not None:
            self._memory.prepare()
        self._last = step
        return step

    def begin(self) -> None:
        """The training has taken its first step here: an earlier run that it replaces is removed.

        Only now has an optimizer the state that most of a checkpoint is. Raises CheckpointError if there is no room
        for it; the earlier run is then still there. Every rank must call it; only the first call does something.
        """
        if self._begun:
            return
        self._begun = True
        if self._settings is not None and self._last == 0:
            self._saver.check_room(self._bytes_needed())
        if self._session.is_main and self._job.run.overwrite:
            forget(self._job, self._run_folder)

    def _bytes_needed(self) -> int:
        """Bytes that a checkpoint would take at least if it were saved now."""
        return total_bytes(saved_pieces(self._trainer, self._session.world, self._base), self._group)

    def _resumed(self, resume: str) -> int:
        """Load the newest checkpoint on disk or in memory, and return its step; 0 if there is none.

        Raises CheckpointError where `run.checkpoint.resume` names a folder without one.
        """
        if resume == "never":
            self._identify(None)
            return 0
        places = self._saver.places if resume in ("auto", "last") else (Path(resume),)
        loader = open_newest(places, self._group, self._session.warn)
        if self._memory is not None:
            loader = self._memory.newer(loader, self._group)
        if loader is None:
            if resume == "auto":
                self._identify(None)
                self._session.warn(f"no checkpoint in {self._folder} yet: starts at step 0")
                return 0
            if resume == "last":  # each of them is damaged
                raise CheckpointError(
                    f"--resume: {self._folder} has no checkpoint that can be read; use another folder"
                )
            raise CheckpointError(f"run.checkpoint.resume is {resume}, where no checkpoint is; use resume: auto")
        self._identify(loader)
        with phases.phase(f"loading the checkpoint of step {loader.info.step:,}"):
            load_state(self._trainer, loader, self._session.world, self._session.layout)
        self._best = loader.info.metrics.get(self._best_metric or "")
        self.early_stop.restore(loader.info.extra.get("early_stop", {}), loader.info.step)
        self._session.warn(f"goes on from {loader.folder}, after step {loader.info.step:,}")
        self._tally.newest = loader.folder
        return loader.info.step

    def _identify(self, loader: CheckpointLoader | None) -> None:
        """Look at what the training learns from, and compare that and the recipe with those of a checkpoint.

        Says what has changed. Raises CheckpointError for a change that makes it another training.
        """
        assert self._settings is not None
        compared = looked(self._learns, loader, self._group)
        self._identity = compared.now
        if loader is None:
            return
        accepts = self._settings.accept_data
        if not accepts:
            refuse_other_data(compared, loader.folder, ACCEPT)
        accepted = compared.sources if accepts else None
        kept = {"same": compared.same_sources, "same_code": compared.same_code}
        for change in changes(loader.info.recipe, self._recipe, **kept, accepted=accepted):
            self._session.warn(f"{change}; the training goes on with the new value")
        for line in told(compared, loader):
            self._session.warn(line)

    def due(self, done: int) -> bool:
        """Whether a checkpoint is due after `done` steps. Every rank must call it after every step; all agree."""
        return self._settings is not None and self._every.due(done)

    def is_best(self, metrics: Mapping[str, Any] | None) -> bool:
        """Whether an evaluation is the best so far by the job's metric; raises CheckpointError if it is missing."""
        if self._settings is None or self._best_metric is None or metrics is None:
            return False
        if self._best_metric not in scalars(metrics):
            raise CheckpointError(
                f"run.checkpoint.best is {self._best_metric}, which the evaluation does not give; use "
                f"{', '.join(scalars(metrics))}"
            )
        value = float(metrics[self._best_metric])
        sign = -1 if self._lowest else 1
        if self._best is not None and sign * value <= sign * self._best:
            return False
        self._best = value
        return True

    def save(self, done: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Save the state after `done` steps, with the metrics of the evaluation just made."""
        self.begin()
        if self._settings is None or self._last == done:
            return
        self._last = done
        self._save_into(self._saver, done, scalars(metrics or {}))
        self._every.saved(done)

    def finish(self, done: int, metrics: Mapping[str, Any] | None = None) -> str | None:
        """Save after the last step, and wait for it. Returns what is lost if that can't be; the same on every rank.

        However many saves have failed before, this one is tried.
        """
        if self._settings is None:
            return None
        self._tally.last()
        with suppress(NotSavedError):  # too many had failed already
            self._saver.wait()
        if self._last == done and self._saved_step() != done:
            self._last = None
        self.save(done, metrics)
        self._saver.wait()
        if self._saved_step() == done:
            return None
        steps = "all" if self._tally.newest is None else "the"
        after = "" if self._tally.newest is None else " after it"
        return (
            f"the training came to its end, and its last checkpoint, {name_of(done)}, is not saved: "
            f"{self._tally.reason}; {self._tally.kept}: the optimizer's state of {steps} steps{after} is lost"
        )

    def _saved_step(self) -> int | None:
        """The step of the newest checkpoint; None if there is none."""
        return None if self._tally.newest is None else step_of(self._tally.newest)

    @property
    def skipped(self) -> int:
        """The saves that were left out, as the system refused them."""
        return 0 if self._settings is None else self._tally.skipped

    def _save_into(self, saver: Saver, done: int, metrics: Mapping[str, float]) -> None:
        """Save to disk or to memory with `saver`; every rank must call it."""
        save_state(
            self._trainer,
            saver,
            self._session.world,
            self._session.layout,
            engine=self._session.engine.name,
            step=done,
            epoch=done // self._steps_per_epoch,
            recipe=self._recipe,
            metrics=metrics,
            extra={"early_stop": state} if (state := self.early_stop.state()) else {},
            base=self._base,
            identity=self._identity,
        )

    def copy_due(self, done: int) -> bool:
        """Whether a copy in memory is due after `done` steps; the same on every rank."""
        return self._settings is not None and self._memory is not None and self._memory.due(done)

    def copy(self, done: int) -> None:
        """Copy the state after `done` steps into the host's memory."""
        self.begin()
        if self._settings is not None and self._memory is not None:
            self._memory.save(lambda saver: self._save_into(saver, done, {}))

    @property
    def waited_seconds(self) -> float:
        """Seconds for which checkpoints blocked the training."""
        if self._settings is None:
            return 0.0
        return self._saver.waited_seconds + (self._memory.waited_seconds if self._memory is not None else 0.0)

    def _keep_some(self, path: Path, info: Info) -> None:
        """Once a checkpoint is complete, remove all but the newest `keep` and the best."""
        settings = self._settings
        assert settings is not None
        best = None
        if self._best_metric is not None:
            saved = [checkpoint for place in self._saver.places for checkpoint in found_in(place)]
            best = best_of(saved, self._best_metric, lowest=self._lowest)
        prune(*self._saver.places, keep=settings.keep, best=best.path if best is not None else None)


def _best_of(settings: Checkpointing, early_stop: EarlyStop | None) -> tuple[str | None, bool]:
    """The metric whose best checkpoint is kept, and whether its lowest value is the best."""
    if settings.best is None and early_stop is not None:
        return early_stop.metric, early_stop.mode == "lowest"
    return settings.best, settings.best_is == "lowest"


class _Every:
    """Decides after which steps a checkpoint is due.

    Where the interval is a time, rank 0 converts it to a number of steps by its clock and broadcasts that: first
    after `_FIRST_LOOK` steps, and again after every checkpoint.
    """

    _FIRST_LOOK = 8  # steps

    def __init__(self, settings: Checkpointing) -> None:
        self._steps = settings.every if isinstance(settings.every, int) else None
        self._seconds: float | None = None
        if isinstance(settings.every, str):
            self._seconds = parse_duration(settings.every)
        self._began: tuple[int, float] | None = None  # a step, and the time at its end
        self._next: int | None = None
        self._look: int | None = None

    def due(self, done: int) -> bool:
        """Whether to save after `done` steps; the same on every rank, even where the interval is a time."""
        if self._seconds is None:
            return self._steps is not None and done % self._steps == 0
        if self._began is None:
            self._began = done, time.monotonic()
            self._look = done + self._FIRST_LOOK
        if done == self._look:
            self._agree(done)
        return done == self._next

    def saved(self, done: int) -> None:
        """Start the next interval, after a checkpoint was saved."""
        if self._seconds is not None and self._began is not None:
            self._agree(done)
            self._began = done, time.monotonic()

    def _agree(self, done: int) -> None:
        """Broadcast from rank 0 the next step to save after, from the mean seconds per step in this interval.

        The ranks' clocks differ, and a rank that saved a step earlier than the others would wait for them forever.
        """
        assert self._began is not None
        assert self._seconds is not None
        step, then = self._began
        a_step = (time.monotonic() - then) / max(1, done - step)
        first = step if done == self._look else done
        chosen: list[Any] = [max(done + 1, first + round(self._seconds / max(a_step, 1e-9)))]
        dist.broadcast_object_list(chosen, src=0)
        self._next = chosen[0]


def check_place(settings: Checkpointing | None, folder: Path | None) -> None:
    """Raise CheckpointError, before any process starts, if a folder is missing or a file."""
    if settings is None:
        return
    if settings.resume not in ("never", "auto", "last") and not Path(settings.resume).is_dir():
        there = "that is a file" if Path(settings.resume).exists() else "there is no such folder"
        raise CheckpointError(
            f"run.checkpoint.resume is {settings.resume}: {there}; use never, auto, last, or the path of a checkpoint"
        )
    place = settings.folder or (folder / CHECKPOINTS if folder is not None else None)
    fallback = settings.fallback_folder
    for key, named in (("folder", place), ("fallback_folder", fallback)):
        if named is not None:
            _check_named(f"run.checkpoint.{key}", named)
    if place is not None and fallback is not None and place.absolute() == fallback.absolute():
        raise CheckpointError(
            f"run.checkpoint.fallback_folder is {fallback}, where checkpoints are saved anyway; use a folder on "
            "another disk"
        )


def _check_named(key: str, place: Path) -> None:
    """Raise CheckpointError if a folder that a key names is a file."""
    there = next((path for path in (place, *place.parents) if path.exists()), place)
    if not there.is_dir():
        raise CheckpointError(f"{key} is {place}: {there} is a file; use a folder, or a new path")
