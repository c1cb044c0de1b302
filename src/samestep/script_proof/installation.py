"""Installs the recorder in a process: in a rank, and in the processes that it starts."""

import atexit
import os
import random
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from samestep import environment
from samestep.recording.calls import Call
from samestep.script_proof import devices, tiny
from samestep.script_proof.children import CHILD
from samestep.script_proof.rebinding import rebinding
from samestep.script_proof.recorder import RecordingEnd, ScriptRecorder
from samestep.script_proof.settings import RecordSettings


def install(settings: RecordSettings, *, place: str | None = None, after_imports: bool = False) -> ScriptRecorder:
    """Install a recorder for the rest of the process; `place`: its folder, of a process that is no rank yet."""
    ranks = environment.ranks()
    rank, size = (ranks.rank, ranks.world_size) if ranks else (0, 1)
    _prepare(settings, rank)
    recorder = ScriptRecorder(settings, rank=rank, world_size=size, follow=Followed, place=place)
    with rebinding(everywhere=after_imports):
        if settings.on is not None:
            devices.install(
                devices.target_of(settings.on),
                devices=settings.devices,
                local_rank=ranks.local_rank if ranks else 0,
                note=recorder.turned,
            )
        recorder.install()
    if settings.tiny:
        tiny.install(recorder.shrunk)
    return recorder


@contextmanager
def recorded(recorder: ScriptRecorder) -> Iterator[None]:
    """Write how what runs inside has ended; the end that the recorder asks for goes no further."""
    try:
        yield
    except RecordingEnd:
        recorder.end("stopped")
    except SystemExit as ended:
        recorder.end("ended" if ended.code in (None, 0) else f"exit code {ended.code}")
        if ended.code not in (None, 0):
            raise
    except BaseException as error:
        recorder.end("failed: " + "".join(traceback.format_exception_only(error)).strip())
        raise
    else:
        recorder.end("ended")


_SEEDS_APART = 1000  # of ranks: without a proof, each process has a seed of its own


def _prepare(settings: RecordSettings, rank: int) -> None:
    """Default dtype and seeds, as the proof asks for them; rank 0 has the run alone's seed, others have others."""
    if settings.dtype is not None:
        torch.set_default_dtype(getattr(torch, settings.dtype))
    if settings.seed is not None:
        seed = settings.seed + _SEEDS_APART * rank
        random.seed(seed)
        torch.manual_seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:  # PyTorch imports it where it is installed
            numpy.random.seed(seed % (1 << 32))


def leave() -> NoReturn:
    """End a process whose script has ended well, without the destructors of what the script has left open.

    The threads of a process group that was not destroyed may abort the process there, long after the last step.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Followed:
    """What a process calls in place of the script's own function. A new program gets it without the recorder."""

    def __init__(self, target: Call, settings: RecordSettings, recorder: ScriptRecorder | None = None) -> None:
        self._target = target
        self._settings = settings
        self._recorder = recorder

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return Followed, (self._target, self._settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        place = f"{CHILD}{os.getpid()}"
        if self._recorder is not None:  # a fork, in which everything is replaced already
            recorder = self._recorder
            recorder.begin(place)
        else:
            recorder = install(self._settings, place=place, after_imports=True)
        with recorded(recorder):
            return self._target(*args, **kwargs)
        return leave()  # the recorder has stopped it
