"""Messages that the documentation shows: each is what the program prints, or a row says why it isn't run."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mistaken_calls import CALLS, MADE
from PIL import Image
from places import BATCH
from shown_pages import (
    PAGES,
    ROOT,
    ROWS,
    NotRun,
    Rows,
    is_a_test,
    is_shown,
    masked,
    messages,
    missing_pieces,
    outputs,
    says,
)

import samestep
from samestep.cli.main import main

pytestmark = pytest.mark.quick

RECIPE = "recipe:\n  task: {}\n  batch: {}\n"
TEXTS = RECIPE.format("text-classification", 8) + "  data: {source: texts.csv, vocabulary: 64}\n"
MODEL = "  model: {layers: 6, hidden: 48, heads: 6}\n"
NOVEL = "It was a dark and stormy night. " * 100

# What the commands read, in their current folder, next to the repository's `examples`.
FILES: Mapping[str, str | bytes] = {
    "typo.yaml": (
        "recipe:\n  task: regression\n  optimizer:\n    lr: 0.1\n    lrr: 0.1\n  schedule: {warmup: 1.5}\n"
        "run:\n  layout: 2\n"
    ),
    "twice.yaml": "recipe:\n  task: regression\n  batch: 8\n  batch: 16\n",
    "tab.yaml": "recipe:\n\ttask: regression\n",
    "empty.yaml": "",
    "latin.yaml": "recipe: {task:  caf\xe9}\n".encode("latin-1"),
    "regression.yaml": RECIPE.format("regression", 64),
    "three.yaml": RECIPE.format("regression", 64) + "run: {layout: zero1x3}\n",
    "texts.yaml": TEXTS,
    "text.yaml": TEXTS + MODEL,
    "language.yaml": RECIPE.format("causal-lm", 16) + f"  data: {{source: novel.txt, vocabulary: 258}}\n{MODEL}",
    "images.yaml": RECIPE.format("image-classification", 8),
    "servers.yaml": "servers: 3\n",
    "identity.json": (
        '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}\n'
    ),
    "hosts.txt": "worker-1 slots=4\nworker-2 slot=4\n",
    "mails.csv": "text,label\none,refund\ntwo,shipping\nthree,damage\n",
    "numbers.jsonl": '{"text": "one", "label": 0}\n{"text": "two", "label": 1}\n{"text": "three", "label": 7}\n',
    "nolabel.csv": "text,class\none,0\n",
    "latin.csv": "text,label\ncaf\xe9,0\n".encode("latin-1"),
    "empty.jsonl": "",
    "bad.jsonl": '{"text": "one", "label": 0}\n{"text":"a" "label": 1}\n',
    "comma.csv": "text,label\none, two,0\n",
    "texts.csv": "text,label\n" + "".join(f"text number {each},{each % 2}\n" for each in range(40)),
    "novel.txt": NOVEL,
    "novel.md": NOVEL,
    "latin/novel.txt": b"n\xff",
    "half.py": (
        "import samestep\n"
        "class Half(samestep.Task):\n"
        "    def model(self):\n"
        "        return None\n"
        "    def train_set(self):\n"
        "        return []\n"
    ),
    "broken.py": "import samestep\nimport nowhere\n",
}


class Call:
    """Unpickled, it runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


COMMANDS = [
    (page, f"{command} {words}", beginning)
    for page, rows in ROWS.items()
    for command, lines in rows.commands.items()
    for beginning, words in lines.items()
]
RAISED = [(page, beginning) for page, calls in CALLS.items() for beginning in calls]
NOT_RUN = [(page, row) for page, rows in ROWS.items() for row in rows.not_run]
COMPARED = [(page, test) for page, rows in ROWS.items() for test in sorted(set(rows.compared.values()))]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with FILES, a pickle that calls, and pictures of the sizes that some of the messages have."""
    folder = tmp_path_factory.mktemp("shown")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    torch.save({"weight": torch.ones(2), "bias": Call()}, folder / "bad.pt")
    for name in ("one/photos/cat", "none/photos/cat", "none/photos/dog", "sizes/photos/cat", "sizes/photos/dog"):
        (folder / name).mkdir(parents=True)
    for name, size in (("cat", (8, 8)), ("dog", (20, 12))):
        Image.new("L", size).save(folder / "sizes" / "photos" / name / "1.png")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def the_message(page: str, beginning: str) -> str:
    (shown,) = {line for line in messages(page) if line.startswith(beginning)}
    return shown


def skip_without_an_engine(message: str, shown: str) -> None:
    """Skip where an engine's package is missing: what follows on that is never reached."""
    if re.search(r"needs \S+, which is not installed", message) and "not installed" not in shown:
        pytest.skip(message)


@pytest.mark.parametrize(("page", "command", "beginning"), COMMANDS)
def test_a_message_that_is_shown_is_what_the_command_prints(
    page: str,
    command: str,
    beginning: str,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(*arguments: object, **options: object) -> None:
        pytest.fail("ranks would be started")

    monkeypatch.setattr("samestep.launch.local.start", start)
    monkeypatch.setattr("samestep.launch.local.train", start)
    monkeypatch.chdir(files)
    if beginning.startswith("SLURM_"):
        for name, value in {**BATCH, "SLURM_NODEID": "3"}.items():
            monkeypatch.setenv(name, value)
    assert main(shlex.split(command)) == 2
    # The documentation leaves the folder of a file out.
    printed = re.sub(rf"({files}|{ROOT})/(?:(?:latin|one|none|sizes)/)?", "", capsys.readouterr().err)
    told = [line.removeprefix("samestep: ") for line in printed.splitlines()]
    skip_without_an_engine(printed, the_message(page, beginning))
    assert the_message(page, beginning) in told


@pytest.mark.parametrize(("page", "beginning"), RAISED)
def test_a_message_that_is_shown_is_what_a_call_raises(
    page: str, beginning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(samestep.UserError) as caught:
        CALLS[page][beginning]()
    skip_without_an_engine(str(caught.value), the_message(page, beginning))
    assert masked(the_message(page, beginning)) == masked(str(caught.value))


@pytest.mark.parametrize(("page", "beginning"), [(page, each) for page, made in MADE.items() for each in made])
def test_a_message_that_is_shown_is_what_the_program_makes_of_a_case(page: str, beginning: str) -> None:
    assert masked(the_message(page, beginning)) == masked(MADE[page][beginning])


@pytest.mark.parametrize("page", PAGES)
def test_every_message_and_output_of_a_page_is_run_or_said_not_to_be(page: str) -> None:
    rows = ROWS.get(page, Rows())
    shown = [*messages(page), *(masked(output) for output in outputs(page))]
    known = [
        *(beginning for lines in rows.commands.values() for beginning in lines),
        *CALLS.get(page, ()),
        *MADE.get(page, ()),
        *rows.compared,
        *rows.inputs,
        *(row.begins for row in rows.not_run),
    ]
    assert [line for line in shown if not begins(line, known)] == []
    assert [beginning for beginning in known if not any(begins(line, [beginning]) for line in shown)] == []


def begins(shown: str, beginnings: list[str]) -> bool:
    return any(shown.startswith((each, masked(each))) for each in beginnings)


@pytest.mark.parametrize(("page", "row"), NOT_RUN, ids=lambda value: getattr(value, "begins", value))
def test_what_is_not_run_is_in_the_source_and_its_test_is_there(page: str, row: NotRun) -> None:
    blocks = [*messages(page), *outputs(page)]
    (shown,) = {each for each in blocks if begins(each, [row.begins]) or begins(masked(each), [row.begins])}
    assert row.why
    assert row.says or row.test
    assert missing_pieces(row) == []
    assert says(shown, row)
    assert row.test is None or is_a_test(row.test)


@pytest.mark.parametrize(
    ("page", "words", "source"),
    [(page, words, source) for page, rows in ROWS.items() for words, source in rows.quoted.items()],
)
def test_a_message_that_is_quoted_in_a_sentence_is_in_the_source(
    page: str, words: str, source: Sequence[str]
) -> None:
    for twin in (page, page.replace("docs/", "docs/zh/") if page != "README.md" else "README.zh-CN.md"):
        assert f"`{words}`" in (ROOT / twin).read_text(encoding="utf-8"), twin
    # N, digits and "..." stand for values.
    pieces = re.sub(r"\bN\b|\d+(?:\.\d+)?|\.\.\.", "*", words)
    assert missing_pieces(NotRun(begins=words, why="", says=[pieces], source=source)) == []


@pytest.mark.parametrize(("page", "test"), COMPARED)
def test_a_test_that_compares_with_a_page_is_there_and_names_it(page: str, test: str) -> None:
    assert is_a_test(test, of_page=page)


def test_another_wording_is_no_longer_shown() -> None:
    shown = the_message("docs/own-tasks.md", "the data set is empty")
    assert is_shown("docs/own-tasks.md", shown)
    assert not is_shown("docs/own-tasks.md", shown.replace("empty", "void"))
    row = NotRun(
        begins="", why="", says=["goes on at step * with layout ", "goes back to step"], source=["launch/rounds.py"]
    )
    assert missing_pieces(row) == ["goes back to step"]
    assert says("worker-3 joins; goes on at step 7 with layout dp4", NotRun(begins="", why="", says=row.says[:1]))
    assert not says("worker-3 joins; goes on at step 7", NotRun(begins="", why="", says=row.says[:1]))
    assert not is_a_test("test_elastic.py::test_that_is_nowhere")
    assert not is_a_test("test_elastic.py::test_a_host_that_says_nothing_is_lost_and_joins_again", of_page="none.md")
