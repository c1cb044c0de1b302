"""A soak over several hosts: ranks fail, hosts die and return, links go down; compared with an undisturbed run.

    python benchmarks/soak_hosts.py --faults 40 --between 15 --seed 1 --json build/soak-hosts/40.json

Makes its hosts from Linux namespaces (root needed; see tools/testbed): some that train with a rank each, and one more
for samestep's controller, which starts a small elastic job with ordered sums on the others with `samestep launch`.
The faults and the report are those of `samestep drill --soak`, plus `host` and `cable`; `gone` takes the power from
all hosts at once. The exit code is 1 if bits differ, steps are lost, or processes or files are left behind. `python
benchmarks/soak_tables.py --hosts FILE --docs` writes the table in docs/faults.md.
"""

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import yaml

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tools")]

from testbed import Host, Running, Testbed, why_not  # noqa: E402

from samestep import jobfile  # noqa: E402
from samestep.drill.disturbances import JobHosts, Target, fault_file, kinds_of, last_step_in  # noqa: E402
from samestep.drill.drill import FinishedRun  # noqa: E402
from samestep.drill.run import print_soak  # noqa: E402
from samestep.drill.soak import SoakReport, SoakSettings, soak, soaked_job  # noqa: E402
from samestep.errors import UserError  # noqa: E402
from samestep.fault_tolerance.scratch import left_in  # noqa: E402
from samestep.job import Fault, Job  # noqa: E402

BATCH, VIRTUAL_RANKS, STEP_SECONDS = 24, 6, 0.05  # a step takes at least STEP_SECONDS
_STATUS = re.compile(r"/samestep-agent-[^/]+/round-\d+/rank-(\d+)$")  # the status file that each rank keeps open


class Bed:
    """The hosts of a testbed: the last one runs the controller, the others train."""

    def __init__(self, bed: Testbed) -> None:
        self.controller = bed.hosts[-1]
        self.workers = {host.name: host for host in bed.hosts[:-1]}
        self._unplugged: set[str] = set()
        self._standing = {host.name: set(_processes(host)) for host in bed.hosts}

    def there(self) -> Sequence[str]:
        return [name for name, host in self.workers.items() if name not in self._unplugged and self.ranks_on(host)]

    def crash(self, host: str) -> None:
        self.workers[host].crash()

    def boot(self, host: str) -> None:
        if not self.workers[host].is_up:
            self._boot(self.workers[host])

    def unplug(self, host: str) -> None:
        self.workers[host].unplug()
        self._unplugged.add(host)

    def plug(self, host: str) -> None:
        self._unplugged.discard(host)
        if self.workers[host].is_up:
            self.workers[host].plug()

    def crash_all(self) -> None:
        """Crash all hosts at once, and boot them again."""
        hosts = [*self.workers.values(), self.controller]
        for host in hosts:
            host.crash()
        for host in hosts:
            self._boot(host)
        self._unplugged.clear()

    def _boot(self, host: Host) -> None:
        host.boot()
        self._standing[host.name] = set(_processes(host))

    def ranks_on(self, host: Host) -> Mapping[int, int]:
        """The process ids, outside the host's namespace, of the ranks on a host, by rank."""
        found = ((_rank_of(pid), pid) for pid in self.tree_on(host))
        return {rank: pid for rank, pid in found if rank is not None}

    def tree_on(self, host: Host) -> Sequence[int]:
        """The processes of a host, except those that it had right after it booted."""
        return [pid for pid in _processes(host) if pid not in self._standing[host.name]]


def _processes(host: Host) -> list[int]:
    """The ids of all processes of a host, outside its namespace."""
    if not host.is_up:
        return []
    try:
        space = (Path("/proc") / str(host.pid) / "ns" / "pid").readlink()
    except OSError:
        return []
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (each / "ns" / "pid").readlink() == space:
                found.append(int(each.name))
    return found


def _rank_of(pid: int) -> int | None:
    """The rank whose status file a process keeps open; None if the process is not a rank."""
    with suppress(OSError):
        for each in (Path("/proc") / str(pid) / "fd").iterdir():
            with suppress(OSError):
                if (status := _STATUS.search(str(each.readlink()))) is not None:
                    return int(status[1])
    return None


class Launched:
    """A job that a controller has started on the hosts."""

    def __init__(self, bed: Bed, running: Running, folder: Path) -> None:
        self._bed, self._running, self._folder = bed, running, folder

    @property
    def hosts(self) -> JobHosts:
        return self._bed

    def poll(self) -> int | None:
        return self._running.poll()

    def last_step(self) -> int:
        return last_step_in(self._folder / "metrics.jsonl")

    def ranks(self) -> Mapping[int, int]:
        return {rank: pid for host in self._bed.workers.values() for rank, pid in self._bed.ranks_on(host).items()}

    def fault_file(self, rank: int, fault: Fault) -> Path:
        return fault_file(self._folder, rank, fault)

    def tree(self) -> Sequence[int]:
        hosts = (*self._bed.workers.values(), self._bed.controller)
        return [pid for host in hosts for pid in self._bed.tree_on(host)]

    def terminate(self) -> None:
        # The process outside the namespace ends with the command, but does not wait for it.
        with suppress(psutil.Error):
            for child in psutil.Process(self._running.pid).children():
                child.send_signal(signal.SIGTERM)

    def kill_supervisor(self) -> None:
        with suppress(psutil.Error):
            for child in psutil.Process(self._running.pid).children():
                child.kill()

    def kill(self) -> None:
        self._bed.crash_all()


class OnHosts:
    """Runs a soak's jobs on the hosts of a testbed."""

    def __init__(self, bed: Bed, place: Path) -> None:
        self._bed, self._place = bed, place
        self._hostfile = place / "hosts"
        self._hostfile.write_text("".join(f"{name} slots=1\n" for name in bed.workers), encoding="utf-8")

    def train(self, name: str, job: Job, watch: Callable[[Target], None]) -> FinishedRun:
        folder = self.folder(name)
        job = replace(job, run=replace(job.run, folder=folder))
        file = self._place / f"{name}.yaml"
        file.write_text(yaml.safe_dump(jobfile.plain(job), allow_unicode=True), encoding="utf-8")
        command = [sys.executable, "-W", "ignore", "-m", "samestep", "launch", "--hostfile", str(self._hostfile)]
        command += ["--nodes", f"1:{len(self._bed.workers)}", "--bind", "none"]
        # `launch` does not read the job's max_restarts.
        command += ["--max-restarts", str(job.run.max_restarts), "--", "-m", "samestep", "train"]
        variables = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        running = self._bed.controller.start([*command, str(file)], env=variables, cwd=self._place)
        try:
            watch(Launched(self._bed, running, folder))
            code = running.poll()
        finally:
            running.stop()
        return FinishedRun(code=code, output=running.text, folder=folder)

    def folder(self, name: str) -> Path:
        return self._place / name

    def left_files(self) -> set[Path]:
        hosts = [host for host in (*self._bed.workers.values(), self._bed.controller) if host.is_up]
        places = [Path("/proc") / str(host.pid) / "root" / "dev" / "shm" for host in hosts]
        return set(left_in([*places, Path("/tmp")]))  # each host has its own /dev/shm; all share /tmp


def job_of(place: Path, hosts: int, faults: int) -> Job:
    """A small job over the hosts, with replicas whose number may shrink."""
    values: Mapping[str, Any] = {
        "recipe": {
            "task": f"{HERE}/noted_task.py:Slow",
            "args": {"folder": str(place), "seconds": STEP_SECONDS},
            "batch": BATCH,
            "virtual_ranks": VIRTUAL_RANKS,
        },
        "run": {"layout": f"dp{hosts}", "threads": 1},
    }
    file = place / "job.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    job = soaked_job(jobfile.load(file).job, faults)
    return replace(job, run=replace(job.run, elastic=True))


def soaked(bed: Bed, settings: SoakSettings) -> SoakReport:
    with TemporaryDirectory(prefix="samestep-soak-", ignore_cleanup_errors=True) as place:
        job = job_of(Path(place), len(bed.workers), settings.faults)
        return soak(OnHosts(bed, Path(place)), job, settings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=40, help="how many (default: 40)")
    parser.add_argument("--between", type=float, default=15.0, metavar="S", help="on average (default: 15 s)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (default: 1)")
    parser.add_argument("--kinds", nargs="*", help="of faults (default: all)")
    parser.add_argument("--hosts", type=int, default=3, help="that train (default: 3)")
    parser.add_argument("--steps", type=int, help="of the job (default: as many as the faults take)")
    parser.add_argument("--time-limit", type=float, default=600, metavar="S", help="without a step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table's numbers to a file")
    given = parser.parse_args()
    reason = why_not()
    if reason is not None:
        sys.exit(f"no hosts can be made here: {reason}")
    try:
        settings = SoakSettings(
            faults=given.faults,
            kinds=kinds_of(given.kinds, ranks=given.hosts, hosts=True),
            seed=given.seed,
            between=given.between,
            steps=given.steps,
            time_limit=given.time_limit,
        )
        if not 2 <= given.hosts <= VIRTUAL_RANKS:
            raise UserError(f"--hosts is {given.hosts}; use 2 to {VIRTUAL_RANKS}")
        with Testbed(given.hosts + 1) as bed:
            found = soaked(Bed(bed), settings)
    except UserError as error:
        print(f"soak_hosts: {error}", file=sys.stderr)
        return 2
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(found.to_json(), indent=2) + "\n", encoding="utf-8")
    print_soak(found)
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
