"""Measures one model under many layouts: ranks are forked from one server, and each start tries many pairs."""

import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from model_table.declared import impossible
from model_table.entry import Entry
from model_table.result import Result, Verdict
from model_table.worker import Answer, hold, hold_against_noise, take_reference
from samestep.layout import Layout
from samestep.script_proof.forked import free_port
from samestep.verification.proof import Proof

_TOOLS = Path(__file__).resolve().parent.parent
_OTHERS = 2.0  # seconds in which the other ranks answer after the first has, where they answer at all
_VERDICTS: dict[str, Verdict] = {
    "same": "same step",
    "different": "NOT the same step",
    "refused": "refused",
    "crash": "crash",
    "not made": "not made",
}
_PRELOADED = (
    "samestep.launch.fork_server_main",
    "samestep.api",
    "torch._dynamo",
    "transformers.modeling_utils",
    "model_table.preload",
)


def prepare() -> None:
    """Say what the server of processes imports, once for all of them; to be called before anything is measured."""
    # The server finds modules by what its environment says, not by this process's sys.path.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])])
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOADED))


def measure(entry: Entry, layouts: Sequence[str], *, steps: int, limit: float) -> Iterator[Result]:
    """Results of a model's layouts as they come. No pair takes longer than `limit` seconds."""
    with tempfile.TemporaryDirectory(prefix="samestep-models-") as name:
        folder = Path(name)
        answer, seconds = _reference(entry, layouts, steps, folder, limit)
        if answer.kind != "known":
            for layout in layouts:
                yield _result(entry, layout, answer, seconds)
            return
        prepared, refused = answer.prepared, answer.refused
        entry = replace(entry, impossible={**entry.impossible, **answer.impossible})
        for layout, reason in refused.items():
            yield _result(entry, layout, Answer(kind="refused", text=reason, prepared=prepared), 0.0)
        left = [layout for layout in layouts if layout not in refused]
        for size in dict.fromkeys(Layout.parse(layout).size for layout in left):
            waiting = [layout for layout in left if Layout.parse(layout).size == size]
            while waiting:
                with _Ranks(size, waiting, steps, folder) as ranks:
                    for layout in list(waiting):
                        answer, seconds, again = ranks.answer(limit)
                        if answer.proof is not None:
                            answer, more = _beside_noise(answer.proof, steps, folder, limit)
                            seconds += more
                        yield _result(entry, layout, replace(answer, prepared=prepared), seconds)
                        waiting.remove(layout)
                        if again:
                            break


def _reference(entry: Entry, layouts: Sequence[str], steps: int, folder: Path, limit: float) -> tuple[Answer, float]:
    return _alone(_Process(take_reference, entry.name, layouts, steps, folder, folder / "reference.out"), limit)


def _beside_noise(proof: Proof, steps: int, folder: Path, limit: float) -> tuple[Answer, float]:
    return _alone(_Process(hold_against_noise, proof, steps, folder, folder / "noise.out"), limit)


def _alone(process: "_Process", limit: float) -> tuple[Answer, float]:
    """The answer of a process that works alone, and its seconds."""
    began = time.monotonic()
    try:
        if not process.connection.poll(limit):
            return Answer(kind="crash", text=f"{_LATE}{limit:g} s from one process"), limit
        return process.connection.recv(), time.monotonic() - began
    except EOFError:
        return Answer(kind="crash", text=process.end()), time.monotonic() - began
    finally:
        process.kill()


def _result(entry: Entry, layout: str, answer: Answer, seconds: float) -> Result:
    late = answer.kind == "crash" and answer.text.startswith(_LATE)
    return Result(
        model=entry.name,
        kind=entry.kind,
        layout=layout,
        verdict="time limit" if late else _VERDICTS[answer.kind],
        reason=_last_of(answer.text) if answer.kind != "same" else "",
        difference=answer.difference,
        seconds=round(seconds, 2),
        prepared=answer.prepared,
        half=entry.half,
        weight=entry.weight,
        impossible=impossible(entry.stages, dict(entry.impossible), layout),
    )


_LATE = "no answer in "


# Where a package is installed differs between machines.
_INSTALLED = re.compile(r"/\S*/site-packages/")


def _last_of(text: str) -> str:
    """Of a traceback its last line, behind the last place in it; else the text."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not text.startswith("Traceback") or len(lines) < 2:
        return _INSTALLED.sub("", " ".join(lines))
    places = [line for line in lines if line.startswith("File ")]
    place = places[-1].removeprefix("File ").replace('"', "") if places else ""
    names = "/".join(place.split(",")[0].split("/")[-2:]) + "," + ",".join(place.split(",")[1:])
    start = next((i for i in range(len(lines) - 1, -1, -1) if "Error" in lines[i].split(":")[0]), len(lines) - 1)
    return f"{' '.join(lines[start:])[:300]} ({names})"


class _Process:
    """One process of the server's, and the connection that it answers by."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        self.connection: Connection
        self.connection, other = context.Pipe(duplex=False)
        self._process: BaseProcess = context.Process(target=function, args=(*arguments, other), daemon=True)
        self._process.start()
        other.close()

    def end(self) -> str:
        """Waits for the process, which has said its last; how it ended."""
        self._process.join(5.0)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code} and gave no answer"

    def kill(self) -> None:
        with suppress(OSError):
            self.connection.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join()


class _Ranks:
    """Ranks that try layouts one after the other."""

    def __init__(self, size: int, layouts: Sequence[str], steps: int, folder: Path) -> None:
        port = free_port()
        self._processes: list[_Process] = []
        for rank in range(size):
            variables = _variables(rank, size, port)
            output = folder / f"rank-{rank}.out"
            self._processes.append(_Process(hold, variables, list(layouts), steps, folder, output))

    def __enter__(self) -> "_Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()

    def answer(self, limit: float) -> tuple[Answer, float, bool]:
        """The answer for the next layout, its seconds, and whether new ranks must try those after it."""
        began = time.monotonic()
        answers: dict[int, Answer] = {}
        until = began + limit
        while len(answers) < len(self._processes) and (left := until - time.monotonic()) > 0:
            ranks = {self._processes[r].connection: r for r in range(len(self._processes)) if r not in answers}
            for connection in wait(list(ranks), timeout=left):
                assert isinstance(connection, Connection)
                rank = ranks[connection]
                try:
                    said = connection.recv()
                except EOFError:
                    said = Answer(kind="crash", text=self._processes[rank].end())
                if isinstance(said, Answer):
                    if not answers or said.kind == "crash":
                        until = min(until, time.monotonic() + max(_OTHERS, limit / 10))
                    answers[rank] = said
            if any((each.kind == "crash" and not _follows(each)) or not each.alike for each in answers.values()):
                until = min(until, time.monotonic() + _OTHERS)
        return self._judged(answers, limit), time.monotonic() - began, self._broken(answers)

    def _broken(self, answers: dict[int, Answer]) -> bool:
        kinds = {each.kind for each in answers.values()}
        alike = all(each.alike for each in answers.values())
        return len(answers) < len(self._processes) or "crash" in kinds or not alike or len(kinds) > 1

    def _judged(self, answers: dict[int, Answer], limit: float) -> Answer:
        for kind in ("refused", "crash", "different"):
            for each in sorted(answers.values(), key=_follows):
                if each.kind == kind:
                    return each
        if len(answers) < len(self._processes):
            return Answer(kind="crash", text=f"{_LATE}{limit:g} s")
        return answers[0]


def _follows(answer: Answer) -> bool:
    """Whether a rank failed only since another one has ended, whose answer tells why."""
    return answer.kind == "crash" and "has given up" in answer.text


def _variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank of one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
