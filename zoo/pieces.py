"""What the scripts of the zoo share: small data, small models, and the start of the ranks."""

import argparse
import importlib
import os
import sys
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def options() -> Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--batch", type=int, default=16, help="samples in a step of all ranks, or micro-batch of them"
    )
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", type=int, help="save after so many steps, and end")
    parser.add_argument("--saved", default="zoo-state.pt", help="where the state is saved and looked for")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--local_rank", type=int, help="given by DeepSpeed's launcher")
    parser.add_argument(_THIRDS, action="store_true", help="batches and data sets that three ranks can share out")
    given = parser.parse_args()
    given.batch = _shared(given.batch)
    return given


_THIRDS = "--thirds"


def _shared(count: int) -> int:
    """So many samples, or three quarters of them: 16 and 64 are 12 and 48, of which three ranks have as many each."""
    return count - count // 4 if _THIRDS in sys.argv else count


def join(seed: int) -> tuple[int, int]:
    """This process's rank, and how many there are; the same random numbers on each."""
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    return dist.get_rank(), dist.get_world_size()


def deepspeed_on_cpus() -> Any:
    """DeepSpeed with its process group. It compiles nothing: what it would compile on CPUs takes minutes."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # read when it is imported
    deepspeed = importlib.import_module("deepspeed")
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    return deepspeed


def samples(count: int = 64, seed: int = 5) -> TensorDataset:
    """Rows of 8 numbers, and one of 3 classes. The few samples of an evaluation are for no number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    count = _shared(count) if count > 16 else count
    rows = torch.randn(count, 8, generator=generator)
    classes = (rows @ torch.randn(8, 3, generator=generator)).argmax(dim=1)
    return TensorDataset(rows, classes)


def sentences(count: int = 64, length: int = 12, seed: int = 5) -> TensorDataset:
    """Tokens, of 0 to 19, and the labels of some of them: -100 for those that have no loss, unlike many in a row."""
    generator = torch.Generator().manual_seed(seed)
    count = _shared(count)
    tokens = torch.randint(0, 20, (count, length), generator=generator)
    lengths = torch.randint(2, length + 1, (count,), generator=generator)
    labels = torch.where(torch.arange(length) < lengths[:, None], (tokens * 3 + 1) % 20, -100)
    return TensorDataset(tokens, labels)


class Classifier(nn.Module):
    """Two layers with a norm between them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(16, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.norm(self.first(rows)))))


class Tagger(nn.Module):
    """A class for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.tokens(tokens))))


def loader(dataset: TensorDataset, batch: int, *, shuffle: bool = True) -> DataLoader:
    """This rank's share of batches of all ranks; its sampler shuffles by the epoch."""
    sampler = DistributedSampler(dataset, shuffle=shuffle)
    return DataLoader(dataset, batch_size=batch // dist.get_world_size(), sampler=sampler)


def replicated(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model)


def cross_entropy(scores: Tensor, classes: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, -2), classes.flatten())


def average_gradients(model: nn.Module) -> None:
    """What DDP does, written out: the mean of all ranks' gradients."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
