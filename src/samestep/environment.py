"""Every environment variable that samestep reads or writes: here, and nowhere else."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from samestep.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Which rank this process is, as torchrun and PyTorch's elastic agent say it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def ranks(environ: Mapping[str, str] = os.environ) -> Ranks | None:
    """Read the rank that a launcher gave this process; None if none did."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, "LOCAL_RANK", rank),
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", world_size),
    )


def asked_threads(environ: Mapping[str, str] = os.environ) -> int | None:
    """Threads a process that the user asked for by OMP_NUM_THREADS.

    torchrun sets OMP_NUM_THREADS=1 where the user set nothing; under it a 1 is nobody's wish.
    """
    if "OMP_NUM_THREADS" not in environ:
        return None
    threads = _integer(environ, "OMP_NUM_THREADS")
    return None if threads == 1 and "TORCHELASTIC_RUN_ID" in environ else threads


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


@contextmanager
def deepspeed_settings(device_type: str, local_rank: int) -> Iterator[None]:
    """Settings that DeepSpeed reads while it is imported and set up; what it writes itself is taken back too."""
    before = dict(os.environ)
    os.environ["DS_ACCELERATOR"] = device_type
    # A launcher says which rank this is; LOCAL_RANK is only missing where a process works alone.
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    try:
        yield
    finally:
        _restore({name: before.get(name) for name in [*os.environ, *before]})


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(f"environment variable {name}={text!r} is not a whole number") from None
