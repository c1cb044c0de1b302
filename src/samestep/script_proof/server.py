"""Forks ranks from a process that has imported what the script imports: `python -m samestep.script_proof.server`.

A line of JSON on stdin starts a rank; a line on stdout says which process it is, and one that it has ended. The
first line says whether ranks can be forked at all.
"""

import json
import multiprocessing.util
import os
import random
import select
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from samestep import environment
from samestep.script_proof import devices, installation, runner
from samestep.script_proof.imports import import_early

_LOOK_EVERY = 0.02  # seconds between two looks for ranks that have ended


def main() -> None:
    """Import, say so, and fork ranks until stdin ends."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what imports print is no answer
    request = json.loads(sys.stdin.readline())
    if not request["cpu"] and getattr(torch, devices.USUAL_KIND).is_available():
        _say(answers, ready=False)  # an accelerator that was touched can't be used after a fork
        return
    torch.compiler.disable(import_early)  # optimizers and DDP import the compiler when they are made
    import_early(request["imports"])
    _say(answers, ready=threading.active_count() == 1)
    _serve(answers)


def _say(answers: Any, **values: Any) -> None:
    answers.write(json.dumps(values) + "\n")


def _serve(answers: Any) -> None:
    """Start ranks as they are asked for, and tell of each that ends."""
    running: set[int] = set()
    buffered = b""
    os.set_blocking(0, False)
    while True:
        ready, _, _ = select.select([0], [], [], _LOOK_EVERY if running else None)
        if ready:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = _forked(request)
                running.add(pid)
                _say(answers, started=pid, run=request["run"], rank=request["rank"])
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.discard(pid)
                _say(answers, ended=pid, code=os.waitstatus_to_exitcode(status))


def _forked(request: Mapping[str, Any]) -> int:
    """A rank as a fork of this process, in a session of its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _become(request)
    finally:  # nothing of the server goes on in a rank
        os._exit(1)


def _become(request: Mapping[str, Any]) -> NoReturn:
    """The rank's variables, files and random numbers, and its program as Python runs it."""
    # What is to be removed at the end of the process it came from is not this one's.
    multiprocessing.util._finalizer_registry.clear()  # pyright: ignore[reportAttributeAccessIssue]
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in ((0, nothing), (1, output), (2, output)):
        os.dup2(file, number)
    sys.stdin = os.fdopen(0)
    environment.become(request["variables"])
    # All ranks have the server's generators: without a seed their numbers must be of each one's own.
    random.seed()
    torch.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    sys.argv[0] = request["module"]
    code = 1
    try:
        runner.main(request["arguments"])
        installation.leave()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        multiprocessing.util._exit_function()  # pyright: ignore[reportAttributeAccessIssue]
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
