"""Trains with faults in single file operations, under the shim of file_faults.c, for tests/test_file_faults.py.

Run as a program, under LD_PRELOAD, it reads cases from standard input, a JSON object a line, and writes the outcome
of each to standard output. Every case is a fork, so that PyTorch is imported once.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
KINDS = {"none": 0, "kill": 1, "error": 2, "short": 3}
STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training into `folder` until step `steps`; its file operations `at` to `at + times - 1` are faulty."""

    folder: str
    kind: str = "none"
    at: int = 0
    times: int = 1
    error: int = 0  # errno
    steps: int = STEPS
    record: str = ""  # a file for the operations, also for those on the folder that `folder` is in
    copy_of: str = ""  # the folder with which the training begins
    # Asynchronous saves are written while the training goes on, so the n-th operation is not always the same one.
    asynchronous: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a case."""

    code: int  # exit code, negative for a signal
    error: str  # "" or the exception's class and text
    operations: int  # counted, unless it was killed
    warnings: str  # what the training wrote to standard error


def shim(place: Path) -> Path:
    """Compile the shim into a folder."""
    library = place / "file_faults.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(TESTS / "file_faults.c"), "-ldl", "-lpthread"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return library


_SECONDS = 90  # for a training of three steps, which takes less than one


class FaultyTrainings:
    """The program that trains under faults: started once, since PyTorch's import takes longer than many cases."""

    def __init__(self, library: Path, errors: Path) -> None:
        """`library`: the shim. `errors`: a file for the program's own standard error."""
        self._errors = errors
        with errors.open("wb") as stream:
            self._program = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "LD_PRELOAD": str(library)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
            )

    def __enter__(self) -> "FaultyTrainings":
        return self

    def __exit__(self, *_: object) -> None:
        """End the program, also in the middle of a case."""
        self._program.kill()
        self._program.communicate()

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        """Run the cases one after another. A program that doesn't end one of them within the limit is killed."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        outcomes = []
        for case in cases:
            limit = threading.Timer(_SECONDS, self._program.kill)
            limit.start()
            try:
                print(json.dumps(asdict(case)), file=self._program.stdin, flush=True)
                line = self._program.stdout.readline()
            finally:
                limit.cancel()
            assert line, (case, self._errors.read_text(encoding="utf-8"))
            outcomes.append(Outcome(**json.loads(line)))
        return outcomes


def _train(case: Mapping[str, Any], faults: ctypes.CDLL) -> None:
    from file_fault_tasks import OneLayer

    import samestep

    folder = Path(case["folder"])
    below = folder.parent if case["record"] else folder
    faults.faults_arm(os.fsencode(below), KINDS[case["kind"]], case["at"], case["times"], case["error"], 0)
    if case["record"]:
        faults.faults_record(os.fsencode(case["record"]))
    samestep.train(
        samestep.Recipe(task=OneLayer(), batch=8, steps=case["steps"], optimizer=samestep.SGD(lr=0.1)),
        threads=1,
        folder=folder,
        log=(),
        check=False,
        checkpoint={"every": 1, "keep": 2, "resume": "auto", "asynchronous": case["asynchronous"]},
    )


def _forked(case: Mapping[str, Any], faults: ctypes.CDLL) -> Outcome:
    """Train in a fork of this process."""
    result, errors = Path(case["folder"] + ".result"), Path(case["folder"] + ".err")
    errors.parent.mkdir(parents=True, exist_ok=True)
    if case["copy_of"]:
        shutil.copytree(case["copy_of"], case["folder"])
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        code, error = 0, ""
        try:
            _train(case, faults)
        except BaseException as raised:  # told to the test
            code, error = 1, f"{type(raised).__name__}: {raised}"
        count = faults.faults_count()
        faults.faults_arm(b"", 0, 0, 0, 0, 0)
        result.write_text(json.dumps({"error": error, "operations": count}), encoding="utf-8")
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    told = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {"error": "", "operations": 0}
    result.unlink(missing_ok=True)
    return Outcome(code=code, warnings=errors.read_text(encoding="utf-8"), **told)


def main() -> None:
    # Once, for all forks. The first step of an optimizer imports PyTorch's compiler, in most of a second.
    import torch._dynamo
    import torch.distributed.checkpoint  # noqa: F401

    import samestep.api  # noqa: F401

    sys.path.insert(0, str(TESTS))
    faults = ctypes.CDLL(None)
    for line in sys.stdin:
        print(json.dumps(asdict(_forked(json.loads(line), faults))), flush=True)


if __name__ == "__main__":
    main()
