"""Which device a rank computes on, and the back end that its messages take. No other module names a device."""

import gc
import importlib
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from samestep import environment
from samestep.errors import UserError
from samestep.launch.memory import available_memory
from samestep.limits import MOST_RANKS_A_HOST
from samestep.ranks import DeviceChoice, has_a_tasks_accelerators
from samestep.sizes import binary_size


def accelerators() -> int:
    """Accelerators of this host that PyTorch can use; 0 where it has none."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def accelerator_names() -> list[str]:
    """What the makers call this host's accelerators."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    module = torch.get_device_module(accelerator)
    return [module.get_device_name(index) for index in range(accelerators())]


def build() -> str:
    """Return the accelerator platform that this PyTorch was built for."""
    for name, title in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU")):
        if number := getattr(torch.version, name, None):
            return f"{title} {number}"
    return "CPU"


def device_of(local_rank: int, choice: DeviceChoice = "auto") -> torch.device:
    """The accelerator of a local rank, or the CPU where there is none or it was asked for.

    A launcher lets each rank see all accelerators of its host, or its own alone, of which it takes the first. Where
    there are more ranks than accelerators, several take the same one.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if choice == "cpu" or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, 0 if _sees_its_own() else local_rank % accelerators())


def _sees_its_own() -> bool:
    """Whether this rank's launcher gave it accelerators that no other rank of its host sees."""
    visible = environment.visible_devices()
    return visible is not None and has_a_tasks_accelerators(environment.snapshot(), len(visible.devices))


def check_devices(
    local_ranks: int, choice: DeviceChoice = "auto", *, in_a_rank: bool = False, may_share: bool = False
) -> None:
    """Raise UserError if this host has fewer accelerators than ranks, but some, unless ranks may share them.

    Also for more ranks than it can hold.

    A rank whose launcher lets it see one accelerator, or several of its own, has those to itself. If several ranks
    see the same one, NCCL refuses it by name when they join.
    """
    if not in_a_rank:
        check_ranks_here(local_ranks)
    there = accelerators()
    one_alone = there == 1 and environment.visible_devices() is not None
    if may_share:
        return
    if in_a_rank and there > 0 and (one_alone or _sees_its_own()):
        return
    if choice == "auto" and 0 < there < local_ranks:
        raise UserError(
            f"{local_ranks} processes on this host, which has {there} accelerator{'s' if there > 1 else ''}; "
            f"ask for {there} or fewer, for --device cpu, or for run.transport: gloo, by which ranks may share one"
        )


_OF_A_RANK = 100 * 2**20  # bytes that a rank has to itself at least, beside what it shares with the others


def check_ranks_here(ranks: int) -> None:
    """Raise UserError for more ranks on this host than can be started, or than its memory can hold."""
    if ranks > MOST_RANKS_A_HOST:
        raise UserError(f"{ranks:,} processes on this host; use {MOST_RANKS_A_HOST} or fewer, or more hosts")
    there = available_memory()
    if ranks > 1 and ranks * _OF_A_RANK > there:
        raise UserError(
            f"{ranks} processes on this host need {binary_size(ranks * _OF_A_RANK)} of memory at least, and "
            f"{binary_size(there)} are free; use {max(1, there // _OF_A_RANK)} or fewer, or more hosts"
        )


def check_slots(host: str, slots: int, chosen: Sequence[int] | None, choice: DeviceChoice = "auto") -> None:
    """Raise UserError if a host lacks accelerators for its slots but has some; `chosen`: indices, None: the first."""
    check_ranks_here(slots)
    if choice == "cpu":
        return
    there = accelerators()
    visible = environment.visible_devices()
    if visible is not None:
        there = min(there, len(visible.devices))
    last = max(chosen, default=0) + 1 if chosen is not None else slots
    if not 0 < there < last:
        return
    slots_asked = f"slot {last - 1}, counted from 0, is" if chosen is not None else f"{slots} slots are"
    left = f" that {visible.variable}={','.join(visible.devices)} leaves" if visible is not None else ""
    usable = "slot 0" if there == 1 else f"slots 0 to {there - 1}"
    raise UserError(
        f"{host}: {slots_asked} asked for, and there "
        f"{'is 1 accelerator' if there == 1 else f'are {there} accelerators'}{left}; use "
        f"{usable if chosen is not None else f'{there} or fewer'}, or --device cpu for a job on the CPU"
    )


def backend_of(device: torch.device, *, gloo_alone: bool = False) -> str:
    """The process group's back end: the device's own, and gloo for what stays on the CPU.

    With `gloo_alone` messages of the device go through the host's memory, where several ranks may have one device,
    which NCCL refuses. On SageMaker the device's is SageMaker's own where that is installed.
    """
    if device.type == "cpu":
        return "gloo"
    if gloo_alone:
        return f"cpu:gloo,{device.type}:gloo"
    own = _SAGEMAKERS if _has_sagemakers() else dist.get_default_backend_for_device(device)
    return f"cpu:gloo,{device.type}:{own}"


_SAGEMAKERS = "smddp"


def _has_sagemakers() -> bool:
    """Whether this is a SageMaker job with its data-parallel library, whose import registers the back end."""
    if not environment.on_sagemaker():
        return False
    try:
        importlib.import_module("smdistributed.dataparallel.torch.torch_smddp")
    except ImportError:
        return False
    return _SAGEMAKERS in dist.Backend.backend_list


def has_flash_attention(device: torch.device) -> bool:
    """Whether PyTorch's flash attention in half precision runs on a device that is no CPU."""
    return device.type == "cuda"


def release_memory(device: torch.device) -> None:
    """Give an accelerator's memory that nothing uses any more back to it, for other processes to take.

    PyTorch keeps it to use it again. What refers to itself, as a model and its hooks do, is collected first.
    """
    if device.type != "cpu":
        gc.collect()
        torch.accelerator.empty_cache()


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this rank in bytes: on its accelerator, or main memory if it computes on the CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    if sys.platform == "linux":
        # Not getrusage: its maximum starts with the memory of the parent process.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024
    # macOS counts in bytes, others in KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
