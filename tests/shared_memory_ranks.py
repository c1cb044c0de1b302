"""What ranks do in the tests of shared memory: they make groups, call collectives, and end in several ways."""

import contextlib
import io
import os
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from samestep.comm.shared_memory import backend
from samestep.comm.shared_memory.backend import for_transport
from samestep.comm.shared_memory.process_group import KernelGroup, SharedMemoryGroup
from samestep.comm.traffic import Traffic
from samestep.launch.world import join
from samestep.parallel.ddp import replicate

NO_COMPILER = {"CXX": "no-such-compiler"}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.uint8, torch.int8)
# One number, some that fill no line, more than a slot of one MiB, and many slots.
# The last two are refused by gloo, over which the hosts' leaders send.
OVER_HOSTS = (torch.float64, torch.complex64, torch.int16, torch.float8_e4m3fn)
LENGTHS = (1, 77, 300_001, 1_500_003)
# Slots are of bytes, which two types fill; the others have their own arithmetic.
LENGTHS_OF: Mapping[torch.dtype, tuple[int, ...]] = {torch.float32: LENGTHS, torch.int64: LENGTHS[:3]}
FEW_LENGTHS = (*LENGTHS[:2], 5_003)


def group_of(
    store: dist.Store,
    rank: int,
    ranks: int,
    environ: Mapping[str, str],
    seconds: float = 30,
    host: str | None = None,
    number: int = 0,
) -> Any:
    options = SimpleNamespace(
        store=store, group_rank=rank, group_size=ranks, timeout=timedelta(seconds=seconds), group_id=str(number)
    )
    return backend.new_group(options, environ, host, tells=number == 0)


def sum_over_a_full_host(hosts: str, most: int) -> float:
    """A sum over ranks of several hosts, one of which has more than the `most` ranks that may share memory."""
    with join(device="cpu", threads=1) as world, mock.patch.object(backend, "MOST_RANKS", most):
        store = dist.PrefixStore("full", dist.distributed_c10d._get_default_store())
        group = group_of(store, world.rank, world.world_size, os.environ, host=hosts[world.rank])
        assert not isinstance(group, KernelGroup)
        total = torch.tensor([1.0 + world.rank])
        group.allreduce([total]).wait()
        return total.item()


def numbers(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    made = torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 10
    return made.abs().clamp(max=30).to(dtype) if dtype is torch.uint8 else made.to(dtype)


def joined(parts: list[Tensor], operation: Any) -> Tensor:
    """What ranks' numbers come to, in the order of the ranks; half precision in float32."""
    half = parts[0].dtype in (torch.float16, torch.bfloat16)
    wide = [part.float() if half else part for part in parts]
    total = wide[0].clone()
    for part in wide[1:]:
        if operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            total = total + part
        elif operation == dist.ReduceOp.PRODUCT:
            total = total * part
        else:
            total = torch.minimum(total, part) if operation == dist.ReduceOp.MIN else torch.maximum(total, part)
    if operation == dist.ReduceOp.AVG:
        total = total / len(parts)
    return total.to(parts[0].dtype)


def told_by_groups(how: str, cache: Path | None = None) -> list[tuple[str, bool, float]]:
    """Of each rank what it prints while it makes two groups, whether both share memory, and a sum over the second.

    `how`: "compiler", which fails, "memory", of which a process may have 64 KiB, or "cache", which is at `cache`.
    """
    with join(device="cpu", threads=1) as world:
        store = dist.distributed_c10d._get_default_store()
        environ = {**os.environ, **({"CXX": "false"} if how == "compiler" else {})}
        if cache is not None:
            environ["XDG_CACHE_HOME"] = str(cache)
        told = io.StringIO()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if how == "memory":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        with contextlib.redirect_stderr(told):
            groups = [
                group_of(
                    dist.PrefixStore(f"{how}-{number}", store), world.rank, world.world_size, environ, number=number
                )
                for number in range(2)
            ]
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        shared = all(isinstance(group, SharedMemoryGroup) for group in groups)
        numbers = torch.tensor([1.0 + world.rank])
        groups[1].allreduce([numbers]).wait()
        found: list[Any] = [None] * world.world_size
        dist.all_gather_object(found, (told.getvalue(), shared, numbers.item()))
        for group in groups:
            if isinstance(group, SharedMemoryGroup):
                group.close()
        return found


def wrong_collectives(kernels: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The collectives that gave anything but what an independent computation gives, bit by bit."""
    found: list[str] = []
    with join(device="cpu", threads=1) as world:
        store = dist.distributed_c10d._get_default_store()
        for name, environ in kernels.items():
            group = group_of(dist.PrefixStore(name, store), world.rank, world.world_size, {**os.environ, **environ})
            assert isinstance(group, SharedMemoryGroup)
            assert type(group.kernel).__name__.lower().startswith(name)
            found += [f"{name}: {what}" for what in _without_memory(group)]
            found += [f"{name}: {what}" for what in _wrong(group, world.rank, world.world_size)]
            group.close()
    return found


def _without_memory(group: SharedMemoryGroup) -> Iterator[str]:
    """What takes a sharded tensor of DTensor, which has no numbers of its own, for numbers of the host's memory."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = DTensor.from_local(torch.ones(3), mesh, [Shard(0)])
    plain = torch.ones(3)
    calls: dict[str, Callable[[], Any]] = {
        "all-reduce": lambda: group.allreduce([sharded]),
        "broadcast": lambda: group.broadcast([sharded]),
        "all-gather": lambda: group.allgather([[plain, plain]], [sharded]),
        "all-gather base": lambda: group._allgather_base(torch.ones(6), sharded),
        "reduce-scatter": lambda: group._reduce_scatter_base(sharded, torch.ones(6)),
    }
    for name, call in calls.items():
        try:
            call()
        except TypeError as error:
            if "DTensor, which has no memory" in str(error):
                continue
        yield f"{name} of a sharded tensor"


def _wrong(group: SharedMemoryGroup, rank: int, n: int) -> Iterator[str]:
    operations = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)
    for dtype in (*FLOATS, *WHOLE):
        for length in LENGTHS_OF.get(dtype, FEW_LENGTHS):
            parts = [numbers(each, length * n, dtype) for each in range(n)]
            short = [part[:length] for part in parts]
            for operation in operations if dtype in FLOATS else (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
                expected = joined(parts, operation)
                own = short[rank].clone()
                options: Any = dist.AllreduceOptions()
                options.reduceOp = operation
                group.allreduce([own], options).wait()
                if not torch.equal(own, expected[:length]):
                    yield f"all-reduce {operation} of {length} {dtype}"
                scatter: Any = dist.ReduceScatterOptions()
                scatter.reduceOp = operation
                out = torch.empty(length, dtype=dtype)
                group._reduce_scatter_base(out, parts[rank].clone(), scatter).wait()
                if not torch.equal(out, expected[rank * length : (rank + 1) * length]):
                    yield f"reduce-scatter {operation} of {length} {dtype}"
                for root in range(n):
                    given = short[rank].clone()
                    to_root: Any = dist.ReduceOptions()
                    to_root.reduceOp, to_root.rootRank = operation, root
                    group.reduce([given], to_root).wait()
                    if rank == root and not torch.equal(given, expected[:length]):
                        yield f"reduce {operation} to {root} of {length} {dtype}"
            whole = torch.empty(n * length, dtype=dtype)
            group._allgather_base(whole, short[rank].clone()).wait()
            if not torch.equal(whole, torch.cat(short)):
                yield f"all-gather of {length} {dtype}"
            lists = [torch.empty(length, dtype=dtype) for _ in range(n)]
            group.allgather([lists], [short[rank].clone()]).wait()
            if not all(map(torch.equal, lists, short)):
                yield f"all-gather into a list of {length} {dtype}"
            for root in range(n):
                given = short[rank].clone()
                options = dist.BroadcastOptions()
                options.rootRank = root
                group.broadcast([given], options).wait()
                if not torch.equal(given, short[root]):
                    yield f"broadcast from {root} of {length} {dtype}"
            group.barrier().wait()


def wrong_over_hosts(hosts: str) -> list[str]:
    """The same of ranks that say they are on other hosts: "aab" are three ranks, the last on a host of its own."""
    found = []
    with join(device="cpu", threads=1) as world:
        rank, n = world.rank, world.world_size
        store = dist.PrefixStore("hosts", dist.distributed_c10d._get_default_store())
        group = group_of(store, rank, n, os.environ, host=hosts[rank])
        assert type(group) is KernelGroup
        for length in LENGTHS:
            parts = [numbers(each, length, torch.float64) for each in range(n)]
            for operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
                own = parts[rank].clone()
                options: Any = dist.AllreduceOptions()
                options.reduceOp = operation
                group.allreduce([own], options).wait()
                if not torch.allclose(own, joined(parts, operation), rtol=1e-14, atol=1e-13):
                    found.append(f"all-reduce {operation} of {length}")
                gathered = [torch.empty_like(own) for _ in range(n)]
                group.allgather([gathered], [own]).wait()
                if not all(torch.equal(each, own) for each in gathered):
                    found.append(f"ranks differ after all-reduce {operation} of {length}")
            for dtype in OVER_HOSTS:
                given = [part.to(dtype) for part in parts]
                whole, lists = torch.empty(n * length, dtype=dtype), [torch.empty_like(part) for part in given]
                group._allgather_base(whole, given[rank].clone()).wait()
                group.allgather([lists], [given[rank].clone()]).wait()
                if not all(map(_same_bytes, (whole, *lists), (torch.cat(given), *given))):
                    found.append(f"all-gather of {length} {dtype}")
            for root, dtype in product(range(n), OVER_HOSTS):
                given, options = parts[rank].to(dtype, copy=True), dist.BroadcastOptions()
                options.rootRank = root
                group.broadcast([given], options).wait()
                if not _same_bytes(given, parts[root].to(dtype)):
                    found.append(f"broadcast from {root} of {length} {dtype}")
            group.barrier().wait()
        group.close()
    return found


def gradients_sent(hosts: str, bucket_mb: float | None) -> tuple[int, bool]:
    """The messages of a backward with 4 MB of gradients, and whether they became the ranks' averages."""
    with join(device="cpu", threads=1) as world:
        store = dist.PrefixStore("buckets", dist.distributed_c10d._get_default_store())
        group = group_of(store, world.rank, world.world_size, os.environ, host=hosts[world.rank])
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
        replicated = replicate(model, group, world.device, bucket_mb=bucket_mb)
        sent: list[int] = []
        group.counters.append(lambda kind, message, ranks: sent.append(message))
        inputs = torch.stack([numbers(rank, 256, torch.float32) for rank in range(world.world_size)])
        for _ in range(3):  # the second forward agrees on buckets in the order of the first backward
            sent.clear()
            model.zero_grad()
            replicated(inputs[world.rank]).sum().backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        (model(inputs).sum() / world.world_size).backward()
        same = all(
            torch.allclose(grad, parameter.grad, rtol=1e-4, atol=1e-6)
            for grad, parameter in zip(found, model.parameters(), strict=True)
            if grad is not None and parameter.grad is not None
        )
        group.close()
        return len(sent), same and sum(sent) == 16 * 256 * 256 * 4


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def asked_in_another_order() -> list[float]:
    """Ranks that begin collectives of two groups in different orders, and wait for them afterwards."""
    with join(device="cpu", threads=1, cpu_backend=for_transport("auto")) as world:
        groups = [dist.new_group(), dist.new_group()]
        tensors = [torch.full((5,), world.rank + 1.0), torch.full((500_000,), world.rank + 10.0)]
        order = (0, 1) if world.rank == 0 else (1, 0)
        works = {each: dist.all_reduce(tensors[each], group=groups[each], async_op=True) for each in order}
        for each in order:
            work = works[each]
            assert work is not None
            work.wait()
        return [tensor.mean().item() for tensor in tensors]


def sent_by(transport: Any) -> dict[str, float]:
    """Bytes by kind of collective, as Traffic counts them, of replicas and of collectives of every sort."""
    with join(device="cpu", threads=1, cpu_backend=for_transport(transport)) as world:
        group = dist.group.WORLD
        assert isinstance(group, SharedMemoryGroup) == (transport == "auto")
        assert dist.get_backend() == ("samestep" if transport == "auto" else "gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 40))
        model(torch.ones(2, 30)).sum().backward()  # builds its buckets
        with Traffic() as traffic:
            model(torch.ones(2, 30)).sum().backward()
            dist.all_reduce(torch.ones(1000))
            dist.all_gather_into_tensor(torch.empty(1000 * world.world_size), torch.ones(1000))
            dist.reduce_scatter_tensor(torch.empty(1000), torch.ones(1000 * world.world_size))
            dist.broadcast(torch.ones(1000), src=0)
            dist.reduce(torch.ones(1000), dst=0)
            functional.all_reduce(torch.ones(1000), "sum", dist.distributed_c10d._get_default_group()).sum()
            peer = 1 - world.rank
            if world.rank == 0:
                dist.send(torch.ones(1000), peer)
            else:
                dist.recv(torch.empty(1000), peer)
        return traffic.sent


def told_by_a_backward() -> str:
    """What a rank is told whose gradients are to be averaged with those of a rank that calls another collective."""
    with join(device="cpu", threads=1, cpu_backend=for_transport("auto")) as world:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 40))
        try:
            if world.rank == 0:
                model(torch.ones(2, 30)).sum().backward()
            else:
                dist.all_reduce(torch.ones(7))
        except RuntimeError as error:
            return str(error)
        return "nothing"


def ends(rank: int, folder: str, how: str) -> None:
    """A rank of two without a launcher: rank 1 departs from what rank 0 does, who writes down what it is told."""
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    environ = NO_COMPILER if how.endswith("without a compiler") else os.environ
    # A rank that has ended, or calls something else, is told long before the group's limit, here of an hour.
    group = group_of(store, rank, 2, environ, seconds=1.5 if how.startswith("late") else 3600)
    tensor = torch.ones(200_000)
    group.allreduce([tensor]).wait()
    Path(folder, f"ready-{rank}").touch()
    if rank == 1:
        if how.startswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if how.startswith("late"):
            signal.pause()
        if how.startswith("another"):
            tensor = torch.ones(7)
    try:
        group.allreduce([tensor]).wait()
        told = "nothing"
    except dist.DistBackendError as error:
        told = str(error)
    _tell(folder, rank, told)


def runs_on(rank: int, folder: str) -> None:
    """A rank of two that calls collectives of several sizes until it is killed, or its peer is."""
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    group = group_of(store, rank, 2, os.environ, seconds=3600)
    Path(folder, f"ready-{rank}").touch()
    try:
        while True:
            for length in (10, 50_000, 2_000_000):
                group.allreduce([torch.ones(length)]).wait()
    except dist.DistBackendError as error:
        _tell(folder, rank, str(error))


def _tell(folder: str, rank: int, text: str) -> None:
    """Write down what a rank was told, where nobody finds it half-written."""
    new = Path(folder, f"telling-{rank}")
    new.write_text(text, encoding="utf-8")
    new.replace(Path(folder, f"told-{rank}"))
