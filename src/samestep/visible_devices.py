"""Whether a job wants accelerators, and which of them an environment variable leaves to a process."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DeviceChoice = Literal["auto", "cpu"]  # auto: the accelerator where there is one


@dataclass(frozen=True, kw_only=True)
class VisibleDevices:
    """The accelerators that a variable leaves to this process, as their makers number or name them."""

    variable: str
    devices: tuple[str, ...]


# Of NVIDIA's, AMD's, Intel's and Huawei's accelerators.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
)

_NONE = ("-1", "NoDevFiles")  # the second is what some versions of Slurm set for a task without accelerators


def read(environ: Mapping[str, str]) -> VisibleDevices | None:
    """Which accelerators a variable chooses for this process; None where none does. An empty one chooses none."""
    name = next((name for name in VARIABLES if name in environ), None)
    if name is None:
        return None
    devices = tuple(device.strip() for device in environ[name].split(",") if device.strip())
    # The makers' own libraries take what is no device for the end of the list.
    end = next((index for index, device in enumerate(devices) if device in _NONE), len(devices))
    return VisibleDevices(variable=name, devices=devices[:end])
