"""Rows from files of every kind, folders, saved data sets: by number, under other names; and bad ones."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from chat_jobs import write_rows

from samestep.data.records import read_rows
from samestep.errors import UserError

pytestmark = pytest.mark.quick

ROWS = [{"prompt": f"how many, {number}?\n", "completion": f"“{number}”, or so"} for number in range(7)]


def all_of(source: Path | str, **options: Any) -> list[Any]:
    rows = read_rows(str(source), "recipe.data.source", **options)
    return [rows[index] for index in range(len(rows))]


def mistake(source: Path | str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        all_of(source, **options)
    return str(caught.value)


def write_csv(path: Path) -> Path:
    lines = "\n".join(f'"{row["prompt"]}","{row["completion"]}"' for row in ROWS)
    path.write_text(f"prompt,completion\n{lines}\n", encoding="utf-8")
    return path


def test_plain_files_give_the_same_rows(tmp_path: Path) -> None:
    lines = write_rows(tmp_path / "a.jsonl", ROWS)
    lines.write_text("\n" + lines.read_text(encoding="utf-8").replace("\n", "\r\n\n"), encoding="utf-8")
    array = tmp_path / "b.json"
    array.write_text(json.dumps(ROWS), encoding="utf-8")
    assert all_of(lines) == all_of(array) == all_of(write_csv(tmp_path / "c.csv")) == ROWS
    assert all_of(tmp_path) == 3 * ROWS
    rows = read_rows(str(lines), "recipe.data.source")
    assert rows.place(2) == f"{lines}:6"
    again = pickle.loads(pickle.dumps(rows))  # as loading processes get it
    assert again[6] == ROWS[6]


def test_splits_columns_and_a_limit(tmp_path: Path) -> None:
    write_rows(tmp_path / "train-0.jsonl", ROWS[:3])
    write_rows(tmp_path / "train-1.jsonl", ROWS[3:5])
    write_rows(tmp_path / "test.jsonl", ROWS[5:])
    assert all_of(tmp_path, split="train") == ROWS[:5]
    assert all_of(tmp_path, split="test") == ROWS[5:]
    renamed = all_of(tmp_path, split="train", columns={"text": "completion"}, limit=4)
    assert renamed == [{"prompt": row["prompt"], "text": row["completion"]} for row in ROWS[:4]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"text": "a"}\n{"text": \n', ":2: the line is not JSON"),
        ('{"text": "a"}\n\n["b"]\n', ":3 is a list; a row must be an object"),
        ("", "has no rows"),
    ],
)
def test_a_bad_line_is_named(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text, encoding="utf-8")
    assert told in mistake(file)


def test_what_can_not_be_read_is_told(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "bytes.jsonl").write_bytes(b'{"text": "\xff"}\n')
    (tmp_path / "short.csv").write_text("prompt,completion\na,b\nc\n", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("a", encoding="utf-8")
    assert ":1: the line is not UTF-8" in mistake(tmp_path / "bytes.jsonl")
    assert "short.csv:3 has 1 columns, and the header 2" in mistake(tmp_path / "short.csv")
    assert "use a file that ends in .jsonl, .json, .csv" in mistake(tmp_path / "notes.txt")
    assert "there is no such file or folder" in mistake(tmp_path / "nowhere.jsonl")
    assert 'no file there is of split "dev"; the files are' in mistake(tmp_path, split="dev")
    assert 'a file without splits; leave out split "dev"' in mistake(file, split="dev")
    told = mistake(file, columns={"messages": "chat"})
    assert (
        f'recipe.data.columns.messages is "chat", and {file}:1 has no such column; it has prompt, completion' in told
    )


def test_a_column_that_is_missing_in_a_later_row_is_named_with_its_line(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "and"}])
    told = mistake(file, columns={"text": "completion"})
    assert told.startswith(f'{file}:8 has no column "completion" (it has prompt)')


def test_other_files_are_read_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")  # which its import sets
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    data.to_parquet(str(tmp_path / "a.parquet"))
    data.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(str(tmp_path / "two"))
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    for source in (tmp_path / "a.parquet", tmp_path / "saved", arrow):
        assert all_of(source) == ROWS
    assert all_of(tmp_path / "two", split="test") == [ROWS[1]]
    assert "has the splits train, test, of which split must name one" in mistake(tmp_path / "two")
    assert read_rows(str(tmp_path / "saved"), "recipe.data.source").place(3) == f"{tmp_path / 'saved'} row 3"


def test_without_datasets_the_install_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.extras.is_installed", lambda package: package != "datasets")
    (tmp_path / "a.parquet").write_bytes(b"")
    assert 'use pip install "samestep[data]"' in mistake(tmp_path / "a.parquet")
