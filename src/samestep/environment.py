"""The process's environment variables: read and written here, and nowhere else.

Modules that know variables of their own are given a mapping of them: `launchers` and `ranks` (what launchers set),
`launch/environments` (places), `launch/script_env` (what scripts expect).
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from samestep import launchers
from samestep.errors import UserError
from samestep.limits import MOST_PORT, MOST_THREADS
from samestep.ranks import Ranks
from samestep.ranks import read as read_ranks
from samestep.variables import DEVICE_VARIABLES, Variables, VisibleDevices
from samestep.variables import visible_devices as read_visible

# Variables at the start of this process. In a forked rank: those at the start of the fork server.
_AT_FIRST: Final = dict(os.environ)


def ranks(environ: Mapping[str, str] = os.environ) -> Ranks | None:
    """Read the rank that a launcher gave this process; None if none did."""
    return read_ranks(environ)


def is_first_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is rank 0, or no rank."""
    try:
        own_ranks = ranks(environ)
    except UserError:  # a variable that can't be read, which is reported where the rank is needed
        return True
    return own_ranks is None or own_ranks.rank == 0


def as_first_of(world_size: int, local_world_size: int) -> AbstractContextManager[None]:
    """Pretend to be the first of so many ranks of samestep's agents, for rehearsals."""
    variables = {"RANK": 0, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local_world_size}
    return given({name: str(value) for name, value in {**variables, _ROUND: 0, _ROUND_FOLDER: os.devnull}.items()})


def horovodrun(environ: Mapping[str, str] = os.environ) -> launchers.HorovodRunVariables | None:
    """Return how ranks started by `horovodrun` meet; None if it didn't start this process."""
    return launchers.read_horovodrun(environ)


def under_mpirun(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether MPI knows this process as one of several."""
    return launchers.mpi_size(environ) > 1


def main_address(environ: Mapping[str, str] = os.environ) -> str:
    """Return the address of rank 0's host, in torchrun's variable."""
    return given_address(environ) or "127.0.0.1"


def gloo_interface(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the network interface that the user chose for gloo."""
    return environ.get("HOROVOD_GLOO_IFACE", environ.get("GLOO_SOCKET_IFNAME"))


def visible_devices(environ: Mapping[str, str] = os.environ) -> VisibleDevices | None:
    """Return the accelerators that a variable makes visible to this process; None if none is set."""
    return read_visible(environ)


_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # on which gloo's and NCCL's sockets listen


def variables_of_interface(
    interface: str | None, environ: Mapping[str, str] = os.environ, *, gloo_alone: bool = False
) -> dict[str, str]:
    """Return the variables that select an interface, unless the user has chosen one or it is None.

    `gloo_alone`: NCCL keeps to its own choice, which may be several interfaces between hosts.
    """
    names = _INTERFACES[:1] if gloo_alone else _INTERFACES
    return {name: interface for name in names if interface is not None and name not in environ}


@contextmanager
def messages_over(interface: str | None, *, gloo_alone: bool = False) -> Iterator[None]:
    """Select an interface for torch.distributed, unless the user has chosen one or it is None."""
    chosen = variables_of_interface(interface, gloo_alone=gloo_alone)
    os.environ.update(chosen)
    try:
        yield
    finally:
        _restore(dict.fromkeys(chosen))


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Silence torch.profiler's messages about its start and stop, unless the user has set a log level."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "100")
    try:
        yield
    finally:
        _restore({name: before})


def asked_threads(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the threads of each process that the user requested by OMP_NUM_THREADS; None if not set.

    torchrun sets OMP_NUM_THREADS=1 where the user set nothing; under it a 1 is not the user's choice, unless
    samestep has shared out the cores of the host. A task of srun has as many cores as were asked for
    (--cpus-per-task).
    """
    read = Variables(environ)
    threads = read.number("OMP_NUM_THREADS", 1, MOST_THREADS)
    if threads is None:
        cores = launchers.slurm_cores_of_task(read)
        own_ranks = ranks(environ) if cores is not None else None
        return cores if own_ranks is not None and own_ranks.launcher == "slurm" else None
    return None if threads == 1 and "TORCHELASTIC_RUN_ID" in environ and _SHARED_OUT not in environ else threads


# Marks a rank that has been given its share of its host's cores and threads.
_SHARED_OUT = "SAMESTEP_SHARED_OUT"


def share(threads: int) -> dict[str, str]:
    """Return variables for a rank with its share of its host's cores: its number of threads."""
    return {"OMP_NUM_THREADS": str(threads), _SHARED_OUT: "1"}


def on_sagemaker(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process belongs to a SageMaker job."""
    return launchers.on_sagemaker(environ)


def accelerate_config(environ: Mapping[str, str] = os.environ) -> Path:
    """Where `accelerate config` writes its file when it isn't told where."""
    cache = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(cache).expanduser() / "accelerate" / "default_config.yaml"


@dataclass(frozen=True, kw_only=True)
class RankRound:
    """The round that a host's agent passes to its ranks in variables."""

    number: int  # of the round, from 0, the same on all hosts
    folder: str  # on this host, for the ranks' status files
    run_folder: str | None = None  # chosen by an earlier round; None: not yet
    memory: str | None = None  # on this host, for in-memory checkpoints kept from round to round
    start: str | None = None  # random id of the job's start, the same in all rounds and on all hosts


_ROUND, _ROUND_FOLDER, _RUN_FOLDER = "SAMESTEP_ROUND", "SAMESTEP_ROUND_FOLDER", "SAMESTEP_RUN_FOLDER"
_MEMORY_FOLDER, _START = "SAMESTEP_MEMORY_FOLDER", "SAMESTEP_START"


def round_of_rank(environ: Mapping[str, str] = os.environ) -> RankRound | None:
    """Read the round passed by samestep's agent; None if no agent started this process."""
    if _ROUND not in environ or _ROUND_FOLDER not in environ or "RANK" not in environ:
        return None
    return RankRound(
        number=Variables(environ).needed(_ROUND),
        folder=environ[_ROUND_FOLDER],
        run_folder=environ.get(_RUN_FOLDER),
        memory=environ.get(_MEMORY_FOLDER),
        start=environ.get(_START),
    )


def started_again(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher or a scheduler says that it starts this job again."""
    read = Variables(environ)
    return any((read.number(name) or 0) > 0 for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def restarts_of_launcher(environ: Mapping[str, str] = os.environ) -> int:
    """How many times the agent that started this rank, samestep's or torchrun's, starts all ranks again."""
    return Variables(environ).number("TORCHELASTIC_MAX_RESTARTS") or 0


def publish_round(round_: RankRound) -> None:
    """Set the variables for ranks that this process starts from now on."""
    os.environ.update({_ROUND: str(round_.number), _ROUND_FOLDER: round_.folder})
    variables = ((_RUN_FOLDER, round_.run_folder), (_MEMORY_FOLDER, round_.memory), (_START, round_.start))
    for name, value in variables:
        if value is not None:
            os.environ[name] = value


def agent_signals(names: str) -> AbstractContextManager[None]:
    """Set the signals that PyTorch's elastic agent handles, while it runs."""
    return given({"TORCHELASTIC_SIGNALS_TO_HANDLE": names})


PROGRESS = "SAMESTEP_PROGRESS"


def progress_interval(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the time between lines of progress that the user chose, or "none"; None if not set."""
    return Variables(environ).text(PROGRESS)


@contextmanager
def progress_every(text: str | None) -> Iterator[None]:
    """Choose the time between lines of progress, here and in processes that are started; None: as it is."""
    if text is None:
        yield
        return
    before = os.environ.get(PROGRESS)
    os.environ[PROGRESS] = text
    try:
        yield
    finally:
        _restore({PROGRESS: before})


def terminal_draws(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a terminal can move its cursor, for lines that are drawn again."""
    return environ.get("TERM") not in ("dumb", "unknown")


_MARK = "SAMESTEP_RUN"


def marked(mark: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a run whose processes can be found again by its mark.

    Its output is kept, not shown, so that it writes no lines of progress.
    """
    return {**environ, _MARK: mark, PROGRESS: "none"}


def mark_of(environ: Mapping[str, str]) -> str | None:
    """Return the mark in a process's environment; None if it has none."""
    return environ.get(_MARK)


def tensorflow_settings(cluster: Mapping[str, Any] | None = None) -> AbstractContextManager[None]:
    """Settings that TensorFlow reads during its import, or when it joins a cluster."""
    settings = {
        # Keras 2, from tf_keras: Keras 3 does not know every strategy. With it TensorFlow also loads faster.
        "TF_USE_LEGACY_KERAS": "1",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),  # errors
    }
    if cluster is not None:
        settings["TF_CONFIG"] = json.dumps(cluster)
    return given(settings)


def quiet_import() -> AbstractContextManager[None]:
    """During PyTorch's first import, silence its warnings about names and peers that can't be found."""
    return given({"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")})


def devices(chosen: Sequence[int], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variable that leaves these accelerators to the ranks, by index among the visible ones."""
    visible = visible_devices(environ)
    if visible is None:
        return {DEVICE_VARIABLES[0]: ",".join(map(str, chosen))}
    return {visible.variable: ",".join(visible.devices[number] for number in chosen)}


def no_devices(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that hide all accelerators from the ranks."""
    return dict.fromkeys([DEVICE_VARIABLES[0], *(name for name in DEVICE_VARIABLES[1:] if name in environ)], "")


_ERROR_FILE = "SAMESTEP_ERROR_FILE"


def error_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return this rank's error file, if samestep's agent started it; torchrun would print the message again."""
    name = environ.get(_ERROR_FILE)
    return Path(name) if name else None


def error_file_at(file: Path) -> dict[str, str]:
    """Return variables that tell a rank, and PyTorch's error handler, where to write its error file."""
    return {_ERROR_FILE: str(file), "TORCHELASTIC_ERROR_FILE": str(file)}


_BAR_FILE, _BAR_COLUMNS = "SAMESTEP_BAR_FILE", "SAMESTEP_BAR_COLUMNS"


def bar_at(file: Path, columns: int) -> dict[str, str]:
    """Return variables for a rank whose progress bar is written to a file and shown on a terminal of this width."""
    return {_BAR_FILE: str(file), _BAR_COLUMNS: str(columns)}


def bar_file(environ: Mapping[str, str] = os.environ) -> tuple[Path, int] | None:
    """Return the file for this rank's progress bar, and the terminal's width; None if no terminal shows it."""
    if _BAR_FILE not in environ:
        return None
    return Path(environ[_BAR_FILE]), Variables(environ).needed(_BAR_COLUMNS)


def take_job_secret() -> str | None:
    """Return the secret that the user gave for the job's hosts, and remove it: no process started later has it."""
    return os.environ.pop("SAMESTEP_JOB_SECRET", None)


def variables_file(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the user's file of variables that go to every host."""
    return environ.get("SAMESTEP_ENV_FILE") or None


def cache_megabytes(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the megabytes allowed for cached data, 0 for no cache; None if not set."""
    return Variables(environ).number(_CACHE_MEGABYTES)


_CACHE_MEGABYTES = "SAMESTEP_CACHE_MB"


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where samestep keeps files that it can make again: `$XDG_CACHE_HOME/samestep`, or `~/.cache/samestep`.

    Without HOME the home folder is that of the password database. It may not be there yet, and may not be this user's
    alone: `private_folders` says.
    """
    if home := environ.get("XDG_CACHE_HOME"):
        return Path(home) / "samestep"
    return home_folder(environ) / ".cache" / "samestep"


def home_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """This user's home folder: HOME, else that of the password database, else /nonexistent."""
    if home := environ.get("HOME"):
        return Path(home)
    import pwd

    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:  # such as in a container
        return Path("/nonexistent")


def use_temporary_folder(folder: Path) -> None:
    """Have the processes that this one starts put temporary files into a folder."""
    os.environ["TMPDIR"] = str(folder)


_COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def compiler_cache(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of what torch.compile has compiled, and loads again; None for PyTorch's default."""
    folder = environ.get(_COMPILER_CACHE)
    return Path(folder) if folder else None


@contextmanager
def compiler_cache_at(folder: Path) -> Iterator[None]:
    """Have torch.compile keep what it compiles in a folder."""
    before = os.environ.get(_COMPILER_CACHE)
    os.environ[_COMPILER_CACHE] = str(folder)
    try:
        yield
    finally:
        _restore({_COMPILER_CACHE: before})


def extension_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where PyTorch keeps the extensions that it has built, and loads them from."""
    if folder := environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder)
    return Path(environ.get("XDG_CACHE_HOME") or home_folder(environ) / ".cache") / "torch_extensions"


def slurm_node(environ: Mapping[str, str] = os.environ) -> str:
    """The name of the node on which Slurm runs this task."""
    return environ["SLURMD_NODENAME"]


def given_address(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the address of rank 0's host that the user or a launcher has set."""
    return environ.get("MASTER_ADDR") or None


def main_port(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the port of rank 0's store that the user or a launcher has set."""
    return Variables(environ).number("MASTER_PORT", 1, MOST_PORT)


def place_interface(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the interface that the environment (SageMaker) names for messages between hosts."""
    with suppress(UserError):  # where the hosts are found, wrong variables are reported
        return launchers.sagemaker_interface(environ)
    return None


def as_torchrun(ranks: Ranks, address: str, port: int) -> AbstractContextManager[None]:
    """Set torchrun's variables in a rank of another launcher, for engines that read only those."""
    return given(
        {
            "RANK": str(ranks.rank),
            "WORLD_SIZE": str(ranks.world_size),
            "LOCAL_RANK": str(ranks.local_rank),
            "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
    )


@contextmanager
def agent_settings() -> Iterator[None]:
    """Settings that PyTorch's elastic agent reads from its own environment, while it runs."""
    settings = {
        # One thread while a rank imports; each rank sets its own number once it runs.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    before = {name: os.environ.get(name) for name in [*settings, "TORCHELASTIC_SIGNALS_TO_HANDLE"]}
    os.environ.update(settings)
    try:
        yield
    finally:
        _restore(before)


def deepspeed_settings(device_type: str, index: int | None) -> AbstractContextManager[None]:
    """Settings that DeepSpeed reads during its import and set-up; `index`: the accelerator's, None: the CPU."""
    return given({"DS_ACCELERATOR": device_type, "LOCAL_RANK": _deepspeed_local_rank(index)})


@contextmanager
def deepspeed_at_work(index: int | None) -> Iterator[None]:
    """Set LOCAL_RANK, which DeepSpeed also reads during a step, unless it is right already."""
    before, local_rank = os.environ.get("LOCAL_RANK"), _deepspeed_local_rank(index)
    if before != local_rank:
        os.environ["LOCAL_RANK"] = local_rank
    try:
        yield
    finally:
        if before != local_rank:
            _restore({"LOCAL_RANK": before})


def _deepspeed_local_rank(index: int | None) -> str:
    # DeepSpeed uses the local rank as the accelerator's index. A single process may have no local rank.
    return os.environ.get("LOCAL_RANK", "0") if index is None else str(index)


def _restore(before: Mapping[str, str | None]) -> None:
    """Restore variables to earlier values; None: unset."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def snapshot() -> dict[str, str]:
    """Return all variables, for `adopt` in the ranks that this process starts."""
    return dict(os.environ)


def adopt(environ: Mapping[str, str]) -> None:
    """In a new rank: take the starting process's variables, except those that the agent set for this rank.

    A forked rank starts with the fork server's variables, which may be outdated.
    """
    for_this_rank = {name: value for name, value in os.environ.items() if _AT_FIRST.get(name) != value}
    for name in os.environ.keys() - environ.keys() - for_this_rank.keys():
        del os.environ[name]
    os.environ.update({**environ, **for_this_rank})


def become(variables: Mapping[str, str]) -> None:
    """In a new rank: replace all variables."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


@contextmanager
def given(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a package that reads them; afterwards restore all, including those that it changed."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
