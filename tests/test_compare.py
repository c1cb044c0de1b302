"""`samestep compare`: rows that are measured, refused, not installed, failed, not the same step; its page."""

import io
import json
import math
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chromium
import pytest
import torch
from rich.console import Console
from small_jobs import losses_in
from torch import nn

import samestep
from samestep import environment, subprocess_group
from samestep.cli.main import main
from samestep.comparison import results
from samestep.comparison.compare import _turns, entries
from samestep.comparison.methods import METHODS, PUBLISHED, ComparedMethod, chosen
from samestep.comparison.results import Comparison, ComparisonRow
from samestep.comparison.same_step import BFLOAT16_TOLERANCE, ParametersHeld, SameStep
from samestep.comparison.terminal import print_comparison
from samestep.display.page import json_in_html
from samestep.engines.native.engine import Native
from samestep.handwritten.loop import Loop
from samestep.handwritten.ranks import run_rank
from samestep.job import Job, Run
from samestep.launch import local
from samestep.tasks.regression import Regression

TESTS = Path(__file__).parent

# The first test of the shared comparison waits for a dozen processes to start, on machines that others use as well.
pytestmark = pytest.mark.timeout(400)

JOB = f"""
recipe:
  task: {TESTS}/compared_task.py:Compared
  batch: 8
  steps: 6
  precision: fp32
run: {{device: cpu, threads: 1}}
"""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A comparison by the command line: one row that is fine, one that fails, one with a wrong step, one refused."""

    code: int
    printed: str
    values: dict[str, Any]
    page: Path

    def row(self, name: str) -> dict[str, Any]:
        return next(row for row in self.values["rows"] if row["method"] == name)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    pytest.importorskip("plotly")
    place = tmp_path_factory.mktemp("compared")
    (place / "job.yaml").write_text(JOB, encoding="utf-8")
    files = ["--json", str(place / "found.json"), "--report", str(place / "page.html")]
    methods = "single, single-bf16, dp2, native:dp16"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream := (place / "printed").open("w", encoding="utf-8"))
        words = ["compare", str(place / "job.yaml"), "--processes", "2", "--repeats", "1", "--methods", methods]
        code = main([*words, *files])
        stream.close()
    return Compared(
        code=code,
        printed=(place / "printed").read_text(encoding="utf-8"),
        values=json.loads((place / "found.json").read_text(encoding="utf-8")),
        page=place / "page.html",
    )


@pytest.mark.slow
def test_a_method_that_works_is_measured_and_takes_the_same_step(compared: Compared) -> None:
    row = compared.row("single")
    assert (row["status"], row["processes"], row["threads"], row["precision"]) == ("measured", 1, 2, "fp32")
    assert row["same_step"]["same_step"]
    assert row["same_step"]["difference"] < 1e-10
    assert len(row["same_step"]["losses"]) == 5
    (run,) = row["repeats"]
    assert run["steps"] == 6
    assert run["seconds"] == pytest.approx(run["times"][-1])
    assert run["samples_per_second"] == pytest.approx(41 / run["seconds"])  # 8 + 8 + 8 + 8 + 1 + 8
    assert run["startup_seconds"] > run["seconds"]
    assert [score["step"] for score in run["scores"]] == [1, 2, 3, 4, 5, 6]
    assert run["scores"][-1]["value"] == row["metric"]
    assert row["speed_up_over_single"] == 1.0
    assert row["speed_up_over_single_core"] is None


@pytest.mark.slow
def test_the_losses_are_those_of_plain_python(compared: Compared) -> None:
    losses = compared.row("single")["same_step"]["losses"]
    recipe = samestep.Recipe(task="regression", batch=8, steps=5, precision="fp64")
    sys.path.insert(0, str(TESTS))
    try:
        from compared_task import Compared as Task
    finally:
        sys.path.remove(str(TESTS))
    loop = Loop(recipe, Task(), device=torch.device("cpu"))
    assert [step.loss.item() for step in loop.steps()] == pytest.approx(losses, rel=1e-12)


@pytest.mark.slow
def test_a_planted_wrong_step_is_seen_and_fails_the_comparison(compared: Compared) -> None:
    row = compared.row("dp2")
    assert row["status"] == "measured"
    assert not row["same_step"]["same_step"]
    first, whole = row["same_step"]["losses"][0], compared.row("single")["same_step"]["losses"][0]
    assert first == pytest.approx(2 * whole, rel=1e-12)  # of the same first weights
    assert row["same_step"]["difference"] >= 1.0
    assert compared.code == 1
    assert not compared.values["passed"]
    assert "NOT the same step as one process: dp2" in compared.printed


@pytest.mark.slow
def test_a_planted_failure_is_a_row_with_its_error_and_the_others_go_on(compared: Compared) -> None:
    row = compared.row("single-bf16")
    assert row["status"] == "failed"
    assert row["reason"].endswith("ArithmeticError: planted in bf16")
    assert "Traceback" in row["output"]
    assert row["repeats"] == []
    assert "failed: single-bf16:" in compared.printed
    assert compared.row("single")["repeats"]


@pytest.mark.slow
def test_what_a_run_says_is_passed_on_once(compared: Compared) -> None:
    (remark,) = compared.row("single")["remarks"]
    assert re.fullmatch(r"planted, \d+", remark)
    assert f"single: {remark}" in compared.printed.splitlines()
    assert remark in compared.page.read_text(encoding="utf-8")
    assert compared.row("native:dp16")["remarks"] == []


@pytest.mark.slow
def test_what_the_job_cannot_have_is_a_row_with_the_reason(compared: Compared) -> None:
    row = compared.row("native:dp16")
    assert row["status"] == "refused"
    assert 'layout "dp16"' in row["reason"]


def read_of_processes(name: str) -> list[bytes]:
    """A file of every process of this user."""
    found = []
    for file in Path("/proc").glob(f"[0-9]*/{name}"):
        with suppress(OSError):
            found.append(file.read_bytes())
    return found


@pytest.mark.slow
def test_the_report_opens_without_a_network_and_draws(compared: Compared, tmp_path: Path) -> None:
    opened = chromium.open_page(compared.page, tmp_path)
    assert opened.console == []
    assert opened.fetched == []
    for name in ("times", "losses", "scores", "memory", "traffic"):
        plot = re.search(rf'id="{name}".*?</noscript>', opened.document, re.DOTALL)
        assert plot is not None
        assert "main-svg" in plot[0], name
    assert 'data-shown="en"' in opened.document
    assert "seconds of training" in opened.document


@pytest.mark.slow
def test_the_report_opens_in_chinese(compared: Compared, tmp_path: Path) -> None:
    chinese = chromium.open_page(compared.page, tmp_path, language="zh-CN")
    assert chinese.console == []
    assert 'data-shown="zh"' in chinese.document
    assert "每个 rank 的峰值内存" in chinese.document


@pytest.mark.slow
def test_a_page_that_fetches_something_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<!DOCTYPE html><img src="http://127.0.0.1:9/x.png"><script>nothing()</script>', encoding="utf-8")
    opened = chromium.open_page(page, tmp_path)
    assert opened.fetched == ["http://127.0.0.1:9/x.png"]
    assert "nothing is not defined" in opened.console[0]


@pytest.mark.slow
def test_the_report_holds_both_languages_and_every_row(compared: Compared) -> None:
    text = compared.page.read_text(encoding="utf-8")
    assert text.count("plotly.js v") == 1
    for shown in (
        '<span lang="zh">失败</span>',
        "ArithmeticError: planted in bf16",
        "samestep dp2",
        "5.12",
        "没有学到东西",
    ):
        assert shown in text
    assert not re.search(r'<(?:script|link|img)[^>]*(?:src|href)="(?!data:)', text)


# What follows starts nothing.


def job(**recipe: Any) -> Job:
    return Job(recipe=samestep.Recipe(task="regression", **recipe), run=Run(device="cpu"))


def measured(name: str, *seconds: float, **row: Any) -> ComparisonRow:
    runs = [
        results.Figures(
            seconds=each,
            evaluation_seconds=0.0,
            startup_seconds=1.0,
            steps=2,
            samples_per_second=8 / each,
            peak_memory_bytes=[5_000_000, 7_000_000],
            sent_bytes=[1000, 3000],
            metric_name="accuracy",
            metric=0.5,
            losses=[2.0, 1.0],
            times=[each / 2, each],
            scores=[],
            versions={"torch": "1"},
        )
        for each in seconds
    ]
    (method,) = chosen([name], 2)
    values = {"processes": 2, "threads": 1, "precision": "fp32", "status": "measured", **row}
    return ComparisonRow(method=method, runs=runs, **values)


def comparison(*rows: ComparisonRow) -> Comparison:
    machine = {"system": "", "processor": "", "cores": 2, "accelerators": "none", "packages": {}}
    return Comparison(job=job(), processes=2, cores=2, repeats=3, rows=rows, machine=machine)


def test_messages_that_differ_in_numbers_alone_are_one() -> None:
    said = ["slow: rank 1, 0.5 s", "tokens are split in net", "slow: rank 2, 7 s"]
    words = "\n".join([f"samestep: {line}" for line in said] + ["a line of the user's", "no samestep: line"])
    outcome = subprocess_group.CommandOutcome(code=0, seconds=1.0, output=words)
    assert outcome.remarks == ("slow: rank 1, 0.5 s", "tokens are split in net")


def test_medians_and_speed_ups() -> None:
    found = comparison(measured("single-core", 9, 8, 10), measured("single", 6, 5, 40), measured("dp2", 3, 2, 90))
    fast = found.rows[2]
    assert fast.seconds == 3
    assert found.speed_up(fast) == 2
    assert found.speed_up(fast, "single-core") == 3
    assert (fast.largest_memory, fast.all_memory, fast.sent) == (7_000_000, 12_000_000, 3000)
    assert found.metric_name == "accuracy"


def test_numbers_that_json_does_not_have_are_null() -> None:
    row = measured("dp2", 1.0)
    runs = [replace(row.runs[0], losses=[2.0, math.nan], metric=math.inf)]
    values = json.loads(json.dumps(comparison(replace(row, runs=runs)).to_json(), allow_nan=False))
    assert values["rows"][0]["repeats"][0]["losses"] == [2.0, None]
    assert values["rows"][0]["metric"] is None


def test_asynchronous_methods_say_so_and_fail_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = comparison(measured("dp2", 1.0, synchronous=False))
    print_comparison(found)
    assert found.passed
    assert "asynchronous" in capsys.readouterr().out


def test_the_default_table_fits_120_columns() -> None:
    rows = [measured(method.name, 1234.567, 1.0, 2.0) for method in chosen(None, 2)]
    same = SameStep(precision="fp64", losses=[1.0], reference=[1.0 + 1e-12])
    console = Console(width=120, record=True, file=io.StringIO())
    print_comparison(comparison(*(replace(row, same_step=same) for row in rows)), console)
    lines = console.export_text().splitlines()
    assert all(len(line) <= 120 for line in lines)
    assert all(line.endswith("│") for line in lines if line.startswith("│"))  # no column is cut off
    assert sum("ddp-torchrun" in line for line in lines) == 2  # no name is broken


def test_the_terminal_and_the_page_have_the_same_cells() -> None:
    pytest.importorskip("plotly")
    from samestep.comparison import page

    same = SameStep(precision="fp64", losses=[1.0], reference=[1.0 + 1e-12])
    row = replace(measured("dp2", 2468.0, 2460.0, 2470.0), same_step=same)
    found = comparison(row)
    console = Console(width=120, record=True, file=io.StringIO())
    print_comparison(found, console)
    in_terminal = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in console.export_text().splitlines()
        if line.startswith("│ dp2")
    ]
    in_page = [re.findall(r"<td[^>]*>(.*?)</td>", table) for table in (page.times(found), page.costs(found))]
    times, costs = in_terminal
    assert times == ["dp2", "2", "2468.00", "2460.00 - 2470.00", "", "", "0", "2", "1234000.0", "1.0"]
    assert in_page[0][3:] == [cell for cell in times[1:] if cell != "1234000.0"]  # milliseconds of a step
    assert costs == ["dp2", "native", "fp32", "7", "12", "0.00", "0.5000", "yes, 1e-12 in fp64"]
    assert in_page[1][1:6] == costs[2:7]
    assert in_page[1][6:8] == ["1.0e-12", "1e-10, fp64"]


def test_long_names_and_verdicts_are_wrapped_and_lose_nothing() -> None:
    row = measured("dp2", 1.0)
    method = replace(row.method, name="parameter-server-2", engine="parameter-server")
    apart = ParametersHeld(worst=2.0, parameter="layers.11.encoder.attention.projection.weight")
    same = SameStep(precision="fp64", losses=[1.0], reference=[1.0], parameters=apart)
    console = Console(width=120, record=True, file=io.StringIO())
    print_comparison(comparison(replace(row, method=method, same_step=same)), console)
    lines = console.export_text().splitlines()
    assert all(line.endswith("│") for line in lines if line.startswith("│"))
    last = "".join(line.split("│")[-2].strip() for line in lines if line.startswith("│"))
    assert apart.parameter in last


@pytest.mark.parametrize(
    ("precision", "mine", "same"),
    [
        ("fp64", 1 + 1e-12, True),
        ("fp64", 1 + 1e-9, False),
        ("fp32", 1 + 1e-6, True),
        ("fp32", 1 + 1e-3, False),
        ("bf16", 1 + 1e-2, True),
        ("bf16", 1 + 3e-2, False),
        ("fp64", math.nan, False),
    ],
)
def test_each_precision_has_its_tolerance(precision: str, mine: float, same: bool) -> None:
    assert SameStep(precision=precision, losses=[1.0, mine], reference=[1.0, 1.0]).same == same


def test_too_few_losses_are_not_the_same_step() -> None:
    held = SameStep(precision="fp64", losses=[1.0], reference=[1.0, 1.0])
    assert not held.same
    assert held.to_json()["difference"] is None


def test_bfloat16_is_judged_by_its_own_epsilon() -> None:
    assert torch.finfo(torch.bfloat16).eps * 2 == BFLOAT16_TOLERANCE


def test_every_method_comes_first_in_its_turn() -> None:
    order = list(_turns(["a", "b", "c"], 3))  # pyright: ignore[reportArgumentType]
    assert [entry for _, entry in order] == ["a", "b", "c", "b", "c", "a", "c", "a", "b", "a", "b", "c"]
    assert [take for take, _ in order] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_a_method_of_ones_own_is_a_row_like_the_others() -> None:
    own = replace(METHODS[0], name="own{n}", layout="dp{n}")
    assert [(each.name, each.layout) for each in chosen(["single", own], 3)] == [
        ("single", "single"),
        ("own3", "dp3"),
    ]


def test_published_methods_are_in_the_table() -> None:
    names = {method.name for method in METHODS}
    assert {name for each in PUBLISHED for name in each.methods} <= names
    assert len(names) == len(METHODS)


def entry_of(method: ComparedMethod, **recipe: Any) -> ComparisonRow:
    (entry,) = entries(job(**recipe), Regression(samples=20, held_out=2), [method], budget=4)
    return entry.row


def test_an_engine_that_is_not_installed_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = replace(Native.abilities, packages={"no_such_module": "pip install such"})
    monkeypatch.setattr(Native, "abilities", needs)
    row = entry_of(chosen(["dp2"], 2)[0])
    assert row.status == "not installed"
    assert row.reason == "it needs no_such_module: pip install such"


def test_an_engine_that_is_not_in_the_table_is_not_installed() -> None:
    row = entry_of(replace(chosen(["dp2"], 2)[0], engine="elsewhere"))
    assert row.status == "not installed"


@pytest.mark.parametrize(("name", "threads"), [("single-core", 1), ("single", 4), ("dp2", 2), ("ddp-torchrun", 2)])
def test_cores_are_shared_out(name: str, threads: int) -> None:
    assert entry_of(chosen([name], 2)[0]).threads == threads


def test_handwritten_methods_refuse_what_they_do_not_have() -> None:
    row = entry_of(chosen(["ddp-spawn"], 2)[0], precision="fp16")
    assert row.status == "refused"
    assert "fp16" in (row.reason or "")


def by_hand(job: Path, folder: Path, store: str) -> int:
    """Train as a rank by hand; returns the exit code."""
    ranks = environment.ranks()
    assert ranks is not None
    return run_rank(job, folder, ranks, store)


def test_two_ranks_by_hand_take_the_steps_of_one_process(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("recipe: {task: regression, batch: 7, steps: 4, precision: fp64}\nrun: {threads: 1}\n")
    assert local.start(by_hand, (file, tmp_path / "run", f"file://{tmp_path}/store"), 2) == 0
    recipe = samestep.Recipe(task="regression", batch=7, steps=4, precision="fp64")
    loop = Loop(recipe, Regression(), device=torch.device("cpu"))
    alone = [step.loss.item() for step in loop.steps()]
    assert losses_in(tmp_path / "run") == pytest.approx(alone, rel=1e-12)


@pytest.mark.slow
def test_every_start_by_hand_takes_the_same_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, found = tmp_path / "job.yaml", tmp_path / "found.json"
    file.write_text("recipe: {task: regression, batch: 8, steps: 3}\nrun: {device: cpu, threads: 1}\n")
    methods = "single, ddp-torchrun, ddp-spawn, ddp-launch"
    words = ["--processes", "2", "--repeats", "1", "--methods", methods, "--json", str(found)]
    assert main(["compare", str(file), *words]) == 0, capsys.readouterr().out
    rows = json.loads(found.read_text(encoding="utf-8"))["rows"]
    assert {row["method"]: row["same_step"]["same_step"] for row in rows} == dict.fromkeys(methods.split(", "), True)


def test_batch_norm_on_several_cpus_is_refused_by_hand() -> None:
    class Normed(Regression):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.BatchNorm1d(20), nn.Linear(20, 1))

    recipe = samestep.Recipe(task="regression", batch=4)
    with pytest.raises(samestep.UserError, match="batch norm"):
        Loop(recipe, Normed(samples=20), rank=0, world_size=2, device=torch.device("cpu"))


def test_a_run_that_hangs_is_ended_with_all_that_it_started() -> None:
    program = (
        "import subprocess, sys, time; subprocess.Popen(['sleep', '77.125'], start_new_session=True); time.sleep(60)"
    )
    began = time.monotonic()
    outcome = subprocess_group.run([sys.executable, "-c", program], limit=2.0)
    assert outcome.code is None
    assert time.monotonic() - began < 30
    commands = read_of_processes("cmdline")
    assert b"sleep\x0077.125\x00" not in commands


def test_values_cannot_end_the_pages_script() -> None:
    assert "</script>" not in json_in_html({"name": "</script><script>alert(1)</script>"})


# The arguments, and what the one message says.
MISTAKES = {
    "an unknown method": (
        "--methods single,dp-torchrun",
        r'unknown method "dp-torchrun"; did you mean "ddp-torchrun"\?',
    ),
    "an unknown engine": ("--methods natve:dp2", r'there is no engine "natve"; did you mean "native"\?'),
    "a wrong layout": ("--methods native:dq2", r'"dq2" is not a part of a layout'),
    "no method": ("--methods ,", "names none"),
    "no processes": ("--processes 0", "run.processes is 0"),
    "no repeats": ("--repeats 0", 'argument --repeats: "0" is out of range; use a whole number from 1 to 1,000'),
    "no steps": ("--steps 0", 'argument --steps: "0" is out of range; use a whole number from 1 to'),
    "no time": ("--time-limit 0", '--time-limit: "0" is no time; use seconds above 0'),
    "a report nowhere": ("--report missing/report.html", "there is no folder missing"),
    "a report on a folder": ("--report .", "this is a folder"),
    "numbers nowhere": ("--json missing/found.json", "there is no folder missing"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found_before_anything_starts(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*arguments: object, **more: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess_group, "run", start)
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("recipe: {task: regression, batch: 8}\nrun: {device: cpu}\n", encoding="utf-8")
    arguments, message = MISTAKES[mistake]
    assert main(["compare", "job.yaml", *arguments.split()]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_report_without_plotly_says_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("recipe: {task: regression}\n", encoding="utf-8")
    assert main(["compare", "job.yaml", "--report", "page.html"]) == 2
    assert 'pip install "samestep[report]"' in capsys.readouterr().err


def test_a_task_object_is_refused() -> None:
    with pytest.raises(samestep.UserError, match="wants the task's name"):
        samestep.compare(samestep.Recipe(task=Regression()), device="cpu")


def test_it_starts_its_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = environment.Ranks(rank=0, world_size=2, local_rank=0, local_world_size=2)
    monkeypatch.setattr(environment, "ranks", lambda: alone)
    with pytest.raises(samestep.UserError, match="without a launcher"):
        samestep.compare(samestep.Recipe(task="regression"), device="cpu")
