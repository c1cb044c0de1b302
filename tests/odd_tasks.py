"""Tasks that break the contract, one part each: in their data, their loss, their count or their scores."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from drawing_nets import AlwaysNoisy, Glancing, look_at_some
from odd_nets import Net, TwoOutputs
from small_tasks import Points
from torch import Tensor, nn

import samestep


class Odd(Points):
    """Points with one of these models, and nothing held out."""

    def __init__(self, net: type[nn.Module] = Net, **points: Any) -> None:
        super().__init__(**points)
        self.net = net

    def model(self) -> nn.Module:
        return self.net()

    def eval_set(self) -> samestep.Samples | None:
        return None


class NormedPadding(nn.Module):
    """Batch norm over the numbers of sequences and of their padding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(1), nn.Linear(1, 3)

    def forward(self, signals: Tensor, real: Tensor) -> Tensor:
        normed = self.norm(signals[:, None])[:, 0] * real
        return self.last((normed.sum(1) / real.sum(1))[:, None])


class Padded(Odd):
    """Sequences of 1 to 4 numbers, as long as the longest of a group."""

    def __init__(self) -> None:
        super().__init__(NormedPadding)

    def train_set(self) -> samestep.Samples:
        lengths = (4 if index % 16 == 0 else 1 + index % 3 for index in range(200))
        return [(self.pairs[index][0][:length], self.pairs[index][1]) for index, length in enumerate(lengths)]

    def collate(self, samples: Any) -> samestep.Batch:
        sequences = [point for point, _ in samples]
        signals = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        real = nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in sequences], batch_first=True)
        return samestep.Batch({"signals": signals, "real": real}, torch.tensor([int(label) for _, label in samples]))


class UnmaskedMean(nn.Module):
    """A mean over the numbers of sequences and of their padding."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(1, 3)

    def forward(self, signals: Tensor, real: Tensor) -> Tensor:
        return self.last(signals.mean(1, keepdim=True))


class UnmaskedPadding(Padded):
    """Both the first five and the next seven samples have one of the longest."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UnmaskedMean

    def train_set(self) -> samestep.Samples:
        lengths = (1 + index % 4 for index in range(200))
        return [(self.pairs[index][0][:length], self.pairs[index][1]) for index, length in enumerate(lengths)]


class AnswerMean(nn.Module):
    """A mean over an answer's numbers and their padding, beside a question's, whose padding counts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 3)

    def forward(self, question: Tensor, answer: Tensor) -> Tensor:
        return self.last(torch.stack([question.sum(1), answer.mean(1)], 1))


class UnmaskedAnswers(Odd):
    """Questions get longer, while answers have the same lengths in the first five and the next seven samples."""

    def __init__(self) -> None:
        super().__init__(AnswerMean)

    def train_set(self) -> samestep.Samples:
        numbers = torch.arange(1.0, 13.0)
        return [(numbers[: 1 + index], numbers[: 2 + (index % 4 > 0)], index % 3) for index in range(12)]

    def collate(self, samples: Any) -> samestep.Batch:
        questions, answers, labels = zip(*samples, strict=True)
        padded = [nn.utils.rnn.pad_sequence(list(each), batch_first=True) for each in (questions, answers)]
        return samestep.Batch(dict(zip(("question", "answer"), padded, strict=True)), torch.tensor(labels))


class Contrastive(Odd):
    """Every sample is told apart from the others of its batch (InfoNCE, van den Oord et al. 2018)."""

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        unit = F.normalize(output, dim=-1)
        return F.cross_entropy(unit @ unit.T, torch.arange(len(unit)), reduction="sum"), len(unit)


class MeanOfOne(Odd):
    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return F.cross_entropy(output, batch.targets), 1


class MeanWithCount(Odd):
    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return F.cross_entropy(output, batch.targets), len(output)


class NoCount(Odd):
    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return super().loss(output, batch)[0], 0


class NoTerms(Odd):
    """Every term is masked."""

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return super().loss(output, batch)[0] * 0, 0


class Vector(Odd):
    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return F.cross_entropy(output, batch.targets, reduction="none"), len(output)


class Detached(Odd):
    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return F.cross_entropy(output.detach(), batch.targets, reduction="sum"), len(output)


class WeightedCount(Odd):
    """Learnt weights of samples, and their sum."""

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        weights = output.sigmoid().mean(1)
        return (F.cross_entropy(output, batch.targets, reduction="none") * weights).sum(), weights.sum()


class LearntLoss(Odd):
    """A loss with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def loss(self, output: Tensor, batch: samestep.Batch) -> Any:
        return super().loss(self.head(output), batch)


class GradientPenalty(Odd):
    """A loss with the gradient of a gradient (Gulrajani et al. 2017)."""

    def loss(self, output: Tensor, batch: samestep.Batch) -> Any:
        (slope,) = torch.autograd.grad(output.square().sum(), output, create_graph=True)
        loss, count = super().loss(output, batch)
        return loss + slope.square().sum(), count


class LastCount(Odd):
    """Only the last of 200 samples count."""

    def train_set(self) -> samestep.Samples:
        return [(point, label if number > 180 else label - 100) for number, (point, label) in enumerate(self.pairs)]

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        known = batch.targets >= 0
        return F.cross_entropy(output[known], batch.targets[known], reduction="sum"), int(known.sum())


class Shuffled(Odd):
    """Another order in each call, and in each process."""

    def train_set(self) -> samestep.Samples:
        return random.sample(self.pairs, len(self.pairs))


class SameModel(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.only = Net()

    def model(self) -> nn.Module:
        return self.only


class NotFinite(Odd):
    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return (output * 0).log().sum(), len(output)


class OutOfRange(Odd):
    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return F.cross_entropy(output[:, :2], batch.targets, reduction="sum"), len(output)


class NoisyLoss(Odd):
    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return super().loss(output + torch.randn_like(output), batch)[0], len(output)


class CentredByCollate(Odd):
    def collate(self, samples: Any) -> samestep.Batch:
        points, labels = super().collate(samples)
        return samestep.Batch(points - points.mean(0), labels)


class NoisyCollate(Odd):
    def collate(self, samples: Any) -> samestep.Batch:
        points, labels = super().collate(samples)
        return samestep.Batch(points + torch.randn_like(points), labels)


class GlancingCollate(Odd):
    """A checker of types looks at some samples."""

    def __init__(self) -> None:
        super().__init__(Glancing)

    def collate(self, samples: Any) -> samestep.Batch:
        look_at_some(samples)
        return super().collate(samples)


class SeldomFlipped(GlancingCollate):
    def collate(self, samples: Any) -> samestep.Batch:
        points, labels = super().collate(samples)
        return samestep.Batch(points.flip(1) if random.random() > 0.999 else points, labels)


class Augmented:
    """Other samples each time."""

    def __init__(self, pairs: Any) -> None:
        self.pairs = pairs
        self.generator = torch.Generator().manual_seed(0)  # which nobody can seed for a sample

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        point, label = self.pairs[index]
        return point + torch.randn(4, generator=self.generator), label


class Promised(Augmented):
    """Longer than it is."""

    def __len__(self) -> int:
        return len(self.pairs) + 7

    def __getitem__(self, index: int) -> Any:
        return self.pairs[index]


class NoisyData(Odd):
    def train_set(self) -> samestep.Samples:
        return Augmented(self.pairs)


class TooFew(Odd):
    def train_set(self) -> samestep.Samples:
        return Promised(self.pairs)


class NoScores(Odd):
    """Held-out samples whose output no metric takes."""

    def eval_set(self) -> samestep.Samples | None:
        return self.held_out

    def scores(self, output: Tensor, batch: samestep.Batch) -> Any:
        return {"logits": output}


class Unscored(Odd):
    """Held-out samples, outputs that are tuples, and no metrics."""

    def __init__(self) -> None:
        super().__init__(TwoOutputs)

    def eval_set(self) -> samestep.Samples | None:
        return self.held_out

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return super().loss(output[0], batch)

    def metrics(self) -> Any:
        return {}


class Unscorable(Unscored):
    def metrics(self) -> Any:
        return Points.metrics(self)


class DrawsInEvaluation(Odd):
    def __init__(self) -> None:
        super().__init__(AlwaysNoisy)

    def eval_set(self) -> samestep.Samples | None:
        return self.held_out
