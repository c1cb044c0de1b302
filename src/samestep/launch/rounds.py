"""NodeRounds: one host's view of a job's rounds: watches its ranks, and posts what ended a round.

Every host that ends a round posts the reason as far as it knows. The first host of the next round finds the root
cause among them, and reports it once its ranks take steps again.

The post of a round is one key in the hosts' store for each host. A rank that fails because its peer is gone
(`Failure.follows`) posts so, and isn't taken for the cause as long as another host has a cause of its own; a host
that is lost comes before ranks that failed, and of equals the earliest counts. At the end of a job that has failed,
the last round's first host waits 2 s for all posts.
"""

import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from samestep import environment, file_errors
from samestep.environment import RankRound
from samestep.errors import StartError
from samestep.fault_tolerance import status
from samestep.fault_tolerance.fault import Fault, PendingFault, cause_of, first_step, tell
from samestep.fault_tolerance.preemption import Signals
from samestep.fault_tolerance.status import JobInfo, Progress, read_job_info
from samestep.fault_tolerance.watchdog import Hang, Kill, OtherHosts, Watchdog
from samestep.launch.endings import server_pid
from samestep.launch.logs import say
from samestep.launch.membership import RoundMember
from samestep.launch.node_heartbeat import HostStatus
from samestep.launch.rendezvous import HostRound, NodeRendezvous, RoundPost, round_key
from samestep.launch.signed_store import Moment, Name, shortened
from samestep.run_folder import RunPlace

_OTHERS = 2.0  # seconds to wait for all hosts' posts about the last round
_APART = 0.1  # seconds between two looks

_RUN_FOLDER, _START = "run-folder", "start"


@dataclass(frozen=True, kw_only=True)
class RanksEnded:
    """Why this host's ranks ended, as far as this host knows."""

    rank: int  # the first one that failed
    reason: str  # its traceback, or the signal that ended it
    at: Moment  # seconds since 1970
    follows: bool = False  # whether its reason is a lost connection to another rank


@dataclass(frozen=True, kw_only=True)
class RunFolderPost:
    """The run's folder, which the first host chose."""

    path: Name


@dataclass(frozen=True, kw_only=True)
class StartPost:
    """The random id of a start of the job."""

    id: Name


@dataclass(frozen=True, kw_only=True)
class RanksPost:
    """The ranks of a host in a round."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EndPost:
    """How a host left a round."""

    why: RanksEnded | None
    step: int  # of the rank that failed; -1: unknown
    moment: Moment | None  # its last progress
    done: int  # complete steps of the training
    layout: str | None
    lost: bool = False  # whether the host is gone, and another one fills this in


class NodeRounds:
    """Rounds of a job on one host."""

    def __init__(
        self,
        hosts: NodeRendezvous,
        place: Path,
        memory: Path,
        run: RunPlace | None,
        *,
        job_info: Callable[[], JobInfo] | None = None,
        signals: Signals | None = None,
    ) -> None:
        """`place` and `memory` are scratch folders of this host, the second in memory, removed with its agent.

        `run`: a samestep job's run folder. `job_info`: the job's facts before its ranks publish them. `signals`:
        handlers that let the ranks save.
        """
        self._run = run
        self._knows = job_info
        self._known: JobInfo | None = None  # facts of the current round, before its ranks publish theirs
        self._signals = signals
        self.run_folder: Path | None = None  # the same on all hosts after `agree`
        self._memory = memory
        self._hosts = hosts
        self._place = place
        self._round: HostRound | None = None
        self._folder = place
        self._watch: Watchdog | None = None
        self._about: JobInfo | None = None
        self._known_folder: str | None = None  # the run's folder as known when this round began
        # Offset from this host's monotonic clock to wall-clock time, which hosts share. Constant, so that the status
        # of a rank without progress doesn't change.
        self._began = time.time() - time.monotonic()
        self._came: Sequence[str] = ()  # hosts that were not in the previous round
        self._pending = PendingFault(self._tell)
        self.hang: Hang | None = None  # of a rank on this host, in the last finished round

    @property
    def number(self) -> int:
        """Number of the current round, from 0."""
        return self._round.number if self._round is not None else 0

    @property
    def took_a_step(self) -> bool:
        """Whether a rank of this host has taken a step in the current round."""
        return self._watch is not None and any(progress.first_done_at for progress in self._watch.read())

    @property
    def step(self) -> int | None:
        """The step that this host's ranks are in, counted from 0; None if they have told none."""
        return (
            max((progress.step for progress in self._watch.last if progress.step >= 0), default=None)
            if self._watch
            else None
        )

    @property
    def grace_period(self) -> float:
        """Seconds that the ranks need to save and end; 0 if they have not published it."""
        return self._about.grace_period if self._about is not None else 0.0

    def agree(self) -> None:
        """Agree with the other hosts on the run's folder, after the rendezvous. Raises what PyTorch's stores raise.

        The first host chooses it, since its first rank writes the run; it stays the same in all rounds.
        """
        round_ = self._hosts.round
        if self._run is None or round_ is None:
            return
        if round_.first:
            post = self._hosts.posted(_RUN_FOLDER, RunFolderPost) or RunFolderPost(path=str(self._run.chosen()))
            self._hosts.post(_RUN_FOLDER, post)
            round_.store.write(_RUN_FOLDER, post)
        self.run_folder = Path(round_.store.wait(_RUN_FOLDER, RunFolderPost).path)

    def begin(self, ranks: Sequence[int]) -> None:
        """Begin a round after the rendezvous; `ranks` are about to be started here."""
        round_ = self._round = self._hosts.round
        assert round_ is not None
        self._folder = self._made(f"round-{round_.number}", ranks)
        told = self._hosts.posted(_RUN_FOLDER, RunFolderPost)
        self._known_folder = str(self.run_folder) if self.run_folder is not None else told and told.path
        environment.publish_round(
            RankRound(
                number=round_.number,
                folder=str(self._folder),
                run_folder=self._known_folder,
                memory=str(self._memory),
                start=self._start_of_job(round_),
            )
        )
        self._about = self._known = self._knows() if self._knows is not None else None
        if round_.first and round_.number > 0:
            if (cause := self._root_cause(round_)) is not None:
                fault, moment, done = cause
                next_layout = self._about.layout if self._about is not None else None
                self._pending.keep(replace(fault, next_layout=next_layout), moment, done)
            self._came = self._new(round_)
        self._watch = Watchdog(
            self._folder,
            ranks,
            limit=self._about.hang_limit if self._about is not None else None,
            goes_on=self._goes_on,
            elsewhere=self._elsewhere,
            server=server_pid,
        )
        self._watch.__enter__()
        if self._signals is not None:
            self._signals.begin(self._folder, self._watch)
        self._hosts.post(_ranks_key(round_.number, self._hosts.node), RanksPost(ranks=tuple(ranks)))
        self._hosts.heartbeat.enter(round_.number, self._hosts.peers(), self._word)

    def _start_of_job(self, round_: HostRound) -> str | None:
        """The random id of this start of the job, from the first host of the first round."""
        post = self._hosts.posted(_START, StartPost)
        if post is None and round_.first:
            post = StartPost(id=uuid.uuid4().hex)
            self._hosts.post(_START, post)
        return None if post is None else post.id

    def _made(self, name: str, ranks: Sequence[int]) -> Path:
        """Create a round's folder for the ranks' status: among temporary files, or in memory if there is no room.

        Raises StartError if there is none either.
        """
        reasons: list[str] = []
        for place in (self._place, self._memory):
            folder = place / name
            shutil.rmtree(folder, ignore_errors=True)
            try:
                folder.mkdir(parents=True)
                status.reserve(folder, ranks)
            except OSError as error:
                elsewhere = "point TMPDIR to a folder with room"
                reasons.append(f"{place}: {file_errors.reason_of(error, place, elsewhere=elsewhere)}")
            else:
                if reasons:
                    say(f"the ranks' status can't be written into {reasons[0]}; it is in {folder}")
                return folder
        raise StartError(f"the ranks' status can't be written: {'; '.join(reasons)}")

    def started(self, pids: Mapping[int, int]) -> None:
        """This host's ranks have started, as these processes."""
        if self._watch is not None:
            self._watch.started(pids)

    @property
    def kills(self) -> Mapping[int, Kill]:
        """The ranks that the watchdog has killed in the current round."""
        return self._watch.kills if self._watch is not None else {}

    def look(self) -> None:
        """Read the facts that the ranks publish about their job; to be called repeatedly."""
        info = read_job_info(self._folder)
        if info is None:
            return
        if self._known is not None and info.layout is None:
            info = replace(info, layout=self._known.layout)
        if info == self._about:
            return
        self._about = info
        if self._watch is not None:
            self._watch.limit = info.hang_limit
        # A script's training publishes its folder only now.
        if self._run is None and info.run_folder is not None and self._round is not None and self._round.first:
            self._hosts.post(_RUN_FOLDER, RunFolderPost(path=info.run_folder))

    def end(self, why: RanksEnded | None) -> None:
        """End the round on this host, whose ranks have ended; `why` if one of them failed."""
        if self._watch is None or self._round is None:
            return
        watch, self._watch = self._watch, None
        if self._signals is not None:
            self._signals.end()
        watch.__exit__(None, None, None)
        self.look()
        self.hang = watch.hang
        if watch.hang is not None:
            why = RanksEnded(rank=watch.hang.rank, reason=watch.hang.reason, at=time.time())
        self._pending.ends()
        own = next((progress for progress in watch.last if why is not None and progress.rank == why.rank), None)
        # The rank's last progress: at most a step before the fault, and never after it.
        moment = None if own is None else self._began + own.moved_at
        left = EndPost(
            why=replace(why, reason=shortened(why.reason)) if why is not None else None,
            step=own.step if own is not None else -1,
            moment=moment,
            done=max((progress.done for progress in watch.last), default=0),
            layout=self._about.layout if self._about is not None else None,
        )
        self._hosts.post(_end_key(self._round.number, self._hosts.node), left)

    def close(self, *, failed: bool) -> None:
        """Close after the last round; with `failed`, write its fault to the run's folder."""
        self._pending.ends()
        round_ = self._round
        if failed and round_ is not None and round_.first and self._folder_of_run() is not None:
            until = time.monotonic() + _OTHERS
            while time.monotonic() < until and not all(
                self._hosts.posted(_end_key(round_.number, member.node), EndPost) for member in round_.members
            ):
                time.sleep(_APART)
            cause = self._root_cause(replace(round_, number=round_.number + 1, members=()))
            if cause is not None:
                # Print it only if the job was restarted or interrupted: otherwise, and for a command, the final error
                # says it all.
                interrupted = self._signals is not None and self._signals.number is not None
                self._tell(cause[0], aloud=self._known is not None and (round_.number > 0 or interrupted))
        shutil.rmtree(self._place, ignore_errors=True)

    def _word(self) -> Mapping[str, Any]:
        """Return the status of this host's ranks, which each heartbeat carries."""
        watch = self._watch
        if watch is None:
            return {}
        ranks = tuple(replace(progress, moved_at=self._began + progress.moved_at) for progress in watch.last)
        return {"ranks": ranks, "entered": watch.entered}

    def _elsewhere(self) -> OtherHosts:
        """Return the status of other hosts' ranks from their heartbeats; the watchdog judges all ranks together."""
        statuses = self._hosts.heartbeat.said.values()
        return OtherHosts(
            ranks=[rank for status in statuses for rank in status.ranks],
            entered={rank: counts for status in statuses for rank, counts in status.entered.items()},
        )

    def _root_cause(self, round_: HostRound) -> tuple[Fault, float, int] | None:
        """Find what ended the previous round; None if nothing failed, as when a host has joined."""
        before = round_.number - 1
        round_post = self._hosts.posted(round_key(before), RoundPost)
        if round_post is None:
            return None
        here = {member.agent for member in round_.members}
        ranks: dict[int, Sequence[int]] = {}
        for member in round_post.members:
            post = self._hosts.posted(_ranks_key(before, member.node), RanksPost)
            ranks[member.node] = post.ranks if post is not None else ()
        lefts: list[tuple[tuple[bool, bool, float], str, RanksEnded, EndPost]] = []
        done = 0
        for member in round_post.members:
            left = self._hosts.posted(_end_key(before, member.node), EndPost)
            if left is None and member.agent not in here and here:
                left = self._lost(member, ranks[member.node])
            if left is None:
                continue
            done = max(done, left.done)
            if (why := left.why) is not None:
                # A lost host is the cause of its ranks' end; a lost connection follows from another rank.
                lefts.append(((why.follows, not left.lost, why.at), member.name, why, left))
        if not lefts:
            return None
        _, host, why, left = min(lefts, key=lambda left_: left_[0])
        fault = Fault(
            round=before,
            rank=why.rank,
            host=host or None,
            cause=cause_of(why.reason),
            reason=why.reason,
            step=left.step,
            at=datetime.fromtimestamp(why.at, UTC).isoformat(timespec="milliseconds"),
            processes=sum(len(of_node) for of_node in ranks.values()),
            layout=next((left_host.layout for *_, left_host in lefts if left_host.layout), ""),
        )
        return fault, left.moment or why.at, done

    def _new(self, round_: HostRound) -> Sequence[str]:
        """Return the hosts of a round that were not in the previous one."""
        post = self._hosts.posted(round_key(round_.number - 1), RoundPost)
        before = {member.node for member in post.members} if post is not None else set[int]()
        return [member.name for member in round_.members if member.node not in before]

    def _lost(self, member: RoundMember, had: Sequence[int]) -> EndPost:
        """Build the post of a lost host, which had the ranks `had`."""
        status = self._hosts.posted(f"alive/{member.node}", HostStatus)
        ranks = status.ranks if status is not None and status.agent == member.agent else ()
        now = time.time()
        moment = max((rank.moved_at for rank in ranks), default=now)
        moment = moment if 0 <= moment <= now else now
        return EndPost(
            why=RanksEnded(rank=min(had, default=-1), reason="its host is gone", at=moment),
            lost=True,
            step=max((rank.step for rank in ranks), default=-1),
            moment=moment,
            done=max((rank.done for rank in ranks), default=0),
            layout=None,
        )

    def _goes_on(self, ranks: Sequence[Progress]) -> None:
        """Report the previous fault or the hosts that have joined, since the training takes steps again."""
        info = self._job_info()
        layout = info.layout if info is not None else None
        if self._pending.goes_on(ranks, offset=self._began, next_layout=layout) or not self._came:
            return
        if info is not None:
            say(f"{', '.join(self._came)} joins; goes on at step {first_step(ranks)} with layout {layout}")

    def _tell(self, fault: Fault, *, aloud: bool = True) -> None:
        tell(fault, self._folder_of_run() or self._place / "no-run", aloud=aloud)

    def _folder_of_run(self) -> Path | None:
        """Return the run's folder, as published by a rank or known to the job."""
        info = self._job_info()
        folder = info.run_folder if info is not None and info.run_folder is not None else self._known_folder
        return Path(folder) if folder is not None else None

    def _job_info(self) -> JobInfo | None:
        """Read what the ranks have published now: their first steps may be over before the agent looks again."""
        return read_job_info(self._folder) or self._about


def _ranks_key(number: int, node: int) -> str:
    """The key of a host's post about its ranks in a round."""
    return f"ranks/{number}/{node}"


def _end_key(number: int, node: int) -> str:
    """The key of a host's post about how it left a round."""
    return f"left/{number}/{node}"
