"""Tasks for pipelines: models of other shapes than a plain list of layers, and models that can't be cut."""

from typing import Any

import torch
from model_tasks import CLASSES, WORDS, Sentences, _config
from small_tasks import Points
from torch import Tensor, nn

import samestep


class Images(Points):
    """Random images for a vision transformer, whose class token and positions are parameters of their own."""

    def train_set(self) -> samestep.Samples:
        generator = torch.Generator().manual_seed(5)
        return [(torch.randn(3, 8, 8, generator=generator) + label, label) for _, label in self.pairs[:60]]

    def eval_set(self) -> samestep.Samples:
        return self.train_set()[:20]  # pyright: ignore  (a list)

    def model(self) -> nn.Module:
        from transformers import ViTForImageClassification

        return ViTForImageClassification(_config("ViT", 3, image_size=8, patch_size=4))

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return super().loss(output.logits, batch)

    def scores(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return output.logits, batch.targets


class Narrowing(Images):
    """A convolutional net whose layers halve the picture, as ResNet's do, with a pool between them."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU()),
            nn.Sequential(nn.Conv2d(6, 10, 3, stride=2, padding=1), nn.GroupNorm(2, 10), nn.ReLU()),
            nn.MaxPool2d(2),
            nn.Sequential(nn.Conv2d(10, 7, 3, stride=2, padding=1), nn.GroupNorm(1, 7), nn.ReLU()),
            nn.Flatten(),
            nn.Sequential(nn.Linear(7, 7), nn.Linear(7, self.classes)),
        )

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return Points.loss(self, output, batch)

    def scores(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return output, batch.targets


class Encoder(Sentences):
    """PyTorch's own transformer, called with words alone."""

    def collate(self, samples: Any) -> samestep.Batch:
        batch = super().collate(samples)
        words = batch.inputs["input_ids"]  # this model knows of no padding: all sentences are made 9 long
        return samestep.Batch(nn.functional.pad(words, (0, 9 - words.shape[1])), batch.targets)

    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
        return nn.Sequential(
            nn.Embedding(WORDS, 12), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), _Mean(12, CLASSES)
        )

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return nn.functional.cross_entropy(output, batch.targets, reduction="sum"), len(output)

    def scores(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return output, batch.targets


class _Mean(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.mean(1))  # [samples, words, width] to [samples, classes]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden)) * condition


class _Conditional(nn.Module):
    """Every layer takes what one module computed from the input, beside the hidden state."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.position = nn.Parameter(torch.full((8,), 0.1))
        self.condition = nn.Linear(4, 8)
        self.layers = nn.ModuleList([_Layer() for _ in range(4)])
        self.last = nn.Linear(8, classes)

    def forward(self, points: Tensor) -> Tensor:
        condition = self.condition(points)
        hidden = self.first(points) + self.position
        for layer in self.layers:
            hidden = layer(hidden, condition)
        return self.last(hidden)


class Conditioned(Points):
    def model(self) -> nn.Module:
        return _Conditional(self.classes)


class _Skip(_Conditional):
    def forward(self, points: Tensor) -> Tensor:
        condition = self.condition(points)
        hidden = self.first(points) + self.position
        early = hidden = self.layers[0](hidden, condition)
        for layer in list(self.layers)[1:]:
            hidden = layer(hidden, condition)
        return self.last(hidden + early)


class Skipping(Points):
    """The last stage wants what the first layer gave."""

    def model(self) -> nn.Module:
        return _Skip(self.classes)


class _Again(_Conditional):
    def forward(self, points: Tensor) -> Tensor:
        condition = self.condition(points)
        hidden = self.first(points)
        for layer in (*self.layers, self.layers[0]):
            hidden = layer(hidden, condition)
        return self.last(hidden)


class Repeating(Points):
    """A layer is called twice."""

    def model(self) -> nn.Module:
        return _Again(self.classes)


class _Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, points: Tensor) -> Tensor:
        self.size = self.linear(points).square().sum(-1, keepdim=True)
        return torch.tanh(points)


class _Kept(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Keeping() for _ in range(4)])
        self.last = nn.Linear(4, classes)

    def forward(self, points: Tensor) -> Tensor:
        for layer in self.layers:
            points = layer(points)
        return self.last(points * sum(layer.size for layer in self.layers))  # pyright: ignore


class Keeping(Points):
    """Layers keep a tensor in an attribute, which the model reads."""

    def model(self) -> nn.Module:
        return _Kept(self.classes)


class _IfPositive(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input if input.sum() > 0 else -input)


class Deciding(Points):
    """What the forward does depends on values."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), _IfPositive(4, self.classes))


class _ShorterLater(nn.Linear):
    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input[: 1 if self.calls > 10 else None])


class Shortening(Points):
    """A hidden state that has another shape after some calls."""

    def model(self) -> nn.Module:
        return nn.Sequential(_ShorterLater(4, 4), nn.Linear(4, self.classes))

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return output.sum(), len(batch.targets)

    def eval_set(self) -> None:
        return None


class _Choosing(nn.Linear):
    """A layer in which values decide a size, and which draws."""

    def forward(self, input: Tensor) -> Tensor:
        chosen = input > 0
        doubled = torch.zeros_like(input).masked_scatter(chosen, 2 * input[chosen])
        return super().forward(doubled * (1 + 0.1 * torch.rand(len(input), 1, dtype=input.dtype)))


class _ChoosingNet(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Choosing(4, 6), _Choosing(6, 5), _Choosing(5, 7)])
        self.head = nn.Linear(7, classes)

    def forward(self, input: Tensor) -> Tensor:
        for layer in self.layers:
            input = layer(input)
        return self.head(input * (1 + 0.1 * torch.rand(len(input), 1, dtype=input.dtype)))


class Choosing(Points):
    """Layers whose output's shape is found with values only; the model itself draws after them."""

    def model(self) -> nn.Module:
        return _ChoosingNet(self.classes)


class _CollectingNet(nn.Module):
    """Collects what its layers compute by hooks, as transformers' backbones do, and uses all of it in the end."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.head = nn.Linear(16, classes)
        self.collected: list[Tensor] = []
        for layer in self.layers:
            layer.register_forward_hook(self._collect)

    def _collect(self, layer: nn.Module, given: Any, output: Tensor) -> None:
        self.collected.append(output)

    def forward(self, input: Tensor) -> Tensor:
        self.collected = []
        for layer in self.layers:
            input = torch.tanh(layer(input))
        return self.head(torch.cat(self.collected, dim=1))


class Collecting(Points):
    def model(self) -> nn.Module:
        return _CollectingNet(self.classes)
