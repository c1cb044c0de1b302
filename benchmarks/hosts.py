"""Recovery from faults of hosts during a training, under torchrun and under samestep: whether, and how fast.

    python benchmarks/hosts.py --runs 3 --json hosts.json --docs

Makes its hosts from Linux namespaces (root needed; see tools/testbed): three that train with a rank each, in steps of
50 ms or more that are all saved, and a fourth for samestep's controller. A run has recovered once ranks that were
started after the fault take a step; after an interruption of 3 s, once any rank takes a step. Seconds are from the
fault to that step. With `--docs` the table is written into docs/elastic.md and docs/zh/elastic.md.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))

from notes import Process, noted  # noqa: E402
from page_parts import markdown_table, write_parts  # noqa: E402
from testbed import Host, Running, Testbed, why_not  # noqa: E402

STEPS = 100_000  # more than any run completes
BATCH = 24
STEP_SECONDS = 0.05  # at least
FAULT_AFTER = 10  # steps
START_LIMIT = 120.0  # seconds to the first steps
BREAK = 3.0  # seconds
PORT = 29400
RESTARTS = 3
BEST = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
GROUP_LIMIT = 10  # seconds; of the process group, in torchrun's best configuration
PYTHON = [sys.executable, "-W", "ignore"]

DOCS = (HERE.parent / "docs" / "elastic.md", HERE.parent / "docs" / "zh" / "elastic.md")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training during which a host failed."""

    recovered: bool
    seconds: float | None  # from the fault to the next step
    ended: float | None  # from the fault to the job's end, if it ended
    said: str | None  # the last line of output with a reason
    resumed: bool | None = None  # whether it continued when it was started again on the remaining hosts


class Job:
    """A training on the hosts of a testbed."""

    def __init__(self, bed: Testbed, folder: Path, way: str) -> None:
        self.bed = bed
        self.folder = folder
        self.way = way
        self.running: dict[str, Running] = {}

    @property
    def workers(self) -> Sequence[Host]:
        return self.bed.hosts[:3]

    def start(self) -> None:
        WAYS[self.way](self, self.workers)

    def run(self, host: Host, command: Sequence[str], **env: str) -> None:
        log = self.folder / f"log-{host.name}-{len(list(self.folder.glob('log-*')))}"
        self.running[host.name] = host.start(
            command, env={"OMP_NUM_THREADS": "1", **env}, cwd=self.folder, output=log
        )

    def steps(self) -> Mapping[Process, list[float]]:
        """The times of each process's steps."""
        return noted(self.folder)

    def wait_for_steps(self) -> None:
        until = time.monotonic() + START_LIMIT
        while len([times for times in self.steps().values() if len(times) >= FAULT_AFTER]) < len(self.workers):
            if time.monotonic() > until or not self.runs():
                raise RuntimeError(f"{self.way} does not start: {self.said()}")
            time.sleep(0.05)

    def runs(self) -> bool:
        """Whether a process of the job still runs on a host that is up."""
        return any(each.poll() is None for name, each in self.running.items() if self.bed[name].is_up)

    def said(self) -> str | None:
        """samestep's last line of output, or else the last line with an error."""
        lines = [line for each in self.running.values() for line in each.text.splitlines()]
        own = [line for line in lines if line.startswith("samestep:")]
        found = own or [line for line in lines if "Error" in line]
        return found[-1].strip()[:300] if found else None

    def stop(self) -> None:
        for host in self.bed.hosts:
            host.crash()
            host.boot()


def torchrun(job: Job, hosts: Sequence[Host], *arguments: str, limit: Sequence[str] = (), **env: str) -> None:
    values = ["--steps", str(STEPS), "--batch", str(BATCH), "--step-seconds", str(STEP_SECONDS), *limit]
    for host in hosts:
        launcher = [*PYTHON, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1"]
        launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].name}:{PORT}", "--rdzv-id=job"]
        launcher += [f"--max-restarts={RESTARTS}", *arguments, str(HERE / "noted_plain.py")]
        job.run(host, [*launcher, str(job.folder), *values], **env)


def torchrun_best(job: Job, hosts: Sequence[Host]) -> None:
    limit = ["--group-limit", str(GROUP_LIMIT)]
    torchrun(job, hosts, f"--rdzv-conf={BEST}", limit=limit, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def train(job: Job, *options: str) -> list[str]:
    """The training command of the ranks."""
    values = {
        "recipe": {
            "task": f"{HERE}/noted_task.py:Slow",
            "args": {"folder": str(job.folder), "seconds": STEP_SECONDS},
            "batch": BATCH,
            "steps": STEPS,
        },
        "run": {
            "layout": "dp3",
            "elastic": True,
            "threads": 1,
            "folder": str(job.folder / "run"),
            "log": (),
            "checkpoint": {"every": 1, "resume": "auto"},
        },
    }
    file = job.folder / "job.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return ["-m", "samestep", "train", str(file), *options]


def agents(job: Job, hosts: Sequence[Host], nodes: str = "2:3") -> None:
    for number, host in enumerate(hosts):
        launch = [*PYTHON, "-m", "samestep", "launch", "--no-ssh", "--node-rank", str(number), "--nodes", nodes]
        launch += ["--num-procs", "1", "--master-addr", hosts[0].name, "--master-port", str(PORT), "--job-id", "job"]
        job.run(host, [*launch, "--max-restarts", str(RESTARTS), "--bind", "none", "--", *train(job)])


def controller(job: Job, hosts: Sequence[Host]) -> None:
    file = job.folder / "hostfile"
    file.write_text("".join(f"{host.name} slots=1\n" for host in hosts), encoding="utf-8")
    launch = [*PYTHON, "-m", "samestep", "launch", "--hostfile", str(file), "--nodes", "2:3"]
    job.run(job.bed.hosts[3], [*launch, "--max-restarts", str(RESTARTS), "--bind", "none", "--", *train(job)])


WAYS: dict[str, Callable[[Job, Sequence[Host]], None]] = {
    "torchrun": torchrun,
    "torchrun, best": torchrun_best,
    "samestep --no-ssh": agents,
    "samestep --hostfile": controller,
}


def kill_worker(job: Job) -> None:
    host = job.workers[1]
    *_, last = (process for process in job.steps() if process.host == host.name)
    host.run(["kill", "-9", str(last.pid)])


def blip(job: Job) -> None:
    job.workers[2].unplug()
    time.sleep(BREAK)
    job.workers[2].plug()


FAULTS: dict[str, Callable[[Job], None]] = {
    "a killed worker": kill_worker,
    "a killed host": lambda job: job.workers[2].crash(),
    "a host without power": lambda job: job.workers[2].power_off(),
    "a pulled cable": lambda job: job.workers[2].unplug(),
    "a break of 3 s": blip,
    "the store's host killed": lambda job: job.workers[0].crash(),
}


def take(bed: Testbed, way: str, fault: str, limit: float) -> Run:
    with TemporaryDirectory(prefix="samestep-hosts-", ignore_cleanup_errors=True) as place:
        job = Job(bed, Path(place), way)
        try:
            job.start()
            job.wait_for_steps()
            before = job.steps().keys()
            at = time.time()
            FAULTS[fault](job)
            found = _next_step(job, before, at, limit, restarted=FAULTS[fault] is not blip)
            seconds, ended = found
            said = job.said()
            resumed = None
            if seconds is None and ended is not None and WAYS[way] is agents:
                resumed = _goes_on_again(job, limit)
            return Run(recovered=seconds is not None, seconds=seconds, ended=ended, said=said, resumed=resumed)
        finally:
            job.stop()


def _next_step(
    job: Job, before: Collection[Process], at: float, limit: float, *, restarted: bool
) -> tuple[float | None, float | None]:
    """Seconds to the next step, and to the job's end if that was first."""
    since = at if restarted else at + BREAK
    while time.time() - at < limit:
        later = [
            moment
            for process, times in job.steps().items()
            for moment in times
            if moment > since and not (restarted and process in before)
        ]
        if later:
            return min(later) - at, None
        if not job.runs():
            return None, time.time() - at
        time.sleep(0.05)
    return None, None


def _goes_on_again(job: Job, limit: float) -> bool:
    """Start the job again on the remaining hosts, from its last checkpoint; returns whether it takes steps."""
    left = [host for host in job.workers if host.is_up]
    before, at = job.steps().keys(), time.time()
    agents(job, left, nodes=str(len(left)))
    return _next_step(job, before, at, limit, restarted=True)[0] is not None


def cell(runs: Sequence[Run]) -> str:
    """A table cell: the number of runs that recovered, and the seconds as median (minimum - maximum)."""
    if not runs:
        return ""
    text = f"{sum(run.recovered for run in runs)} of {len(runs)}"
    seconds = [run.seconds for run in runs if run.seconds is not None]
    if seconds:
        text += f", {median(seconds):.1f} s ({min(seconds):.1f} - {max(seconds):.1f})"
    ended = [run.ended for run in runs if run.ended is not None]
    if ended:
        text += f"; ended after {median(ended):.1f} s"
    resumed = [run.resumed for run in runs if run.resumed is not None]
    if resumed:
        text += f", started again: {sum(resumed)} of {len(resumed)}"
    return text


def table(found: dict[str, dict[str, list[Run]]]) -> str:
    ways = list(found)
    rows = [[fault, *(cell(found[way].get(fault, [])) for way in ways)] for fault in FAULTS]
    return markdown_table(["fault", *ways], [row for row in rows if any(row[1:])], align="l")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each way and fault (default: 3)")
    parser.add_argument("--time-limit", type=float, default=75, metavar="S", help="after a fault (default: 75 s)")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--faults", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run; what it holds already stays")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        sys.exit(f"no hosts can be made here: {reason}")
    found: dict[str, dict[str, list[Run]]] = {way: {} for way in options.ways}
    if options.json is not None and options.json.is_file():
        for way, faults in json.loads(options.json.read_text(encoding="utf-8")).items():
            found[way] = {fault: [Run(**run) for run in runs] for fault, runs in faults.items()}
    with Testbed(4) as bed:
        for _ in range(options.runs):
            for fault in options.faults:
                for way in options.ways:  # in turns, so that other load on the machine affects all ways
                    try:
                        run = take(bed, way, fault, options.time_limit)
                    except RuntimeError as error:  # it failed before the fault
                        print(f"{fault}, {way}: not counted: {error}", file=sys.stderr, flush=True)
                        continue
                    found[way].setdefault(fault, []).append(run)
                    load = os.getloadavg()[0]
                    print(f"{fault}, {way}: {run} (load {load:.1f})", file=sys.stderr, flush=True)
                    if options.json is not None:
                        values = {
                            way: {fault: [asdict(run) for run in runs] for fault, runs in faults.items()}
                            for way, faults in found.items()
                        }
                        options.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    print(table(found))
    for file in DOCS if options.docs else ():
        write_parts(file, {"benchmarks/hosts.py": table(found)})


if __name__ == "__main__":
    main()
