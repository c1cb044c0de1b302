"""World: this rank's numbers and device, and the process group that it joins and leaves."""

import atexit
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from samestep import environment
from samestep.launch import compiler_cache, rank_rendezvous
from samestep.launch.affinity import threads_of
from samestep.launch.device import DeviceChoice, backend_of, check_devices, device_of
from samestep.launch.memory import give_back_freed_memory, keep_freed_memory
from samestep.launch.network import (
    LOOPBACK,
    address_towards,
    agreed_before_group,
    interface_of,
    loopback_interface,
    store_at,
)
from samestep.launch.rank_rendezvous import JoinedStore
from samestep.launchers import HorovodRunVariables
from samestep.progress import phases
from samestep.ranks import Ranks
from samestep.torch_internals.groups import all_groups, backend_for_cpu

_SCOPE, _KEY = "samestep", "store"


def join_process_group(
    run: HorovodRunVariables, ranks: Ranks, backend: str, *, timeout: float = 300.0, **options: object
) -> None:
    """Join torch.distributed on a free port of rank 0's host. Raises TimeoutError if rank 0 doesn't announce it.

    Ranks of several hosts meet at the address from which rank 0 reaches horovodrun's server, as all of them do.
    """
    from horovod.runner.http.http_client import put_data_into_kvstore  # pyright: ignore[reportMissingImports]

    if ranks.rank == 0:
        host = LOOPBACK if ranks.one_host else address_towards(run.address)
        store = store_at(host)
        put_data_into_kvstore(run.address, run.port, _SCOPE, _KEY, (host, store.port))
    else:
        host, port = _meeting_place(run, timeout)
        store = dist.TCPStore(host, port, ranks.world_size, is_master=False, timeout=timedelta(seconds=timeout))
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, **options)  # pyright: ignore
    dist.barrier()
    if ranks.rank == 0:
        put_data_into_kvstore(run.address, run.port, _SCOPE, _KEY, None)  # a later group meets at another port


def _meeting_place(run: HorovodRunVariables, timeout: float) -> tuple[str, int]:
    """Return the host and port that rank 0 has announced, as soon as it has."""
    from horovod.runner.http.http_client import read_data_from_kvstore  # pyright: ignore[reportMissingImports]

    until = time.monotonic() + timeout
    while time.monotonic() < until:
        with suppress(RuntimeError):  # nothing is written yet
            place = read_data_from_kvstore(run.address, run.port, _SCOPE, _KEY)
            if place is not None:
                return place
        time.sleep(0.05)
    raise TimeoutError(f"rank 0 did not say within {timeout:.0f} s where to meet")


# Registers a back end for messages between CPU ranks, by the environment's variables, and returns its name.
RegisterBackend = Callable[[Mapping[str, str]], str]


@runtime_checkable
class ClosableGroup(Protocol):
    """A process group that holds more than its connections, such as shared memory, until it is closed."""

    def close(self) -> None: ...


_ALONE = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1, one_host=True)


@dataclass(frozen=True, kw_only=True)
class World:
    """This rank's numbers and device. A single process is rank 0 of 1, in a process group of its own."""

    rank: int
    world_size: int
    device: torch.device
    threads: int


@contextmanager
def join(
    *,
    alone: bool = False,
    device: DeviceChoice = "auto",
    threads: int | None = None,
    cpu_backend: RegisterBackend | None = None,
    share_devices: bool = False,
) -> Iterator[World]:
    """Join the ranks that a launcher started, or run alone if none did.

    With `alone` the process works by itself, even as one of many. An existing process group is used and left as it
    is. Ranks that share one host listen on its loopback only, those of several hosts on the interface towards the
    others. `cpu_backend` carries messages between ranks on CPUs; None: gloo. With `share_devices` several ranks may
    compute on one accelerator, and messages go through the host's memory.
    """
    ranks = (None if alone else environment.ranks()) or _ALONE
    check_devices(ranks.local_world_size, device, in_a_rank=ranks is not _ALONE, may_share=share_devices)
    world = World(
        rank=ranks.rank,
        world_size=ranks.world_size,
        device=device_of(ranks.local_rank, device),
        threads=threads_of(ranks.local_world_size, threads),
    )
    threads_before, hook_before = torch.get_num_threads(), sys.excepthook
    torch.set_num_threads(world.threads)
    kept = world.device.type == "cpu" and keep_freed_memory(environment.snapshot())
    if world.device.type != "cpu":
        torch.accelerator.set_device_index(world.device.index)
    ours = not dist.is_initialized()
    with _meeting(ranks):
        met = _met(ranks) if ours else None
        interface = _interface(ranks, met) if ours else None
    try:
        # Set as long as the group exists: a mesh's subgroups are created later.
        with environment.messages_over(interface, gloo_alone=not ranks.one_host), ExitStack() as while_here:
            while_here.enter_context(compiler_cache.private())
            if ours:
                with _meeting(ranks):
                    _join_process_group(world, ranks, met, while_here, cpu_backend, share_devices)
            if world.world_size == 1:
                sys.excepthook = hook_before  # PyTorch's begins every line of a traceback with the rank
            yield world
    except BaseException:
        # Leaving the group waits for the others; a failing rank must not.
        ours = ours and world.world_size == 1 and dist.is_initialized()
        raise
    finally:
        if ours:
            leave_process_group()
            sys.excepthook = hook_before
        torch.set_num_threads(threads_before)
        if kept:
            give_back_freed_memory()


@contextmanager
def _meeting(ranks: Ranks) -> Iterator[None]:
    """Context of the rendezvous, for its line of progress."""
    if ranks.world_size == 1:
        yield
    else:
        with phases.phase(f"rendezvous of {ranks.world_size} ranks", once="rendezvous"):
            yield


def _met(ranks: Ranks) -> JoinedStore | None:
    """Rendezvous through a store, if torch.distributed can't do it itself or the ranks are on several hosts."""
    if ranks.world_size == 1 or environment.horovodrun() is not None:
        return None
    if rank_rendezvous.tells_no_address(ranks):
        return rank_rendezvous.meet(ranks)
    if ranks.local_world_size == ranks.world_size:
        return None
    store, _, _ = next(dist.rendezvous("env://"))
    return JoinedStore(store=store, address=environment.main_address())


def _interface(ranks: Ranks, met: JoinedStore | None) -> str | None:
    """Return the interface for messages between ranks; None if the back end finds it by itself."""
    if ranks.one_host:
        return loopback_interface()
    if (named := environment.place_interface()) is not None:
        return named
    if met is None:
        return None
    return interface_of(agreed_before_group(met.store, ranks.rank, ranks.world_size, met.address))


def _join_process_group(
    world: World,
    ranks: Ranks,
    met: JoinedStore | None,
    while_here: ExitStack,
    cpu_backend: RegisterBackend | None,
    share_devices: bool,
) -> None:
    """Join the ranks' process group: alone, through Horovod's launcher, in a store that was met, or as torchrun says.

    The back end is NCCL or the accelerator's own, gloo, or on CPUs what `cpu_backend` registers.
    """
    backend = backend_of(world.device, gloo_alone=share_devices)
    if backend == "gloo" and cpu_backend is not None:
        backend = cpu_backend(environment.snapshot())
    # Early binding lets NCCL know the device before the first message; gloo can't split a bound group.
    bound = world.device if world.device.type != "cpu" and not share_devices else None
    if world.world_size == 1:
        alone = dist.HashStore()  # no port, no other rank to meet
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, device_id=bound)
    elif (run := environment.horovodrun()) is not None:
        join_process_group(run, ranks, backend, device_id=bound)
    elif met is not None:
        store = dist.PrefixStore("default_pg", met.store)
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, device_id=bound)
        if met.port is not None:
            while_here.enter_context(environment.as_torchrun(ranks, met.address, met.port))
    else:
        dist.init_process_group(backend, device_id=bound)


def leave_process_group() -> None:
    """Destroy the process group and its subgroups, once every rank is there, avoiding a deadlock in gloo.

    A thread of gloo lets go of a finished message with the group's lock held, and where the message's tensors came
    from Python, it needs the GIL for it. The group's destructor takes the GIL first and then the group's lock, so the
    two may deadlock (seen in PyTorch 2.13 on a busy machine, in about one of thirty process exits). The holder of the
    last reference destroys the group: often this function, or later a DistributedDataParallel that is still in use.

    So every group sends one more message, which holds references to those before it. A rank among others holds a
    reference to that message to the end of its process, and with it to the group's connections: so no thread of gloo
    is the last to let go of one, whenever the group ends.
    """
    every = all_groups()
    # A barrier in every group: all are started in the same order on all ranks before any is waited for.
    last = [backend.barrier(dist.BarrierOptions()) for group in every if (backend := _gloo_of(group)) is not None]
    for work in last:
        work.wait()
    if dist.get_world_size() > 1:  # one process alone has no replicas that would hold its group
        atexit.register(_hold, last)
    for group in every:
        if isinstance(group, ClosableGroup):
            group.close()
    dist.destroy_process_group()
    del last  # after the groups: their threads have ended unless there are other references


def _gloo_of(group: Any) -> Any | None:
    """Return the gloo back end behind a group; None if it has none."""
    with suppress(RuntimeError):  # the group has no back end for CPU tensors
        backend = backend_for_cpu(group)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
        return backend if isinstance(backend, dist.ProcessGroupGloo) else None
    return None


def _hold(last: list[Any]) -> None:
    """No-op registered with atexit, which keeps its arguments alive until exit."""
