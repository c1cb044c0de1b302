"""Fork server: ranks are forked from a process that has imported PyTorch once, and start in tenths of a second."""

import atexit
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import NoReturn

from samestep import environment, private_folders
from samestep.errors import UserError
from samestep.fault_tolerance.scratch import scratch
from samestep.torch_internals.compiler import COMPILER

_PR_SET_PDEATHSIG = 1  # Linux, <sys/prctl.h>; preserved across exec


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; no effect where unsupported, as on macOS."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # the parent had already ended
        os._exit(1)


def end_with_starter() -> None:
    """In a new multiprocessing process: exit when the process that started it ends, even by SIGKILL.

    A rank forked from a server is no child of the starter, so the kernel can only end it with the server.
    """
    import multiprocessing  # imported here: a rank that execs another program starts faster without it

    starter = multiprocessing.parent_process()
    assert starter is not None

    def wait() -> None:
        """Thread: exits this process when the starting process ends."""
        starter.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# After a process has loaded macOS's frameworks, forking it is unsafe.
METHOD = "forkserver" if sys.platform == "linux" else "spawn"

_STDERR = 2  # file descriptor
_LONGEST_PATH = 60  # bytes; a socket's whole path has 107 at most
_SHORT_PATHS = (Path("/tmp"), Path("/dev/shm"))

# Imported first: it defers signals and garbage collection.
_FIRST = "samestep.launch.fork_server_main"

_ALWAYS = (
    "samestep.api",
    COMPILER,  # which PyTorch imports at an optimizer's first step
    "torch.distributed.elastic.multiprocessing.api",
)

# Slow imports; needed by the ranks if the starting process has imported them.
_WHERE_USED = (
    "safetensors.torch",
    "tokenizers",
    "samestep.training.board",
    "torchmetrics.classification",
    "transformers.modeling_utils",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
)


def preload(more: Sequence[str] = ()) -> None:
    """Set the modules that the server imports when it starts; no effect on a running server."""
    if METHOD == "forkserver":
        used = (name for name in _WHERE_USED if name in sys.modules)
        multiprocessing.set_forkserver_preload([_FIRST, *dict.fromkeys((*_ALWAYS, *used, *more))])


def start_early(modules: Sequence[str], *, ranks: int) -> None:
    """Start the fork server for a job of several ranks; it imports `modules`, which they need.

    It ends with this process. A job whose process is a rank already starts none.
    """
    if _wants_server(ranks):
        preload(modules)
        ensure_running()


def fork_early(modules: Sequence[str], *, ranks: int) -> None:
    """Like `start_early`, by a fork of this process, which has imported `samestep.api`: nothing is imported again.

    Only at the start of a samestep command: a user's program may have threads and open files that a fork must not
    inherit.
    """
    if not _wants_server(ranks):
        return
    for module in (*_ALWAYS, *modules):
        with suppress(ImportError):
            importlib.import_module(module)
    _keep_sockets_in_scratch()
    resource_tracker.ensure_running()  # another program, which the server would otherwise start after the fork
    with _forks_server():
        ensure_running()


def _keep_sockets_in_scratch() -> None:
    """Put the server's socket into a scratch folder, which a later start removes if this process is killed."""
    settings = multiprocessing.current_process()._config  # pyright: ignore[reportAttributeAccessIssue]
    if "tempdir" in settings:
        return
    where: Path | None = None
    if _has_long_path(private_folders.temporary_folder()):
        where = next((place for place in _SHORT_PATHS if private_folders.is_safe_parent(place)), None)
    stack = ExitStack()
    folder = stack.enter_context(scratch("samestep-sockets-", where))
    atexit.register(stack.close)
    settings["tempdir"] = str(folder)


def _has_long_path(folder: Path) -> bool:
    """Whether the path of a socket in a folder's scratch folder would be longer than the system takes."""
    return len(os.fsencode(folder)) > _LONGEST_PATH


def _wants_server(ranks: int) -> bool:
    """Whether a job starts ranks here, on a system with a fork server."""
    if METHOD != "forkserver" or imports_main_again():
        return False
    with suppress(UserError):
        return environment.ranks() is None and ranks > 1
    return False


def ensure_running() -> None:
    """Start the server unless it runs; it imports in the background what `preload` has set."""
    if _has_long_path(private_folders.temporary_folder()):
        _keep_sockets_in_scratch()
    private_folders.temporary_folder()  # where its socket is
    with environment.quiet_import():
        forkserver.ensure_running()
    atexit.unregister(_end)
    atexit.register(_end)


@contextmanager
def _forks_server() -> Iterator[None]:
    """Make multiprocessing fork its server instead of starting an interpreter."""
    spawn = util.spawnv_passfds

    def fork(path: bytes, args: Sequence[str], passed: Sequence[int]) -> int:
        """Replacement of `spawnv_passfds`: forks, since PyTorch is already imported."""
        del path, args
        with warnings.catch_warnings():  # about the threads of imported libraries, which are idle
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _serve(*passed)
        return pid

    util.spawnv_passfds = fork
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


def _serve(listener: int, alive: int) -> NoReturn:
    """Run the server in a forked process, until the pipe `alive` is closed by all users."""
    # The descriptors that the forked process has inherited are closed. One of a pipe or socket that stays open here
    # would keep its other end from seeing that the process which opened it has ended.
    try:
        for open_file in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
            if open_file > _STDERR and open_file not in (listener, alive):
                with suppress(OSError):  # the descriptor of the listing itself
                    os.close(open_file)
        importlib.import_module(_FIRST)
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)


def imports_main_again() -> bool:
    """Whether this is a new rank importing the starting process's main module, where it can't start ranks."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def _end() -> None:
    """Kill a server that may still be importing; ranks have ended, or end with this process."""
    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)  # pyright: ignore[reportAttributeAccessIssue]
    if pid is not None:
        with suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):  # else its id may be reused
                os.kill(pid, signal.SIGKILL)
