"""Registers the back end "samestep" of `torch.distributed`, for groups of CPU ranks and their subgroups.

Every rank of a group decides by what all of them have put into the group's store (hosts, kernels, problems), never by
itself: a rank with shared memory and one with gloo in the same collective would wait for each other until they time
out.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from samestep import environment
from samestep.comm.shared_memory import build, compiled, interpreted, region
from samestep.comm.shared_memory.build import NoKernelError
from samestep.comm.shared_memory.compiled import CompiledKernel
from samestep.comm.shared_memory.hierarchical import HierarchicalKernel, Hosts
from samestep.comm.shared_memory.interpreted import InterpretedKernel
from samestep.comm.shared_memory.kernel import MOST_RANKS, GroupPlace, HostKernel
from samestep.comm.shared_memory.process_group import KernelGroup, SharedMemoryGroup, gloo_group
from samestep.comm.shared_memory.region import NoRegionError, host_identity, host_of_each
from samestep.errors import UserError
from samestep.ranks import Transport
from samestep.torch_internals.groups import count_collectives

NAME = "samestep"

_OTHER_RANK = "another rank of this host can't compile it"

Choice = Literal["compiled", "interpreted", "none"]


def register(environ: Mapping[str, str]) -> str:
    """Make the back end known to `torch.distributed`, and return its name. `environ` names compiler and cache.

    A problem with shared memory is reported once, by the first group of the back end, which has all ranks.
    """
    made: list[None] = []  # one for each group

    def create(options: Any, _: Any) -> dist.ProcessGroup:
        made.append(None)
        return new_group(options, environ, tells=len(made) == 1)

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    return NAME


def for_transport(transport: Transport) -> Callable[[Mapping[str, str]], str] | None:
    """Return what registers the back end of `run.transport` for this process's ranks; None: gloo.

    auto: shared memory between the ranks of a host, gloo between hosts. Raises UserError.
    """
    ranks = environment.ranks()
    if transport == "shared-memory" and ranks is not None and ranks.local_world_size < ranks.world_size:
        raise UserError(
            "run.transport is shared-memory, and the ranks are on several hosts, which share none; use auto, by "
            "which the ranks of each host share memory"
        )
    return None if transport == "gloo" else register


def new_group(
    options: Any, environ: Mapping[str, str], host: str | None = None, *, tells: bool = True
) -> dist.ProcessGroup:
    """Create a process group with shared memory within each host and gloo between hosts.

    `options` are PyTorch's `_DistributedBackendOptions`; `host`: an identifier of this host, None: `host_identity()`;
    `tells`: print why shared memory, or its compiled kernel, is not used. Every rank of the group must call this, and
    all make the same choices.
    """
    store, rank, ranks = options.store, options.group_rank, options.group_size
    gloo = _gloo(options, "gloo", rank, ranks)
    if ranks == 1:
        return gloo_group(gloo)
    hosts = Hosts(of_rank=host_of_each(store, rank, ranks, host_identity() if host is None else host))
    own = hosts.ranks_on(hosts.of_rank[rank])
    if hosts.count == ranks or hosts.most > MOST_RANKS:
        return gloo_group(gloo)
    place = GroupPlace(
        rank=own.index(rank),
        ranks=len(own),
        limit=options.timeout.total_seconds(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )
    # A prefix for each host, so that the keys of different hosts' ranks don't collide.
    on_host = PrefixStore(f"host-{hosts.of_rank[rank]}", store)
    kernel, problem = None, ""
    if len(own) > 1:
        try:
            kernel = _kernel(on_host, place, environ, tells=tells and place.rank == 0)
        except NoRegionError as error:
            problem = str(error)
    if reason := _first_problem(store, rank, ranks, problem):
        if kernel is not None:
            kernel.close()
        if rank == 0 and tells:
            print(f"samestep: messages go through gloo, not through shared memory: {reason}", file=sys.stderr)
        return gloo_group(gloo)
    if hosts.count == 1:
        assert kernel is not None
        return SharedMemoryGroup(gloo, kernel)
    leads = place.rank == 0
    leaders = _gloo(options, "leaders", hosts.of_rank[rank], hosts.count) if leads else None
    return KernelGroup(gloo, HierarchicalKernel(hosts, rank, kernel, leaders))


def _gloo(options: Any, name: str, rank: int, ranks: int) -> ProcessGroupGloo:
    gloo = ProcessGroupGloo(PrefixStore(name, options.store), rank, ranks, timeout=options.timeout)
    count_collectives(gloo)
    return gloo


def _first_problem(store: Store, rank: int, ranks: int, problem: str) -> str:
    """The first rank's reason for having no shared memory, "" if all have it; the same on every rank of the group."""
    store.set(f"problem/{rank}", problem)
    problems = [store.get(f"problem/{number}").decode() for number in range(ranks)]
    return next((problem for problem in problems if problem), "")


def _kernel(store: Store, place: GroupPlace, environ: Mapping[str, str], *, tells: bool) -> HostKernel:
    """Map the group's region with the fastest kernel that all its ranks have. Raises NoRegionError on every rank."""
    functions: Any = None
    own: Choice = "interpreted" if interpreted.is_sound() else "none"
    try:
        functions = _compiled_functions(environ)
        own, why = "compiled", ""
    except (NoKernelError, OSError) as error:
        why = str(error)
    store.set(f"kernel/{place.rank}", own)
    choices = {store.get(f"kernel/{rank}").decode() for rank in range(place.ranks)}
    if "none" in choices:
        raise NoRegionError(why or _OTHER_RANK)
    if choices == {"compiled"}:
        size = compiled.region_bytes(functions, place.ranks)
        return CompiledKernel(functions, region.share(store, place.rank, place.ranks, size), place)
    if tells:
        print(
            f"samestep: shared memory without its compiled kernel, which is faster: {why or _OTHER_RANK}",
            file=sys.stderr,
        )
    size = interpreted.region_bytes(place.ranks)
    return InterpretedKernel(region.share(store, place.rank, place.ranks, size), place)


def _compiled_functions(environ: Mapping[str, str]) -> Any:
    """Load the compiled kernel. Raises NoKernelError, OSError.

    A file in the cache that is another machine's, or lacks a function, is compiled again.
    """
    with build.place(environ) as folder:
        try:
            return compiled.load(build.library(environ, folder))
        except (OSError, AttributeError):
            return _just_compiled(build.library(environ, folder, rebuilt=True))


def _just_compiled(library: Path) -> Any:
    try:
        return compiled.load(library)
    except AttributeError as error:
        raise NoKernelError(f"the compiler's library lacks a function ({error}); CXX names another one") from None
