"""Copies in the memory of several hosts: what one held, another has, and all of them get it back."""

import shutil
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from samestep.checkpoint.info import Info
from samestep.checkpoint.load import open_newest
from samestep.checkpoint.peer_memory import Neighbours
from samestep.checkpoint.save import Saver
from samestep.comm.mesh import new_group
from samestep.launch import local
from samestep.launch.world import join
from samestep.parallel.state_shards import Box, Piece

HOSTS = ((0,), (1, 2), (3,))


def info(step: int) -> Info:
    return Info(step=step, epoch=None, layout="fsdp4", processes=4, engine="native", recipe={})


def piece(step: int, rank: int) -> Piece:
    """A quarter of 8 x 3 numbers."""
    values = torch.arange(6.0, dtype=torch.float64).reshape(2, 3) + 10 * rank + 1000 * step
    return Piece(shape=torch.Size((8, 3)), dtype=values.dtype, boxes=[Box(offsets=(2 * rank, 0), values=values)])


def whole(step: int) -> torch.Tensor:
    return torch.cat([piece(step, rank).boxes[0].values for rank in range(4)])


def saved_and_lost(rank: int, folder: Path, lost: tuple[int, ...], unfinished: tuple[int, ...]) -> tuple[int, bool]:
    """Save steps 3 and 5, lose some hosts' memory, take step 5 from others.

    Returns the step that all ranks then read, -1 for none, and whether it is what was saved.
    """
    group = new_group(range(4), backend="gloo")
    mine = next(number for number, host in enumerate(HOSTS) if rank in host)
    place = folder / f"host-{mine}"
    neighbours = Neighbours(group=group, rank=rank, hosts=HOSTS)
    saver = Saver(place, group, asynchronous=True, durable=False, neighbours=neighbours)
    saver.prepare()
    for step in (3, 5):
        saver.save({"model.weight": piece(step, rank)}, info(step))
    saver.wait()
    if neighbours.leads and mine in lost:
        shutil.rmtree(place)
    if neighbours.leads and mine in unfinished:
        shutil.rmtree(place / "step-5")
    dist.barrier(group=group)
    if not neighbours.gather(place, partial(saver.together, where=place)):
        return -1, False
    loader = open_newest((place,), group, lambda _: None, summed=False)
    assert loader is not None
    values = torch.zeros(8, 3, dtype=torch.float64)
    box = Box(offsets=(0, 0), values=values)
    loader.read({"model.weight": Piece(shape=values.shape, dtype=values.dtype, boxes=[box])})
    rights: list[bool] = [False] * 4
    dist.all_gather_object(rights, torch.equal(values, whole(loader.info.step)), group=group)
    return loader.info.step, all(rights)


def cases(folder: Path, what: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[int, bool]]:
    with join(threads=1) as world:
        return [
            saved_and_lost(world.rank, folder / str(number), lost, unfinished)
            for number, (lost, unfinished) in enumerate(what)
        ]


def test_a_lost_hosts_state_comes_from_its_neighbour(tmp_path: Path) -> None:
    found = local.start(
        cases, (tmp_path, [((), ()), ((0,), ()), ((1,), ()), ((2,), ()), ((1,), (2,)), ((0, 1), ())]), 4
    )
    # One host's loss is made good. The last two: of the newest, or of all, host 1's part is nowhere; and host 0's.
    assert found == [(5, True), (5, True), (5, True), (5, True), (3, True), (-1, False)]


def left_alone(folder: Path) -> bool:
    """Three hosts save, and one goes on alone: whether it takes what it has for whole."""
    with join(threads=1) as world:
        group = new_group(range(4), backend="gloo")
        mine = next(number for number, host in enumerate(HOSTS) if world.rank in host)
        neighbours = Neighbours(group=group, rank=world.rank, hosts=HOSTS)
        saver = Saver(folder / f"host-{mine}", group, asynchronous=False, durable=False, neighbours=neighbours)
        saver.prepare()
        saver.save({"model.weight": piece(3, world.rank)}, info(3))
        alone = Neighbours(group=group, rank=world.rank, hosts=(tuple(range(4)),))
        return alone.gather(folder / "host-0", partial(saver.together, where=folder))


def test_a_part_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    assert local.start(left_alone, (tmp_path,), 4) is False


def hosts_found(local_ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    with join(threads=1) as world:
        group = new_group(range(world.world_size), backend="gloo")
        return list(Neighbours.find(group, local_ranks[world.rank]).hosts)


def test_hosts_are_known_by_their_local_ranks() -> None:
    assert local.start(hosts_found, ((0, 1, 0, 0),), 4) == [(0, 1), (2,), (3,)]
    assert local.start(hosts_found, ((0, 1),), 2) == [(0, 1)]
