"""PowerSGD: the gradient M of a matrix is averaged as P Q^T, with a few columns in P and Q each.

Vogels et al. 2019, "PowerSGD: Practical low-rank gradient compression", algorithms 1 and 2. On each rank, with Q of
the step before (at first: normal numbers, the same on every rank),

    M = gradient + error;  P = mean over ranks of M Q;  P = orthonormal columns of P
    Q = mean over ranks of M^T P;  gradient = P Q^T;  error = M - gradient

A tensor of more than two dims is the matrix of its first one and the rest. What P and Q would not make smaller
(biases, norms, small matrices) is averaged whole. PyTorch's `powerSGD_hook` keeps its errors by buckets, whose order
changes while a training runs, so that they can't be saved; here they are kept by parameter.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from samestep.comm.compression.base import Method, Replica
from samestep.communication import PowerSGD


class LowRank(Method):
    """Averages the gradients of matrices in low rank, after warm-up steps in which all are averaged whole."""

    def __init__(self, options: PowerSGD, replica: Replica) -> None:
        super().__init__(options, replica)
        self._options = options
        self._steps = torch.zeros((), dtype=torch.int64)
        self._q: dict[str, Tensor] = {}  # [columns, rank] by the parameter's name
        self._errors: dict[str, Tensor] = {}  # [rows, columns]
        self._new_errors: dict[str, Tensor] = {}  # pending until the step is taken
        for number, (name, parameter) in enumerate(replica.parameters.items()):
            rows, columns = _shape(parameter)
            rank = min(options.rank, rows, columns)
            if (rows + columns) * rank < rows * columns:
                drawn = torch.randn(columns, rank, generator=torch.Generator().manual_seed(number))
                self._q[name] = drawn.to(parameter.device, parameter.dtype)
                if options.error_feedback:
                    self._errors[name] = torch.zeros_like(parameter.detach()).view(rows, columns)

    def exchange(self) -> bool:
        """Average gradients: three steps of algorithm 1, with two messages.

        The first message has P [rows, rank] of every matrix and what is averaged whole, the second Q [columns, rank].
        All ranks orthonormalise the same averaged P, so they hold the same columns.
        """
        gradients = {name: p.grad for name, p in self.replica.parameters.items() if p.grad is not None}
        if int(self._steps) < self._options.start:
            self.replica.wire.mean(list(gradients.values()))
            return True
        matrices = {name: self._with_error(name, gradients[name]) for name in self._q if name in gradients}
        p = {name: matrix @ self._q[name] for name, matrix in matrices.items()}  # [rows, rank]
        whole = [gradient for name, gradient in gradients.items() if name not in matrices]
        self.replica.wire.mean([*whole, *p.values()])
        p = {name: torch.linalg.qr(matrix).Q for name, matrix in p.items()}
        q = {name: matrix.T @ p[name] for name, matrix in matrices.items()}  # [columns, rank]
        self.replica.wire.mean(list(q.values()))
        for name, matrix in matrices.items():
            mean = p[name] @ q[name].T  # [rows, columns]
            gradients[name].copy_(mean.view_as(gradients[name]))
            self._q[name].copy_(q[name])
            if self._options.error_feedback:
                self._new_errors[name] = matrix - mean
        return True

    def _with_error(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient as a matrix [rows, columns], plus this rank's residual of earlier steps (error feedback)."""
        matrix = gradient.reshape(_shape(gradient))
        return matrix + self._errors[name] if self._options.error_feedback else matrix

    def update(self, weight: float) -> None:
        self.replica.optimizer.step()
        self._steps += 1
        # Only now, since a step whose gradient is not finite is skipped.
        for name, error in self._new_errors.items():
            self._errors[name].copy_(error)
        self._new_errors = {}

    def shared(self) -> Mapping[str, Tensor]:
        return {"steps": self._steps, **{f"q.{name}": value for name, value in self._q.items()}}

    def own(self) -> Mapping[str, Tensor]:
        return {f"error.{name}": value for name, value in self._errors.items()}


def _shape(tensor: Tensor | nn.Parameter) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix; a vector is one column."""
    rows = tensor.shape[0] if tensor.ndim else 1
    return rows, tensor.numel() // max(1, rows)
