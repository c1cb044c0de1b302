"""Tasks that break the contract, one part each, and models whose forward draws; for tests of the check."""

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from small_tasks import Points
from torch import Tensor, nn

import samestep


class Net(nn.Module):
    """Two linear layers; subclasses change what lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, points: Tensor) -> Tensor:
        return self.last(self.between(self.first(points).tanh()))


class DropPath(Net):
    """Stochastic depth: some samples skip a branch (Huang et al. 2016)."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * (torch.rand(len(hidden), 1) < 0.5) if self.training else hidden


class NewEmptyDropPath(Net):
    """Stochastic depth as timm and torchvision write it."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * hidden.new_empty(len(hidden), 1).bernoulli_(0.5) if self.training else hidden


class LayerDrop(Net):
    """One number for the whole step decides whether a layer is taken (Fan et al. 2019)."""

    def between(self, hidden: Tensor) -> Tensor:
        return torch.where(torch.rand([]) < 0.5, hidden * 2, hidden) if self.training else hidden


class Noisy(Net):
    """Noise of several kinds."""

    def between(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return hidden
        hidden = hidden + torch.randn_like(hidden) + torch.normal(torch.zeros_like(hidden), 0.1)
        steps = torch.randint(0, 10, (len(hidden),))
        kinds = torch.multinomial(hidden.detach().softmax(-1), 2)
        gumbel = F.gumbel_softmax(hidden, hard=True)
        return hidden * steps[:, None] + hidden.gather(1, kinds).sum(1, keepdim=True) + gumbel


class LateDropout(Net):
    """Drops nothing in the first step: until a parameter that begins with 0 has moved."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def between(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden + self.shift, 0.5, self.training and bool(self.shift != 0))


class NumpyDraw(Net):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden * float(np.random.rand())


class PythonDraw(Net):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden * random.random()


class KernelDraw(Net):
    """Draws inside a kernel of PyTorch, where no function is seen."""

    def between(self, hidden: Tensor) -> Tensor:
        return F.rrelu(hidden, training=True)


class Permuted(Net):
    """Mixes each sample with another, as mixup does."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden + hidden[torch.randperm(len(hidden))]


class Centred(Net):
    """A norm over the batch, written by hand."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0)


class PlainList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = [nn.Linear(16, 16)]

    def between(self, hidden: Tensor) -> Tensor:
        return self.more[0](hidden)


class PlainDict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = {"middle": [nn.Parameter(torch.ones(16))]}

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.more["middle"][0]


class Counting(Net):
    """Keeps something from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return hidden * self.calls


class Failing(Net):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden @ hidden


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 16, sparse=True)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden + self.table(torch.zeros(len(hidden), dtype=torch.long))


class Unseeded(Net):
    """Initial weights from NumPy, which has no seed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(np.random.rand(16), dtype=torch.float32))


class Written(Net):
    """Keeps its weights at one length, in place."""

    def between(self, hidden: Tensor) -> Tensor:
        self.last.weight.data.copy_(F.normalize(self.last.weight.data, dim=1))
        return hidden


class Followed(Net):
    """A moving average of a layer, which begins as its copy and is moved by every training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(4, 16).requires_grad_(False)
        self.slow.load_state_dict(self.first.state_dict())

    def between(self, hidden: Tensor) -> Tensor:
        if self.training:
            for mine, theirs in zip(self.slow.parameters(), self.first.parameters(), strict=True):
                mine.data.lerp_(theirs.data, 0.01)
        return hidden + self.slow.bias


class Renormed(Net):
    """A table whose rows are shortened as they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 16, max_norm=0.1)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden + self.table((hidden[:, 0] > 0).long())


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.clamp(-1e-2, 1e-2)


class Clamped(Net):
    """Gradients are clamped on their way."""

    def between(self, hidden: Tensor) -> Tensor:
        return Clamp.apply(hidden)  # pyright: ignore[reportReturnType]


class ClampedByHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class MaskedByHook(Net):
    """A hook that is right in any part of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient * 0.5)


class NormedByBatch(Net):
    """Batch norm, whose coupling of samples every layout keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def between(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class ReluNorm(nn.BatchNorm1d):
    """Batch norm with a forward of its own that goes on, as fused layers do."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.float()).relu().to(input.dtype)


class NormedAndMore(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = ReluNorm(16)

    def between(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class Untracked(Net):
    """Batch norm without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16, track_running_stats=False)

    def between(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class GhostNorm(nn.BatchNorm1d):
    """Batch norm of each half by itself (Hoffer et al. 2017)."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(GhostNorm, self).forward(half) for half in input.chunk(2)])


class Ghost(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = GhostNorm(16)

    def between(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class NotQuiteBatchNorm(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return (input - input.mean(0)) * self.weight


class CentredByNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = NotQuiteBatchNorm(16)

    def between(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class ClippedParameter(Net):
    """Each backward's gradient is clipped by itself, whatever the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class ScaledGradient(Net):
    def between(self, hidden: Tensor) -> Tensor:
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient / gradient.norm())
        return hidden


class CentredBehindZeros(Net):
    """Couples samples, which the first loss does not show."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.last.weight)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0)


class PlainTensor(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(16, requires_grad=True)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class OwnGenerator(Net):
    """Initial weights from a generator of its own, which has no seed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(np.random.default_rng().random(16), dtype=torch.float32))

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class KeepsInputs(Net):
    """Takes a gradient by its inputs, as models of forces do, and remembers them."""

    def forward(self, points: Tensor) -> Tensor:
        with torch.enable_grad():
            self.points = points.detach().requires_grad_()
            output = super().forward(self.points)
            (slope,) = torch.autograd.grad(output.sum(), self.points, create_graph=True)
        return output + slope[:, :3]


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


class Augmented:
    """Other samples each time."""

    def __init__(self, pairs: Any) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        point, label = self.pairs[index]
        return point + torch.randn(4), label


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


class TwoOutputs(Net):
    def forward(self, points: Tensor) -> Any:
        hidden = self.first(points).tanh()
        return self.last(hidden), hidden


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
        super().__init__(_AlwaysNoisy)

    def eval_set(self) -> samestep.Samples | None:
        return self.held_out


class _AlwaysNoisy(Net):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden + torch.randn_like(hidden)
