"""The folder from which torch.compile loads libraries and pickles that an earlier process compiled.

PyTorch's default is a name in the shared temporary folder that everybody knows, and uses it whoever made it.
"""

import getpass
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from samestep import environment, private_folders
from samestep.fault_tolerance.scratch import scratch
from samestep.torch_internals.compiler import avoid_precompiled_headers

_OTHER = "TORCHINDUCTOR_CACHE_DIR names another folder"
_NOT_OF_A_NAME = re.compile(r'[\\/:*?"<>|]')


@contextmanager
def private() -> Iterator[None]:
    """Have torch.compile use the user's folder, or PyTorch's, if no other user can write to it, else a scratch one.

    To be entered before the ranks start, which have the same folder, or in a rank that another launcher started.
    """
    usual = environment.compiler_cache() or _default()
    if private_folders.is_kept(usual, _OTHER):
        yield
        return
    with scratch("samestep-compiled-") as folder, environment.compiler_cache_at(folder):
        yield


def avoid_foreign_headers() -> None:
    """To be called before anything is compiled: precompiled headers are in PyTorch's folder, whatever was chosen."""
    if private_folders.is_kept(_default(), _OTHER):
        return
    avoid_precompiled_headers()


def _default() -> Path:
    """PyTorch's folder, by its rule."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir()) / f"torchinductor_{_NOT_OF_A_NAME.sub('_', user)}"
