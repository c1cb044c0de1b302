"""The process's environment variables: read and written here, and nowhere else.

Modules that know variables of their own are given a mapping of them: `ranks` (launchers, accelerators),
`launch/environments` (places), `launch/script_env` (what scripts expect).
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from samestep.ranks import DEVICE_VARIABLES, Ranks, VisibleDevices, by_horovodrun, integer
from samestep.ranks import read as read_ranks
from samestep.ranks import visible_devices as read_visible

# What this process began with. In a rank: what the server that it was forked from had at its start.
_AT_FIRST: Final = dict(os.environ)


def ranks(environ: Mapping[str, str] = os.environ) -> Ranks | None:
    """Read the rank that a launcher gave this process; None if none did."""
    return read_ranks(environ)


def as_first_of(world_size: int, local_world_size: int) -> AbstractContextManager[None]:
    """As if this process were the first of so many ranks of samestep's agents, to look at what they are to do."""
    wanted = {"RANK": 0, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local_world_size}
    return given({name: str(value) for name, value in {**wanted, _ROUND: 0, _ROUND_FOLDER: os.devnull}.items()})


@dataclass(frozen=True, kw_only=True)
class HorovodRun:
    """What `horovodrun` tells a rank that it started."""

    host: str  # this rank's, as the command names it
    address: str  # of the server where the ranks meet
    port: int


def horovodrun(environ: Mapping[str, str] = os.environ) -> HorovodRun | None:
    """How ranks that `horovodrun` started meet; None where something else started them, or nothing."""
    if not by_horovodrun(environ):
        return None
    return HorovodRun(
        host=environ.get("HOROVOD_HOSTNAME", "localhost"),
        address=environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"],
        port=integer(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    )


def under_mpirun(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether MPI knows this process as one of several."""
    return any(integer(environ, name) > 1 for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if name in environ)


def main_address(environ: Mapping[str, str] = os.environ) -> str:
    """The address of rank 0's host, as torchrun says it to every rank."""
    return environ.get("MASTER_ADDR", "127.0.0.1")


def gloo_interface(environ: Mapping[str, str] = os.environ) -> str | None:
    """The network interface that the user chose for gloo's messages."""
    return environ.get("HOROVOD_GLOO_IFACE", environ.get("GLOO_SOCKET_IFNAME"))


def visible_devices(environ: Mapping[str, str] = os.environ) -> VisibleDevices | None:
    """Which accelerators a variable chooses for this process; None where none does."""
    return read_visible(environ)


_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # on which gloo's and NCCL's sockets listen


def variables_of_interface(
    interface: str | None, environ: Mapping[str, str] = os.environ, *, gloo_alone: bool = False
) -> dict[str, str]:
    """What names an interface for messages, unless the user has chosen one or it is None.

    `gloo_alone`: NCCL keeps to its own choice, which may be several interfaces between hosts.
    """
    wanted = _INTERFACES[:1] if gloo_alone else _INTERFACES
    return {name: interface for name in wanted if interface is not None and name not in environ}


@contextmanager
def messages_over(interface: str | None, *, gloo_alone: bool = False) -> Iterator[None]:
    """An interface for the messages of torch.distributed, unless the user has chosen one or it is None."""
    chosen = variables_of_interface(interface, gloo_alone=gloo_alone)
    os.environ.update(chosen)
    try:
        yield
    finally:
        _restore(dict.fromkeys(chosen))


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Without the lines in which torch.profiler tells that it starts and stops, unless the user asks for a level."""
    name = "KINETO_LOG_LEVEL"
    asked = os.environ.get(name)
    os.environ.setdefault(name, "100")
    try:
        yield
    finally:
        _restore({name: asked})


def asked_threads(environ: Mapping[str, str] = os.environ) -> int | None:
    """Threads a process that the user asked for by OMP_NUM_THREADS.

    torchrun sets OMP_NUM_THREADS=1 where the user set nothing; under it a 1 is not the user's choice, unless
    samestep has shared out the cores of the host. A task of srun has as many cores as were asked for
    (--cpus-per-task).
    """
    if "OMP_NUM_THREADS" not in environ:
        found = ranks(environ) if "SLURM_CPUS_PER_TASK" in environ else None
        return integer(environ, "SLURM_CPUS_PER_TASK") if found is not None and found.launcher == "slurm" else None
    threads = integer(environ, "OMP_NUM_THREADS")
    return None if threads == 1 and "TORCHELASTIC_RUN_ID" in environ and _SHARED_OUT not in environ else threads


# Set for a rank that has its share of its host's cores and threads.
_SHARED_OUT = "SAMESTEP_SHARED_OUT"


def share(threads: int) -> dict[str, str]:
    """Variables for a rank that has its share of its host's cores: the threads that it starts on them."""
    return {"OMP_NUM_THREADS": str(threads), _SHARED_OUT: "1"}


def on_sagemaker(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process belongs to a SageMaker job."""
    return "SM_HOSTS" in environ


def accelerate_config(environ: Mapping[str, str] = os.environ) -> Path:
    """Where `accelerate config` writes its file when it isn't told where."""
    cache = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(cache).expanduser() / "accelerate" / "default_config.yaml"


@dataclass(frozen=True, kw_only=True)
class ToldRound:
    """What this host's agent tells its ranks about the start that they are part of."""

    number: int  # of the start, from 0, the same on all hosts
    folder: str  # on this host, where the ranks leave how far they are
    run_folder: str | None = None  # that an earlier round chose for what the run leaves; None: none did
    memory: str | None = None  # on this host, for copies of the training's state from round to round


_ROUND, _ROUND_FOLDER, _RUN_FOLDER = "SAMESTEP_ROUND", "SAMESTEP_ROUND_FOLDER", "SAMESTEP_RUN_FOLDER"
_MEMORY_FOLDER = "SAMESTEP_MEMORY_FOLDER"


def told_round(environ: Mapping[str, str] = os.environ) -> ToldRound | None:
    """The round that an agent of samestep's told this rank; None where something else started it, or nothing."""
    if _ROUND not in environ or _ROUND_FOLDER not in environ or "RANK" not in environ:
        return None
    return ToldRound(
        number=integer(environ, _ROUND),
        folder=environ[_ROUND_FOLDER],
        run_folder=environ.get(_RUN_FOLDER),
        memory=environ.get(_MEMORY_FOLDER),
    )


def tell_round(round_: ToldRound) -> None:
    """Tell the ranks that this process starts from now on."""
    os.environ.update({_ROUND: str(round_.number), _ROUND_FOLDER: round_.folder})
    for name, value in ((_RUN_FOLDER, round_.run_folder), (_MEMORY_FOLDER, round_.memory)):
        if value is not None:
            os.environ[name] = value


def agent_signals(names: str) -> AbstractContextManager[None]:
    """The signals upon which PyTorch's elastic agent ends, and what it tells its ranks: for as long as it runs."""
    return given({"TORCHELASTIC_SIGNALS_TO_HANDLE": names})


def own_bootstrap() -> AbstractContextManager[None]:
    """While PyTorch's rendezvous meets, it makes no store of its own for the ranks."""
    return given({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


_MARK = "SAMESTEP_RUN"


def marked(mark: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a run whose processes are to be found again, whatever started them."""
    return {**environ, _MARK: mark}


def mark_line(mark: str) -> bytes:
    """How a mark stands among a process's variables."""
    return f"{_MARK}={mark}".encode()


def tensorflow_settings(cluster: Mapping[str, Any] | None = None) -> AbstractContextManager[None]:
    """Settings that TensorFlow reads while it is imported, or while it joins the ranks of a cluster."""
    wanted = {
        # Keras 2, from tf_keras: Keras 3 does not know every strategy. With it TensorFlow also loads faster.
        "TF_USE_LEGACY_KERAS": "1",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),  # errors
    }
    if cluster is not None:
        wanted["TF_CONFIG"] = json.dumps(cluster)
    return given(wanted)


def quiet_import() -> AbstractContextManager[None]:
    """Let PyTorch, where it is first imported now, not warn that names and peers can't be found while hosts meet."""
    return given({"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")})


def devices(chosen: Sequence[int], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What leaves these accelerators to the ranks, counted among those that are left to this process."""
    visible = visible_devices(environ)
    if visible is None:
        return {DEVICE_VARIABLES[0]: ",".join(map(str, chosen))}
    return {visible.variable: ",".join(visible.devices[number] for number in chosen)}


def no_devices(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What leaves no accelerator to the ranks, whichever variable leaves some to this process."""
    return dict.fromkeys([DEVICE_VARIABLES[0], *(name for name in DEVICE_VARIABLES[1:] if name in environ)], "")


_ERROR_FILE = "SAMESTEP_ERROR_FILE"


def error_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where the agent of samestep's that started this rank looks for why it ended; torchrun would print it again."""
    name = environ.get(_ERROR_FILE)
    return Path(name) if name else None


def error_file_at(file: Path) -> dict[str, str]:
    """Tells a rank where to write why it ends: PyTorch's own recorder too."""
    return {_ERROR_FILE: str(file), "TORCHELASTIC_ERROR_FILE": str(file)}


_BAR_FILE, _BAR_COLUMNS = "SAMESTEP_BAR_FILE", "SAMESTEP_BAR_COLUMNS"


def bar_at(file: Path, columns: int) -> dict[str, str]:
    """Tells ranks that the progress bar they write into a file is shown on a terminal of so many columns."""
    return {_BAR_FILE: str(file), _BAR_COLUMNS: str(columns)}


def bar_file(environ: Mapping[str, str] = os.environ) -> tuple[Path, int] | None:
    """The file for this rank's progress bar and the columns of the terminal that shows it; None where none does."""
    if _BAR_FILE not in environ:
        return None
    return Path(environ[_BAR_FILE]), integer(environ, _BAR_COLUMNS)


def variables_file(environ: Mapping[str, str] = os.environ) -> str | None:
    """The file that the user names for variables that go to every host."""
    return environ.get("SAMESTEP_ENV_FILE") or None


def cache_megabytes(environ: Mapping[str, str] = os.environ) -> int | None:
    """Megabytes that the user leaves to prepared data on disk, 0 for none of it; None where it isn't said."""
    return integer(environ, _CACHE_MEGABYTES) if environ.get(_CACHE_MEGABYTES) else None


_CACHE_MEGABYTES = "SAMESTEP_CACHE_MB"


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where samestep keeps files that it can make again: `$XDG_CACHE_HOME/samestep`, or `~/.cache/samestep`.

    It may not be there yet.
    """
    if home := environ.get("XDG_CACHE_HOME"):
        return Path(home) / "samestep"
    return Path(environ.get("HOME", tempfile.gettempdir())) / ".cache" / "samestep"


def slurm_node(environ: Mapping[str, str] = os.environ) -> str:
    """The name of the node on which Slurm runs this task."""
    return environ["SLURMD_NODENAME"]


def given_address(environ: Mapping[str, str] = os.environ) -> str | None:
    """The host of rank 0 that the user, or a launcher, has said."""
    return environ.get("MASTER_ADDR") or None


def main_port(environ: Mapping[str, str] = os.environ) -> int | None:
    """The port that the user, or a launcher, has said for rank 0's store."""
    return integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None


def place_interface(environ: Mapping[str, str] = os.environ) -> str | None:
    """The network interface that a place names for the messages between its hosts: SageMaker does."""
    with suppress(KeyError, ValueError, TypeError):  # what is wrong with them is told elsewhere
        named = environ.get("SM_NETWORK_INTERFACE_NAME")
        return named or str(json.loads(environ["SM_RESOURCE_CONFIG"])["network_interface_name"] or "") or None


def as_torchrun(ranks: Ranks, address: str, port: int) -> AbstractContextManager[None]:
    """torchrun's variables, for engines that read nothing else, in a rank that another launcher started."""
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
    """Settings that PyTorch's elastic agent reads from its own environment, for as long as it runs."""
    wanted = {
        # One thread while a rank imports; each rank sets its own number once it runs.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    before = {name: os.environ.get(name) for name in [*wanted, "TORCHELASTIC_SIGNALS_TO_HANDLE"]}
    os.environ.update(wanted)
    try:
        yield
    finally:
        _restore(before)


def deepspeed_settings(device_type: str, index: int | None) -> AbstractContextManager[None]:
    """Settings that DeepSpeed reads while it is imported and set up; `index` is the accelerator's, None: the CPU."""
    return given({"DS_ACCELERATOR": device_type, "LOCAL_RANK": _deepspeed_local_rank(index)})


@contextmanager
def deepspeed_at_work(index: int | None) -> Iterator[None]:
    """The setting that DeepSpeed also reads in the middle of a step. It is changed only where it isn't right."""
    before, wanted = os.environ.get("LOCAL_RANK"), _deepspeed_local_rank(index)
    if before != wanted:
        os.environ["LOCAL_RANK"] = wanted
    try:
        yield
    finally:
        if before != wanted:
            _restore({"LOCAL_RANK": before})


def _deepspeed_local_rank(index: int | None) -> str:
    # DeepSpeed takes the local rank for the accelerator's number. A process that works alone may have none.
    return os.environ.get("LOCAL_RANK", "0") if index is None else str(index)


def _restore(before: Mapping[str, str | None]) -> None:
    """Set variables back to what they were; None: not set."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def snapshot() -> dict[str, str]:
    """All variables as they are now, for `adopt` in the ranks that this process starts."""
    return dict(os.environ)


def adopt(environ: Mapping[str, str]) -> None:
    """In a new rank: take the starting process's variables, and keep over them what the agent has set for this rank.

    A rank that is forked from a server has that server's variables, as old as the server.
    """
    for_this_rank = {name: value for name, value in os.environ.items() if _AT_FIRST.get(name) != value}
    for name in os.environ.keys() - environ.keys() - for_this_rank.keys():
        del os.environ[name]
    os.environ.update({**environ, **for_this_rank})


def become(variables: Mapping[str, str]) -> None:
    """In a new rank: have these variables and no others."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


@contextmanager
def given(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables for a package that takes its settings from them. Afterwards all are as before, whatever it set."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
