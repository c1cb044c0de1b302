"""RankSupervision: one rank's side of fault tolerance. The training loop reports its progress to it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from samestep import environment
from samestep.errors import UserError
from samestep.fault_tolerance import stacks
from samestep.fault_tolerance.injection import Injection
from samestep.fault_tolerance.lease import Held
from samestep.fault_tolerance.pace import Pace
from samestep.fault_tolerance.preemption import StopAgreement
from samestep.fault_tolerance.status import Heartbeat, JobInfo, Phase, RankStatus, job_info_of, write_job_info
from samestep.job import Job, Run
from samestep.layout import Layout
from samestep.progress import phases


@dataclass(frozen=True, kw_only=True)
class Round:
    """The round that a rank belongs to, as the process that started it gives it."""

    number: int = 0
    # For the ranks' status files and the stop notice; None: no watchdog.
    folder: Path | None = None
    # For in-memory checkpoints, kept from round to round; None: there are none.
    memory: Path | None = None
    # The run's folder, chosen by an earlier round; None: not chosen yet.
    run_folder: Path | None = None
    # Random id of the job's start, the same in all rounds and on all hosts; None: no agent started this process.
    start: str | None = None

    @classmethod
    def from_agent(cls) -> Self | None:
        """Return the round of a rank started by a node's agent; None in any other process."""
        own_round = environment.round_of_rank()
        if own_round is None:
            return None
        run_folder = Path(own_round.run_folder) if own_round.run_folder is not None else None
        memory = Path(own_round.memory) if own_round.memory is not None else None
        return cls(
            number=own_round.number,
            folder=Path(own_round.folder),
            run_folder=run_folder,
            memory=memory,
            start=own_round.start,
        )


_APART = 0.5  # seconds between heartbeats, at most
_IN_WORDS: Mapping[Phase, str] = {"evaluation": "evaluating", "checkpoint": "saving a checkpoint"}
_ASKED_IN_A_NOTICE = 4.0  # all-reduces for the stop signal within one grace period


class RankSupervision:
    """Reports this rank's status, listens for the stop notice, and commits injected faults, in one round."""

    def __init__(self, run: Run, round_: Round, held: Held | None = None) -> None:
        """`held`: the leases of the training's folders; None where this rank writes nothing there."""
        ranks = environment.ranks()
        self._rank = ranks.rank if ranks is not None else 0
        self._world_size = ranks.world_size if ranks is not None else 1
        self._run = run
        self._round = round_
        self.held = held
        self._injection = Injection(run.inject, self._rank, round_.number)
        self._notice: StopAgreement | None = None
        self.pace = Pace()
        self._beat: RankStatus | None = None
        self._heartbeat: Heartbeat | None = None
        self._stack_file: IO[str] | None = None
        self._signal: int | None = None
        self._done = 0  # steps

    def __enter__(self) -> Self:
        folder = self._round.folder
        if folder is not None:
            self._publish(job_info_of(self._run))
            with suppress(OSError):  # without room for it a hang is told without a stack
                self._stack_file = stacks.answer(folder, self._rank)
            self._beat = RankStatus(folder, self._rank)
            limit = self._run.hang_limit
            self._heartbeat = Heartbeat(
                folder,
                self._rank,
                apart=min(_APART, limit / 10) if limit is not None else _APART,
                own=self.pace,
                noticed=self._hear,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._beat is not None:
            self._beat.close("left" if error is None else "failed")
        if self._stack_file is not None:
            stacks.ignore(self._stack_file)
        if self._notice is not None:
            self._notice.leave()

    def joined(self) -> None:
        """The ranks have joined their group. From now on a signal stops a training that can be saved after a step."""
        if self._run.checkpoint is not None:
            self._notice = StopAgreement(self._world_size, forwarded=self._round.folder is not None)
            self._notice.listen()

    def ask_seldom(self) -> None:
        """Agree on signals rarely: the ranks run freely, and a frequent all-reduce would synchronize them."""
        if self._notice is not None:
            self._notice.apart = self._run.grace_period / _ASKED_IN_A_NOTICE

    def goes_on(self, job: Job) -> bool:
        """Whether the run may have been started before, by an earlier round or an earlier start of the job."""
        return self._round.number > 0 or (job.run.checkpoint is not None and job.run.checkpoint.resume != "never")

    def runs(self, layout: Layout, folder: Path) -> None:
        """Publish the layout and the run's folder, on which the ranks have agreed."""
        if self._round.folder is not None:
            self._publish(replace(job_info_of(self._run), layout=str(layout), run_folder=str(folder.absolute())))

    def _publish(self, info: JobInfo) -> None:
        """Publish facts about the job, if there is room for them."""
        assert self._round.folder is not None
        with suppress(OSError):  # the starting process knows most of them
            write_job_info(self._round.folder, self._rank, info)

    def check(self, total_steps: int) -> None:
        """Raise UserError for an injected fault in a step that is never taken."""
        for fault in self._run.inject:
            if fault.step >= total_steps:
                raise UserError(
                    f"run.inject: step {fault.step} is never taken; the training's last one is {total_steps - 1}"
                )

    def _hear(self, number: int) -> None:
        """Pass the starting process's notice on; called by the heartbeat thread."""
        if self._notice is not None:
            self._notice.hear(number)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Context of one step."""
        if self._beat is not None:
            self._beat.begin(step)
        if self._injection:
            self._injection.before(step)
        if self._notice is not None:
            self._notice.begin(step)
        self.pace.begin()
        yield
        if self._notice is not None:
            self._signal = self._notice.end(step)
        self.pace.end()
        self._done = step + 1
        if self._beat is not None:
            self._beat.end(step)

    @property
    def memory(self) -> Path | None:
        """Folder in memory for checkpoints of the training's state."""
        return self._round.memory

    @property
    def stop_signal(self) -> int | None:
        """The signal for which all ranks stop after the step that was just taken."""
        return self._signal

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Context of a phase other than a step, which may take longer."""
        text = f"{_IN_WORDS.get(phase, phase)} after step {self._done:,}"
        with phases.phase(text, once=phase), nullcontext() if self._beat is None else self._beat.phase(phase):
            yield
        self.pace.pause()

    def ends(self) -> None:
        """The last step is done; the rest (reports, final checkpoint) may take longer."""
        if self._beat is not None:
            self._beat.enter("end")

    def spoils(self, step: int) -> bool:
        """Whether a fault is injected that makes this step's loss NaN; True once for each such fault."""
        return bool(self._injection) and self._injection.spoils(step)
