"""Server: holds a shard of the parameters and the optimizer's state, and updates it with the workers' gradients."""

import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.data.loader import StepBatch
from samestep.engines.base import Loss, StepReport
from samestep.engines.parameter_server.member import ParameterServerMember, ServerSetup, piece_of_state
from samestep.engines.parameter_server.messages import Pushed, PushHeader, PushKind, ReplyHeader
from samestep.engines.parameter_server.shards import Chunk
from samestep.engines.setup import TrainerSetup
from samestep.parallel.holdings import Holdings, state_tensors
from samestep.parallel.sharding import Entry
from samestep.parallel.state_shards import MODEL, OPTIMIZER, Piece


@dataclass(kw_only=True)
class _Totals:
    """Sums of the workers' figures of one step."""

    loss: float = 0.0
    count: float = 0.0
    norms: float = 0.0
    pushes: int = 0

    def add(self, facts: PushHeader) -> None:
        self.loss += facts.loss
        self.count += facts.count
        self.norms += facts.norm
        self.pushes += 1

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1.0, self.count)

    @property
    def mean_norm(self) -> float:
        return self.norms / max(1, self.pushes)


class _Attendance:
    """Which workers, by number, are present, away or lost, and what they missed; a server waits for no absent one."""

    def __init__(self, workers: int) -> None:
        self._present = set(range(workers))
        self._lost: set[int] = set()
        self._left_at: dict[int, int] = {}  # worker that is away -> updates made before it left
        self._deaths = self._returns = self._missed_steps = self._missed_samples = self._meanwhile = 0

    def slowest(self, clock: Sequence[int]) -> int | None:
        """The step count of the slowest worker that is present; None if none is."""
        return min((clock[worker] for worker in self._present), default=None)

    def slowest_rank(self, clock: Sequence[int]) -> int:
        """The count of done and skipped steps of the slowest worker that isn't lost."""
        return min(clock[worker] for worker in range(len(clock)) if worker not in self._lost)

    @property
    def lost(self) -> int:
        """The number of lost workers, which won't return."""
        return len(self._lost)

    def leaves(self, worker: int, updates: int) -> None:
        """Mark a worker as away, as its process has died; `updates`: made so far by all workers."""
        self._present.discard(worker)
        self._left_at[worker] = updates
        self._deaths += 1

    def misses(self, worker: int, samples: int, *, lost: bool) -> None:
        """Record that a worker skipped its samples of a step."""
        self._missed_steps += 1
        self._missed_samples += samples
        if lost:
            self._lost.add(worker)

    def returns(self, worker: int, updates: int) -> None:
        """Mark a worker as present again."""
        self._present.add(worker)
        self._meanwhile += updates - self._left_at.pop(worker)
        self._returns += 1

    def measured(self) -> Mapping[str, Any]:
        """For the report."""
        return {
            "deaths": self._deaths,
            "returns": self._returns,
            "lost_workers": self.lost,
            "missed_steps": self._missed_steps,
            "missed_samples": self._missed_samples,
            "updates_until_returns": self._meanwhile,
        }


class Server(ParameterServerMember):
    """Base class of servers: a shard as chunks of parameters, and a flat gradient of the same length."""

    def __init__(
        self, setup: TrainerSetup, shared: ServerSetup, chunks: Mapping[nn.Parameter, Chunk], *, number: int
    ) -> None:
        """`number`: of this server among the servers. `chunks`: of the parameters that its optimizer steps."""
        super().__init__(setup, shared)
        self._number = number
        self._chunks = chunks
        self._in_order = list(chunks.values())
        self.shard = self.flat.shard(number)
        self.gradient: Tensor = torch.zeros_like(self.shard)

    def held_chunks(self) -> Mapping[nn.Parameter, Chunk]:
        return self._chunks

    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        # In its first step every rank hears whether a worker's forwards have moved a buffer too often.
        self._spread.repeated.check("a worker's step may run several")
        lr = self.optimizer.param_groups[0]["lr"]
        loss_value, norm = self.serve(batch)
        self.wire.wait()
        self._changed = True
        values = torch.tensor([loss_value, norm], dtype=torch.float64)
        return StepReport(loss=values[0], grad_norm=values[1], lr=lr)

    @abstractmethod
    def serve(self, batch: StepBatch) -> tuple[float, float]:
        """Serve the workers until all have done this step. Returns its loss and gradient norm."""

    def receive(self, worker: int | None) -> tuple[int, Pushed]:
        return self.wire.receive_push(self._in_order, self.shard.dtype, worker)

    def step_shard(self, used: Sequence[bool]) -> None:
        """Step the optimizer with `gradient`; chunks with `used` False get no update, and no weight decay either."""
        for (parameter, chunk), has_one in zip(self._chunks.items(), used, strict=True):
            parameter.grad = self.gradient[chunk.at].view(chunk.shape) if has_one else None
        self.optimizer.step()

    def pieces(self) -> dict[str, Piece]:
        pieces: dict[str, Piece] = {}
        for parameter, chunk in self._chunks.items():
            pieces[MODEL + chunk.span.name] = chunk.piece(parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    pieces[f"{OPTIMIZER}{chunk.span.name}.{key}"] = piece_of_state(chunk, value)
        return pieces

    def holdings(self) -> Holdings:
        return Holdings(
            parameters=[parameter.detach() for parameter in self.model.parameters()],
            gradients=[self.gradient],
            optimizer_state=list(state_tensors(self.optimizer)),
        )


class SynchronousServer(Server):
    """Sums the gradients of all workers, in the order of their ranks, and takes the step of one process."""

    def __init__(
        self,
        setup: TrainerSetup,
        shared: ServerSetup,
        chunks: Mapping[nn.Parameter, Chunk],
        *,
        number: int,
        server_group: dist.ProcessGroup,
    ) -> None:
        super().__init__(setup, shared, chunks, number=number)
        self._server_group = server_group

    def serve(self, batch: StepBatch) -> tuple[float, float]:
        self.wire.wait()
        self.gradient.zero_()
        totals = _Totals()
        used = [False] * len(self._chunks)
        for worker in self.roles.workers:
            _, pushed = self.receive(worker)
            pushed.add_to(self.gradient)
            used = [before or now for before, now in zip(used, pushed.used, strict=True)]
            totals.add(pushed.facts)
        norm = self._clip_whole(batch.global_samples / max(1.0, totals.count))
        self.step_shard(used)
        if self.schedule is not None:
            self.schedule.step()
        answer = ReplyHeader(loss=totals.mean_loss, norm=norm, stop_at=math.inf)
        for worker in self.roles.workers:
            self.wire.reply(worker, answer, self.shard)
        return answer.loss, answer.norm

    def _clip_whole(self, to_mean: float) -> float:
        """Rescale the gradient from sum / samples to sum / terms, and clip it by the norm over all servers' shards.

        Returns the norm before clipping.
        """
        square = torch.linalg.vector_norm(self.gradient, dtype=torch.float64).square().cpu()
        if len(self.roles.servers) > 1:
            dist.all_reduce(square, group=self._server_group)
        norm = square.sqrt().item() * to_mean
        factor = to_mean if self._clip is None else to_mean * min(1.0, self._clip / (norm + 1e-6))
        if factor != 1.0:
            self.gradient *= factor
        return norm


class AsynchronousServer(Server):
    """Applies each worker's gradient on arrival, and lets no worker get more than the bound ahead of the slowest.

    A gradient is the mean over its worker's terms, clipped by its own norm; it is applied with the learning rate
    times the worker's share of the batch, so that the gradients of one step together have the step's learning rate.
    """

    def __init__(
        self, setup: TrainerSetup, shared: ServerSetup, chunks: Mapping[nn.Parameter, Chunk], *, number: int
    ) -> None:
        super().__init__(setup, shared, chunks, number=number)
        count = len(self.roles.workers)
        self._clock = [0] * count  # steps that each worker has pushed
        self._attendance = _Attendance(count)
        self._seen = [0] * count  # number of updates when each worker's parameters were last sent
        compensates = self.settings.delay_compensation is not None
        self._sent = [self.shard.clone() for _ in range(count)] if compensates else []  # each worker's parameters
        self._waiting: list[int] = []  # workers whose push is applied and whose reply is pending
        self._followers: list[int] = []  # lost workers whose reply is pending until the others have caught up
        self._totals: dict[int, _Totals] = {}  # by step
        self._latest: _Totals | None = None  # of the newest step that all workers have done
        self._steps = 0  # that this rank has reported
        self._scheduled = 0
        self._stop_at = math.inf
        self._updates = self._ages = self._oldest = self._left_out = self._furthest = 0

    def serve(self, batch: StepBatch) -> tuple[float, float]:
        """Apply pushes, also those of later steps, until all workers have done this step."""
        step, self._steps = self._steps, self._steps + 1
        while min(self._clock) <= step:
            worker, pushed = self.receive(None)
            self._take(self.roles.workers.index(worker), pushed)
        totals = self._totals.pop(step)
        last_totals = totals if totals.pushes else self._known()
        return math.nan if step >= self._stop_at else last_totals.mean_loss, last_totals.mean_norm

    def _take(self, worker: int, pushed: Pushed) -> None:
        """Handle a push, and reply to the workers that the bound then allows to continue."""
        self._stop_at = min(self._stop_at, pushed.facts.stop_at)
        kind = PushKind(int(pushed.facts.kind))
        if kind is PushKind.GRADIENT:
            self._take_gradient(worker, pushed)
        elif kind is PushKind.AWAY:
            self._attendance.leaves(worker, self._updates)
        elif kind is PushKind.BACK:
            self._attendance.returns(worker, self._updates)
            self._hand_out(worker)
            self._reply(worker, self.shard)
        else:
            self._take_missed(worker, pushed.facts, lost=kind is PushKind.LOST)
        self._answer()

    def _take_gradient(self, worker: int, pushed: Pushed) -> None:
        facts, step, slowest = pushed.facts, self._clock[worker], self._attendance.slowest(self._clock)
        assert slowest is not None  # the worker itself is present
        self._furthest = max(self._furthest, step - slowest)
        finite = math.isfinite(facts.loss) and math.isfinite(facts.norm)
        if finite:
            self._totals.setdefault(step, _Totals()).add(facts)
            if facts.samples:
                self._update(worker, pushed)
        self._pass(worker)
        if not finite:
            self._leave_out(worker, step)
        self._waiting.append(worker)

    def _take_missed(self, worker: int, facts: PushHeader, *, lost: bool) -> None:
        self._attendance.misses(worker, int(facts.samples), lost=lost)
        if self._attendance.lost == len(self._clock):
            raise RuntimeError(
                f"every worker is lost: worker_restarts is {self.settings.worker_restarts}, and what their processes "
                "died of stands above"
            )
        self._pass(worker)
        if lost:
            self._followers.append(worker)
        else:
            self._reply(worker, None)

    def _pass(self, worker: int) -> None:
        """Count a step that a worker has done or skipped."""
        step, before = self._clock[worker], min(self._clock)
        self._totals.setdefault(step, _Totals())
        self._clock[worker] += 1
        if min(self._clock) > before and self._totals[before].pushes:
            self._latest = self._totals[before]
        self._advance(sum(self._clock) // len(self._clock))

    def _update(self, worker: int, pushed: Pushed) -> None:
        self.wire.wait()  # the shard may still be on its way to a worker
        age = self._updates - self._seen[worker]
        self._ages, self._oldest = self._ages + age, max(self._oldest, age)
        self.gradient.zero_()
        pushed.add_to(self.gradient)
        strength = self.settings.delay_compensation
        if strength is not None:
            # Zheng et al. 2017, equation 10: g + lambda g * g * (w now - w that the gradient was computed at).
            moved = self.shard - self._sent[worker]
            self.gradient.addcmul_(self.gradient.square(), moved, value=strength)
        share = pushed.facts.samples / pushed.facts.global_samples
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * share
        self.step_shard(pushed.used)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._updates += 1

    def _leave_out(self, worker: int, step: int) -> None:
        """Discard a gradient that isn't finite, and stop the training at a step that no worker has begun.

        All ranks report a loss of NaN from that step on. The first server chooses it and sends it to the workers,
        which send it to the other servers with their next push.
        """
        self._left_out += 1
        if self._number or math.isfinite(self._stop_at):
            return
        self._stop_at = max(self._clock) + 1
        print(
            f"samestep: the loss or gradient of worker {worker} (rank {self.roles.workers[worker]}) is not finite in "
            f"its step {step} of this start; it is not applied, and the training stops at step {self._stop_at:.0f}",
            file=sys.stderr,
            flush=True,
        )

    def _advance(self, steps: int) -> None:
        """Advance the schedule to `steps` steps; one step is as many pushes as there are workers."""
        while self._scheduled < steps:
            self._scheduled += 1
            if self.schedule is not None:
                self.pass_over()

    def _answer(self) -> None:
        """Reply to the waiting workers that the bound allows to continue."""
        slowest = self._attendance.slowest(self._clock)
        for worker in list(self._waiting):
            if slowest is not None and self._clock[worker] - slowest <= self.settings.bound:
                self._waiting.remove(worker)
                self._hand_out(worker)
                self._reply(worker, self.shard)
        # Before a server ends a step, all have an answer to it: they may meet next.
        for worker in list(self._followers):
            if self._clock[worker] <= self._attendance.slowest_rank(self._clock):
                self._followers.remove(worker)
                self._reply(worker, None)

    def _reply(self, worker: int, parameters: Tensor | None) -> None:
        slowest = self._attendance.slowest(self._clock)
        totals = self._known()
        answer = ReplyHeader(
            loss=totals.mean_loss,
            norm=totals.mean_norm,
            stop_at=self._stop_at,
            slowest=self._clock[worker] if slowest is None else slowest,
        )
        self.wire.reply(self.roles.workers[worker], answer, parameters)

    def _known(self) -> _Totals:
        """The totals of the newest step that all workers have done, otherwise of the first that any has done."""
        if self._latest is not None:
            return self._latest
        return next((totals for _, totals in sorted(self._totals.items()) if totals.pushes), _Totals())

    def _hand_out(self, worker: int) -> None:
        self._seen[worker] = self._updates
        if self._sent:
            self._sent[worker].copy_(self.shard)

    def holdings(self) -> Holdings:
        held = super().holdings()
        return replace(held, parameters=[*held.parameters, *self._sent])

    def refresh(self) -> None:
        super().refresh()
        for worker in range(len(self._clock)):  # who have all of them now
            self._hand_out(worker)

    def restore(
        self,
        step: int,
        saved: Mapping[str, Entry],
        read: Callable[[Mapping[str, Piece]], None],
        scaler: Mapping[str, float],
    ) -> None:
        super().restore(step, saved, read, scaler)
        for worker in range(len(self._clock)):
            self._hand_out(worker)

    def measured(self) -> Mapping[str, Any]:
        """Staleness of the gradients: updates between a worker's pull and push, and steps ahead of the slowest."""
        return {
            "updates": self._updates,
            "mean_age_in_updates": self._ages / max(1, self._updates),
            "oldest_in_updates": self._oldest,
            "most_steps_ahead": self._furthest,
            "left_out": self._left_out,
            **(self._attendance.measured() if self.settings.worker_restarts is not None else {}),
        }
