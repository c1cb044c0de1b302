"""Models of tables, graphs, points and pairs as people write them."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import samestep
from model_table.entry import OF_VECTORS, Entry, Row, numbers, stacked, without_tokens, words


class Recommender(nn.Module):
    """Embedding bags of what a user has seen, dense features, and their products (Naumov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.liked = nn.EmbeddingBag(41, 10, mode="sum"), nn.EmbeddingBag(23, 10, mode="mean")
        self.item = nn.Embedding(37, 10)
        self.bottom = nn.Sequential(nn.Linear(6, 14), nn.ReLU(), nn.Linear(14, 10), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16, 18), nn.ReLU(), nn.Linear(18, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, seen: Tensor, liked: Tensor, item: Tensor, dense: Tensor) -> Tensor:
        features = torch.stack([self.bottom(dense), self.seen(seen), self.liked(liked), self.item(item)], 1)
        products = features @ features.transpose(1, 2)  # [batch, 4, 4]
        first, second = torch.triu_indices(4, 4, 1)
        return self.top(torch.cat([features[:, 0], products[:, first, second]], 1)).squeeze(1)


def _clicked(index: int) -> Row:
    bags = {"seen": words(index, 5, 41, 0), "liked": words(index + 70, 3, 23, 0)}
    return {**bags, "item": words(index, 1, 37, 0)[0], "dense": numbers(index, 6), "target": float(index % 2)}


def _clicks(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.binary_cross_entropy_with_logits(output, target.to(output.dtype), reduction="sum"), len(output)


class Message(nn.Module):
    """Each node adds up what its neighbours say."""

    def __init__(self) -> None:
        super().__init__()
        self.say = nn.Sequential(nn.Linear(24, 18), nn.ReLU(), nn.Linear(18, 12))
        self.update = nn.Sequential(nn.Linear(24, 18), nn.ReLU(), nn.Linear(18, 12))

    def forward(self, nodes: Tensor, first: Tensor, second: Tensor) -> Tensor:
        said = self.say(torch.cat([nodes[first], nodes[second]], 1))  # [edges, 12]
        heard = torch.zeros_like(nodes).index_add(0, second, said)
        return nodes + self.update(torch.cat([nodes, heard], 1))


class Graph(nn.Module):
    """Four rounds of messages over a batch of graphs, and a number for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 12)
        self.rounds = nn.ModuleList(Message() for _ in range(4))
        self.head = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 1))

    def forward(self, nodes: Tensor, edges: Tensor, owner: Tensor, empty: Tensor) -> Tensor:
        hidden = self.enter(nodes)
        for each in self.rounds:
            hidden = each(hidden, edges[0], edges[1])
        sums = hidden.new_zeros(len(empty), 12).index_add(0, owner, hidden)
        return self.head(sums).squeeze(1)


def graph(index: int) -> Row:
    """A ring of 4 to 7 nodes."""
    count = 4 + index % 4
    ring = torch.arange(count)
    edges = torch.cat([torch.stack([ring, (ring + 1) % count]), torch.stack([ring, (ring + 2) % count])], 1)
    return {"nodes": numbers(index, count, 5), "edges": edges, "target": float(count)}


def graphs(rows: list[Row]) -> dict[str, Any]:
    """Graphs as one graph whose parts don't touch; `empty` is a row a graph, so that their number is known."""
    counts = torch.tensor([len(row["nodes"]) for row in rows])
    starts = counts.cumsum(0) - counts
    return {
        "nodes": torch.cat([row["nodes"] for row in rows]),
        "edges": torch.cat([row["edges"] + start for row, start in zip(rows, starts, strict=True)], 1),
        "owner": torch.arange(len(rows)).repeat_interleave(counts),
        "empty": torch.zeros(len(rows), 1),
        "target": torch.tensor([row["target"] for row in rows]),
    }


def _numbers(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target.to(output.dtype)).square().sum(), len(output)


class Tower(nn.Sequential):
    def __init__(self, given: int) -> None:
        super().__init__(nn.Linear(given, 22), nn.GELU(), nn.Linear(22, 18), nn.GELU(), nn.Linear(18, 10))


class Towers(nn.Module):
    """A tower for each side; what they say of a pair is one number, or a direction each."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(12), Tower(9)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return (self.left(left) * self.right(right)).sum(1) * self.scale


class Contrast(Towers):
    """As CLIP: each side's direction."""

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return F.normalize(self.left(left), dim=1), F.normalize(self.right(right), dim=1) * self.scale


def _pair(index: int) -> Row:
    return {"left": numbers(index, 12), "right": numbers(index + 40, 9), "target": float(index % 2)}


def _in_batch(output: tuple[Tensor, Tensor], target: Tensor, gather: samestep.Gather) -> tuple[Tensor, int]:
    """Each left belongs to its right, and all other rights of the batch are its negatives."""
    left, right = output
    return F.cross_entropy(left @ gather(right).T, gather.rows(left), reduction="sum"), len(left)


class Points(nn.Module):
    """A perceptron of each point, the largest of each feature, a perceptron of the cloud (Qi et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 14, 18, 22)
        self.points = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()) for a, b in pairwise(widths)
        )
        self.cloud = nn.Sequential(nn.Linear(22, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, cloud: Tensor) -> Tensor:
        for each in self.points:
            cloud = each(cloud)
        return self.cloud(cloud.amax(-1))


def _cloud(index: int) -> Row:
    return {"cloud": numbers(index, 3, 15), "target": torch.tensor(index % 4)}


def _classes(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output, target, reduction="sum"), len(output)


def entries() -> list[Entry]:
    vectors: dict[str, Any] = {"collate": stacked, "impossible": OF_VECTORS}
    nodes = without_tokens("its layers take nodes and edges")
    points = without_tokens("its points meet in a maximum alone")
    return [
        Entry(
            name="recommender", kind="recommender", model=Recommender, row=_clicked, loss=_clicks, stages=4, **vectors
        ),
        Entry(name="graph", kind="graph", model=Graph, row=graph, collate=graphs, loss=_numbers, impossible=nodes),
        Entry(name="two-towers", kind="two towers", model=Towers, row=_pair, loss=_clicks, **vectors),
        Entry(name="contrast", kind="contrastive", model=Contrast, row=_pair, loss=_in_batch, **vectors),
        Entry(
            name="points",
            kind="points",
            model=Points,
            row=_cloud,
            collate=stacked,
            loss=_classes,
            impossible=points,
        ),
    ]
