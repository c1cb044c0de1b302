"""Caches and temporary folders of a stranger's: nothing is loaded from them, and one line says why."""

import ctypes
import grp
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch._inductor.config

from samestep import environment, private_folders
from samestep.comm.shared_memory import backend, build
from samestep.data.cache import DataCache
from samestep.engines.deepspeed import nvme
from samestep.errors import UserError
from samestep.fault_tolerance.scratch import scratch
from samestep.launch import compiler_cache
from samestep.launch.script_env import accelerate
from samestep.launch.script_env.base import Rank
from samestep.private_folders import NotPrivateError
from samestep.ranks import Ranks

NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder such as /tmp: everybody may write into it."""
    folder = Path(tempfile.mkdtemp(prefix="samestep-shared-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def folder_of(user: int, place: Path, mode: int = 0o755) -> Path:
    place.mkdir(parents=True)
    place.chmod(mode)
    os.chown(place, user, user)
    return place


def file_in(folder: Path, mode: int = 0o644) -> Path:
    file = folder / "file"
    file.write_text("x", encoding="utf-8")
    file.chmod(mode)
    return file


@pytest.mark.quick
def test_what_is_this_users_alone_is_private(shared: Path) -> None:
    own = shared / "own"
    own.mkdir(mode=0o755)
    file = file_in(own)
    (own / "link").symlink_to("../own")
    for path in (own, file, own / "link" / "file", own / ".." / "own", Path("/")):
        private_folders.check(path)
    private_folders.check(shared, as_parent=True)
    private_folders.make(own / "a" / "b")
    assert [(own / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]


@pytest.mark.quick
def test_what_everybody_may_write_to_is_not(shared: Path) -> None:
    own = shared / "own"
    own.mkdir()
    inner = own / "inner"
    inner.mkdir()
    file = file_in(inner, 0o666)
    refused = {file: "o-w", shared: "o-w"}
    for path, change in refused.items():
        with pytest.raises(NotPrivateError, match=f"^{path} can be written by everybody$") as caught:
            private_folders.check(path)
        assert (
            caught.value.advising("that")
            == f"{path} can be written by everybody; use `chmod {change} {path}`, or that"
        )
    file.chmod(0o644)
    own.chmod(0o777)  # no sticky bit: anybody can rename `inner`, and make another
    for path in (file, inner):
        with pytest.raises(NotPrivateError, match=f"^{own} can be written by everybody$") as caught:
            private_folders.check(path, as_parent=True)
        assert f"`chmod +t {own}`" in caught.value.advising("that")
    own.chmod(0o1777)  # as the message advises
    private_folders.check(file)


@pytest.mark.quick
def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(NotPrivateError, match="goes through more than 40 links"):
        private_folders.check(tmp_path / "a")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert not private_folders.is_kept(tmp_path / "dangling" / "cache")


@pytest.mark.quick
def test_a_group_of_this_users_own_may_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    group, user = tmp_path.stat().st_gid, os.geteuid()
    named = grp.getgrgid(group).gr_name
    if user != 0 and (named != pwd.getpwuid(user).pw_name or grp.getgrgid(group).gr_mem):
        pytest.skip("this user has no group of its own")
    private_folders.check(tmp_path)
    if user == 0:
        os.chown(tmp_path, 0, NOBODY)
        with pytest.raises(NotPrivateError, match="can be written by the group"):
            private_folders.check(tmp_path)


def of_a_stranger(shared: Path) -> Path:
    return folder_of(NOBODY, shared / "strange") / "cache"


def below_a_stranger(shared: Path) -> Path:
    folder_of(NOBODY, shared / "strange")
    return folder_of(0, shared / "strange" / "own") / "cache"


def link_of_a_stranger(shared: Path) -> Path:
    folder_of(0, shared / "own")
    (shared / "link").symlink_to(shared / "own")
    os.lchown(shared / "link", NOBODY, NOBODY)
    return shared / "link" / "cache"


def where_everybody_writes(shared: Path) -> Path:
    return folder_of(0, shared / "own", 0o777) / "cache"


def with_a_strangers_file(shared: Path) -> Path:
    return folder_of(0, shared / "own") / "cache"


# It leaves a trace as it is loaded.
EVIL = '#include <fcntl.h>\n__attribute__((constructor)) void run() {{ open("{trace}", O_CREAT, 0600); }}\n'


@pytest.fixture
def evil(shared: Path) -> Path:
    """A library that user nobody has compiled."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no compiler")
    work = folder_of(NOBODY, shared / "work")
    (work / "evil.c").write_text(EVIL.format(trace=shared / "trace"), encoding="utf-8")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "evil.c", "-o", "evil.so"],
        cwd=work,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        env={"PATH": os.environ["PATH"], "TMPDIR": str(work)},
        timeout=60,
        check=True,
    )
    return work / "evil.so"


@AS_ROOT
@pytest.mark.parametrize(
    "place",
    [of_a_stranger, below_a_stranger, link_of_a_stranger, where_everybody_writes, with_a_strangers_file],
)
def test_a_strangers_library_is_not_loaded(place: Callable[[Path], Path], shared: Path, evil: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(place(shared)), "CXX": "false"}
    plant(evil, environment.cache_folder(environ), environ)
    with pytest.raises(build.NoKernelError, match="false fails"):  # so it wasn't loaded, but compiled
        backend._compiled_functions(environ)
    assert not (shared / "trace").exists()


@AS_ROOT
def test_without_home_nothing_is_looked_for_in_the_shared_folder(
    shared: Path, evil: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    file = plant(evil, shared / ".cache" / "samestep", {"CXX": "false"})
    assert environment.cache_folder({}) == Path(pwd.getpwuid(0).pw_dir) / ".cache" / "samestep"
    with pytest.raises(build.NoKernelError, match="false fails"):
        backend._compiled_functions({"CXX": "false"})
    assert not (shared / "trace").exists()
    ctypes.CDLL(str(file))
    assert (shared / "trace").exists()  # loaded, it shows


def plant(evil: Path, cache: Path, environ: Mapping[str, str]) -> Path:
    """Put another user's library where this user's kernel is looked for."""
    cache.mkdir(parents=True, exist_ok=True)
    file = cache / f"{build.key_of(environ)}-{sha256(evil.read_bytes()).hexdigest()[:16]}.so"
    os.link(evil, file)
    return file


@AS_ROOT
@pytest.mark.quick
def test_a_strangers_tokens_are_not_trained_on(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, planted = {"ids": np.arange(3)}, {"ids": np.zeros(3)}
    own = DataCache(folder=shared / "own", limit=10**6)
    own.get("kind", "key", lambda: planted)
    (file,) = own.folder.iterdir()
    assert own.get("kind", "key", lambda: good).arrays["ids"].tolist() == [0, 0, 0]
    os.chown(file, NOBODY, NOBODY)
    assert own.get("kind", "key", lambda: good).arrays["ids"].tolist() == [0, 1, 2]  # and replaces it
    assert file.stat().st_uid == 0
    os.chown(own.folder, NOBODY, NOBODY)
    for _ in range(2):
        assert own.get("kind", "key", lambda: planted).arrays["ids"].tolist() == [0, 0, 0]
    assert capsys.readouterr().err == (
        f"samestep: nothing is kept in {own.folder}, into which another user could put files: {own.folder} belongs "
        "to nobody; XDG_CACHE_HOME names another folder\n"
    )


@AS_ROOT
@pytest.mark.quick
def test_temporary_files_are_not_where_a_stranger_could_exchange_them(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks unpickle what is in them."""
    strange = folder_of(NOBODY, shared / "strange", 0o1777)
    monkeypatch.setenv("TMPDIR", str(strange))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with scratch("samestep-test-") as folder:
        assert folder.parent == Path("/tmp")
    assert os.environ["TMPDIR"] == tempfile.gettempdir() == "/tmp"
    assert list(strange.iterdir()) == []
    assert capsys.readouterr().err == (
        f"samestep: temporary files are in /tmp, since other users could exchange those in {strange}: {strange} "
        "belongs to nobody\n"
    )


@AS_ROOT
@pytest.mark.quick
def test_torch_compile_loads_nothing_of_a_strangers(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    monkeypatch.setenv("USER", "me")
    monkeypatch.setenv("LOGNAME", "me")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    usual = shared / "torchinductor_me"
    with compiler_cache.private():
        assert environment.compiler_cache() is None
        assert usual.stat().st_mode & 0o777 == 0o700  # nobody can make it first
    os.chown(usual, NOBODY, NOBODY)
    with compiler_cache.private():
        chosen = environment.compiler_cache()
        assert chosen is not None
        private_folders.check(chosen)
        with compiler_cache.private():  # in a rank, which has it from the agent
            assert environment.compiler_cache() == chosen
    assert environment.compiler_cache() is None
    headers = torch._inductor.config.cpp_cache_precompile_headers
    compiler_cache.avoid_foreign_headers()
    assert not torch._inductor.config.cpp_cache_precompile_headers
    torch._inductor.config.cpp_cache_precompile_headers = headers


@AS_ROOT
@pytest.mark.quick
def test_deepspeeds_extension_is_not_loaded_from_a_strangers_folder(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = folder_of(NOBODY, shared / "strange")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(strange))
    with pytest.raises(UserError, match=f"{strange} belongs to nobody; TORCH_EXTENSIONS_DIR names another folder"):
        nvme.load(torch.device("cpu"))


@AS_ROOT
@pytest.mark.quick
def test_deepspeeds_state_is_not_where_a_stranger_could_exchange_it(shared: Path) -> None:
    config = {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}
    folder = folder_of(0, shared / "own", 0o777)
    with pytest.raises(
        UserError, match=r"run\.offload_folder is .* another user could exchange the optimizer's state"
    ):
        nvme.placed(config, folder)
    folder.chmod(0o1777)  # as the message advises
    _, place = nvme.placed(config, folder)
    assert Path(place.name).parent == folder
    place.cleanup()


@AS_ROOT
@pytest.mark.quick
def test_a_strangers_configuration_of_accelerate_is_not_read_unless_it_is_named(shared: Path) -> None:
    folder = folder_of(NOBODY, shared / "strange") / "accelerate"
    file = folder_of(0, folder) / "default_config.yaml"
    file.write_text("nonsense: true\n", encoding="utf-8")
    rank = Rank(
        ranks=Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1),
        environ={"HF_HOME": str(folder.parent), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        threads=1,
    )
    with pytest.raises(UserError, match=r"isn't read: .* belongs to nobody; name the file by --engine accelerate:co"):
        accelerate.CONTRACT.expected(rank)
