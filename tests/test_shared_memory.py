"""Shared memory between the ranks of a host: the right numbers, however ranks end, and nothing left behind."""

import multiprocessing
import os
import random
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_memory_ranks import (
    NO_COMPILER,
    asked_in_another_order,
    ends,
    gradients_sent,
    runs_on,
    sent_by,
    sum_over_a_full_host,
    told_by_a_backward,
    told_by_groups,
    wrong_collectives,
    wrong_over_hosts,
)
from small_tasks import Points

import samestep
from samestep.comm.shared_memory import backend, build, region
from samestep.comm.shared_memory.process_group import KernelGroup, SharedMemoryGroup
from samestep.launch import local

MEMORY = Path("/dev/shm")


@contextmanager
def two(target: Callable[..., None], *arguments: Any) -> Iterator[list[BaseProcess]]:
    """Two ranks that no launcher started; both have ended afterwards."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shared_memory_ranks"])  # imports PyTorch once
    processes: list[BaseProcess] = [context.Process(target=target, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def until(folder: Path, *names: str, seconds: float = 60) -> None:
    began = time.monotonic()
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() - began < seconds, f"no {names} after {seconds} s"
        time.sleep(0.02)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_collectives_give_what_their_definitions_say(ranks: int) -> None:
    assert local.start(wrong_collectives, ({"compiled": {}, "interpreted": NO_COMPILER},), ranks) == []


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aab", pytest.param("aba", marks=pytest.mark.slow)])
def test_collectives_over_hosts_go_through_one_rank_of_each(hosts: str) -> None:
    assert local.start(wrong_over_hosts, (hosts,), len(hosts)) == []


def test_gradients_leave_a_host_in_about_eight_buckets_unless_told_otherwise() -> None:
    # 4 MB of gradients, two layers of 0.25 MB a bucket.
    assert local.start(gradients_sent, ("aab", None), 3) == (8, True)


@pytest.mark.parametrize(
    ("hosts", "bucket_mb", "messages"),
    # PyTorch's buckets: one of 1 MB first, and all others in one of 25.
    [("aa", None, 2), pytest.param("aab", 1.0, 4, marks=pytest.mark.slow)],
)
def test_gradients_within_a_host_and_in_given_buckets(hosts: str, bucket_mb: float | None, messages: int) -> None:
    assert local.start(gradients_sent, (hosts, bucket_mb), len(hosts)) == (messages, True)


def test_collectives_may_be_begun_in_any_order_of_their_groups() -> None:
    assert local.start(asked_in_another_order, (), 2) == [3.0, 21.0]


def test_what_is_sent_is_counted_alike() -> None:
    counted = local.start(sent_by, ("auto",), 2)
    assert counted == local.start(sent_by, ("gloo",), 2)
    gradients, small = (30 * 40 + 40) * 4, 1000 * 4
    # Of a ring of two, a rank sends the whole message of an all-reduce and half of the others.
    assert counted["all-reduce"] == gradients + 2 * small
    assert counted["all-gather"] == counted["reduce-scatter"] == small
    assert counted["reduce"] == small / 2
    assert counted["point-to-point"] == small


@pytest.mark.parametrize("kernel", ["", pytest.param(" without a compiler", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("killed", "Connection closed by peer: rank 1 of the group has ended"),
        ("late", "Timed out waiting 1500ms for rank 1 of the group"),
        ("another", "rank 1 of the group calls another collective"),
    ],
)
def test_a_rank_that_does_not_come_is_told(how: str, told: str, kernel: str, tmp_path: Path) -> None:
    with two(ends, str(tmp_path), how + kernel):
        until(tmp_path, "ready-0", "ready-1", "told-0")
    assert told in (tmp_path / "told-0").read_text(encoding="utf-8")


def test_a_backward_beside_another_collective_is_an_error_and_no_crash() -> None:
    told = "rank 1 of the group calls another collective, or one of another size or dtype"
    assert told in local.start(told_by_a_backward, (), 2)


def test_what_pytorch_looks_up_in_a_group_never_reaches_its_base_class() -> None:
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/PyProcessGroup.hpp"
    text = header.read_text(encoding="utf-8").partition("c10::intrusive_ptr<Work> allgather(")[2]
    names = set(re.findall(r"c10::intrusive_ptr<Work> (\w+)\(", "c10::intrusive_ptr<Work> allgather(" + text))
    assert names >= {"allgather", "allreduce", "all_to_all_single", "barrier", "broadcast", "recv", "send"}
    own = {name for each in (SharedMemoryGroup, KernelGroup) for name in vars(each)}
    assert names - own <= {"endCoalescing"}  # which gloo has not


def kill_one(folder: Path, chance: random.Random) -> None:
    with two(runs_on, str(folder)) as processes:
        until(folder, "ready-0", "ready-1")
        time.sleep(chance.uniform(0, 0.3))
        victim = chance.randrange(2)
        processes[victim].kill()
        until(folder, f"told-{1 - victim}")
        assert "Connection closed by peer" in (folder / f"told-{1 - victim}").read_text(encoding="utf-8")


def left_behind() -> set[str]:
    return {each.name for each in MEMORY.glob("samestep-*") if not each.name.startswith("samestep-memory")}


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_killed_rank_leaves_nothing_behind(kills: int, tmp_path: Path) -> None:
    before, chance = left_behind(), random.Random(0)
    for kill in range(kills):
        folder = tmp_path / str(kill)
        folder.mkdir()
        kill_one(folder, chance)
    assert left_behind() <= before
    assert multiprocessing.active_children() == []


def test_a_region_has_no_name_that_could_outlive_its_ranks() -> None:
    file, path = region.create(1 << 16)
    try:
        assert path.startswith("/proc/")
        assert os.fstat(file).st_nlink == 0
    finally:
        os.close(file)


@pytest.mark.parametrize(("size", "words"), [(528_384, "516 KiB"), ((10 << 20) + 1, "11 MiB")])
def test_a_region_that_can_not_be_had_is_told_with_its_size(size: int, words: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(region.NoRegionError, match=f"^{words} of shared memory are needed: File too large$"):
            region.share(dist.HashStore(), 0, 1, size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("what", ["\n{short}", "\n{pipe}", "\n{absent}", "{short}", "\n\0", "\n/proc/self/mem", ""])
def test_what_is_no_region_is_not_mapped(tmp_path: Path, what: str) -> None:
    """The store in which rank 0 tells its region has no password."""
    files = {name: tmp_path / name for name in ("short", "pipe", "absent")}
    files["short"].write_bytes(b"x" * 100)
    os.mkfifo(files["pipe"])
    store = dist.HashStore()
    store.set("region", what.format(**files))
    store.set("mapped/0", "")
    with pytest.raises(region.NoRegionError):
        region.share(store, 1, 2, 1 << 16)
    assert files["short"].read_bytes() == b"x" * 100


def test_memory_that_is_too_small_is_told_once_with_what_is_needed_and_gloo_is_used() -> None:
    first, second = local.start(told_by_groups, ("memory",), 2)
    (told, *others) = first
    words = r"samestep: messages go through gloo, not through shared memory: \d+ KiB of shared memory are needed: "
    assert re.fullmatch(words + "File too large\n", told)
    assert others == [False, 3.0]
    assert second == ("", False, 3.0)


def test_a_compiler_that_fails_is_told_once_and_another_kernel_is_used() -> None:
    (told, *first), second = local.start(told_by_groups, ("compiler",), 2)
    assert told.startswith("samestep: shared memory without its compiled kernel, which is faster: ")
    assert told.endswith("false fails: exit code 1; CXX names another compiler\n")
    assert told.count("\n") == 1
    assert first == [True, 3.0]
    assert second == ("", True, 3.0)


def built_in(cache: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """The kernel's file in a cache."""
    environ = {**environ, "XDG_CACHE_HOME": str(cache)}
    with build.place(environ) as folder:
        return build.library(environ, folder)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the kernel of the usual compiler."""
    folder = tmp_path_factory.mktemp("cache")
    built_in(folder)
    return folder


@pytest.mark.slow
def test_a_damaged_kernel_in_the_cache_is_compiled_again(cache: Path, tmp_path: Path) -> None:
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    built = built_in(tmp_path)
    built.write_bytes(b"no library")
    assert local.start(told_by_groups, ("cache", tmp_path), 2) == [("", True, 3.0), ("", True, 3.0)]
    assert built_in(tmp_path).stat().st_size > len(b"no library")


def truncated(good: bytes) -> bytes:
    return good[: len(good) // 2]


def of_another_machine(good: bytes) -> bytes:
    """With the number of another processor in the header: RISC-V's."""
    return good[:18] + (243).to_bytes(2, sys.byteorder) + good[20:]


def without_a_function(good: bytes) -> bytes:
    """An older source's: it loads, and has no samestep_reduce."""
    return good.replace(b"samestep_reduce\0", b"samestep_reducf\0")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [truncated, of_another_machine, without_a_function])
@pytest.mark.parametrize("named", ["as it was", "by its sum"])
def test_a_library_of_no_use_is_compiled_again(
    damage: Callable[[bytes], bytes], named: str, cache: Path, tmp_path: Path
) -> None:
    if damage is truncated and named == "by its sum":
        pytest.skip("to load it ends the process, which is why the sum stands in the name")
    good = built_in(cache).read_bytes()
    compiler = tmp_path / "compiler"  # it gives the kernel that was compiled before
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done\ncp "{built_in(cache)}" "$last"\n', encoding="utf-8")
    compiler.chmod(0o755)
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler)}
    kept = built_in(tmp_path, environ)
    assert kept.read_bytes() == good
    bad = damage(good)
    kept.unlink()
    if named == "by its sum":
        kept = kept.with_name(f"{build.key_of(environ)}-{sha256(bad).hexdigest()[:16]}.so")
    kept.write_bytes(bad)
    kept.chmod(0o700)
    assert backend._compiled_functions(environ).samestep_reduce is not None
    (file,) = (tmp_path / "samestep").iterdir()
    assert file.read_bytes() == good


def test_where_one_host_has_too_many_ranks_all_hosts_use_gloo() -> None:
    assert local.start(sum_over_a_full_host, ("aab", 1), 3) == 6.0


def test_ranks_of_other_hosts_share_none() -> None:
    store, own = dist.HashStore(), region.host_identity()
    store.set("host/1", "another one")
    store.set("host/2", own)
    assert region.host_of_each(store, 0, 3, own) == [0, 1, 0]


def test_the_kernel_is_built_once_and_kept(cache: Path) -> None:
    (kept,) = (cache / "samestep").iterdir()
    first = kept.stat().st_mtime_ns
    assert built_in(cache) == kept
    assert kept.stat().st_mtime_ns == first
    assert list((cache / "samestep").iterdir()) == [kept]


def test_a_compiler_that_is_missing_or_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(build.NoKernelError, match=r"there is no C\+\+ compiler \(no-such-compiler\)"):
        built_in(tmp_path, {**os.environ, **NO_COMPILER})
    with pytest.raises(build.NoKernelError, match="false fails: exit code 1"):
        built_in(tmp_path, {**os.environ, "CXX": "false"})
    assert list((tmp_path / "samestep").iterdir()) == []


def test_a_compiler_may_have_arguments(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "CXX"}
    # To preprocess alone takes no time, and shows in the file.
    built = built_in(tmp_path, {**environ, "CXX": "c++ -E"})
    assert built.read_bytes().startswith(b"# ")
    assert built_in(tmp_path, {**environ, "CXX": "c++ -E -P"}) != built
    with pytest.raises(build.NoKernelError, match=r"there is no C\+\+ compiler \(no-such-compiler -O2\)"):
        built_in(tmp_path, {**environ, "CXX": "no-such-compiler -O2"})


def test_a_transport_that_an_engine_can_not_have_is_refused() -> None:
    with pytest.raises(samestep.UserError, match='engine "accelerate" does not send through it; use engine native'):
        samestep.train(
            samestep.Recipe(task=Points(), batch=16, steps=1),
            layout="dp2",
            engine="accelerate",
            transport="shared-memory",
        )


def test_shared_memory_over_several_hosts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(samestep.UserError, match="the ranks are on several hosts, which share none; use auto"),
        samestep.session(layout="dp2", device="cpu", transport="shared-memory"),
    ):
        pass
