"""What hosts of a job compare before it begins: their code, their scripts and their commands, without any secret."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from launching import hosts_store

import samestep
from samestep.errors import StartError, UserError
from samestep.launch import consistency
from samestep.launch.handshake import Handshake
from samestep.launch.node_spec import NodeSpec
from samestep.launch.options import RankOptions

pytestmark = pytest.mark.quick

SOURCES = consistency._SOURCES


def part(host: str, *command: str, **values: object) -> NodeSpec:
    known = {"job": "one", "most": 2, "num_procs": 1, "command": command or ("x",)}
    return NodeSpec(**{"host": host, **known, **values})  # pyright: ignore


def told(host: NodeSpec) -> dict[str, object]:
    """What a host tells, as it comes out of the store."""
    return json.loads(json.dumps({"host": host.host, **consistency.facts_of(host)}))


def message(first: NodeSpec, second: NodeSpec) -> str | None:
    found = consistency.difference(told(first), told(second))
    return found[1] if found is not None else None


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small package that stands for samestep's own sources."""
    folder = tmp_path / "one" / "package"
    for name, text in (("a.py", "a = 1\n"), ("inner/b.py", "b = 2\n"), ("inner/a.py", "a = 1\n")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(consistency, "_SOURCES", folder)
    return folder


def test_checkouts_of_one_version_that_differ_are_told_apart(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = told(part("host-a"))
    other = package.parent / "two"
    shutil.copytree(package, other)
    monkeypatch.setattr(consistency, "_SOURCES", other)
    assert consistency.difference(first, told(part("host-b"))) is None
    (other / "inner" / "b.py").write_text("b = 3\n", encoding="utf-8")
    found = consistency.difference(first, told(part("host-b")))
    assert found is not None
    digests = first["samestep sources"], consistency.digest_of(other)
    assert found[1] == (
        f'the hosts of this job differ in their samestep sources: host-a has "{digests[0]}", host-b has '
        f'"{digests[1]}"; install the same on both'
    )


def test_the_digest_of_sources_is_that_of_the_files_and_their_places(package: Path) -> None:
    before = consistency.digest_of(package)
    for name in ("__pycache__/a.cpython-311.pyc", "notes.txt", ".#a.py"):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_bytes(b"x")
    os.utime(package / "a.py", (0, 0))
    assert consistency.digest_of(package) == before
    (package / "inner" / "a.py").rename(package / "inner" / "c.py")
    assert consistency.digest_of(package) != before


def test_the_digest_of_samestep_costs_no_time() -> None:
    assert Path(samestep.__file__).parent == SOURCES
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        consistency.digest_of(SOURCES)
        taken.append(time.perf_counter() - began)
    assert min(taken) < 0.5  # on a busy machine; about 0.015 s on another


@pytest.mark.parametrize(
    ("before", "name", "kind"),
    [
        ([], "train.py", "script"),
        ([], "train", "script"),
        (["python", "-u"], "train.py", "script"),
        (["bash"], "train.sh", "script"),
        (["-m", "samestep", "train"], "job.yaml", "job file"),
    ],
)
def test_each_host_reads_its_own_copy_of_the_script(before: list[str], name: str, kind: str, tmp_path: Path) -> None:
    files = [tmp_path / host / name for host in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text("#!/bin/sh\nlr=1\n", encoding="utf-8")
    parts = [part(f"host-{file.parent.name}", *before, str(file)) for file in files]
    assert message(*parts) is None  # where it is on a host is the host's own
    files[1].write_text("#!/bin/sh\nlr=2\n", encoding="utf-8")
    said = message(*parts) or ""
    assert said.startswith(f'the hosts of this job differ in their {kind}: host-a has "{name} of SHA-256 ')
    assert said.endswith("; copy the same file to both")


def test_a_program_is_no_script_and_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "compiled").write_bytes(b"\x7fELF")
    for command in (["echo", "train.py"], [str(tmp_path / "compiled")], ["x" * 5000 + ".py"], [str(tmp_path)]):
        assert not {"script", "job file"} & told(part("host-a", *command)).keys()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("t.py --lr 3e-4", "t.py --lr 1e-3"),
        ("t.py", "other.py"),
        ("t.py", "t.py fast"),
        ("t.py a b", "t.py b a"),
        ("-m one", "-m two"),
    ],
)
def test_commands_that_differ_are_refused(first: str, second: str) -> None:
    hosts = part("host-a", *first.split()), part("host-b", *second.split())
    digests = [told(host)["command"] for host in hosts]
    assert message(*hosts) == (
        f'the hosts of this job differ in their command: host-a has "{digests[0]}", host-b has "{digests[1]}"; '
        "give both the same, and take what is a host's own from its environment"
    )
    assert message(hosts[0], part("host-b", *first.split())) is None


def test_nothing_of_a_command_is_in_the_store_or_the_message() -> None:
    store = hosts_store()
    where = {"address": "127.0.0.1", "port": store.port, "fewest": 2}
    first = Handshake(part("host-a", "t.py", "--token", "pa55word", **where))
    first._compare()
    with pytest.raises(UserError, match="in their command: ") as refused:
        Handshake(part("host-b", "t.py", "--token=w0rd pass", **where, node_rank=1)).agree()
    there = [str(refused.value)]
    with pytest.raises(UserError, match="in their command: ") as refused:
        first.agree()
    there += [str(refused.value)]
    there += [store.get(key).decode() for key in ("samestep/first", "samestep/refused")]
    assert "host-a" in there[2]
    assert "in their command: " in there[3]
    assert not any(word in text for text in there for word in ("token", "pa55", "w0rd"))


def test_what_brings_the_hosts_up_gives_them_one_command_which_need_not_be_told() -> None:
    words = ["t.py", "--lr", "3e-4"]
    assert "command" in told(part("host-a", *words))
    assert "command" not in told(part("host-a", *words, controlled=True))


def test_engines_that_differ() -> None:
    said = message(part("host-a"), part("host-b", ranks=RankOptions(engine="keras")))
    assert said == (
        'the hosts of this job differ in their engine: host-a has "torch", host-b has "keras"; give both the same'
    )


@pytest.mark.parametrize(("controlled", "error"), [(True, StartError), (False, UserError)])
def test_a_host_that_joins_later_is_compared_too(controlled: bool, error: type[Exception], tmp_path: Path) -> None:
    files = [tmp_path / host / "train.py" for host in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text("lr = 1\n", encoding="utf-8")
    store = hosts_store()
    where = {"address": "127.0.0.1", "port": store.port, "fewest": 1, "controlled": controlled}
    Handshake(part("host-a", str(files[0]), **where)).agree()
    later = part("host-b", str(files[1]), **where, node_rank=1)
    files[1].write_text("lr = 2\n", encoding="utf-8")
    # After a StartError the controller may try the host again; a UserError ends the job.
    with pytest.raises(error, match=r"differ in their script: host-a has .*, host-b has .*; copy the same"):
        Handshake(later).agree()
    files[1].write_text("lr = 1\n", encoding="utf-8")
    Handshake(later).agree()
