"""The lease of a folder: who holds it, when it is taken over, and how its owner notices."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samestep import UserError
from samestep.fault_tolerance import lease, lease_owner
from samestep.fault_tolerance.lease import FolderInUseError, LeaseLostError, hold
from samestep.fault_tolerance.lease_owner import Owner

pytestmark = pytest.mark.quick

ENDED = 0.25  # seconds, the limit of the leases in here


@pytest.fixture(autouse=True)
def looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_LOOK", 0.05)


def owner(**values: Any) -> Owner:
    return replace(Owner.here(ENDED), **values)


ELSEWHERE: dict[str, Any] = {"host": "node-7"}
DEAD: dict[str, Any] = {"pid": 2**22 + 1}  # above Linux' largest process id


def lease_file(folder: Path, number: int = 1, content: bytes | None = None, **values: Any) -> Path:
    """A lease that some other process has left, or renews."""
    folder.mkdir(exist_ok=True)
    file = folder / f".lease-{number}"
    file.write_bytes(owner(**values).content(0) if content is None else content)
    return file


@contextmanager
def renewed(file: Path, content: bytes) -> Iterator[None]:
    """Renew a lease as its owner on another host does."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            file.write_bytes(content)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_one_training_holds_a_folder_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    with hold([folder]) as held:
        held.check()
        with pytest.raises(FolderInUseError) as caught, hold([folder]):
            pass
        said = str(caught.value)
        assert f"in use by another training (host {os.uname().nodename}, process {os.getpid()}, since 20" in said
        assert "wait for its end or stop it, or use another folder" in said
        held.check()
        (folder / "metrics.jsonl").touch()
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
    with hold([tmp_path / "empty" / "run"]):
        pass
    assert not (tmp_path / "empty").exists()  # nothing was written into it


def test_names_of_one_folder_are_one_lease(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with hold([tmp_path / "there", tmp_path / "link", tmp_path / "there" / "checkpoints"]) as held:
        assert len(held.files) == 2
        with pytest.raises(FolderInUseError), hold([tmp_path / "other", tmp_path / "link"]):
            pass
    assert not (tmp_path / "other").exists()  # the first one is given back where the second can't be had


@pytest.mark.parametrize(
    "values",
    [DEAD, {"pid": os.getpid(), "started": 17}, {"pid": 1, "started": 17}],
    ids=["no process", "the number is this process's now", "the number is another's now"],
)
def test_the_lease_of_a_dead_process_of_this_host_is_taken_over_at_once(
    tmp_path: Path, values: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    lease_file(tmp_path, limit=60.0, **values)
    with hold([tmp_path]) as held:
        held.check()
        assert [path.name for path in tmp_path.iterdir()] == [".lease-2"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "values",
    [ELSEWHERE, {"namespace": 1}, {"boot": "another"}, {"boot": None}, {"started": None}],
    ids=["host", "container", "boot", "no boot id", "no start time"],
)
def test_of_others_the_heartbeat_decides(
    tmp_path: Path, values: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Though its process id is that of a live process here, or of none."""
    file = lease_file(tmp_path, **values)
    with renewed(file, owner(**values).content(1)), pytest.raises(FolderInUseError, match="in use"), hold([tmp_path]):
        pass
    capfd.readouterr()
    began = time.monotonic()
    with hold([tmp_path]):
        assert time.monotonic() - began >= ENDED
    said = capfd.readouterr().err
    assert f"waits up to {ENDED} s for a sign of life, and takes the folder over if none comes" in said
    assert f"no sign of life of its owner in {ENDED} s; this training takes the folder over" in said


def test_two_folders_of_a_dead_owner_are_waited_for_together(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "run", tmp_path / "checkpoints"]
    for folder in folders:
        lease_file(folder, limit=0.5, **ELSEWHERE)
    began = time.monotonic()
    with hold(folders) as held:
        held.check()
    assert 0.5 <= time.monotonic() - began < 0.9
    assert capfd.readouterr().err.count("no sign of life") == 1
    for folder in folders:
        lease_file(folder, limit=0.5, **ELSEWHERE)
    with (
        renewed(folders[1] / ".lease-1", owner(**ELSEWHERE, limit=0.5).content(1)),
        pytest.raises(FolderInUseError, match="checkpoints is in use"),
        hold(folders),
    ):
        pass


def test_a_clock_that_jumps_takes_no_lease_from_a_live_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the observer is suspended for an hour, or its host's time is set."""
    real, jumps = time.monotonic, iter([0.0, 0.0])
    monkeypatch.setattr(time, "monotonic", lambda: real() + next(jumps, 3600.0))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    values = {**ELSEWHERE, "limit": 3.0}
    file = lease_file(tmp_path, **values)
    with renewed(file, owner(**values).content(1)), pytest.raises(FolderInUseError), hold([tmp_path]):
        pass


def test_a_limit_that_nobody_waits_for_is_cut() -> None:
    read = lease_owner.owner_in(owner(limit=1e9).content(0))
    assert read is not None
    assert read.limit == 3600


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("left", [None, DEAD], ids=["new", "taken over"])
def test_of_many_at_once_one_holds_it(
    tmp_path: Path, left: dict[str, Any] | None, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links on this file system")

    if not links:
        monkeypatch.setattr(os, "link", refused)
        # One that is not complete yet is another's, whom the others wait for.
        monkeypatch.setattr(lease, "LIMIT", ENDED)
    together, over = threading.Barrier(6), threading.Barrier(6)

    def attempt(folder: Path) -> bool:
        together.wait(10)
        with ExitStack() as stack:
            try:
                held = stack.enter_context(hold([folder]))
            except FolderInUseError:
                over.wait(10)
                return False
            over.wait(10)
            held.check()
            return True

    with ThreadPoolExecutor(6) as threads:
        for number in range(10):
            folder = tmp_path / str(number)
            if left is not None:
                lease_file(folder, **left)
            assert sum(threads.map(attempt, [folder] * 6)) == 1
            assert not folder.exists() or list(folder.iterdir()) == []


def test_an_answer_that_is_lost_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a network the link may be there though the call says that its name was taken."""
    real = os.link

    def link(*names: Any) -> None:
        real(*names)
        real(*names)

    monkeypatch.setattr(os, "link", link)
    with hold([tmp_path]) as held:
        held.check()


def test_who_was_cut_off_notices_before_it_writes(tmp_path: Path) -> None:
    with hold([tmp_path]) as held:
        taken = lease_file(tmp_path, 2, **ELSEWHERE)
        with pytest.raises(LeaseLostError, match=r"taken over by another training \(host node-7, process \d+, since"):
            held.check()
        with pytest.raises(LeaseLostError, match="node-7"):
            held.look()  # though another thread of it has just looked
        held.files[0].unlink()  # the new owner does so
        with pytest.raises(LeaseLostError, match="node-7"):
            held.check()
    assert taken.read_bytes()  # the new owner's stays


@pytest.mark.parametrize("left", [None, b"", owner(**ELSEWHERE).content(0)], ids=["gone", "empty", "another's"])
def test_a_lease_that_no_longer_says_who_holds_it_is_lost(tmp_path: Path, left: bytes | None) -> None:
    """As where the successor of one that was cut off has come to its end."""
    with hold([tmp_path]) as held:
        if left is None:
            held.files[0].unlink()
        else:
            held.files[0].write_bytes(left)
        with pytest.raises(LeaseLostError):
            held.check()
        time.sleep(lease.BEAT / 100)


def test_a_folder_that_is_deleted_is_told(tmp_path: Path) -> None:
    with hold([tmp_path / "run"]) as held:
        held.files[0].unlink()
        (tmp_path / "run").rmdir()
        with pytest.raises(LeaseLostError, match="run was deleted while the training ran"):
            held.check()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        owner().content(0)[:200],
        b'{"format": 1}\n',
        b'{"loss": 0.5, "step": 3}\n',
        b"[" * 100_000,
        b"\x00\xff" * 50_000,
        owner().content(0).replace(b'"pid": ', b'"pid": -'),
        owner().content(0).replace(b'"limit": 0.25', b'"limit": null'),
    ],
    ids=["empty", "cut", "half", "no owner", "another's JSON", "nested", "huge", "a negative pid", "no limit"],
)
def test_a_lease_that_can_not_be_read_is_waited_for(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lease, "LIMIT", ENDED)
    lease_file(tmp_path, content=content)
    with hold([tmp_path]) as held:
        held.check()
    assert "an owner that can't be read from .lease-1" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["pipe", "link", "link to a lease", "dangling link", "folder"])
def test_what_is_no_plain_file_is_no_lease_and_never_written(tmp_path: Path, kind: str) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    file = folder / ".lease-1"
    elsewhere.write_bytes(owner().content(0) if kind == "link to a lease" else b"mine")
    before = elsewhere.read_bytes()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(elsewhere if kind != "dangling link" else tmp_path / "none")
    with hold([folder]) as held:
        time.sleep(0.05)
        held.check()
    assert elsewhere.read_bytes() == before
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC], ids=lambda code: errno.errorcode[code])
def test_a_folder_that_can_not_be_written_is_one_message(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if ".lease-" in str(path) and flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError) as caught, hold([tmp_path / "run"]):
        pass
    assert str(caught.value).endswith(f"run can't be written: {os.strerror(code)}; use another folder")
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fails_for_a_moment_ends_no_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lease, "BEAT", 0.02)
    real, failures = os.pwrite, iter(range(5))

    def write(descriptor: int, content: bytes, at: int) -> int:
        if b'"beats": 0' not in content and next(failures, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, content, at)

    monkeypatch.setattr(os, "pwrite", write)
    with hold([tmp_path]) as held:
        until = time.monotonic() + 10
        while b'"beats": 0' in held.files[0].read_bytes():
            assert time.monotonic() < until
            time.sleep(0.01)
        held.check()
    said = capfd.readouterr().err
    assert said.count("the lease can't be renewed: No space left on device; tries it again every") == 1


def test_a_later_round_of_the_same_job_does_not_wait(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whose rank 0 may be on another host than before; the old one, if it is still there, notices."""
    with hold([tmp_path], job="5e1f") as before:
        file = before.files[0]
        file.write_bytes(file.read_bytes().replace(os.uname().nodename.encode(), b"node-7".ljust(1)))
        with hold([tmp_path], job="5e1f") as now:
            now.check()
            with pytest.raises(LeaseLostError):
                before.check()
    assert capfd.readouterr().err == ""
    with hold([tmp_path], job="5e1f"), pytest.raises(FolderInUseError), hold([tmp_path], job="5e1f"):
        pass  # in one process it is no later round
