"""The smallest job: one dense layer learns a line through random samples."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, Le

from samestep.data.types import Batch, Samples
from samestep.field_types import Least, Whole, Width
from samestep.tasks.base import Task

if TYPE_CHECKING:
    from torch import Tensor, nn

    from samestep.tasks.metrics import Metric


class Regression(Task):
    """y = w x + b + noise, with w and b drawn once; the mean of squared errors is learned."""

    def __init__(
        self,
        *,
        samples: Annotated[Whole, Gt(0), Le(10**7)] = 4096,
        held_out: Annotated[Whole, Ge(0), Le(10**7)] = 512,
        features: Width = 20,
        noise: Least = 0.1,
    ) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(features, 1, generator=generator)
        inputs = torch.randn(samples + held_out, features, generator=generator)  # [samples, features]
        errors = noise * torch.randn(samples + held_out, 1, generator=generator)
        targets = inputs @ weight + 1 + errors  # [samples, 1]
        pairs = list(zip(inputs, targets, strict=True))
        self._features = features
        self._train, self._held_out = pairs[:samples], pairs[samples:]

    def model(self) -> "nn.Module":
        from torch import nn

        return nn.Linear(self._features, 1)

    def train_set(self) -> Samples:
        return self._train

    def eval_set(self) -> Samples | None:
        return self._held_out or None

    def loss(self, output: Any, batch: Batch) -> "tuple[Tensor, int]":
        from torch.nn.functional import mse_loss

        return mse_loss(output, batch.targets, reduction="sum"), len(output)

    def metrics(self) -> "Mapping[str, Metric]":
        from samestep.tasks.metrics import SquaredError

        return {"mean_squared_error": SquaredError()}
