"""Every environment variable that samestep reads or writes: here, and nowhere else."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from samestep.errors import UserError

# What this process began with. In a rank: what the server that it was forked from had at its start.
_AT_FIRST: Final = dict(os.environ)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Which rank this process is, as torchrun, PyTorch's elastic agent or horovodrun say it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    # Whether all ranks are known to share this host; a launcher that doesn't say how many there are leaves it open.
    one_host: bool = False


def ranks(environ: Mapping[str, str] = os.environ) -> Ranks | None:
    """Read the rank that a launcher gave this process; None if none did."""
    if horovodrun(environ) is not None:
        world_size, local_size = _integer(environ, "HOROVOD_SIZE"), _integer(environ, "HOROVOD_LOCAL_SIZE")
        return Ranks(
            rank=_integer(environ, "HOROVOD_RANK"),
            world_size=world_size,
            local_rank=_integer(environ, "HOROVOD_LOCAL_RANK"),
            local_world_size=local_size,
            one_host=local_size == world_size,
        )
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    # DeepSpeed's launcher has another name for it.
    named = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environ), None)
    local_size = _integer(environ, named) if named is not None else world_size
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, "LOCAL_RANK", rank),
        local_world_size=local_size,
        one_host=named is not None and local_size == world_size,
    )


@dataclass(frozen=True, kw_only=True)
class HorovodRun:
    """What `horovodrun` tells a rank that it started."""

    host: str  # this rank's, as the command names it
    address: str  # of the server where the ranks meet
    port: int


def horovodrun(environ: Mapping[str, str] = os.environ) -> HorovodRun | None:
    """How ranks that `horovodrun` started meet; None where something else started them, or nothing."""
    if "RANK" in environ or "HOROVOD_RANK" not in environ or "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in environ:
        return None
    return HorovodRun(
        host=environ.get("HOROVOD_HOSTNAME", "localhost"),
        address=environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"],
        port=_integer(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    )


def main_address(environ: Mapping[str, str] = os.environ) -> str:
    """The address of rank 0's host, as torchrun says it to every rank."""
    return environ.get("MASTER_ADDR", "127.0.0.1")


def gloo_interface(environ: Mapping[str, str] = os.environ) -> str | None:
    """The network interface that the user chose for gloo's messages."""
    return environ.get("HOROVOD_GLOO_IFACE", environ.get("GLOO_SOCKET_IFNAME"))


# Where gloo and NCCL take the interface that their sockets listen on.
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@contextmanager
def messages_over(interface: str | None) -> Iterator[None]:
    """An interface for the messages of torch.distributed, unless the user has chosen one or it is None."""
    chosen = {name: interface for name in _INTERFACES if interface is not None and name not in os.environ}
    os.environ.update(chosen)
    try:
        yield
    finally:
        _restore(dict.fromkeys(chosen))


def asked_threads(environ: Mapping[str, str] = os.environ) -> int | None:
    """Threads a process that the user asked for by OMP_NUM_THREADS.

    torchrun sets OMP_NUM_THREADS=1 where the user set nothing; under it a 1 is nobody's wish.
    """
    if "OMP_NUM_THREADS" not in environ:
        return None
    threads = _integer(environ, "OMP_NUM_THREADS")
    return None if threads == 1 and "TORCHELASTIC_RUN_ID" in environ else threads


@dataclass(frozen=True, kw_only=True)
class ToldRound:
    """What this host's agent tells its ranks about the start that they are part of."""

    number: int  # of the start, from 0, the same on all hosts
    folder: str  # on this host, where the ranks leave how far they are
    run_folder: str | None = None  # that an earlier round chose for what the run leaves; None: none did


_ROUND, _ROUND_FOLDER, _RUN_FOLDER = "SAMESTEP_ROUND", "SAMESTEP_ROUND_FOLDER", "SAMESTEP_RUN_FOLDER"


def told_round(environ: Mapping[str, str] = os.environ) -> ToldRound | None:
    """The round that an agent of samestep's told this rank; None where something else started it, or nothing."""
    if _ROUND not in environ or _ROUND_FOLDER not in environ or "RANK" not in environ:
        return None
    return ToldRound(
        number=_integer(environ, _ROUND), folder=environ[_ROUND_FOLDER], run_folder=environ.get(_RUN_FOLDER)
    )


def tell_round(round_: ToldRound) -> None:
    """Tell the ranks that this process starts from now on."""
    os.environ.update({_ROUND: str(round_.number), _ROUND_FOLDER: round_.folder})
    if round_.run_folder is not None:
        os.environ[_RUN_FOLDER] = round_.run_folder


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


def deepspeed_settings(device_type: str, local_rank: int) -> AbstractContextManager[None]:
    """Settings that DeepSpeed reads while it is imported and set up."""
    # A launcher says which rank this is; LOCAL_RANK is only missing where a process works alone.
    return given({"DS_ACCELERATOR": device_type, "LOCAL_RANK": os.environ.get("LOCAL_RANK", str(local_rank))})


def _restore(before: Mapping[str, str | None]) -> None:
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


@contextmanager
def given(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables for a package that takes its settings from them. Afterwards all are as before, whoever wrote them."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(f"environment variable {name}={text!r} is not a whole number") from None
