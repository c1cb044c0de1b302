"""Models with embeddings, and what ranks do in the tests of sparse rows."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from small_tasks import Points
from torch import Tensor, nn

import samestep
from samestep.comm.shared_memory import backend
from samestep.comm.shared_memory.backend import for_transport
from samestep.comm.shared_memory.process_group import KernelGroup, SharedMemoryGroup
from samestep.comm.traffic import Traffic
from samestep.job import Job, Run
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.parallel.sparse_rows import RowExchange, find_tables
from samestep.tasks.registry import resolve
from samestep.training.fit import Training

USERS, ITEMS, TAGS = 900, 700, 60


class Recommender(nn.Module):
    """Two tables of ids, and one of tags of which a sample has two; [samples, 4] to scores of classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, 6)
        self.items = nn.Embedding(ITEMS, 5)
        self.tags = nn.EmbeddingBag(TAGS, 3, mode="sum")
        self.head = nn.Sequential(nn.Linear(14, 12), nn.Tanh(), nn.Linear(12, classes))

    def forward(self, ids: Tensor) -> Tensor:
        user, item, tags = ids[:, 0] % USERS, ids[:, 1] % ITEMS, ids[:, 2:] % TAGS
        return self.head(torch.cat([self.users(user), self.items(item), self.tags(tags)], dim=1))


class Factors(nn.Module):
    """Nothing but embeddings: the scores of a sample are a row of one times a row of the other."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, classes)
        self.items = nn.Embedding(ITEMS, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.users(ids[:, 0] % USERS) * self.items(ids[:, 1] % ITEMS)


class Branches(Recommender):
    """Looks up more for some samples alone: a rank may have no gradient of that table; of another none ever has."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.extra = nn.Embedding(ITEMS, classes)
        self.never = nn.Embedding(ITEMS, classes)

    def forward(self, ids: Tensor) -> Tensor:
        found, some = super().forward(ids), ids[:, 3] % 19 == 0
        return found + self.extra(ids[:, 1] % ITEMS) * some[:, None] if some.any() else found


class Tied(nn.Module):
    """An output layer with the weight of the embedding."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, 8)
        self.head = nn.Linear(8, classes, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids % self.embed.num_embeddings).mean(dim=1))


class Ids(Points):
    """A model on four whole numbers a sample."""

    def __init__(self, kind: type[Any]) -> None:
        super().__init__()
        self.kind = kind

    def model(self) -> nn.Module:
        return self.kind(self.classes)

    def train_set(self) -> samestep.Samples:
        return [((point.abs() * 400).long(), label) for point, label in self.pairs]

    def eval_set(self) -> samestep.Samples:
        return [self.train_set()[index] for index in range(10)]


def trained_both_ways(
    recipes: Mapping[str, samestep.Recipe], layout: str, transport: Any, hosts: str, steps: int
) -> dict[str, Any]:
    """By recipe: whether every number of every rank is the same with rows and without, and the bytes of a step.

    `hosts`: the host that each rank says it is on.
    """
    backend.host_identity = lambda: hosts[int(os.environ["RANK"])]
    found: dict[str, Any] = {}
    with join(device="cpu", threads=1, cpu_backend=for_transport(transport)) as world:
        expected = {"gloo": dist.ProcessGroup, "auto": SharedMemoryGroup if len(set(hosts)) == 1 else KernelGroup}
        assert type(dist.group.WORLD) is expected[transport]
        for name, recipe in recipes.items():
            states: list[Mapping[str, Tensor]] = []
            sent: list[int] = []
            for choice in ("on", "off"):
                run = Run(layout=layout, sparse_rows=choice, micro_batch=5)  # pyright: ignore[reportArgumentType]
                training = Training(Job(recipe=recipe, run=run), resolve(recipe), world, Layout.parse(layout))
                for _ in training.steps(stop=steps, measured=steps - 1):
                    pass
                assert training.usage is not None
                states.append({key: value.clone() for key, value in training.session.trainer.state().items()})
                sent.append(sum(training.usage.sent.values()))
            rows, whole = states
            apart = [key for key, value in whole.items() if not torch.equal(rows[key], value)]
            found[name] = (_on_all_ranks(apart), sent)
    return found


def _on_all_ranks(mine: list[str]) -> list[str]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return sorted({name for each in everyone for name in each})


def exchanged(rows_of: Sequence[Sequence[Sequence[int]]], transport: Any) -> list[tuple[str, Mapping[str, float]]]:
    """Exchange gradients of one table of [100, 8] whose rows each rank touches; what is wrong, and the bytes sent.

    `rows_of`: for each exchange the rows of each rank; a rank that touches row -1 has no gradient at all.
    """
    found: list[tuple[str, Mapping[str, float]]] = []
    with join(device="cpu", threads=1, cpu_backend=for_transport(transport)) as world:
        group = dist.distributed_c10d._get_default_group()
        table = nn.Embedding(100, 8)
        nn.init.constant_(table.weight, world.rank)
        exchange = RowExchange(find_tables(table)[0], group)
        wrong = "" if table.weight.eq(0).all() else "rank 0's values"
        for number, by_rank in enumerate(rows_of):
            every = [_gradient(rows, seed=100 * number + rank) for rank, rows in enumerate(by_rank)]
            table.weight.grad = every[world.rank]
            with_gradient = [each / world.world_size for each in every if each is not None]
            wanted = torch.stack(with_gradient).sum(0) if with_gradient else None
            with Traffic() as traffic:
                exchange.exchange()
            own = table.weight.grad
            if own is None or wanted is None:
                wrong += "" if own is wanted else "a gradient that only some have"
            elif not torch.allclose(own, wanted, rtol=1e-6, atol=1e-6):
                wrong += f"exchange {number}"
            found.append((wrong, {kind: count for kind, count in traffic.sent.items() if count}))
    return found


def _gradient(rows: Sequence[int], *, seed: int) -> Tensor | None:
    if -1 in rows:
        return None
    gradient = torch.zeros(100, 8)
    gradient[list(rows)] = torch.randn(len(rows), 8, generator=torch.Generator().manual_seed(seed))
    return gradient
