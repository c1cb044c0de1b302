"""Worker: computes its samples' gradient, pushes it to the servers and pulls the parameters of the next step."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from samestep.data.loader import StepBatch
from samestep.engines.base import StepReport
from samestep.engines.parameter_server.member import ParameterServerMember
from samestep.engines.parameter_server.messages import Push, PushHeader, ReplyHeader
from samestep.tasks.losses import TaskLoss


class Worker(ParameterServerMember):
    """One worker's steps. Its optimizer has no state and never steps; it carries the learning rate."""

    _steps = 0
    _stop_at = math.inf  # the step from which on every rank reports a loss of NaN

    def _step(self, batch: StepBatch, loss: TaskLoss) -> StepReport:
        totals = self._compute(batch, loss)
        return self._push_and_pull(
            batch, totals, {name: parameter.grad for name, parameter in self.flat.parameters.items()}
        )

    def _compute(self, batch: StepBatch, loss: TaskLoss) -> Tensor:
        """Compute the gradients of this worker's samples. Returns their loss sum and count."""
        if not self.model.training:
            self.model.train()
        self._forget_gradients()
        return self.backward(batch, loss)

    def _push_and_pull(self, batch: StepBatch, totals: Tensor, gradients: Mapping[str, Tensor | None]) -> StepReport:
        """Push a step's gradients to the servers, and receive the next parameters."""
        factor, norm = 1.0, math.nan
        if not self.settings.synchronous:
            factor, norm = self._mean_and_clip(batch, totals, gradients.values())
        facts = PushHeader(
            loss=totals[0].item(),
            count=totals[1].item(),
            samples=batch.local_samples,
            global_samples=batch.global_samples,
            norm=norm,
            stop_at=self._stop_at,
        )
        for number, server in enumerate(self.roles.servers):
            chunks = self.flat.chunks[number]
            push = Push(chunks, [gradients[chunk.span.name] for chunk in chunks], sparse=self.settings.sparse_rows)
            if factor != 1.0:
                push.scale(factor)
            self.wire.push(server, facts, push)
        answers = self.wire.receive_replies(self.roles.servers, self._shards())
        return self._report(answers)

    def _shards(self) -> list[Tensor]:
        """Each server's range of this rank's parameters."""
        return [self.flat.shard(number) for number in range(len(self.roles.servers))]

    def _report(self, answers: Sequence[ReplyHeader]) -> StepReport:
        """Make the report of a step from the servers' replies."""
        self.wire.wait()
        self._changed = True
        answer = answers[0]
        self._stop_at = min(self._stop_at, answer.stop_at)
        stopped, self._steps = self._steps >= self._stop_at, self._steps + 1
        values = torch.tensor([math.nan if stopped else answer.loss, answer.norm], dtype=torch.float64)
        return StepReport(loss=values[0], grad_norm=values[1], lr=self.pass_over())

    def sum_totals(self, totals: Tensor) -> None:
        """Sum nothing: the servers sum the loss and the count of terms."""

    def gradient_scale(self, batch: StepBatch) -> float:
        """Servers sum over the workers, so each one's part is its loss sum / the global batch's samples."""
        return 1 / batch.global_samples

    def _mean_and_clip(
        self, batch: StepBatch, totals: Tensor, gradients: Iterable[Tensor | None]
    ) -> tuple[float, float]:
        """The factor from sum / global samples to the clipped mean over this worker's terms, and the mean's norm."""
        norms = [
            torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients if gradient is not None
        ]
        to_mean = batch.global_samples / max(1.0, totals[1].item())
        norm = (torch.stack(norms).norm().item() if norms else 0.0) * to_mean
        clipped = 1.0 if self._clip is None else min(1.0, self._clip / (norm + 1e-6))
        return to_mean * clipped, norm
