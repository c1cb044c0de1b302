"""RankSupervision: what one rank does so that its training outlives faults. The loop tells it where it is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from samestep import environment
from samestep.errors import UserError
from samestep.fault_tolerance import stacks
from samestep.fault_tolerance.injection import Injection, spoiled
from samestep.fault_tolerance.pace import Pace
from samestep.fault_tolerance.preemption import Notice
from samestep.fault_tolerance.status import Heartbeat, Phase, RankStatus, job_info_of, write_job_info
from samestep.job import Job, Run
from samestep.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a rank is told about the start that it is part of."""

    number: int = 0
    # Where ranks leave how far they are, and find out that the job is to stop; None: no process looks after them.
    folder: Path | None = None
    # Where copies of the training's state lie in the host's memory, from round to round; None: there are none.
    memory: Path | None = None
    # Where the run leaves its files, as an earlier round has chosen; None: none has.
    run_folder: Path | None = None

    @classmethod
    def told(cls) -> Self | None:
        """The round of a rank that its host's agent has started; None in any other process."""
        told = environment.told_round()
        if told is None:
            return None
        run_folder = Path(told.run_folder) if told.run_folder is not None else None
        memory = Path(told.memory) if told.memory is not None else None
        return cls(number=told.number, folder=Path(told.folder), run_folder=run_folder, memory=memory)


_APART = 0.5  # seconds between heartbeats, at most
_ASKED_IN_A_NOTICE = 4.0  # times that free-running ranks ask each other in the time that a signal leaves them


class RankSupervision:
    """One rank's part in being supervised, in one round."""

    def __init__(self, run: Run, round_: Round) -> None:
        ranks = environment.ranks()
        self._rank = ranks.rank if ranks is not None else 0
        self._world_size = ranks.world_size if ranks is not None else 1
        self._run = run
        self._round = round_
        self._injection = Injection(run.inject, self._rank, round_.number)
        self._notice: Notice | None = None
        self.pace = Pace()
        self._beat: RankStatus | None = None
        self._heartbeat: Heartbeat | None = None
        self._stack_file: IO[str] | None = None
        self._signal: int | None = None

    def __enter__(self) -> Self:
        folder = self._round.folder
        if folder is not None:
            write_job_info(folder, self._rank, job_info_of(self._run))
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
        """The ranks have met. Where the training can be saved, a signal stops it after a step from now on."""
        if self._run.checkpoint is not None:
            self._notice = Notice(self._world_size, told=self._round.folder is not None)
            self._notice.listen()

    def ask_seldom(self) -> None:
        """The ranks don't wait for each other in every step, and shall do so seldom to hear of signals."""
        if self._notice is not None:
            self._notice.apart = self._run.grace_period / _ASKED_IN_A_NOTICE

    def goes_on(self, job: Job) -> bool:
        """Whether the run may have been begun before, in an earlier round or an earlier start of the job."""
        return self._round.number > 0 or (job.run.checkpoint is not None and job.run.checkpoint.resume != "never")

    def runs(self, layout: Layout, folder: Path) -> None:
        """The ranks have met, and agree on the run's folder."""
        if self._round.folder is not None:
            said = replace(job_info_of(self._run), layout=str(layout), run_folder=str(folder.absolute()))
            write_job_info(self._round.folder, self._rank, said)

    def check(self, total_steps: int) -> None:
        """Raise UserError for a fault that would never be committed."""
        for fault in self._run.inject:
            if fault.step >= total_steps:
                raise UserError(
                    f"run.inject: step {fault.step} is never taken; the training's last one is {total_steps - 1}"
                )

    def _hear(self, number: int) -> None:
        """The heartbeat's thread has found a notice of the starting process."""
        if self._notice is not None:
            self._notice.hear(number)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around a step."""
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
        if self._beat is not None:
            self._beat.end(step)

    @property
    def memory(self) -> Path | None:
        """Where copies of the training's state lie in the host's memory."""
        return self._round.memory

    @property
    def stop_signal(self) -> int | None:
        """The signal for which all ranks stop after the step that was just taken."""
        return self._signal

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Around what is not a step and may take longer."""
        if self._beat is None:
            yield
        else:
            with self._beat.phase(phase):
                yield
        self.pace.pause()

    def ends(self) -> None:
        """The last step is done; what is left may take longer."""
        if self._beat is not None:
            self._beat.enter("end")

    def loss(self, step: int, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The loss of a step, spoiled where that is asked for."""
        return spoiled(loss) if self._injection and self._injection.spoils(step) else loss
