"""Files that users name, in every place where one can be: what is no file, or not the right one, is one message.

Nothing waits for a writer, reads a device without end, or fills the memory.
"""

import gzip
import json
import lzma
import os
import socket
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest
from fuzzing import command

from samestep.errors import UserError
from samestep.input_files import bytes_of, parse_json, path_option, read_all, text_of, wrong_path

pytestmark = pytest.mark.quick

JOB = "recipe: {task: regression, batch: 8, steps: 2}\nrun: {device: cpu, layout: dp2}\n"
TEXTS = "recipe: {task: text-classification, data: {source: FILE}, batch: 4}\nrun: {device: cpu}\n"
ENGINE = (
    "recipe: {task: regression, batch: 8}\nrun: {engine: ENGINE, layout: dp2, engine_config: FILE, device: cpu}\n"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with everything that is no file of settings, and good job files beside it."""
    place = tmp_path_factory.mktemp("files")
    os.mkfifo(place / "pipe")
    with (place / "huge").open("wb") as stream:
        stream.truncate(10**9)
    (place / "utf16").write_bytes(JOB.encode("utf-16"))
    (place / "utf32").write_bytes(JOB.encode("utf-32"))
    (place / "latin").write_bytes("caf\xe9\n".encode("latin-1"))
    (place / "binary").write_bytes(bytes(range(256)))
    (place / "folder").mkdir()
    (place / "job.yaml").write_text(JOB, encoding="utf-8")
    before = Path.cwd()
    os.chdir(place)  # a socket's path may have 107 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        yield place
    os.chdir(before)


WRONG = {
    "pipe": "is a pipe",
    "socket": "is a socket",
    "/dev/zero": "is a device",
    "/dev/tty": "a device",
    "huge": "has 1 GB",
    "utf16": "is UTF-16; save it as UTF-8",
    "utf32": "save it as UTF-8",
    "latin": "is not UTF-8: byte 3 is 0xe9",
    "binary": "save it as UTF-8",
    "folder": "is a folder",
    "nowhere": "no",
    "job.yaml/inside": "Not a directory",
    "n" * 300: "a name in it is longer than the 255 bytes",
    "d/" * 3000: "it is longer than the 4095 bytes",
    "/proc/self/mem": "",
}
COMMANDS = {
    "train": "train FILE --print-config",
    "verify": "verify FILE",
    "translate": "translate FILE",
    "plan --rows": "plan --rows FILE --gpu a100",
    "hosts": "hosts --hostfile FILE",
    "launch": "launch --hostfile FILE -- x.py",
    "doctor": "doctor --hostfile FILE",
    "checkpoint": "checkpoint verify FILE",
    "inspect": "checkpoint inspect FILE",
    "convert --job": "checkpoint convert job.yaml out.pt --job FILE",
    "evaluate": "evaluate job.yaml --checkpoint FILE",
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("which", COMMANDS)
def test_what_is_no_file_is_told_at_once(which: str, name: str, place: Path) -> None:
    told = command(COMMANDS[which].replace("FILE", name).split(" "))
    assert told.startswith("samestep: ")
    if which in ("train", "verify", "hosts", "launch", "doctor") and name != "/dev/tty":
        assert WRONG[name] in told


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(JOB.encode(), mtime=0), "is compressed by gzip; unpack it"),
        (lzma.compress(JOB.encode()), "is compressed by xz; unpack it"),
        (b"PK\x03\x04\x14\x00\x06\x00", "is an archive, such as a spreadsheet"),
        (b"SQLite format 3\x00", "is an SQLite database; export it as text"),
        (b"PAR1\x15\x04\x00", "is a Parquet file; export it as text"),
        (b"PAR1: {}\n", 'unknown key "PAR1"'),  # a text may begin so
    ],
    ids=["gzip", "xz", "zip", "sqlite", "parquet", "text"],
)
def test_what_a_file_is_in_place_of_a_text_is_told(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(content)
    assert said in command(["train", str(file)])


@pytest.mark.parametrize("name", [name for name in WRONG if name not in ("nowhere", "folder")])
@pytest.mark.parametrize("engine", ["", "deepspeed", "accelerate", "parameter-server", "horovod"])
def test_what_a_job_names_is_told_too(name: str, engine: str, place: Path) -> None:
    """A task's data, and an engine's settings."""
    text = ENGINE.replace("ENGINE", engine) if engine else TEXTS
    file = name if name.startswith("/") else str(place / name)
    if not engine and name != "huge":
        link = place / "data.csv"
        link.unlink(missing_ok=True)
        link.symlink_to(file[:200])
        file = str(link)
    (place / "named.yaml").write_text(text.replace("FILE", file), encoding="utf-8")
    assert command(["train", "named.yaml", "--dry-run"]).startswith("samestep: ")


@pytest.mark.parametrize(
    ("key", "task"),
    [
        ("task", ""),
        ("optimizer.name", "regression"),
        ("data.source", "text-classification"),
        ("data.eval_source", "text-classification"),
        ("data.tokenizer", "text-classification"),
        ("model.folder", "causal-lm"),
    ],
)
def test_names_that_no_file_has_are_told_wherever_a_recipe_has_them(key: str, task: str, place: Path) -> None:
    (place / "own.yaml").write_text(
        f"recipe: {{task: {task or 'x'}, steps: 1}}\nrun: {{device: cpu}}\n", encoding="utf-8"
    )
    for name in ("n" * 300, "d/" * 3000 + "x"):
        value = f"{name}.py:Own" if key in ("task", "optimizer.name") else name
        told = command(["train", "own.yaml", "--dry-run", "--set", f"recipe.{key}={value}"])
        assert "longer than the" in told
    if key.startswith("data."):
        value = "~no-such-user-here/x"
        assert "there is no such user" in command(
            ["train", "own.yaml", "--dry-run", "--set", f"recipe.{key}={value}"]
        )


@pytest.mark.parametrize("name", ["n" * 300, "folder", "nowhere/x", "/dev/full", "job.yaml/x", "job.yaml"])
def test_files_to_write_are_told_too(name: str, place: Path) -> None:
    told = command(["layout", "dp2", "--json", name])
    assert told.startswith("samestep: ")
    assert "can't be written" in told or "--json" in told


def test_a_character_that_no_argument_has(place: Path) -> None:
    for words in (["train", "a\0b"], ["layout", "dp2", "--json", "a\0"], ["train", "x", "--set", "run.folder=\0"]):
        assert "has the character NUL" in command(words)
    (place / "nul.yaml").write_text('recipe: {task: "a\\0b"}\n', encoding="utf-8")
    assert "character 0x0 can't stand in a text" in command(["train", "nul.yaml"])


def test_a_pipe_of_the_shell_and_an_empty_device_are_read(place: Path) -> None:
    read, write = os.pipe()
    os.write(write, JOB.encode())
    os.close(write)
    assert text_of(Path(f"/dev/fd/{read}")) == JOB
    os.close(read)
    assert text_of(Path("/dev/null")) == ""
    assert bytes_of(place / "binary", most=256) == bytes(range(256))
    with pytest.raises(UserError, match="binary has 256 B; such a file may have 255 B"):
        bytes_of(place / "binary", most=255)


@pytest.mark.parametrize("most", [None, 100])
def test_a_file_without_an_end_is_told(most: int | None) -> None:
    """As /proc/kmsg, whose messages would be lost to who reads them: a pipe that isn't waited for, with a writer."""
    read, write = os.pipe2(os.O_NONBLOCK)
    told = r"^kmsg can't be read: it has no end, and nothing to read now; a file is wanted$"
    with FileIO(read) as stream, FileIO(write, "w"), pytest.raises(UserError, match=told):
        read_all(stream, Path("kmsg"), most=most)


def test_marks_of_the_beginning_and_ends_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert text_of(file) == "a\nb\nc\n"
    assert text_of(file, newlines=False) == "a\r\nb\rc\n"


def test_a_path_is_told_why_it_is_none() -> None:
    assert wrong_path("a" * 255) is None
    assert "255" in str(wrong_path("a" * 256))
    assert "255" in str(wrong_path("é" * 128))
    assert path_option("x/y") == Path("x/y")
    for address in ("s3://bucket/x.csv", "https:/host/x.yaml", "hdfs://a/b", "HF://x"):
        assert "it is an address" in str(wrong_path(address))
        assert "copy it here" in str(wrong_path(address))
    assert "write the path alone" in str(wrong_path("file:///x"))
    for path in ("s3/x", "gs:x", "a/https:/x", "package:name/rest"):
        assert wrong_path(path) is None


@pytest.mark.parametrize(
    "words",
    [
        "train s3://bucket/job.yaml",
        "train job.yaml --folder gs://bucket/runs",
        "train job.yaml --set run.checkpoint.folder=https://host/x",
        "train job.yaml --resume s3://bucket/checkpoints",
        "train job.yaml --dry-run --set recipe.task=text-classification --set recipe.data.source=hf://datasets/x",
        "checkpoint list s3://bucket/checkpoints",
    ],
)
def test_an_address_is_no_path(words: str, place: Path) -> None:
    assert "it is an address, and files are read and written on this machine" in command(words.split())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested too deep"),
        ('{"a": ' * 50_000, "nested too deep"),
        ('{"a": [-' + "1" * 5000 + "]}", "thousands of digits"),
        ("{", "Expecting"),
    ],
)
def test_json_beyond_what_python_reads_is_no_json(text: str, reason: str) -> None:
    with pytest.raises(json.JSONDecodeError, match=reason):
        parse_json(text)


def test_an_error_of_a_hook_is_its_own() -> None:
    def refuse(_: object) -> None:
        raise ValueError("not such a section")

    with pytest.raises(ValueError, match=r"^not such a section$"):
        parse_json('{"a": 1}', object_pairs_hook=refuse)
    assert parse_json('{"a": [1, -2, 1.5, 1e400]}') == {"a": [1, -2, 1.5, float("inf")]}
