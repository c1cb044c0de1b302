"""Tasks whose losses couple the samples of a batch; for tests of `gather`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.tasks.metrics import ColumnMean


class Towers(nn.Module):
    """Two towers and a learnt temperature, as CLIP has them (Radford et al. 2021, figure 3)."""

    def __init__(self, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.first, self.second = self._tower(width, dropout), self._tower(width, dropout)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def _tower(self, width: int, dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, 8))

    def forward(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
        return {
            "first": F.normalize(self.first(first), dim=-1),
            "second": F.normalize(self.second(second), dim=-1),
            "scale": self.temperature.exp(),
        }


class Pairs(samestep.Task):
    """Two noisy views of a point; a contrastive loss finds which belong together."""

    def __init__(self, *, samples: int = 120) -> None:
        generator = torch.Generator().manual_seed(3)
        points = torch.randn(samples, 6, generator=generator)
        noise = torch.randn(2, samples, 6, generator=generator)
        views = [points + 0.3 * each for each in noise]
        self.samples = [((a, b), torch.tensor(number)) for number, (a, b) in enumerate(zip(*views, strict=True))]

    def model(self) -> nn.Module:
        return Towers()

    def train_set(self) -> samestep.Samples:
        return self.samples

    def eval_set(self) -> samestep.Samples | None:
        return self.samples[:25]

    def loss(
        self, output: Any, batch: samestep.Batch, gather: samestep.Gather = samestep.alone
    ) -> tuple[Tensor, Tensor | int]:
        first, second, scale = output["first"], output["second"], output["scale"]
        all_first, all_second = gather((first, second))
        mine = gather.rows(first)
        forth = F.cross_entropy(scale * first @ all_second.T, mine, reduction="sum")
        back = F.cross_entropy(scale * second @ all_first.T, mine, reduction="sum")
        return forth + back, len(first)

    def metrics(self) -> Mapping[str, ColumnMean]:
        return {"loss": ColumnMean(0)}

    def scores(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        loss, count = self.loss(output, batch)
        return loss.double().reshape(1, 1), torch.tensor([[count]])


class TwoRounds(Pairs):
    """A second gather of what a first one made, and one of whole numbers."""

    def loss(
        self, output: Any, batch: samestep.Batch, gather: samestep.Gather = samestep.alone
    ) -> tuple[Tensor, Tensor | int]:
        first, second = output["first"], output["second"]
        numbers = gather(batch.targets)
        centred = first - gather(first).mean(0)
        everyone = gather({"first": centred, "second": second})
        same = (numbers[None, :] % 5 == batch.targets[:, None] % 5).to(first.dtype)
        near = centred @ everyone["second"].T - (second @ everyone["first"].T).tanh()
        return (near - same).square().sum(), len(first)


class Lines(Pairs):
    """Samples of unlike lengths, which are padded to the longest of a micro-batch."""

    def __init__(self) -> None:
        super().__init__(samples=60)
        sizes = torch.randint(1, 12, (60,), generator=torch.Generator().manual_seed(8)).tolist()
        self.lines = [(torch.arange(size) * (number + 3) % 19 + 1, number) for number, size in enumerate(sizes)]

    def model(self) -> nn.Module:
        return Mean()

    def train_set(self) -> samestep.Samples:
        return self.lines

    def eval_set(self) -> samestep.Samples | None:
        return None

    def sample_lengths(self) -> Sequence[int]:
        return [len(line) for line, _ in self.lines]

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        lines = nn.utils.rnn.pad_sequence([line for line, _ in samples], batch_first=True)
        return samestep.Batch(lines, torch.tensor([number for _, number in samples]))

    def loss(
        self, output: Any, batch: samestep.Batch, gather: samestep.Gather = samestep.alone
    ) -> tuple[Tensor, Tensor | int]:
        near = output @ gather(output.flip(-1)).T
        weights = torch.arange(near.shape[1]).to(near)  # by the place in the batch: the order counts
        return (near * weights).logsumexp(1).sum(), len(output)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(21, 16), nn.Linear(16, 4)

    def forward(self, lines: Tensor) -> Tensor:
        seen = (lines > 0).unsqueeze(-1)
        return self.last((self.table(lines) * seen).sum(1) / seen.sum(1)).tanh()


class Layers(Pairs):
    """One tower of layers, which a pipeline can cut, and whose linear layers can be sliced."""

    def model(self) -> nn.Module:
        return Deep()

    def train_set(self) -> samestep.Samples:
        return [(a, number) for (a, _), number in self.samples]

    def eval_set(self) -> samestep.Samples | None:
        return None

    def loss(
        self, output: Any, batch: samestep.Batch, gather: samestep.Gather = samestep.alone
    ) -> tuple[Tensor, Tensor | int]:
        first, second = output.chunk(2, dim=-1)
        everyone = gather(second)
        return F.cross_entropy(4 * first @ everyone.T, gather.rows(first), reduction="sum"), len(first)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.last(x), dim=-1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
