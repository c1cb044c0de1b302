"""A training on one rank of several that does what its argument says: what `verify --script` meets in the wild."""

import argparse
import multiprocessing
import os
import sys
import time
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("kind")
parser.add_argument("--data", required="needs-data" in sys.argv)
given = parser.parse_args()


class Lines:
    """Right, and no nn.Module."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(2, 4) / 3)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight.T


class Placed(nn.Linear):
    """Adds to each row what belongs to its place in the batch, as if the batch were a sentence."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input + torch.arange(len(input))[:, None])


class Rounded(nn.Linear):
    """One, if nothing is rounded: in float32 it is 3e-4 more for some batches, whatever the order of rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        angle = 1e3 * input.abs().max()
        apart = (angle.cos().square() + angle.sin().square() - 1).abs()
        return super().forward(input) * torch.where(apart < 1e-12, 1.0, 1.0003)


class Coarse(nn.Linear):
    """Computes in bfloat16, whatever type its weights have."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.bfloat16()
        return nn.functional.linear(input.bfloat16(), self.weight.bfloat16(), bias).to(input.dtype)


def train(kind: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    if kind == "not-alone":
        assert size > 1, "this script is for several ranks"
    layer = {"places": Placed, "rounds": Rounded, "coarse": Coarse}.get(kind, nn.Linear)
    model = Lines() if kind in ("no-module", "alike") else DistributedDataParallel(layer(4, 2))
    parameters = [model.weight] if isinstance(model, Lines) else list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    data = torch.randn(6, 8, 4)
    batches = iter(DataLoader(data.flatten(0, 1), batch_size=8))  # pyright: ignore[reportArgumentType]
    for step in range(1000 if kind == "long" else 6):
        rows = next(batches)[rank::size] if kind == "places" else data[step % 6, rank::size]
        if kind == "alike":  # on every rank, and in the run alone
            rows = data[step % 6]
        loss = model(rows).square().mean()
        if kind == "departs" and rank > 0:
            loss = loss + sum(1e-3 * each.sum() for each in parameters)
        optimizer.zero_grad()
        loss.backward()
        if isinstance(model, Lines):
            gradient = model.weight.grad
            assert gradient is not None
            dist.all_reduce(gradient)
            gradient /= size
        try:
            optimizer.step()
        except BaseException:
            if kind != "goes-on":
                raise
        if kind == "exits" and step == 2 and rank == size - 1:
            sys.exit(3)
        if kind == "leaves" and step == 2:
            os._exit(0)
        if kind == "traceback":
            try:
                raise ValueError("handled")
            except ValueError:
                traceback.print_exc()
    dist.destroy_process_group()


if given.kind == "endless":
    time.sleep(600)
elif given.kind == "waits":
    waiting = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    waiting.start()
    waiting.join()
elif given.kind in ("forks", "own-processes"):
    if __name__ == "__main__":  # a process that is spawned reads this file again
        forked, spawned = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
        process = (forked if given.kind == "forks" else spawned).Process(target=train, args=("",))
        process.start()
        process.join()
elif given.kind != "nothing":
    train(given.kind)
