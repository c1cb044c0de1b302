"""Tables of the documentation that list what there is to choose: they have all of it, and options are there.

The keys of a job file are compared in `test_docs.py`, the settings of two engines in `test_shown_outputs.py`.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from shown_pages import ROOT, SOURCE, literals

from samestep.cli.main import _parser
from samestep.comm_bench.results import BandwidthLimits, Report
from samestep.communication import Bf16, DiLoCo, Fp16, LocalSGD, OneBitAdam, PowerSGD, ZeroOneAdam
from samestep.contract.check import PARTS
from samestep.convert.formats import FORMATS
from samestep.drill.disturbances import KINDS as FAULTS
from samestep.job import Run
from samestep.launch.affinity import BindChoice
from samestep.launch.options import LaunchTimeouts, RankOptions, options_of
from samestep.launch.script_env.registry import CONTRACTS
from samestep.profiling.breakdown import CATEGORIES
from samestep.recipe import AdamW
from samestep.script_proof.kinds import KINDS as CAUSES
from samestep.training.usage import Usage
from samestep.tuning.settings import SETTINGS

pytestmark = pytest.mark.quick

COMMUNICATIONS = (Bf16, Fp16, PowerSGD, OneBitAdam, ZeroOneAdam, LocalSGD, DiLoCo)
REPORT = Report(
    hosts=(),
    transports=(),
    missing={},
    checks=(),
    rows=(),
    fits=(),
    limits=BandwidthLimits(copies={}, interface=None, adapter=None, stream=None),
)


def names(owner: type[Any]) -> list[str]:
    return [field.name for field in fields(owner)]


def choices(owner: type[Any], key: str) -> tuple[str, ...]:
    return get_args(get_type_hints(owner)[key])


# Page -> what the first column of one of its tables has, in whatever order.
TABLES: Sequence[tuple[str, Sequence[str]]] = (
    ("binding.md", get_args(BindChoice)),
    ("binding.md", [*CONTRACTS]),
    ("communication.md", choices(Run, "sparse_rows")),
    ("communication.md", [*REPORT.to_json()]),
    ("contract.md", [*PARTS]),
    ("convert.md", [*FORMATS]),
    ("faults.md", [*FAULTS]),
    ("is-my-training-right.md", [*CAUSES]),
    ("less-communication.md", [each().kind for each in COMMUNICATIONS]),
    ("memory.md", choices(AdamW, "state")),
    ("memory.md", names(Usage)),
    ("profile.md", [setting.name for setting in SETTINGS]),
    ("profile.md", [*CATEGORIES, "overlapped"]),
    ("promise.md", ["loss", "grad_norm", "parameters", "metrics"]),
)
PAGES_OF_TABLES = [(f"docs/{folder}{page}", expected) for page, expected in TABLES for folder in ("", "zh/")]


def first_columns(page: str) -> list[list[list[str]]]:
    """Of each table, row by row, what stands as code in the first cell, or else all of the cell."""
    text = (ROOT / page).read_text(encoding="utf-8")
    tables = re.findall(r"^\|.*\n\|[ :|-]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    cells = [[row.split(" | ")[0].removeprefix("|").strip() for row in table.splitlines()] for table in tables]
    return [[re.findall(r"`([^`]+)`", cell) or [cell] for cell in table] for table in cells]


@pytest.mark.parametrize(
    ("page", "expected"), PAGES_OF_TABLES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_table_has_all_that_there_is(page: str, expected: Sequence[str]) -> None:
    tables = [sorted(name for row in table for name in row) for table in first_columns(page)]
    nearest = max(tables, key=lambda table: len({*table} & {*expected}))
    assert nearest == sorted(expected)


@pytest.mark.parametrize("page", ["docs/elastic.md", "docs/zh/elastic.md"])
def test_time_limits_of_a_launch_are_described_with_their_defaults(page: str) -> None:
    found = dict(
        re.findall(r"^\| `--([\w-]+)` \| ([\d.]+ ?\S+)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    )
    declared = [*options_of(LaunchTimeouts), *options_of(RankOptions)]
    defaults = {each.flag.removeprefix("--"): each.default for each in declared if each.help.kind == "seconds"}
    assert {name: seconds(text) for name, text in found.items() if name in defaults} == defaults


def seconds(text: str) -> float:
    number, unit = re.match(r"([\d.]+) ?(\w+)", text).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return float(number) * (60 if unit in ("minutes", "分钟") else 1)


@pytest.mark.parametrize("page", ["docs/translate.md", "docs/zh/translate.md"])
def test_keys_of_other_tools_are_those_that_are_read(page: str) -> None:
    files = [*(SOURCE / "translate").glob("*.py"), *(SOURCE / "engines").rglob("*.py")]
    read = "\n".join(text for file in files for text in literals(file.relative_to(SOURCE).as_posix()))
    keys = [name for table in first_columns(page) for row in table for name in row if re.fullmatch(r"[a-z_.]+", name)]
    assert len(keys) > 30
    words = {word for key in keys for word in key.split(".")}
    assert [word for word in sorted(words) if re.search(rf"\b{word}\b", read) is None] == []


# Options of other programs that stand alone in a sentence about them.
OTHERS = {
    "docs/binding.md": {"--local_rank"},
    "docs/elastic.md": {"--rdzv-conf", "--shm-size"},
    "docs/engines/deepspeed.md": {"--num_gpus", "--num_accelerators"},
    "docs/run.md": {"--nproc-per-node"},
    "docs/is-my-training-right.md": {"--batch_size"},
    "docs/places.md": {"--gpus-per-task", "--gpus-per-node", "--gpu-bind", "--key"},
}


def option_strings(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from option_strings(command)


def all_options() -> set[str]:
    """Options of samestep's commands, and of the programs in benchmarks/ and tools/."""
    programs = "".join(
        file.read_text(encoding="utf-8")
        for folder in ("benchmarks", "tools")
        for file in (ROOT / folder).glob("*.py")
    )
    return {*option_strings(_parser()), *re.findall(r'add_argument\(\s*"(--[\w-]+)"', programs)}


def test_options_that_are_named_alone_are_there() -> None:
    known = all_options()
    pages = [ROOT / "README.md", ROOT / "README.zh-CN.md", *(ROOT / "docs").rglob("*.md")]
    named = {page: set(re.findall(r"`(--[a-z][\w-]*)", page.read_text(encoding="utf-8"))) for page in pages}
    unknown = {name_of(page): found - known - OTHERS.get(twin_of(page), set()) for page, found in named.items()}
    assert {page: sorted(found) for page, found in unknown.items() if found} == {}
    assert sum(len(found & known) for found in named.values()) > 200
    assert all(found & OTHERS[name_of(page)] for page, found in named.items() if name_of(page) in OTHERS)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def twin_of(page: Path) -> str:
    """The English page's name."""
    return name_of(page).replace("docs/zh/", "docs/")
