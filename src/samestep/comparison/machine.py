"""The machine that a comparison ran on, in words."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from samestep.cluster.cores import cores
from samestep.cluster.device import accelerators

# What methods are made of, beside what every run reports of itself.
_PACKAGES = ("torch", "deepspeed", "accelerate", "horovod", "tensorflow", "tensorflow-cpu", "tf_keras")


def machine() -> dict[str, Any]:
    there = accelerators()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    name = torch.get_device_module(accelerator).get_device_name(0) if accelerator is not None else None
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "accelerators": f"{there} x {name}" if there else "none",
        "python": platform.python_version(),
        "packages": {package: found for package in _PACKAGES if (found := _version(package))},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
