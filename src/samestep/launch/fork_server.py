"""Ranks are forked from a server that has imported PyTorch once, so that a start takes tenths of a second."""

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

from samestep import environment
from samestep.errors import UserError
from samestep.fault_tolerance.scratch import scratch
from samestep.job import Job
from samestep.layout import Layout, unsized
from samestep.tasks import TASKS

_PR_SET_PDEATHSIG = 1  # Linux, <sys/prctl.h>; what a process becomes by exec keeps it


def end_with_parent() -> None:
    """Have the system kill this process when its parent is gone; without effect where it can't, as on macOS."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it was gone before it could be said
        os._exit(1)


def end_with_starter() -> None:
    """In a new process of multiprocessing's: end it when the one that started it is gone, even if that was killed.

    That process is not the system's parent of a rank which a server has forked: the server lives on as long as any
    of its ranks.
    """
    import multiprocessing  # a rank that becomes another program is to start without it

    starter = multiprocessing.parent_process()
    assert starter is not None

    def wait() -> None:
        """A thread: when the starting process is gone, so is this one."""
        starter.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# Forking a process that has loaded the system's frameworks is not safe on macOS.
METHOD = "forkserver" if sys.platform == "linux" else "spawn"

_STDERR = 2  # the number of its open file

# It holds off signals and garbage collection; the others are imported after it.
_FIRST = "samestep.launch.fork_server_main"

_ALWAYS = (
    "samestep.api",
    "torch._dynamo",  # which PyTorch imports at an optimizer's first step
    "torch.distributed.elastic.multiprocessing.api",
)

# Slow to import, and imported by the ranks of a job whose starting process has imported them.
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
    """Say what the server imports when it starts; without effect on one that runs already."""
    if METHOD == "forkserver":
        used = (name for name in _WHERE_USED if name in sys.modules)
        multiprocessing.set_forkserver_preload([_FIRST, *dict.fromkeys((*_ALWAYS, *used, *more))])


def start_early(job: Job) -> None:
    """Start the server for a job's ranks, if there will be any; it imports what a job of this task needs.

    It is ended with this process. Mistakes in the job are not told here.
    """
    if _wants_server(job):
        preload(_modules_of(job))
        ensure_running()


def fork_early(job: Job) -> None:
    """The same by a fork of this process, which has imported `samestep.api`: nothing is imported a second time.

    Only for a process that runs nothing but a command of samestep's, and as its first work: what threads and open
    files of a user's program would be in the server is not known.
    """
    if not _wants_server(job):
        return
    for module in (*_ALWAYS, *_modules_of(job)):
        with suppress(ImportError):
            importlib.import_module(module)
    _keep_sockets_in_scratch()
    resource_tracker.ensure_running()  # a program of its own, which the server's start would start
    with _forks_server():
        ensure_running()


def _keep_sockets_in_scratch() -> None:
    """Have the server's socket in a folder that a later start removes where this process is killed."""
    stack = ExitStack()
    folder = stack.enter_context(scratch("samestep-sockets-"))
    atexit.register(stack.close)
    multiprocessing.current_process()._config.setdefault("tempdir", str(folder))  # pyright: ignore[reportAttributeAccessIssue]


def _wants_server(job: Job) -> bool:
    """Whether a server pays: a job that starts ranks here, on a system that forks."""
    if METHOD != "forkserver" or imports_main_again():
        return False
    with suppress(UserError):
        return environment.ranks() is None and _has_ranks(job)
    return False


def ensure_running() -> None:
    """Start the server where there is none. What it imports in the background is said by `preload`."""
    with environment.quiet_import():
        forkserver.ensure_running()
    atexit.unregister(_end)
    atexit.register(_end)


@contextmanager
def _forks_server() -> Iterator[None]:
    """Let multiprocessing fork its server where it would start a new interpreter for it."""
    spawn = util.spawnv_passfds

    def fork(path: bytes, args: Sequence[str], passed: Sequence[int]) -> int:
        """Fork in place of starting an interpreter: PyTorch is imported already."""
        del path, args
        with warnings.catch_warnings():  # of the threads of libraries that were imported, which wait
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
    """Be the server, in a process that was forked for it; `alive` ends when no process wants it any more."""
    try:
        for open_file in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
            if open_file > _STDERR and open_file not in (listener, alive):
                with suppress(OSError):  # that of the listing
                    os.close(open_file)
        importlib.import_module(_FIRST)
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)


def imports_main_again() -> bool:
    """Whether this is a new rank that imports the starting process's main module, in which nothing can be started."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def _has_ranks(job: Job) -> bool:
    """Whether a job has more than one rank, so that there is anything to start."""
    layout, processes = job.run.layout, job.run.processes
    return (unsized(layout) and processes is None) or Layout.parse(layout, processes).size > 1


def _modules_of(job: Job) -> list[str]:
    """What the ranks of a task that ships import beside that which all ranks do."""
    recipe = job.recipe
    if not isinstance(recipe.task, str) or recipe.task not in TASKS:
        return []
    found = [TASKS[recipe.task].partition(":")[0], "safetensors.torch"]
    if job.run.tensorboard:
        found.append("samestep.training.board")
    if recipe.task in _MODEL_TYPES:
        found.append("transformers.modeling_utils")
        kind = recipe.model.get("type", _MODEL_TYPES[recipe.task])
        if isinstance(kind, str) and kind.isidentifier() and "folder" not in recipe.model:
            found.append(f"transformers.models.{kind}.modeling_{kind}")
    return found


# The tasks with models of transformers, and the type of such a model where the job says none.
_MODEL_TYPES = {"text-classification": "bert", "causal-lm": "llama"}


def _end() -> None:
    """End a server that may still be importing; ranks have ended, or end with this process by themselves."""
    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)  # pyright: ignore[reportAttributeAccessIssue]
    if pid is not None:
        with suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):  # else the number may be another process's
                os.kill(pid, signal.SIGKILL)
