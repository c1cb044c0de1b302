"""Versions of what decides a training's numbers."""

import platform
from importlib.metadata import version

_PACKAGES = ("samestep", "torch", "numpy", "transformers", "tokenizers", "torchmetrics")


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
