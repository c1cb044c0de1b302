"""A rank's first lines: it installs the recorder, and runs the user's script or module as Python itself would.

`python -m samestep.script_proof.runner [ENGINE'S ARGUMENTS] --recorder=SETTINGS.json SCRIPT.py [ARGUMENTS]`, or
`-m MODULE` in place of the script.
"""

import atexit
import os
import random
import runpy
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from samestep import environment
from samestep.script_proof import devices
from samestep.script_proof.rebinding import rebinding
from samestep.script_proof.recorder import RecordingEnd, ScriptRecorder
from samestep.script_proof.settings import RECORDER, RecordSettings


def main(arguments: Sequence[str]) -> None:
    """Run the script to its end, or to the last step that is noted. What it raises is raised here too."""
    at = next(index for index, word in enumerate(arguments) if word.startswith(RECORDER))
    engines, command = arguments[:at], arguments[at + 1 :]
    settings = RecordSettings.read(Path(arguments[at].removeprefix(RECORDER)))
    ranks = environment.ranks()
    _prepare(settings)
    recorder = ScriptRecorder(settings, rank=ranks.rank if ranks else 0, world_size=ranks.world_size if ranks else 1)
    with rebinding():
        if settings.on is not None:
            devices.install(
                devices.target_of(settings.on),
                devices=settings.devices,
                local_rank=ranks.local_rank if ranks else 0,
                note=recorder.turned,
            )
        recorder.install()
    try:
        with environment.given(settings.variables):
            _run(command, engines)
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


def _prepare(settings: RecordSettings) -> None:
    """Default dtype and seeds, as the proof asks for them."""
    if settings.dtype is not None:
        torch.set_default_dtype(getattr(torch, settings.dtype))
    if settings.seed is not None:
        random.seed(settings.seed)
        torch.manual_seed(settings.seed)
        if (numpy := sys.modules.get("numpy")) is not None:  # PyTorch imports it where it is installed
            numpy.random.seed(settings.seed)


def _run(command: Sequence[str], engines: Sequence[str]) -> None:
    """The command as the main program of this process, with what an engine's launcher puts before its arguments."""
    if command[0] == "-m":
        module, own = command[1], command[2:]
        sys.argv = [module, *engines, *own]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    script, own = command[0], command[1:]
    sys.argv = [script, *engines, *own]
    sys.path[0] = str(Path(script).resolve().parent)
    # It stays __main__ to the end of the process: classes of the script are pickled by that name.
    main_module = ModuleType("__main__")
    vars(main_module).update({"__file__": script, "__builtins__": __builtins__})
    sys.modules["__main__"] = main_module
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(main_module))


def leave() -> None:
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


if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
