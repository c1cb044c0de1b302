"""A graph net of one's own on made data: graphs in three classes that differ in nothing but their edges.

Every graph has nodes of two kinds. In class 0 edges join nodes of one kind, in class 1 nodes of different kinds, in
class 2 either. How many nodes, how many of each kind and how many edges there are is drawn alike in all classes, so a
net that does not look at edges can't do better than chance: 1 in 3.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

import samestep

CLASSES = ("like", "unlike", "mixed")
NODES = 24  # the most of a graph
FEATURES = 8
_NEAR = (0.8, 0.2, 0.5)  # by class, how many of the edges join nodes of one kind


class Layer(nn.Module):
    """To each node what it makes of itself and its neighbours' mean (Hamilton et al. 2017, algorithm 1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.own, self.near = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:  # [samples, nodes, width], [samples, nodes, nodes]
        given = self.norm(x)
        mean = edges @ given / edges.sum(-1, keepdim=True).clamp(min=1)
        return x + F.gelu(self.own(given) + self.near(mean))


class Net(nn.Module):
    def __init__(self, width: int, layers: int, *, edges: bool) -> None:
        super().__init__()
        self.edges = edges
        self.embed = nn.Linear(FEATURES, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, len(CLASSES))

    def forward(self, nodes: Tensor, edges: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(nodes)
        edges = edges if self.edges else torch.zeros_like(edges)
        for layer in self.layers:
            x = layer(x, edges)
        mean = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)  # of the nodes that are there
        return self.head(mean)  # [samples, classes]


class Graphs(samestep.Task):
    """Made graphs; `edges: false` is the same net without them, for comparison."""

    def __init__(
        self, *, samples: int = 4000, held_out: int = 1000, width: int = 32, layers: int = 2, edges: bool = True
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        graphs = [_graph(number % len(CLASSES), generator) for number in range(samples + held_out)]
        self._train, self._held_out = graphs[:samples], graphs[samples:]
        self._width, self._layers, self._edges = width, layers, edges

    def model(self) -> nn.Module:
        return Net(self._width, self._layers, edges=self._edges)

    def train_set(self) -> samestep.Samples:
        return self._train

    def eval_set(self) -> samestep.Samples:
        return self._held_out

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        """Graphs padded to the most nodes: features, edges as 0 and 1, and which nodes are there."""
        nodes = torch.zeros(len(samples), NODES, FEATURES)
        edges, mask = torch.zeros(len(samples), NODES, NODES), torch.zeros(len(samples), NODES)
        for number, (features, pairs, _) in enumerate(samples):
            nodes[number, : len(features)], mask[number, : len(features)] = features, 1.0
            edges[number, pairs[0], pairs[1]] = edges[number, pairs[1], pairs[0]] = 1.0
        targets = torch.tensor([label for *_, label in samples])
        return samestep.Batch({"nodes": nodes, "edges": edges, "mask": mask}, targets)

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return F.cross_entropy(output, batch.targets, reduction="sum"), len(batch.targets)

    def metrics(self) -> Mapping[str, Metric]:
        return {"accuracy": MulticlassAccuracy(len(CLASSES), average="micro")}

    def class_names(self) -> Sequence[str]:
        return CLASSES


def _graph(label: int, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Features [nodes, 8], of which the first tells a node's kind among noise; edges [2, edges]; and the class."""
    count = int(torch.randint(12, NODES + 1, (), generator=generator))
    kinds = torch.randint(0, 2, (count,), generator=generator)
    features = torch.randn(count, FEATURES, generator=generator)
    features[:, 0] = 2.0 * kinds - 1.0 + 0.5 * features[:, 0]
    pairs = torch.combinations(torch.arange(count))  # [pairs, 2]
    same = kinds[pairs[:, 0]] == kinds[pairs[:, 1]]
    # Drawn without replacement, so the number of edges is the same whatever the class.
    likely, near = same.sum().clamp(min=1), _NEAR[label]
    weight = torch.where(same, near / likely, (1 - near) / (~same).sum().clamp(min=1))
    chosen = torch.multinomial(weight, 2 * count, generator=generator)
    return features, pairs[chosen].t(), label
