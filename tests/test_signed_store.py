"""Values in a store that agents believe: those of the job's own hosts alone; and the secret that signs them."""

import os
import pickle
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from stranger import GARBAGE, put
from torch.distributed import HashStore

from samestep.cli.main import main
from samestep.errors import UserError
from samestep.launch.job_secret import VARIABLE, JobSecret, of_user
from samestep.launch.signed_store import ForeignValueError, SignedStore, open_to_hosts, where_hosts_meet

pytestmark = pytest.mark.quick

KEY, PORT = "samestep/node/1", "10.0.0.5:29500"
TEXT = "0123456789abcdef"  # a secret of a user's


@dataclass(frozen=True, kw_only=True)
class Form:
    host: str
    ranks: tuple[int, ...] = ()


VALUE = Form(host="host-é\n", ranks=(1, 2))


def signed(store: HashStore, secret: JobSecret | None, scope: str = "one") -> SignedStore:
    return SignedStore(store, secret, scope=scope, where=PORT)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture(params=["a secret", "no secret"])
def secret(request: pytest.FixtureRequest) -> JobSecret | None:
    return JobSecret.made() if request.param == "a secret" else None


def test_a_value_comes_back_in_its_form(store: HashStore, secret: JobSecret | None) -> None:
    one, other = signed(store, secret), signed(store, secret)
    assert other.read(KEY, Form) is None
    one.write(KEY, VALUE)
    assert other.read(KEY, Form) == other.wait(KEY, Form) == other.read_own(KEY, Form) == VALUE
    assert other.claim(KEY, Form(host="late"), Form) == VALUE
    one.write("another", VALUE)
    assert other.wait_all([KEY, "another"], Form) == [VALUE, VALUE]
    assert other.read_all_own([KEY, "absent"], Form) == [VALUE, None]


@pytest.mark.parametrize("kind", [*GARBAGE, "a pickle"])
def test_garbage_is_refused_with_its_key_and_place(
    store: HashStore, secret: JobSecret | None, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = signed(store, secret)
    put(store, KEY, GARBAGE.get(kind, pickle.dumps(VALUE)))
    with pytest.raises(ForeignValueError) as error:
        reader.read(KEY, Form)
    says = f'a value of key "{KEY}" in the job\'s store at {PORT} was not written by a host of this job: '
    assert str(error.value).startswith(says)
    assert len(str(error.value)) < 400
    for _ in range(2):
        assert reader.read_own(KEY, Form) is None
    assert capsys.readouterr().err.count(says) == 1


@pytest.mark.parametrize(
    "value",
    ['{"host": 1}', '{"host": "a", "ranks": [true]}', '{"host": "a", "ranks": [1e999]}', '{"host": NaN}', "[]", "{"],
)
def test_a_signed_value_of_another_form_is_refused(store: HashStore, value: str) -> None:
    secret = JobSecret.made()
    store.set(KEY, f"{secret.signature(b'one', KEY.encode(), value.encode())} {value}")
    with pytest.raises(ForeignValueError, match="its form is another one"):
        signed(store, secret).read(KEY, Form)


def _under_another_key(store: HashStore, secret: JobSecret) -> None:
    signed(store, secret).write("another", VALUE)
    store.set(KEY, store.get("another").decode())


def _of_another_scope(store: HashStore, secret: JobSecret) -> None:
    signed(store, secret, scope="two").write(KEY, VALUE)


def _of_another_secret(store: HashStore, secret: JobSecret) -> None:
    signed(store, JobSecret.made()).write(KEY, VALUE)


def _changed(store: HashStore, secret: JobSecret) -> None:
    signed(store, secret).write(KEY, VALUE)
    store.set(KEY, store.get(KEY).decode().replace("1", "7"))


@pytest.mark.parametrize("put", [_under_another_key, _of_another_scope, _of_another_secret, _changed])
def test_a_signature_counts_for_its_own_value_key_and_store(
    store: HashStore, put: Callable[[HashStore, JobSecret], None]
) -> None:
    secret = JobSecret.made()
    put(store, secret)
    with pytest.raises(ForeignValueError, match="it is not signed with the secret of this host"):
        signed(store, secret).read(KEY, Form)


def test_each_store_has_a_scope_of_its_own_and_hosts_without_the_secret_see_none() -> None:
    secret = JobSecret.made()
    stores = [HashStore(), HashStore()]
    for served in stores:
        open_to_hosts(served, secret)
    first = where_hosts_meet(stores[0], secret, PORT)
    assert where_hosts_meet(stores[0], secret, PORT).scope == first.scope
    assert where_hosts_meet(stores[1], secret, PORT).scope != first.scope
    with pytest.raises(ForeignValueError, match="it is signed with a secret, and this host has none"):
        where_hosts_meet(stores[0], None, PORT)
    unsigned = HashStore()
    open_to_hosts(unsigned, None)
    with pytest.raises(ForeignValueError, match="it is not signed, and this host has a secret"):
        where_hosts_meet(unsigned, secret, PORT)


def test_a_secret_shows_nowhere() -> None:
    secret = JobSecret.made()
    assert secret.sent() not in f"{secret!r} {secret} {vars(JobSecret)}"
    with pytest.raises(TypeError, match="goes to agents only"):
        pickle.dumps(secret)


def test_a_file_and_the_variable_give_the_same_secret(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{TEXT}\n", encoding="utf-8")
    file.chmod(0o400)
    one, other = of_user(file, None), of_user(None, TEXT)
    assert one is not None
    assert other is not None
    assert one.sent() == other.sent()
    assert TEXT not in one.sent()
    assert of_user(None, None) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o777])
def test_a_file_that_others_may_use_is_refused_with_the_chmod_that_mends_it(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_text(TEXT, encoding="utf-8")
    file.chmod(mode)
    with pytest.raises(UserError, match=rf"has the mode {mode:04o}, so others than its owner may use it; chmod") as e:
        of_user(file, None)
    command, value, _ = str(e.value).rpartition("; ")[2].split()
    assert command == "chmod"
    file.chmod(int(value, 8))
    assert of_user(file, None) is not None


def _absent(file: Path) -> None:
    pass


def _folder(file: Path) -> None:
    file.mkdir(0o700)


def _pipe(file: Path) -> None:
    os.mkfifo(file, 0o600)


def _empty(file: Path) -> None:
    file.touch(0o600)


def _short(file: Path) -> None:
    _empty(file)
    file.write_text(f"{TEXT[:-1]}\n", encoding="utf-8")


def _long(file: Path) -> None:
    _empty(file)
    file.write_bytes(b"x" * 100_000)


def _anothers(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives a file away")
    _empty(file)
    os.chown(file, 65534, 65534)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_absent, "No such file or directory; head -c 32"),
        (_folder, "is no regular file"),
        (_pipe, "is no regular file"),
        (_empty, "has 0 bytes; a secret has 16 to 4096"),
        (_short, "has 15 bytes; a secret has 16 to 4096"),
        (_long, "bytes; a secret has 16 to 4096"),
        (_anothers, "belongs to user 65534, who can read and change it"),
    ],
)
def test_a_file_that_is_no_secret_is_refused(tmp_path: Path, make: Callable[[Path], None], says: str) -> None:
    file = tmp_path / "secret"
    make(file)
    with pytest.raises(UserError, match=says) as error:
        of_user(file, None)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "/proc/self/mem/x"])
def test_a_name_of_no_file_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="--secret-file"):
        of_user(Path(name), None)


def test_the_secret_is_given_once_and_goes_to_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "secret"
    _empty(file)
    file.write_text(TEXT, encoding="utf-8")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    launch = ["launch", "--no-ssh", "--num-nodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"]
    monkeypatch.setenv(VARIABLE, TEXT)
    assert main([*launch, "--secret-file", str(file), "--", "true"]) == 2
    assert f"--secret-file {file} and {VARIABLE} are both given; use one of them" in capsys.readouterr().err
    assert VARIABLE not in os.environ  # before any process is started
    monkeypatch.setenv(VARIABLE, TEXT)
    assert main([*launch, "--pass", VARIABLE, "--", "true"]) == 2
    assert f"--pass would give {VARIABLE} to every rank" in capsys.readouterr().err
    (tmp_path / ".samestep_env").write_text(f"{VARIABLE}={TEXT}\n", encoding="utf-8")
    assert main([*launch, "--print-variables", "--", "true"]) == 2
    printed = capsys.readouterr()
    assert f".samestep_env would give {VARIABLE} to every rank" in printed.err
    assert TEXT not in printed.out + printed.err
