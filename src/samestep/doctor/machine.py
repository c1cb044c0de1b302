"""Checks of this machine: processors, memory, disks, limits of a process, clock, and installed packages."""

import ctypes
import itertools
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from samestep import environment
from samestep.doctor.findings import DoctorFinding, ExaminationRequest, ok, problem, warning
from samestep.engines.registry import engine_names, resolve
from samestep.errors import UserError
from samestep.extras import is_installed
from samestep.launch.affinity import cores as usable_cores
from samestep.launch.device import accelerator_names, build
from samestep.launch.memory import cgroup_limit
from samestep.sizes import binary_size

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_CGROUPS = Path("/sys/fs/cgroup")


def cores(request: ExaminationRequest) -> Iterator[DoctorFinding]:
    """Check the cores of the machine, of this process's affinity mask, and of its cgroup's quota."""
    of_machine, usable, quota = os.cpu_count() or 1, usable_cores(), cpu_quota(_CGROUPS)
    values = {"machine": of_machine, "usable": usable, "quota": quota}
    if quota is not None and quota < usable:
        yield warning(
            "cores",
            f"a quota of {quota:g} cores, and {usable} that processes see: they start more threads than may run",
            f"--threads {max(1, int(quota))} for one process, or give the container more (docker run --cpus)",
            **values,
        )
    elif usable < of_machine:
        yield ok(
            "cores",
            f"{usable} of the machine's {of_machine} are for this process",
            "for more: taskset, or what the scheduler or the container was asked for",
            **values,
        )
    else:
        yield ok("cores", f"{usable}, all of the machine's", **values)


def cpu_quota(groups: Path) -> float | None:
    """Cores that the cgroup of this process may use at a time, version 2 or 1; None where there is no limit."""
    newer, quota, period = groups / "cpu.max", groups / "cpu/cpu.cfs_quota_us", groups / "cpu/cpu.cfs_period_us"
    try:
        if newer.is_file():
            words = newer.read_text(encoding="ascii").split()
        elif quota.is_file() and period.is_file():
            words = [quota.read_text(encoding="ascii").strip(), period.read_text(encoding="ascii").strip()]
        else:
            return None
        return int(words[0]) / int(words[1]) if words[0] not in ("max", "-1") else None
    except (OSError, ValueError, IndexError):
        return None


def threads(request: ExaminationRequest) -> Iterator[DoctorFinding]:
    """Check OMP_NUM_THREADS against the available cores."""
    threads_set, usable = environment.asked_threads(), usable_cores()
    if threads_set is None:
        yield ok("threads", "OMP_NUM_THREADS is not set: samestep shares the cores out among the ranks of a host")
    elif threads_set > usable:
        yield warning(
            "threads",
            f"OMP_NUM_THREADS={threads_set}, and there are {usable} cores",
            "unset OMP_NUM_THREADS, or set it to the cores of one rank",
            threads=threads_set,
        )
    else:
        yield ok("threads", f"OMP_NUM_THREADS={threads_set}: every rank has so many", threads=threads_set)


def numa(request: ExaminationRequest) -> Iterator[DoctorFinding]:
    """Count the NUMA nodes; access to another node's memory is slower."""
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if nodes > 1:
        yield ok(
            "NUMA",
            f"{nodes} nodes: a rank is slower where its memory is another node's",
            "one rank or more a node, bound to it: numactl --cpunodebind=0 --membind=0 for ranks you start yourself",
            nodes=nodes,
        )
    else:
        yield ok("NUMA", "one node", nodes=max(nodes, 1))


SHARED = Path("/dev/shm")
_CONTAINER_DEFAULT = 64 * 2**20  # what a container gets by default
_LITTLE = 2**30


def memory(request: ExaminationRequest) -> Iterator[DoctorFinding]:
    """Check the free memory of the machine, and the limit of this process's cgroup."""
    there, limit = psutil.virtual_memory(), cgroup_limit()
    total, free = there.total, there.available
    values: dict[str, Any] = {"total_bytes": total, "available_bytes": free, "limit_bytes": limit}
    text = f"{binary_size(free)} of {binary_size(total)} are free"
    if limit is not None:
        text += f"; a limit of {binary_size(limit)} on this process's group"
    if min(free, limit or free) < _LITTLE:
        yield warning("memory", text, "end what else holds memory, or ask for a larger machine", **values)
    else:
        yield ok("memory", text, **values)


def swap(request: ExaminationRequest) -> Iterator[DoctorFinding]:
    """Check how much memory is swapped out."""
    used = psutil.swap_memory().used
    if used > _LITTLE // 4:
        yield warning(
            "swap",
            f"{binary_size(used)} are swapped out: ranks that wait for the disk make every other rank wait",
            "end what else holds memory, or take fewer ranks, smaller micro-batches or more sharding",
            used_bytes=used,
        )
    else:
        yield ok("swap", "nothing to speak of is swapped out", used_bytes=used)


def shared_memory(request: ExaminationRequest) -> Iterator[DoctorFinding]:
    """Check the free space in /dev/shm, through which loader workers and NCCL pass tensors."""
    if not SHARED.is_dir():
        yield ok("shared memory", f"there is no {SHARED} on this system")
        return
    total, _, free = shutil.disk_usage(SHARED)
    values: dict[str, Any] = {"total_bytes": total, "free_bytes": free}
    text = f"{binary_size(free)} of {binary_size(total)} are free in {SHARED}"
    if free < _CONTAINER_DEFAULT // 4:
        remedy = f"remove unused files from {SHARED}, or give the container more: docker run --shm-size=8g"
        yield problem("shared memory", text, remedy, **values)
    elif total <= _CONTAINER_DEFAULT:
        yield warning(
            "shared memory",
            f"{text}: a container's default, too little for loader workers and NCCL, which end by a bus error",
            "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm",
            **values,
        )
    elif free < _LITTLE:
        remedy = f"remove unused files from {SHARED}; docker run --shm-size=8g in a container"
        yield warning("shared memory", text, remedy, **values)
    else:
        yield ok("shared memory", text, **values)


_TOO_LITTLE, _LITTLE_ON_DISK = 100 * 2**20, 5 * 2**30


def disks(request: ExaminationRequest) -> Iterator[DoctorFinding]:
    """Check the free space in the folders that a training writes to."""
    yield _folder("runs' folder", request.folder, "write elsewhere with run.folder or --folder")
    yield _folder("temporary folder", Path(tempfile.gettempdir()), "point TMPDIR to a folder with more room")


def _folder(subject: str, folder: Path, remedy: str) -> DoctorFinding:
    """Check a folder, or its nearest existing parent."""
    there = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()), Path("/"))
    if not there.is_dir():
        return problem(subject, f"{folder}: {there} is a file", remedy, folder=str(folder))
    total, _, free = shutil.disk_usage(there)
    values = {"folder": str(folder), "total_bytes": total, "free_bytes": free}
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"samestep")
    except OSError as error:
        return problem(subject, f"{folder} can't be written: {error.strerror}", remedy, **values)
    text = f"{folder} can be written, {binary_size(free)} of {binary_size(total)} are free"
    if free < _TOO_LITTLE:
        return problem(subject, text, f"remove old runs and checkpoints, or {remedy}", **values)
    if free < _LITTLE_ON_DISK:
        return warning(subject, text, f"remove old runs and checkpoints, or {remedy}", **values)
    return ok(subject, text, **values)


_FEW, _TOO_FEW = 4096, 256  # open files
_REMEDY = "ulimit -n 65536 before the start, LimitNOFILE= in a systemd unit, or docker run --ulimit nofile=65536"


def open_files(request: ExaminationRequest) -> Iterator[DoctorFinding]:
    """Check the limit of open files; every peer and every tensor from a loader worker takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    values: dict[str, Any] = {"soft": soft, "hard": hard}
    if soft == resource.RLIM_INFINITY:
        yield ok("open files", "no limit", **values)
    elif soft < _TOO_FEW:
        yield problem("open files", f"a process may open {soft:,}, too few for loader workers", _REMEDY, **values)
    elif soft < _FEW:
        yield warning("open files", f"a process may open {soft:,}, few for many ranks or workers", _REMEDY, **values)
    else:
        yield ok("open files", f"a process may open {soft:,}", **values)


def locked_memory(request: ExaminationRequest) -> Iterator[DoctorFinding]:
    """Check the limit of locked memory, which InfiniBand needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    there = any(Path("/sys/class/infiniband").glob("*"))
    text = "no limit" if unlimited else f"a process may lock {binary_size(soft)}"
    values: dict[str, Any] = {"soft_bytes": None if unlimited else soft, "infiniband": there}
    if there and not unlimited:
        remedy = "ulimit -l unlimited before the start, or docker run --ulimit memlock=-1"
        yield problem("locked memory", f"{text}, and InfiniBand needs all of a message locked", remedy, **values)
    else:
        yield ok("locked memory", text if there else f"{text}; there is no InfiniBand that needs it", **values)


_STEPS = 1000
_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)


def clock(request: ExaminationRequest) -> Iterator[DoctorFinding]:
    """Check that the clock advances and is synchronized, which matters between hosts."""
    times = [time.monotonic_ns() for _ in range(_STEPS)]
    if any(later < earlier for earlier, later in itertools.pairwise(times)):
        yield problem("clock", "the monotonic clock goes backwards", "choose another clock source in the kernel")
        return
    state = _state()
    values: dict[str, Any] = {"synchronised": None if state is None else state != _UNSYNCHRONISED}
    text = "it goes forward"
    if state is None or state < 0:
        yield ok("clock", f"{text}; whether it follows a time server is not known here")
    elif state != _UNSYNCHRONISED:
        yield ok("clock", f"{text}, and follows a time server", **values)
    elif request.hosts:
        remedy = "let all hosts follow one time server: chrony or systemd-timesyncd"
        yield warning("clock", f"{text}, and follows no time server", remedy, **values)
    else:
        yield ok("clock", f"{text}, and follows no time server; that matters between hosts", **values)


def _state() -> int | None:
    """Return the state of the system clock from adjtimex(2), which is only read; None if unavailable."""
    if sys.platform != "linux":
        return None
    timex = ctypes.create_string_buffer(512)  # struct timex; modes = 0 reads only
    try:
        return ctypes.CDLL(None).adjtimex(timex)
    except (OSError, AttributeError):
        return None


def torch_build(request: ExaminationRequest) -> Iterator[DoctorFinding]:
    """Python, PyTorch and the kind of device it is built for, and the accelerators that it sees."""
    names = accelerator_names()
    text = f"Python {platform.python_version()}, PyTorch {version('torch')} built for {build()}"
    values = {"python": platform.python_version(), "torch": version("torch"), "built_for": build()}
    if names:
        yield ok("PyTorch", f"{text}, {len(names)} x {names[0]}", accelerators=names, **values)
    elif build() != "CPU":
        yield warning(
            "PyTorch",
            f"{text}, and no accelerator is seen",
            "look whether the driver is there (nvidia-smi) and new enough for this build, and whether a container "
            "was given the devices (docker run --gpus all)",
            accelerators=[],
            **values,
        )
    else:
        yield ok("PyTorch", f"{text}, no accelerator", accelerators=[], **values)


def packages(request: ExaminationRequest) -> Iterator[DoctorFinding]:
    """What samestep must have, in the versions that it asks for, then its extras."""
    if not is_installed("packaging"):
        yield warning("packages", "packaging is not installed, so no versions were compared", "pip install packaging")
        return
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(text) for text in requires("samestep") or []]
    except PackageNotFoundError:
        yield warning(
            "packages",
            "samestep is not installed, it runs from its source",
            "pip install --editable packages/prove --editable .",
        )
        return
    always = [requirement for requirement in needed if requirement.marker is None]
    wrong = [text for requirement in always if (text := _wrong(requirement)) is not None]
    if wrong:
        yield problem("packages", "; ".join(wrong), "pip install --upgrade samestep")
    else:
        yield ok("packages", ", ".join(f"{requirement.name} {version(requirement.name)}" for requirement in always))
    extras = {
        extra: of_extra
        for extra in sorted({name for requirement in needed for name in _extras(requirement)} - {"dev"})
        if (of_extra := [requirement for requirement in needed if extra in _extras(requirement)])
    }
    yield from (_extra(extra, requirements) for extra, requirements in extras.items())


def _extras(requirement: "Requirement") -> list[str]:
    """Return the extras of a requirement, from a marker such as `extra == "images"`."""
    words = str(requirement.marker or "").split('extra == "')[1:]
    return [word.partition('"')[0] for word in words]


def _wrong(requirement: "Requirement") -> str | None:
    """Return why a requirement is not met; None if it is."""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(installed, prereleases=True):
        return None
    return f"{requirement.name} is {installed}, and {requirement.specifier} is wanted"


def _extra(extra: str, requirements: "list[Requirement]") -> DoctorFinding:
    """Check that the packages of an extra are installed in matching versions."""
    subject, install = f"extra {extra}", f'pip install --upgrade "samestep[{extra}]"'
    wrong = [(requirement, text) for requirement in requirements if (text := _wrong(requirement)) is not None]
    if not wrong:
        return ok(
            subject,
            ", ".join(f"{requirement.name} {version(requirement.name)}" for requirement in requirements),
            installed=True,
        )
    text = "; ".join(text for _, text in wrong)
    if all(text.endswith("is not installed") for _, text in wrong):
        return ok(subject, text, f"to have it: {install}", installed=False)
    return warning(subject, text, install, installed=True)


def engines(request: ExaminationRequest) -> Iterator[DoctorFinding]:
    """Check which engines have their packages installed, those that other distributions add among them."""
    for name in engine_names():
        try:
            packages = resolve(name).abilities.packages
        except UserError as error:  # the code of another distribution, which does not load
            yield warning(f"engine {name}", str(error), "repair its package, or uninstall it", installed=False)
            continue
        missing = {
            module: install.removeprefix("use ") for module, install in packages.items() if not is_installed(module)
        }
        if missing:
            commands = " and ".join(dict.fromkeys(missing.values()))
            text = f"{', '.join(missing)} not installed"
            yield ok(f"engine {name}", text, f"to have it: {commands}", installed=False)
        else:
            yield ok(f"engine {name}", "can be used", installed=True)
