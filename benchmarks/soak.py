"""A long training under faults at random times, by torchrun with its best settings and by samestep.

    python benchmarks/soak.py --faults 20 --between 2 --seed 1 --json build/soak-torchrun.json --docs

Both train the same small net on two ranks in steps of 20 ms or more, and get the same faults, drawn beforehand, each
some time after the training has recovered from the previous one. samestep runs the soak of `samestep drill --soak`.
torchrun's script saves after every step and resumes by itself. torchrun has unlimited restarts,
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (without it, a restart with gloo may read the old round's addresses), and a
process group timeout of 10 s, samestep's own limit for hangs in a soak. After faults that end the whole job, both are
started again by the same command. If torchrun ends by itself, or takes no step for 150 s, an operator would have to
intervene: that is counted, the remaining processes are killed, and the same command is run once more. With `--docs`
the table is written into docs/faults.md and docs/zh/faults.md.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
import yaml
from notes import last_step

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tools")]

from page_parts import markdown_table, write_parts  # noqa: E402

from samestep import jobfile  # noqa: E402
from samestep.drill.disturbances import Processes, kinds_of  # noqa: E402
from samestep.drill.soak import OneHost, SoakSettings, soak, soaked_job  # noqa: E402
from samestep.drill.under_faults import UnderFaults, planned  # noqa: E402

BATCH, STEP_SECONDS = 16, 0.02  # at least
GROUP_LIMIT = 10.0  # seconds
# Seconds without a step after which an operator intervenes: above samestep's limit for hangs at the start of a round.
STUCK = 150.0
MARGIN = 1.5  # factor on the number of steps, as in samestep's soak
# Faults from outside, which the ranks of every way can have; a script can't be asked for the others.
KINDS = ["kill", "crash", "raise", "hang", "pause", "terminate", "gone"]
PROCESSES = 2

DOCS = {"en": HERE.parent / "docs" / "faults.md", "zh": HERE.parent / "docs" / "zh" / "faults.md"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one way's run under faults."""

    way: str
    faults: Mapping[str, int]  # by kind
    alone: int  # faults before the first intervention
    stepped_in: int  # number of interventions
    ended: bool
    same_weights: bool  # whether the weights are bit for bit those of the same way's undisturbed run
    goodput: float  # seconds of the undisturbed run / seconds of this one
    recoveries: Sequence[float]  # seconds from a fault to the first step that was not taken before it
    left_processes: int
    seconds: float
    last_words: str


class Workers(Processes):
    """The processes of torchrun and of its workers, which are the ranks."""

    def __init__(self, started: subprocess.Popen[bytes], folder: Path) -> None:
        super().__init__(started, folder, PROCESSES)
        self._notes = folder

    def last_step(self) -> int:
        return last_step(self._notes)

    def ranks(self) -> Mapping[int, int]:
        found = ((_rank_of(pid), pid) for pid in self.tree() if pid != self.started.pid)
        return {rank: pid for rank, pid in found if rank is not None}


def _rank_of(pid: int) -> int | None:
    """The rank of a worker process; None for any other process."""
    with suppress(psutil.Error, KeyError):
        process = psutil.Process(pid)
        if any(word.endswith("noted_plain.py") for word in process.cmdline()):
            return int(process.environ()["RANK"])
    return None


def command(folder: Path, steps: int) -> Sequence[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    values = ["--steps", str(steps), "--batch", str(BATCH), "--step-seconds", str(STEP_SECONDS)]
    script = [str(HERE / "noted_plain.py"), str(folder), *values, "--group-limit", str(GROUP_LIMIT)]
    return [*launcher, "--max-restarts=100000", "--monitor-interval=0.1", *script]


def started(folder: Path, steps: int) -> "subprocess.Popen[bytes]":
    variables = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command(folder, steps),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def weights(folder: Path) -> Mapping[str, torch.Tensor]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]


def torchrun(place: Path, settings: SoakSettings) -> Row:
    steps = max(40, int(MARGIN * settings.faults * settings.between / STEP_SECONDS))
    quiet, folder = place / "undisturbed", place / "soak"
    for each in (quiet, folder):
        each.mkdir()
    began = time.monotonic()
    code = started(quiet, steps).wait()
    quiet_seconds = time.monotonic() - began
    if code != 0:
        raise SystemExit(f"torchrun's undisturbed run failed:\n{(quiet / 'log').read_text(errors='replace')}")
    plan = planned(settings.kinds, faults=settings.faults, between=settings.between, seed=settings.seed)
    under = UnderFaults(
        plan=plan, stuck_after=STUCK, rested=True, say=lambda kind: print(f"torchrun: {kind}", file=sys.stderr)
    )
    alone: int | None = None
    stepped_in = 0
    began = time.monotonic()
    while True:
        job = started(folder, steps)
        try:
            under.disturb(Workers(job, folder))
        finally:
            _end(job, folder)
        if job.returncode == 0 and not under.stuck:
            break
        if not under.goes_on(job.returncode):
            print(f"torchrun: {'stuck' if under.stuck else 'ended by itself'}", file=sys.stderr)
            alone = max(0, under.committed.total() - 1) if alone is None else alone
            stepped_in += 1
            under.stuck = False
    seconds = time.monotonic() - began
    known, found = weights(quiet), weights(folder)
    return Row(
        way="torchrun",
        faults=dict(under.committed),
        alone=under.committed.total() if alone is None else alone,
        stepped_in=stepped_in,
        ended=True,
        same_weights=all(torch.equal(found[name], value) for name, value in known.items()),
        goodput=quiet_seconds / seconds,
        recoveries=under.recoveries,
        left_processes=under.left_processes,
        seconds=seconds,
        last_words="",
    )


def _end(job: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Kill the job's remaining processes, also stopped workers: all with this folder among their arguments."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in process.cmdline():
                process.kill()
    job.wait()


def samestep(place: Path, settings: SoakSettings) -> Row:
    values = {
        "recipe": {
            "task": f"{HERE}/noted_task.py:Slow",
            "args": {"folder": str(place), "seconds": STEP_SECONDS},
            "batch": BATCH,
            "virtual_ranks": PROCESSES,
        },
        "run": {"layout": f"dp{PROCESSES}", "threads": 1},
    }
    file = place / "job.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    job = soaked_job(jobfile.load(file).job, settings.faults)
    found = soak(OneHost(place=place, processes=PROCESSES), job, settings)
    faults = sum(found.faults.values())
    return Row(
        way="samestep",
        faults=found.faults,
        alone=faults if found.ended else max(0, faults - 1),
        stepped_in=0,  # if samestep ends by itself or takes no step, its soak has failed
        ended=found.ended,
        same_weights=found.same_weights,
        goodput=found.goodput,
        recoveries=found.recoveries,
        left_processes=found.left_processes,
        seconds=found.seconds,
        last_words=found.last_words,
    )


WAYS = {"torchrun": torchrun, "samestep": samestep}
TITLES = {
    "en": [
        "",
        "faults",
        "before somebody had to step in",
        "stepped in",
        "final weights",
        "goodput",
        "recovery, median",
        "slowest",
        "processes left",
    ],
    "zh": ["", "故障", "需要人介入之前", "介入次数", "最终权重", "有效产出", "恢复，中位数", "最慢", "遗留进程"],
}
NAMES = {"torchrun": "`torchrun --standalone`", "samestep": "`samestep drill --soak`"}
WORDS = {
    "en": {"same": "the same bits", "other": "others", "none": "it did not end", "s": " s"},
    "zh": {"same": "逐位相同", "other": "不同", "none": "没有结束", "s": " 秒"},
}


def table(rows: Sequence[Row], language: str) -> str:
    words = WORDS[language]
    lines = [
        [
            NAMES[row.way],
            str(sum(row.faults.values())),
            str(row.alone),
            str(row.stepped_in),
            words["none"] if not row.ended else words["same" if row.same_weights else "other"],
            f"{row.goodput:.2f}",
            f"{median(row.recoveries):.1f}{words['s']}" if row.recoveries else "",
            f"{max(row.recoveries):.1f}{words['s']}" if row.recoveries else "",
            str(row.left_processes),
        ]
        for row in rows
    ]
    return markdown_table(TITLES[language], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--between", type=float, default=2.0, metavar="S", help="from a recovery to the next fault")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (default: 1)")
    parser.add_argument("--kinds", nargs="*", default=KINDS, help="of faults (default: all that every way can have)")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row; other ways' stay")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    given = parser.parse_args()
    settings = SoakSettings(
        faults=given.faults,
        kinds=kinds_of(given.kinds, ranks=PROCESSES),
        seed=given.seed,
        between=given.between,
        time_limit=STUCK,
        rested=True,
    )
    found: dict[str, dict[str, Any]] = {}
    if given.json is not None and given.json.is_file():
        found = json.loads(given.json.read_text(encoding="utf-8"))
    for way in given.ways:
        with TemporaryDirectory(prefix="samestep-soak-") as place:
            found[way] = asdict(WAYS[way](Path(place), settings))
        if given.json is not None:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    rows = [Row(**found[way]) for way in WAYS if way in found]
    print(table(rows, "en"))
    for language, page in DOCS.items() if given.docs else ():
        write_parts(page, {"benchmarks/soak.py": table(rows, language)})


if __name__ == "__main__":
    main()
