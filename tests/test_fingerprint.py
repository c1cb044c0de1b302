"""Data sets are told apart by their samples, however they are held; and what is random is no difference."""

import random
import threading
import time
from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from samestep.checkpoint.identity import LearnsFrom
from samestep.data import fingerprint, images, source_files
from samestep.data.cache import DataCache
from samestep.data.canonical import Canonical
from samestep.data.fingerprint import compare, identify
from samestep.recipe import Recipe
from samestep.tasks.registry import resolve

pytestmark = pytest.mark.quick


def rows(count: int = 300) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, generator=generator), index % 3) for index in range(count)]


def told(before: Any, now: Any) -> str | None:
    return compare(now, identify(before))[1]


def with_row(index: int, row: Any) -> list[Any]:
    changed: list[Any] = rows()
    changed[index] = row
    return changed


CHANGES: dict[str, tuple[list[Any], str]] = {
    "values": ([(inputs * 1.001, label) for inputs, label in rows()], "of other contents"),
    "one value": (with_row(151, (rows()[151][0] + torch.tensor([0, 0, 1e-2]), 151 % 3)), "of other contents"),
    "one label": (with_row(299, (rows()[299][0], 1)), "of other contents"),
    "order": (sorted(rows(), key=lambda row: float(row[0][0])), "of other contents"),
    "two swapped": ([*with_row(5, rows()[6])[:6], rows()[5], *rows()[7:]], "of other contents"),
    "labels": ([(inputs, (label + 1) % 3) for inputs, label in rows()], "of other contents"),
    "fewer": (rows(260), "has 260 samples, and had 300"),
    "type": ([(inputs.double(), label) for inputs, label in rows()], "of other contents"),
    "shape": ([(inputs[None], label) for inputs, label in rows()], "of other contents"),
    "a further part": ([(*row, 0) for row in rows()], "of other contents"),
}


def wide(column: int, large: float, seed: int, count: int = 100) -> list[tuple[torch.Tensor, int]]:
    """Rows of 20 numbers, of which column 0 holds `large` and more; `seed` is of the numbers of `column`."""
    generator, changed = torch.Generator().manual_seed(1), torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        row = torch.randn(20, generator=generator)
        row[column] = torch.randn((), generator=changed)
        row[0] = large + index
        found.append((row, index % 3))
    return found


@pytest.mark.parametrize("large", [2e6, 1e9, 1e30])
@pytest.mark.parametrize("column", [1, 16])
def test_a_column_of_large_numbers_hides_no_change_of_another(column: int, large: float) -> None:
    assert told(wide(column, large, 2), wide(column, large, 2)) is None
    assert "of other contents" in (told(wide(column, large, 2), wide(column, large, 3)) or "")


@pytest.mark.parametrize("outlier", [1e8, -999999.0, 1e35])
def test_one_large_row_hides_no_change_of_the_others(outlier: float) -> None:
    first = (torch.full((3,), outlier), 0)
    before = [first, *rows()[1:]]
    assert told(before, [first, *[(-inputs, label) for inputs, label in rows()[1:]]]) is not None
    assert told(before, [first, *[(inputs * 1.001, label) for inputs, label in rows()[1:]]]) is not None


def test_data_that_are_held_otherwise_are_said_not_to_be_compared() -> None:
    before = LearnsFrom(train=TensorDataset(torch.arange(12.0).view(4, 3))).look(None).now
    compared = LearnsFrom(train=list(torch.zeros(4, 3))).look(before)
    assert compared.data == ()
    assert "the training set is of another kind than it was" in "".join(compared.notes)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_rows_is_told(name: str) -> None:
    changed, said = CHANGES[name]
    assert said in (told(rows(), changed) or "")
    assert said in (told(changed, rows()) or "").replace("has 300 samples, and had 260", said)


def test_the_same_rows_are_no_change() -> None:
    assert told(rows(), rows()) is None
    assert identify(rows()) == identify(rows())
    assert identify(rows()).is_whole


def test_the_part_that_changed_is_named() -> None:
    before = [{"pixels": np.arange(4) + index, "label": index % 2} for index in range(50)]
    now = [{**row, "label": 1 - row["label"]} for row in before]
    assert 'of other contents (in "label")' in (told(before, now) or "")
    swapped = [{"pixels": row["label"], "label": row["pixels"]} for row in before]
    assert '"pixels", "label"' in (told(before, swapped) or "")
    assert told(before, [dict(reversed(row.items())) for row in before]) is None  # the same mapping


@pytest.mark.parametrize("array", [np.asarray, torch.as_tensor])
def test_arrays_count_whole(array: Callable[[Any], Any]) -> None:
    values = np.arange(300_000, dtype=np.float32).reshape(-1, 3)
    other = values.copy()
    other[54_321, 1] += 1
    assert told(array(values), array(values.copy())) is None
    assert "of other contents" in (told(array(values), array(other)) or "")
    assert identify(array(values)).is_whole


def test_a_set_of_tensors_counts_whole() -> None:
    inputs, labels = torch.randn(100_000, 2), torch.arange(100_000)
    assert told(TensorDataset(inputs, labels), TensorDataset(inputs.clone(), labels)) is None
    labels = labels.clone()
    labels[77_777] = 0
    assert told(TensorDataset(inputs, torch.arange(100_000)), TensorDataset(inputs, labels)) is not None


@pytest.mark.parametrize("held", [list, lambda pairs: TensorDataset(*map(torch.stack, zip(*pairs, strict=True)))])
def test_rounding_is_no_change(held: Callable[[Any], Any]) -> None:
    """As where a mean is summed by another number of threads."""
    generator = torch.Generator().manual_seed(2)
    pairs = [(torch.randn(5, generator=generator), torch.tensor(index % 3)) for index in range(2000)]
    nudged = [(torch.nextafter(inputs, inputs + 1), label) for inputs, label in pairs]
    assert told(held(pairs), held(nudged)) is None
    one = [*pairs[:700], nudged[700], *pairs[701:]]
    assert told(held(pairs), held(one)) is not None  # no rounding changes one row alone
    pairs[1234] = (pairs[1235][0], pairs[1234][1])
    assert "of other contents" in (told(held(pairs), held(nudged)) or "")


def test_columns_of_other_units_do_not_hide_a_change() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.rand(500, 5, generator=generator) * torch.tensor([1e9, 1.0, 1e-6, 1.0, 1e4])
    for column in range(5):
        other = values.clone()
        other[:, column] *= 1.001
        assert told(values, other) is not None
        assert told(list(values), list(other)) is not None
    assert told(values, torch.nextafter(values, values + 1)) is None
    doubles = values.double()
    assert told(doubles, doubles * (1 + 1e-9)) is not None


def test_real_numbers_that_are_none_or_too_large_count() -> None:
    def of(*values: float) -> list[torch.Tensor]:
        return [torch.tensor(values, dtype=torch.float64)] * 20

    for values in ((float("nan"), 1.0), (1.0, float("inf")), (1e300, 1.0)):
        assert told(of(*values), of(*values)) is None
        assert told(of(*values), of(*values[::-1])) is not None
    assert told(of(float("nan")), of(0.0)) is not None


# -- what is drawn at random


@dataclass
class Augmented(Dataset[Any]):
    """Rows whose inputs are changed at random each time that they are read, all of them or with a probability."""

    draw: Callable[[], float]
    pairs: Sequence[tuple[torch.Tensor, int]]
    probability: float = 1.0

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        inputs, label = self.pairs[index]
        return (inputs + self.draw() if self.draw() < self.probability else inputs), label


GENERATORS = {"python": random.random, "numpy": np.random.rand, "torch": lambda: float(torch.rand(()))}


@pytest.mark.parametrize("probability", [1.0, 0.5, 0.02])
@pytest.mark.parametrize("generator", GENERATORS)
def test_what_is_drawn_at_random_is_no_change(generator: str, probability: float) -> None:
    draw = GENERATORS[generator]
    before = identify(Augmented(draw, rows(), probability))
    for _ in range(5):
        draw()
        now, difference = compare(Augmented(draw, rows(), probability), before)
        assert difference is None
        assert now.drawn == ("0",)
        assert not now.is_whole
    other = [(inputs, 1 - min(label, 1)) for inputs, label in rows()]  # the labels still count
    assert "in part 1" in (compare(Augmented(draw, other, probability), before)[1] or "")


def test_a_look_leaves_the_generators_as_they_were() -> None:
    def state() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    def seed() -> None:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    seed()
    expected = state()
    seed()
    for draw in GENERATORS.values():
        identify(Augmented(draw, rows()))
    assert state() == expected


# -- how much is read


def test_a_slow_set_is_read_for_a_while_and_its_rows_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_SECONDS", 0.4)
    monkeypatch.setattr(fingerprint, "_SECONDS_AGAIN", 0.2)
    read: list[int] = []

    class Slow(Dataset[Any]):
        wait = 0.02

        def __len__(self) -> int:
            return 1_000_000_000

        def __getitem__(self, index: int) -> tuple[int, int]:
            read.append(index)
            time.sleep(self.wait)
            return index, index % 7

    began = time.perf_counter()
    slow = identify(Slow())
    assert time.perf_counter() - began < 3  # twice 16 rows at least, of 0.02 s
    assert {0, 999_999_999} <= set(read)
    assert max(np.diff(sorted(set(read)))) < 1_000_000_000 / 8
    Slow.wait = 0.002
    now, difference = compare(Slow(), slow)
    assert difference is None
    assert now.rows > slow.rows

    class Other(Slow):
        def __getitem__(self, index: int) -> tuple[int, int]:
            return index, super().__getitem__(index)[1] + (index == 999_999_999)

    assert "in part 1" in (compare(Other(), slow)[1] or "")


def test_every_row_of_a_small_set_is_read_once() -> None:
    for size in (*range(40), 127, 128, 129, 1000):
        assert sorted(fingerprint._spread(size)) == list(range(size))


def test_a_row_that_can_not_be_read_ends_nothing() -> None:
    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            if index == 7:
                raise OSError("broken image")
            return index

    assert told(Broken(), Broken()) is None
    assert told(Broken(), list(range(10))) is not None


# -- values of every kind


@dataclass
class Record:
    text: str
    number: float


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def image(color: int, mode: str = "L") -> Image.Image:
    return Image.new(mode, (4, 3), color)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "none": (lambda: None, lambda: 0),
    "bool": (lambda: True, lambda: 1),
    "int": (lambda: 3, lambda: 4),
    "large int": (lambda: 10**30, lambda: 10**30 + 1),
    "huge int": (lambda: 10**5000, lambda: 10**5000 + 1),
    "float": (lambda: 0.1 + 0.2, lambda: 0.3),
    "nan": (lambda: float("nan"), lambda: float("inf")),
    "complex": (lambda: 1 + 2j, lambda: 2 + 1j),
    "text": (lambda: "ab", lambda: "ba"),
    "half a surrogate pair": (lambda: "\ud800", lambda: "\ud801"),
    "bytes": (lambda: b"ab", lambda: bytearray(b"ac")),
    "list": (lambda: ["ab", "c"], lambda: ["a", "bc"]),
    "nested": (lambda: [[1], [2, 3]], lambda: [[1, 2], [3]]),
    "mapping": (lambda: {"a": 1, "b": 2}, lambda: {"a": 2, "b": 1}),
    "mapping of another class": (lambda: UserDict(a=1), lambda: UserDict(a=2)),
    "set": (lambda: {"a", "b"}, lambda: {"a", "c"}),
    "array": (lambda: np.arange(4), lambda: np.arange(4.0)),
    "array of texts": (lambda: np.array(["a", "b"]), lambda: np.array(["a", "c"])),
    "array of objects": (lambda: np.array([{"a": 1}, None]), lambda: np.array([{"a": 2}, None])),
    "scalar": (lambda: np.float32(1), lambda: np.float64(1)),
    "strided array": (lambda: np.arange(8)[::2], lambda: np.arange(8)[1::2]),
    "tensor": (lambda: torch.ones(3), lambda: torch.ones(3, dtype=torch.bfloat16)),
    "bfloat16": (lambda: torch.ones(3, dtype=torch.bfloat16), lambda: torch.zeros(3, dtype=torch.bfloat16)),
    "complex tensor": (lambda: torch.tensor([1j]).conj(), lambda: torch.tensor([1j])),
    "sparse tensor": (lambda: torch.eye(3).to_sparse(), lambda: torch.zeros(3, 3).to_sparse()),
    "parameter": (lambda: torch.nn.Parameter(torch.ones(2)), lambda: torch.nn.Parameter(torch.zeros(2))),
    "image": (lambda: image(1), lambda: image(2)),
    "image with a palette": (lambda: image(1).convert("P"), lambda: image(2).convert("P")),
    "date": (lambda: date(2026, 1, 2), lambda: date(2026, 2, 1)),
    "dataclass": (lambda: Record("a", 1.0), lambda: Record("a", 2.0)),
    "object": (lambda: Plain([1]), lambda: Plain([2])),
    "object with slots": (lambda: Slotted(1), lambda: Slotted(2)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_equal_values_have_one_hash_and_others_another(kind: str) -> None:
    one, other = KINDS[kind]
    canonical = Canonical()
    assert canonical.digest(one()) == Canonical().digest(one())
    assert canonical.digest(one()) != canonical.digest(other())
    assert not canonical.unknown


def test_what_has_no_hash_is_noted_by_its_type() -> None:
    for value, name in ((lambda: None, "function"), (threading.Lock(), "lock"), (iter([1]), "list_iterator")):
        canonical = Canonical()
        assert canonical.digest([value]) == Canonical().digest([value])
        assert name in str(canonical.unknown)
    known = identify([(1, threading.Lock())] * 3)
    assert known.unknown == ("_thread.lock",)
    assert not known.is_whole


def test_a_value_that_holds_itself_has_a_hash() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    assert Canonical().digest(ring) == Canonical().digest(ring)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_counts_by_the_name_and_contents_of_its_file(tmp_path: Path, kind: Any) -> None:
    for folder, content in (("one", b"a"), ("other", b"a"), ("changed", b"b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "image.raw").write_bytes(content)
    one, other, changed = ([(kind(tmp_path / name / "image.raw"), 1)] for name in ("one", "other", "changed"))
    assert told(one, other) is None
    assert told(one, changed) is not None


# -- the data of tasks that read files


def set_of(task: str, model: dict[str, Any], **data: Any) -> Any:
    return resolve(Recipe(task=task, batch=2, steps=1, data=data, model=model)).train_set()


def texts(folder: Path, change: Callable[[list[str]], list[str]] = list, name: str = "mails.csv") -> Any:
    lines = [f"text number {index} of the mail,{'spam' if index % 3 else 'mail'}" for index in range(120)]
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("text,label\n" + "\n".join(change(lines)) + "\n", encoding="utf-8")
    return set_of("text-classification", {}, source=str(folder / name), vocabulary=300, held_out=0)


def swapped(line: str) -> str:
    return line[:-4] + {"spam": "mail", "mail": "spam"}[line[-4:]]


TEXTS: dict[str, tuple[Callable[[list[str]], list[str]], str | None]] = {
    "nothing": (list, None),
    "values": (lambda lines: [line.replace("mail,", "letter,") for line in lines], "of other contents"),
    "sorted": (sorted, "of other contents"),
    "fewer": (lambda lines: lines[40:], "has 80 samples, and had 120"),
    "labels": (lambda lines: [swapped(line) for line in lines], "of other contents"),
    "one line": (lambda lines: [*lines[:60], lines[60].replace("60", "61"), *lines[61:]], "of other contents"),
    "two lines": (lambda lines: [*lines[:60], lines[61], lines[60], *lines[62:]], "of other contents"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts(tmp_path: Path, name: str) -> None:
    change, said = TEXTS[name]
    found = told(texts(tmp_path / "before"), texts(tmp_path / "now", change, "others.csv"))
    assert found == said if said is None else said in (found or "")


def test_columns_in_another_order_are_the_same_texts(tmp_path: Path) -> None:
    before = texts(tmp_path)
    file = tmp_path / "mails.csv"
    rows_of = [line.rpartition(",") for line in file.read_text(encoding="utf-8").splitlines()]
    file.write_text("\n".join(f"{label},{text}" for text, _, label in rows_of), encoding="utf-8")
    now = set_of("text-classification", {}, source=str(file), vocabulary=300, held_out=0)
    assert told(before, now) is None


def test_another_tokenizer_or_length_gives_other_samples(tmp_path: Path) -> None:
    before = texts(tmp_path)
    source = str(tmp_path / "mails.csv")
    for settings in ({"vocabulary": 40}, {"vocabulary": 300, "max_length": 5}):
        now = set_of("text-classification", {}, source=source, held_out=0, **settings)
        assert "of other contents" in (told(before, now) or "")


def test_texts_from_the_cache_are_those_that_were_put_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.data.cache.WORTH_KEEPING", 10)
    monkeypatch.setattr(DataCache, "of", lambda _: DataCache(folder=tmp_path / "cache", limit=10**8))
    first = identify(texts(tmp_path))
    again = identify(texts(tmp_path))
    monkeypatch.setattr(DataCache, "of", lambda _: DataCache(folder=tmp_path / "cache", limit=0))
    assert first == again == identify(texts(tmp_path))


def test_running_text(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"Document {number}. " * 200, encoding="utf-8")

    def blocks() -> Any:
        return set_of("causal-lm", {}, source=str(folder), held_out=0, vocabulary=300, length=16)

    before, sources = identify(blocks()), source_files.sources_of({"data": {"source": str(folder)}})
    assert compare(blocks(), before)[1] is None
    file = folder / "1.txt"
    file.write_text(file.read_text(encoding="utf-8").replace("1", "7", 1), encoding="utf-8")
    assert compare(blocks(), before)[1] is not None
    assert source_files.sources_of({"data": {"source": str(folder)}}) != sources


def test_an_image_that_is_replaced(tmp_path: Path) -> None:
    def write(name: str, color: int) -> None:
        file = tmp_path / "pictures" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.full((8, 8), color, dtype=np.uint8)
        pixels[0] = np.arange(8)
        images.pillow("test").fromarray(pixels).save(file)

    for number in range(6):
        write(f"{'cats' if number % 2 else 'dogs'}/{number}.png", 40 * number)

    def pictures() -> Any:
        return set_of("image-classification", {}, source=str(tmp_path / "pictures"), held_out=0)

    before = identify(pictures())
    assert compare(pictures(), before)[1] is None
    write("cats/3.png", 3)
    assert "of other contents" in (compare(pictures(), before)[1] or "")
    write("cats/3.png", 120)
    assert compare(pictures(), before)[1] is None
    (tmp_path / "pictures" / "cats" / "3.png").rename(tmp_path / "pictures" / "dogs" / "3.png")  # another label
    assert "of other contents" in (compare(pictures(), before)[1] or "")


# -- files that a recipe names


def test_sources_are_known_by_their_contents(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder / "inner").mkdir(parents=True)
        (tmp_path / folder / "inner" / "a.bin").write_bytes(b"a")
        (tmp_path / folder / ".hidden").write_bytes(folder.encode())
    one, other = (source_files.digest_of(str(tmp_path / name)) for name in ("one", "other"))
    assert one == other is not None
    (tmp_path / "other" / "inner" / "b.bin").write_bytes(b"")
    assert source_files.digest_of(str(tmp_path / "other")) != one
    assert source_files.digest_of(str(tmp_path / "nothing.csv")) is None
    assert source_files.sources_of({"args": {"count": 3, "name": "one", "file": "no.csv", "list": ["a.b"]}}) == {}


def test_of_a_large_file_blocks_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "_WHOLE", 1000)
    monkeypatch.setattr(source_files, "_BLOCK", 10)
    file = tmp_path / "large.bin"
    file.write_bytes(bytes(10_000))
    before = source_files.digest_of(str(file))
    for content in (bytes(10_001), bytes(9_999) + b"\1", b"\1" + bytes(9_999)):
        file.write_bytes(content)
        assert source_files.digest_of(str(file)) != before


def test_a_folder_of_too_many_files_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "_MOST_FILES", 3)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("")
    assert source_files.digest_of(str(tmp_path)) is None
