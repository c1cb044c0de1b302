"""The back end "samestep": what `torch.distributed` makes of a group of CPU ranks, and of every group made of it."""

import os
import sys
from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from samestep.comm.shared_memory import build, compiled, interpreted, region
from samestep.comm.shared_memory.build import NoKernelError
from samestep.comm.shared_memory.compiled import CompiledKernel
from samestep.comm.shared_memory.host import share_a_host
from samestep.comm.shared_memory.interpreted import InterpretedKernel
from samestep.comm.shared_memory.kernel import MOST_RANKS, Kernel, Place
from samestep.comm.shared_memory.process_group import GlooGroup, SharedMemoryGroup
from samestep.comm.shared_memory.region import NoRegionError

NAME = "samestep"

Choice = Literal["compiled", "interpreted", "none"]


def register(environ: Mapping[str, str]) -> str:
    """Make the back end known to `torch.distributed`, and return its name. `environ` names compiler and cache."""

    def create(options: Any, _: Any) -> dist.ProcessGroup:
        return new_group(options, environ)

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    return NAME


def new_group(options: Any, environ: Mapping[str, str]) -> dist.ProcessGroup:
    """A group of ranks: through shared memory where all of them share a host, through gloo else.

    `options` are PyTorch's `_DistributedBackendOptions`. Every rank of the group calls this, and all choose alike.
    """
    store, rank, ranks = options.store, options.group_rank, options.group_size
    gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, ranks, timeout=options.timeout)
    gloo._set_sequence_number_for_group()
    if not 1 < ranks <= MOST_RANKS or not share_a_host(store, rank, ranks):
        return GlooGroup(gloo)
    place = Place(
        rank=rank,
        ranks=ranks,
        limit=options.timeout.total_seconds(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )
    is_first_group = options.group_id == "0"
    try:
        kernel = _kernel(store, place, environ, tells=rank == 0 and is_first_group)
    except NoRegionError as error:
        if rank == 0 and is_first_group:
            print(f"samestep: messages go through gloo, not through shared memory: {error}", file=sys.stderr)
        return GlooGroup(gloo)
    return SharedMemoryGroup(gloo, kernel)


def _kernel(store: Store, place: Place, environ: Mapping[str, str], *, tells: bool) -> Kernel:
    """The fastest kernel that every rank of a group has, in a region of theirs. Raises NoRegionError on all alike."""
    functions: Any = None
    own: Choice = "interpreted" if interpreted.is_sound() else "none"
    try:
        functions = compiled.load(build.library(environ))
        own, why = "compiled", ""
    except (NoKernelError, OSError) as error:
        why = str(error)
    store.set(f"kernel/{place.rank}", own)
    choices = {store.get(f"kernel/{rank}").decode() for rank in range(place.ranks)}
    if "none" in choices:
        raise NoRegionError(why or "another rank has no C++ compiler")
    if choices == {"compiled"}:
        size = compiled.region_bytes(functions, place.ranks)
        return CompiledKernel(functions, region.share(store, place.rank, place.ranks, size), place)
    if tells:
        print(f"samestep: shared memory without its compiled kernel, which is faster: {why}", file=sys.stderr)
    size = interpreted.region_bytes(place.ranks)
    return InterpretedKernel(region.share(store, place.rank, place.ranks, size), place)
