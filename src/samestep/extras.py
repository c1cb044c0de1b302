"""Packages that only some jobs need. What needs one asks for it here, before it imports it."""

import importlib.util
from collections.abc import Mapping

from samestep.errors import UserError

# The extra of samestep that installs each.
EXTRAS: Mapping[str, str] = {
    "datasets": "data",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "tensorboard": "board",
    "tokenizers": "text",
    "torchmetrics": "metrics",
    "trackio": "trackio",
    "transformers": "text",
    "wandb": "wandb",
}


def is_installed(package: str) -> bool:
    """Whether a package can be imported, which isn't tried: that may take seconds.

    A folder of that name without code, such as one of configurations in the working directory, is no package, though
    Python imports it as a namespace.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None


def need(needed_by: str, *packages: str) -> None:
    """Raise UserError if one of these packages isn't installed, with the command that installs them."""
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        text = (
            f"{needed_by} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
        )
        raise UserError(f"{text}; {how_to_install(missing[0])}")


def how_to_install(package: str) -> str:
    """The command that installs a package that samestep has an extra for."""
    return f'use pip install "samestep[{EXTRAS[package]}]"'
