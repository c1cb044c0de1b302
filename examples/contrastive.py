"""A contrastive task: which lower half belongs to the upper half of a handwritten digit?"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import samestep


class Towers(nn.Module):
    """One tower for each half of an image, and a learnt temperature (Radford et al. 2021, figure 3)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.upper, self.lower = self._tower(width), self._tower(width)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def _tower(self, width: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 32)
        )

    def forward(self, upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.upper(upper), dim=-1), F.normalize(self.lower(lower), dim=-1), self.log_scale.exp()


class Recall:
    """Among all held-out lower halves, how often is the right one within the best `most`?"""

    def __init__(self, most: int) -> None:
        self.most = most
        self.upper: list[Tensor] = []
        self.lower: list[Tensor] = []

    def update(self, upper: Tensor, lower: Tensor) -> None:
        self.upper.append(upper)
        self.lower.append(lower)

    def compute(self) -> Tensor:
        near = torch.cat(self.upper) @ torch.cat(self.lower).T
        best = near.topk(self.most).indices  # [samples, most]
        return (best == torch.arange(len(near))[:, None]).any(1).double().mean()


class Halves(samestep.Task):
    """The upper and the lower half of scikit-learn's digits. Arguments come from `args:`."""

    def __init__(self, *, width: int = 128) -> None:
        digits: Any = load_digits()
        images = torch.tensor(digits.data / 16.0, dtype=torch.float32)  # [1797, 64]
        self.samples = [((image[:32], image[32:]), 0) for image in images]
        self.width = width

    def model(self) -> nn.Module:
        return Towers(self.width)

    def train_set(self) -> samestep.Samples:
        return self.samples[297:]

    def eval_set(self) -> samestep.Samples:
        return self.samples[:297]

    def loss(
        self,
        output: tuple[Tensor, Tensor, Tensor],
        batch: samestep.Batch,
        gather: samestep.Gather = samestep.alone,
    ) -> tuple[Tensor, int]:
        upper, lower, scale = output  # [samples of this call, 32] twice, []
        all_upper, all_lower = gather((upper, lower))  # [samples of the global batch, 32] each
        mine = gather.rows(upper)  # where this call's samples stand among them
        down = F.cross_entropy(scale * upper @ all_lower.T, mine, reduction="sum")
        up = F.cross_entropy(scale * lower @ all_upper.T, mine, reduction="sum")
        return (down + up) / 2, len(upper)

    def metrics(self) -> dict[str, Recall]:
        return {"recall_at_1": Recall(1), "recall_at_5": Recall(5)}

    def scores(self, output: tuple[Tensor, Tensor, Tensor], batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return output[0], output[1]
