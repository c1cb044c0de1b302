"""`samestep layout`: who holds what, against PyTorch's mesh, schedules and messages; the picture; wrong inputs."""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.cli.main import main
from samestep.comm.mesh import build_mesh
from samestep.comm.shared_memory.backend import for_transport
from samestep.launch import local
from samestep.launch.world import join
from samestep.layout import MESH_AXES, Layout
from samestep.options import Options
from samestep.parallel.apply import spread
from samestep.parallel.optimizer.spread import spread_optimizer
from samestep.parallel.parallel_model import ModelDetails

ROOT = Path(__file__).resolve().parent.parent
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))

LAYOUTS = [
    "single",
    "dp2",
    "dp3",
    "fsdp4",
    "zero1x4",
    "zero2x3",
    "tp4",
    "pp4",
    "cp2",
    "dp2 fsdp2 cp2",
    "pp2 dp2 tp2",
    "dp2 zero1x2 tp3",
    "pp2 zero2x2 cp2 stages=3 schedule=interleaved-1f1b",
    "pp3 tp2 schedule=zbv-zero-bubble stages=2",
    "pp2 dp2 fsdp2 cp2 tp2",
]


@pytest.fixture
def shown(tmp_path: Path) -> Any:
    """What the command writes about a layout for a program."""

    def show(*words: str) -> dict[str, Any]:
        assert main(["layout", *words, "--json", str(tmp_path / "shown.json"), "--force"]) == 0
        return json.loads((tmp_path / "shown.json").read_text(encoding="utf-8"))

    return show


@contextmanager
def one_of(size: int, rank: int = 0) -> Iterator[None]:
    """A process group in which the other ranks are made up, and no message arrives."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "text",
    [
        "dp2",
        "zero1x2 cp3",
        "pp2 dp2 tp2",
        "dp2 fsdp2 cp2",
        "dp2 fsdp2 ep3 tp2",
        "pp2 dp3 tp2 order=tp.dp.fsdp.pp.cp",
        "pp2 dp2 tp2 order=spread",
    ],
)
def test_ranks_and_groups_are_those_of_the_mesh(text: str, shown: Any) -> None:
    layout = Layout.parse(text)
    found = shown(text)
    groups = {group["axis"]: group["ranks"] for group in found["groups"]}
    assert tuple(groups) == layout.split_axes()
    for rank in range(layout.size):
        with one_of(layout.size, rank):
            mesh = build_mesh(layout, "cpu")
            place = mesh.grid.get_coordinate()
            own = {name: dist.get_process_group_ranks(mesh.grid.get_group(name)) for name in groups}
            data = mesh.data_place
        entry = found["ranks"][rank]
        assert entry["rank"] == rank
        assert [entry["coordinates"][name] for name in MESH_AXES] == list(place or ())
        assert entry["samples"] == {"index": data.index, "of": data.of}
        for name, ranks in own.items():
            assert ranks in groups[name]
    for listed in groups.values():
        assert sorted(rank for ranks in listed for rank in ranks) == list(range(layout.size))


@pytest.mark.parametrize("text", LAYOUTS)
def test_every_piece_of_work_is_done_once(text: str, shown: Any) -> None:
    batch = 13
    layout, found = Layout.parse(text), shown(text, "--batch", str(batch))
    done = Counter(
        (sample, rank["tokens"]["index"], stage, rank["matrices"]["index"])
        for rank in found["ranks"]
        for sample in range(*rank["positions"])
        for stage in rank["stages"]
    )
    pieces = product(range(batch), range(layout.context), range(found["stages"]), range(layout.tensor))
    assert done == Counter(pieces)
    lengths = {stop - start for start, stop in (rank["positions"] for rank in found["ranks"])}
    assert max(lengths) - min(lengths) <= 1


# ZeRO (Rajbhandari et al. 2020, section 5): what each stage splits.
SPLIT_BY_ZERO = {
    0: set(),
    1: {"optimizer state"},
    2: {"optimizer state", "gradients"},
    3: {"optimizer state", "gradients", "parameters"},
}


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("state", ["parameters", "gradients", "optimizer state"])
def test_every_piece_of_state_is_kept_once_a_replica(text: str, state: str, shown: Any) -> None:
    layout, found = Layout.parse(text), shown(text)
    split = state in SPLIT_BY_ZERO[layout.zero]
    kept: Counter[tuple[int, ...]] = Counter()
    for rank in found["ranks"]:
        part, place = rank["kept"][state], rank["coordinates"]
        shards = [part["index"]] if part["of"] == layout.shard > 1 else range(layout.shard)
        kept.update(
            (place["replicate"], place["context"], stage, rank["matrices"]["index"], shard)
            for stage in rank["stages"]
            for shard in shards
        )
    sizes = (layout.replicate, layout.context, found["stages"], layout.tensor, layout.shard)
    assert kept.keys() == set(product(*map(range, sizes)))
    assert set(kept.values()) == {1 if split else layout.shard}
    whole = sum(rank["share_of_the_model"][state] for rank in found["ranks"])
    assert whole == pytest.approx(layout.replicate * layout.context * (1 if split else layout.shard))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved-1f1b", "interleaved-zero-bubble"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_are_dealt_in_rounds(schedule: str, stages: int, shown: Any) -> None:
    found = shown(f"pp4 schedule={schedule} stages={stages}")
    wanted = generate_stage_to_rank_mapping(4, 4 * stages, style="loop")
    assert {stage: rank["rank"] for rank in found["ranks"] for stage in rank["stages"]} == wanted


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("stages", ["", " stages=2"])
def test_stages_of_zbv_are_dealt_down_and_up(ranks: int, stages: str, shown: Any) -> None:
    found = shown(f"pp{ranks} schedule=zbv-zero-bubble{stages}")
    wanted = generate_stage_to_rank_mapping(ranks, 2 * ranks, style="v")
    assert {stage: rank["rank"] for rank in found["ranks"] for stage in rank["stages"]} == wanted


class Collectives(TorchDispatchMode):
    """Counts the messages sent."""

    NAMES = (
        ("allreduce", "all-reduce"),
        ("allgather", "all-gather"),
        ("reduce_scatter", "reduce-scatter"),
        ("reduce_", "reduce"),
        ("broadcast", "broadcast"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("c10d."):
            self.sent[next(name for start, name in self.NAMES if start in str(func))] += 1
        return func(*args, **(kwargs or {}))


BLOCKS = 3


def count_messages(layouts: Sequence[str]) -> dict[str, Counter[str]]:
    """One of two ranks: by layout the messages of a step."""
    with join(device="cpu", threads=1, cpu_backend=for_transport("gloo")):
        return {text: messages_of_a_step(Layout.parse(text)) for text in layouts}


def messages_of_a_step(layout: Layout) -> Counter[str]:
    mesh = build_mesh(layout, "cpu")
    model = nn.Sequential(*(nn.Linear(7, 7) for _ in range(BLOCKS)))
    device = torch.device("cpu")
    settings = {"options": Options(), "autocast": nullcontext, "details": ModelDetails(example=torch.ones(2, 7))}
    spread_model = spread(model, layout, mesh, device, **settings)  # pyright: ignore
    module = spread_model.module  # pyright: ignore
    plain = torch.optim.SGD(module.parameters(), 0.1)
    optimizer = spread_optimizer(plain, layout, mesh, device, spread_model=spread_model)
    collectives = Collectives()
    for _ in range(3):  # the first two also set up DistributedDataParallel's buckets
        collectives = Collectives()
        with collectives:
            module(torch.ones(2, 7)).sum().backward()
            if spread_model.parts.owners is not None:
                spread_model.parts.owners.settle()
            optimizer.step()
            optimizer.zero_grad()
    return collectives.sent


@pytest.mark.slow
def test_messages_are_those_that_a_step_sends(shown: Any) -> None:
    gathers = {"dp2": 0, "zero1x2": 0, "zero2x2": BLOCKS, "fsdp2": 2 * BLOCKS}
    found: dict[str, Counter[str]] = local.start(count_messages, (list(gathers),), 2)
    for text, wanted in gathers.items():
        sent = found[text]
        (group,) = shown(text)["groups"]
        said = {exchange["operation"]: exchange["when"] for exchange in group["exchanges"]}
        assert said.keys() == sent.keys(), text
        assert sent.get("all-gather", 0) == wanted
        assert ("backward" in said.get("all-gather", "")) == (wanted == 2 * BLOCKS)


def drawn(tmp_path: Path, *words: str) -> ElementTree.Element:
    file = tmp_path / "picture.svg"
    assert main(["layout", *words, "--svg", str(file)]) == 0
    return ElementTree.fromstring(file.read_text(encoding="utf-8"))


def boxes(picture: ElementTree.Element, kind: str) -> list[tuple[float, float, float, float]]:
    found = picture.iter("{http://www.w3.org/2000/svg}rect")
    return [
        (float(box.get("x", 0)), float(box.get("y", 0)), float(box.get("width", 0)), float(box.get("height", 0)))
        for box in found
        if box.get("class") == kind
    ]


def texts(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("text", LAYOUTS)
def test_the_picture_names_every_rank_and_fills_what_it_has(text: str, tmp_path: Path, shown: Any) -> None:
    layout, found = Layout.parse(text), shown(text)
    picture = drawn(tmp_path, text)
    assert texts(picture)[0] == str(layout)
    assert [word for word in texts(picture) if word.startswith("rank ")] == [f"rank {n}" for n in range(layout.size)]

    filled = boxes(picture, "own")
    frames = sorted(frame for frame in boxes(picture, "frame") if frame[2] > 14)  # without the legend's
    assert len(frames) == 5 * layout.size  # batch, model, and three bars, from rank to rank
    cells: list[Counter[tuple[int, int]]] = [Counter() for _ in range(5)]  # how many ranks have a cell
    for rank, start in zip(found["ranks"], range(0, len(frames), 5), strict=True):
        own = sorted(frames[start : start + 5], key=lambda frame: frame[1])
        share = rank["share_of_the_model"]
        wanted = [
            Fraction(1, layout.data_ranks * layout.context),
            Fraction(1, layout.pipeline * layout.tensor),
            share["parameters"] / (layout.shard if layout.zero == 2 else 1),  # the others' part is gathered
            share["gradients"],
            share["optimizer state"],
        ]
        areas = []
        for (x, y, width, height), counted in zip(own, cells, strict=True):
            inside = [box for box in filled if x - 0.1 <= box[0] < x + width and y - 0.1 <= box[1] < y + height]
            areas.append(sum(box[2] * box[3] for box in inside) / (width * height))
            counted.update((round(10 * (box[0] - x)), round(10 * (box[1] - y))) for box in inside)
        assert areas == pytest.approx([float(value) for value in wanted], rel=0.01)
    # All ranks together have every cell, and each as often as every other one.
    state = found["stages"] * layout.tensor * layout.shard
    assert [len(counted) for counted in cells] == [
        layout.data_ranks * layout.context,
        found["stages"] * layout.tensor,
        *[state] * 3,
    ]
    assert all(len(set(counted.values())) == 1 for counted in cells)


@pytest.mark.parametrize("text", [*LAYOUTS, "dp64", "pp8 tp8", "pp2 stages=40 schedule=interleaved-1f1b"])
def test_nothing_of_the_picture_lies_outside(text: str, tmp_path: Path) -> None:
    picture = drawn(tmp_path, text, "--batch", "100000")
    _, _, wide, tall = map(float, picture.get("viewBox", "").split())
    for element in picture.iter():
        x, y = float(element.get("x", 0)), float(element.get("y", 0))
        assert 0 <= x + float(element.get("width", 0)) <= wide
        assert 0 <= y + float(element.get("height", 0)) <= tall
        assert 0 <= float(element.get("x2", 0)) <= wide
    # A letter of this size is at most 6.5 pixels wide on the average, also in a wide typeface.
    assert (
        max(float(e.get("x", 0)) + 6.5 * len(e.text or "") for e in picture.iter() if e.get("class") == "quiet")
        <= wide
    )


def test_eight_ranks_fit_into_a_thousand_pixels(tmp_path: Path) -> None:
    assert float(drawn(tmp_path, "pp2 dp2 tp2").get("width", 0)) <= 1000


def test_no_two_lines_of_groups_lie_over_each_other(tmp_path: Path) -> None:
    picture = drawn(tmp_path, "pp2 dp2 fsdp2 cp2 tp2")
    lines = [line for line in picture.iter("{http://www.w3.org/2000/svg}line") if "link" in line.get("class", "")]
    assert len(lines) == 5 * 16
    covered: dict[str, float] = {}
    for line in sorted(lines, key=lambda line: float(line.get("x1", 0))):
        height = line.get("y1", "")
        assert float(line.get("x1", 0)) > covered.get(height, 0)
        covered[height] = float(line.get("x2", 0))


def test_the_table_shows_samples_stages_and_shares(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "pp2 dp2", "--batch", "5"]) == 0
    rows = re.findall(r"│ +(\d) │ +(\d) │ +(\d) │ +([\d to]+) │ +(\S+, \S+, \S+) │", capsys.readouterr().out)
    assert rows == [
        ("0", "0", "0", "0 to 2", "1/2, 1/2, 1/2"),
        ("1", "0", "1", "3 to 4", "1/2, 1/2, 1/2"),
        ("2", "1", "0", "0 to 2", "1/2, 1/2, 1/2"),
        ("3", "1", "1", "3 to 4", "1/2, 1/2, 1/2"),
    ]


def test_a_layout_without_a_size_takes_the_processes(shown: Any) -> None:
    assert shown("ddp tp2", "--processes", "6")["layout"] == "dp3 tp2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["xp2"], 'layout "xp2": "xp2" is not a part of a layout'),
        (["ddp"], 'layout "ddp": dp (replicate) has no size and the number of processes is not known'),
        (["dp4", "--processes", "3"], 'layout "dp4" needs 4 processes, not 3; "dp3" would use 3 processes'),
        (["dp4", "--processes", "many"], 'argument --processes: "many" is no whole number'),
        (["dp", "--processes", "0"], 'argument --processes: "0" is out of range; use a whole number from 1 to'),
        (["dp4", "--batch", "3"], 'layout "dp4": a batch of 3 leaves some of its 4 data ranks without a sample'),
        (["single", "--batch", "-1"], 'argument --batch: "-1" is out of range; use a whole number from 1 to'),
        (["dp4", "--batch", "1.5"], 'argument --batch: "1.5" is no whole number'),
        (["dp1025"], 'layout "dp1025": 1025 ranks are too many to show'),
        (["dp999999999"], "has size 999999999; it must be a whole number from 1 to 1,048,576"),
        (["dp65", "--svg", "x.svg"], 'layout "dp65": 65 ranks are too many for a picture'),
        (["pp2 schedule=zbv-zero-bubble stages=3"], "stages=3; with schedule=zbv-zero-bubble a rank holds 2 stages"),
        (["dp2", "--svg", "."], "--svg .: this is a folder; the path of a file is wanted"),
        (["dp2", "--json", "."], "--json .: this is a folder; the path of a file is wanted"),
        (["dp2", "--svg", "nowhere/x.svg"], "--svg nowhere/x.svg: there is no folder nowhere"),
        ([], "the following arguments are required: LAYOUT"),
        (["dp2", "tp2"], 'samestep layout takes no "tp2"'),
        (["dp2", "\u2014world", "2"], 'begins with an em dash, as word processors write it; write "--world"'),
    ],
)
def test_a_mistake_is_one_message(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["layout", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("samestep: ")
    assert message in told.err
    assert told.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", PICTURES, ids=lambda file: file.stem)
def test_the_pictures_of_the_docs_are_what_the_command_draws(file: Path, tmp_path: Path) -> None:
    drawn(tmp_path, file.stem.replace("-", " "), "--batch", "64")
    assert (tmp_path / "picture.svg").read_text(encoding="utf-8") == file.read_text(encoding="utf-8")


def test_the_docs_show_every_picture_that_make_draws() -> None:
    names = [file.stem for file in PICTURES]
    (made,) = re.findall(r"^PICTURES := (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(made.split()) == names
    for page in (ROOT / "docs" / "layouts.md", ROOT / "docs" / "zh" / "layouts.md"):
        assert sorted(re.findall(r"pictures/([\w-]+)\.svg", page.read_text(encoding="utf-8"))) == names


def test_the_docs_show_the_table_that_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["layout", "dp2 tp2", "--batch", "8"]) == 0
    assert f"```text\n{capsys.readouterr().out}```" in (ROOT / "docs" / "layouts.md").read_text(encoding="utf-8")
