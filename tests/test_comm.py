"""`samestep comm`: what collectives do, how they are counted and timed, what a back end has, and wrong input."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import comm_ranks
import numpy as np
import pytest
import torch
import torch.distributed as dist

from samestep.cli.main import main
from samestep.comm import limits, measure, transports
from samestep.comm.collectives import COLLECTIVES
from samestep.comm.correctness import attempt, difference, known_values
from samestep.comm_bench import request, support
from samestep.comm_bench.display import console, dtype_in_short, print_report, seconds_in_words, write_plot
from samestep.comm_bench.request import CommRequest
from samestep.comm_bench.results import BandwidthLimits, Report
from samestep.launch import local
from samestep.launch.world import join
from samestep.sizes import binary_size

TESTS = Path(__file__).parent
KB, MB = 1024, 1024**2

TRANSPORTS = ("gloo", "shared-memory")  # of ranks on one host

# What nccl-tests multiplies S / t with, on n ranks: doc/PERFORMANCE.md; src/gather.cu, scatter.cu, sendrecv.cu.
BUS_FACTORS = {
    "send/recv": {2: 1.0, 4: 1.0},
    "broadcast": {2: 1.0, 4: 1.0},
    "scatter": {2: 0.5, 4: 0.75},
    "gather": {2: 0.5, 4: 0.75},
    "reduce": {2: 1.0, 4: 1.0},
    "all-reduce": {2: 1.0, 4: 1.5},
    "all-gather": {2: 0.5, 4: 0.75},
    "reduce-scatter": {2: 0.5, 4: 0.75},
    "all-to-all": {2: 0.5, 4: 0.75},
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("comm")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """What 2 ranks have measured; the picture stands beside it."""
    written = folder / "comm.json"
    words = ["--sizes", "1KB,64KB", "--seconds", "0.02", "--json", str(written), "--plot", str(folder / "comm.svg")]
    assert main(["comm", "--processes", "2", "--device", "cpu", *words]) == 0
    return json.loads(written.read_text(encoding="utf-8"))


def test_every_collective_is_timed_at_every_size(found: dict[str, Any]) -> None:
    timed = [(row["collective"], row["bytes"], row["transport"]) for row in found["rows"]]
    assert timed == [
        (name, size, transport)
        for name in (*BUS_FACTORS, "barrier")
        for size in ((0,) if name == "barrier" else (KB, 64 * KB))
        for transport in TRANSPORTS
    ]
    for row in found["rows"]:
        assert (row["ranks"], row["device"]) == (2, "cpu")
        assert 0 < row["seconds_p10"] <= row["seconds_median"] <= row["seconds_p90"] < 60
        if row["collective"] == "barrier":
            assert row["algorithm_bandwidth"] is row["bus_bandwidth"] is row["limit"] is None
            continue
        rate = row["bytes"] / row["seconds_median"]
        assert row["algorithm_bandwidth"] == pytest.approx(rate)
        assert row["bus_bandwidth"] == pytest.approx(rate * BUS_FACTORS[row["collective"]][2])
        assert row["limit"] > 0


def test_results_are_checked_before(found: dict[str, Any]) -> None:
    assert found["passed"]
    checks = {(check["collective"], check["dtype"]): check for check in found["checks"]}
    for name in COLLECTIVES:
        assert checks[name, "float32"]["right"]
    for name in BUS_FACTORS:
        for dtype in ("float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"):
            assert checks[name, dtype]["right"], (name, dtype)
    assert "Invalid scalar type" in checks["all-reduce", "int16"]["reason"]


def test_models_limits_and_host_are_told(found: dict[str, Any]) -> None:
    models = {fit["collective"]: fit for fit in found["fits"]}
    assert set(models) == set(BUS_FACTORS)
    assert all(fit["latency_seconds"] >= 0 for fit in models.values())
    assert [copy["bytes"] for copy in found["limits"]["memory_copy"]] == [KB, 64 * KB]
    assert found["limits"]["stream_bytes_per_second"] is None
    assert len(found["hosts"]) == 2
    assert found["host"]["name"] == found["hosts"][0]
    assert found["host"]["packages"]["torch"] == torch.__version__
    assert set(found["missing"]) == {"accelerator", "mpi", "ucc"}


def test_the_picture_has_a_line_for_each_collective_and_the_limit(folder: Path, found: dict[str, Any]) -> None:
    root = ElementTree.parse(folder / "comm.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    lines = root.findall(f"{name}polyline")
    assert len(lines) == 2 * len(TRANSPORTS) * len(BUS_FACTORS) + 1
    assert {len(line.get("points", "").split()) for line in lines} == {2}
    words = {text.text for text in root.findall(f"{name}text")}
    assert words >= {"limit", "1 KiB", "64 KiB"}
    assert words >= {f"{each}, {transport}" for each in BUS_FACTORS for transport in TRANSPORTS}


def made_up(*transports: str) -> Report:
    """Times of an all-reduce that follow a model."""
    rows = [
        measure.CollectiveTiming(
            collective="all-reduce",
            bytes=size,
            ranks=4,
            transport=transport,
            device="cpu",
            seconds_median=(1e-4 + size / 1e9) * (number + 1),
            seconds_p10=1e-5,
            seconds_p90=1.0,
            samples=5,
            calls=1,
        )
        for size in (KB, MB)
        for number, transport in enumerate(transports)
    ]
    return Report(
        hosts=("a", "a", "b", "b"),
        transports=transports,
        missing={},
        checks=[],
        rows=rows,
        fits=measure.fits(rows),
        limits=BandwidthLimits(copies={KB: 1e9, MB: 2e9}, interface="eth0", stream=1.25e8),
    )


def test_on_several_hosts_the_link_is_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    report = made_up("gloo", "other")
    assert [report.limit(row) for row in report.rows] == [1.25e8] * 4
    assert [fit.latency for fit in report.fits] == pytest.approx([1e-4, 2e-4])
    known = replace(report.limits, adapter=1.25e9)
    assert [known.of(size, one_host=False) for size in (KB, MB)] == [1.25e9, 1.25e9]
    assert [known.of(size, one_host=True) for size in (KB, 1000 * KB)] == [1e9, 2e9]
    print_report(report, console())
    output = capsys.readouterr().out
    assert "link between hosts: eth0, no rate by its driver; one TCP stream: 0.125 GB/s" in output
    assert re.search(r"other +│ +202 us │.* 0\.50 │", output)  # twice gloo's time


def test_a_page_of_html_has_every_line(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    write_plot(made_up("gloo", "other"), tmp_path / "comm.html")
    page = (tmp_path / "comm.html").read_text(encoding="utf-8")
    assert "all-reduce, gloo" in page
    assert "all-reduce, other" in page
    assert re.search(r"<script[^>]+src=", page) is None  # it needs nothing from elsewhere


@pytest.mark.parametrize("name", BUS_FACTORS)
def test_the_bus_factor_is_that_of_nccl_tests(name: str) -> None:
    assert {n: COLLECTIVES[name].bus_factor(n) for n in (2, 4)} == pytest.approx(BUS_FACTORS[name])


def by_numpy(name: str, given: list[np.ndarray], rank: int) -> np.ndarray | None:
    """What a rank should hold, by the MPI standard's definitions, on whole arrays."""
    n = len(given)
    if name == "send/recv":
        return np.roll(np.stack(given), 1, axis=0)[rank]
    if name == "broadcast":
        return given[0]
    if name == "scatter":
        return given[0].reshape(n, -1)[rank]
    if name in ("gather", "all-gather"):
        return np.concatenate(given) if name == "all-gather" or rank == 0 else None
    if name in ("reduce", "all-reduce"):
        return np.sum(given, axis=0) if name == "all-reduce" or rank == 0 else None
    if name == "reduce-scatter":
        return np.sum(given, axis=0).reshape(n, -1)[rank]
    if name == "all-to-all":
        return np.stack(given).reshape(n, n, -1)[:, rank].reshape(-1)
    return np.array([])


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_is_expected_is_what_the_definition_says(name: str, n: int) -> None:
    values = known_values(COLLECTIVES[name], n, chunk=4)
    for rank in range(n):
        wanted = by_numpy(name, [np.array(each) for each in values], rank)
        expected = COLLECTIVES[name].expected(values, rank)
        assert (expected is None) == (wanted is None)
        if expected is not None and wanted is not None:
            assert list(expected) == wanted.tolist()
            assert len(expected) == COLLECTIVES[name].elements(4, n, rank)[1]


@pytest.mark.parametrize("n", [2, 4, 16, 300])
@pytest.mark.parametrize("name", BUS_FACTORS)
def test_values_and_their_sums_are_exact_in_every_dtype(name: str, n: int) -> None:
    values = known_values(COLLECTIVES[name], n)
    most = max(max(each, default=0) for each in values)
    if COLLECTIVES[name].reduces:
        most = max(sum(column) for column in zip(*values, strict=True))
    assert 0 < most <= 15
    assert torch.arange(16).to(torch.float8_e4m3fn).to(torch.int64).tolist() == list(range(16))


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with join(alone=True, device="cpu"):
        group: Any = dist.group.WORLD
        for name in ("all-reduce", "all-gather"):
            assert attempt(COLLECTIVES[name], group, torch.float32, torch.device("cpu")) is None
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.add_(1))
        reason = attempt(COLLECTIVES["all-reduce"], group, torch.float32, torch.device("cpu"))
    assert reason == "a wrong result: element 0 is 1, and 0 is right"
    assert difference(torch.tensor([float("nan")]), [1]) is not None
    assert difference(torch.tensor([1 + 2j]), [1]) is not None
    assert difference(torch.tensor([True]), [7]) is None


def test_transports_are_measured_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = CommRequest(collectives=("all-reduce",), sizes=(KB, 4 * KB), device="cpu", seconds=0.05)
    report = local.start(comm_ranks.measure_two, (wanted,), 2)
    timed = [(row.bytes, row.transport) for row in report.rows]
    assert timed == [(size, transport) for size in (KB, 4 * KB) for transport in (*TRANSPORTS, "slow")]
    for fast, slow in zip(report.rows[::3], report.rows[2::3], strict=True):
        assert slow.seconds_p10 > comm_ranks.SLOWER
        assert fast.seconds_p10 < comm_ranks.SLOWER
    assert {fit.transport for fit in report.fits} == {*TRANSPORTS, "slow"}
    print_report(report, console())
    output = capsys.readouterr().out
    assert "x gloo" in output
    assert "results: 30 right, 0 wrong, 6 refused by the back end" in output


@pytest.mark.slow
def test_shared_memory_that_ranks_can_not_have_is_told_and_not_measured(tmp_path: Path) -> None:
    sizes = ["--sizes", "1KB", "--collectives", "all-reduce", "--seconds", "0.02"]
    found, told = _without_shared_memory(["--processes", "2", *sizes], tmp_path)
    assert told.count("messages go through gloo, not through shared memory: ") == 1
    assert {row["transport"] for row in found["rows"]} == {"gloo"}
    assert "their messages go through gloo" in found["missing"]["shared-memory"]


@pytest.mark.slow
def test_shared_memory_that_ranks_can_not_have_supports_nothing(tmp_path: Path) -> None:
    found, _ = _without_shared_memory(["support", "--processes", "2"], tmp_path)
    attempts = found["attempts"]
    told = {(each["verdict"], each["reason"]) for each in attempts if each["transport"] == "shared-memory"}
    assert told == {("refused", "rank 0: the ranks could not map it, and their messages go through gloo")}
    assert any(each["verdict"] == "works" for each in attempts if each["transport"] == "gloo")


def _without_shared_memory(words: list[str], folder: Path) -> tuple[Any, str]:
    """Run `samestep comm` where no file can be large enough for shared memory; return its `--json` and its stderr."""
    file = folder / "comm.json"
    comm = shlex.join([sys.executable, "-m", "samestep", "comm", *words, "--json", str(file)])
    # Files of 400 blocks of 1,024 bytes at most; the region of two ranks is larger.
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 400; exec {comm}"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text(encoding="utf-8")), done.stderr


def test_a_wrong_result_on_one_rank_is_named_and_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = CommRequest(collectives=("broadcast", "barrier"), sizes=(KB,), device="cpu", seconds=0.01)
    report = local.start(comm_ranks.measure_wrong, (wanted,), 2)
    assert not report.passed
    assert [(row.collective, row.transport) for row in report.rows] == [("barrier", each) for each in TRANSPORTS]
    print_report(report, console())
    assert "WRONG: broadcast of float32 over gloo: rank 1: a wrong result: element 1" in capsys.readouterr().out


def test_the_model_is_found_again() -> None:
    points = {size: 2e-5 + size / 3e9 for size in request.USUAL}
    latency, bandwidth, worst = measure.fit(points)
    assert latency == pytest.approx(2e-5)
    assert bandwidth == pytest.approx(3e9)
    assert worst < 1e-9


def test_the_model_minimises_relative_differences() -> None:
    generator = np.random.default_rng(0)
    points = {size: float((1e-4 + size / 1e9) * generator.uniform(0.8, 1.25)) for size in request.USUAL}
    latency, bandwidth, worst = measure.fit(points)
    assert bandwidth is not None

    def loss(alpha: float, beta: float) -> float:
        return sum(((alpha + size / beta - seconds) / seconds) ** 2 for size, seconds in points.items())

    least = loss(latency, bandwidth)
    for alpha, beta in [(1.01, 1.0), (0.99, 1.0), (1.0, 1.01), (1.0, 0.99), (1.02, 0.98)]:
        assert loss(latency * alpha, bandwidth * beta) > least
    assert worst == pytest.approx(
        max(abs(latency + size / bandwidth - seconds) / seconds for size, seconds in points.items())
    )


def test_no_part_of_the_model_is_negative() -> None:
    assert measure.fit({KB: 2e-3, MB: 1e-3})[1] is None  # longer messages that take less time
    latency, bandwidth, _ = measure.fit({KB: 1e-9, MB: 1.0})
    assert latency == 0
    assert bandwidth is not None


def test_a_network_adapter_tells_its_rate_unless_it_is_virtual(tmp_path: Path) -> None:
    for name, speed in (("eth0", "10000\n"), ("eth1", "-1\n"), ("veth0", "10000\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(speed, encoding="ascii")
        if name != "veth0":
            (tmp_path / name / "device").mkdir()
    rates = [limits.adapter_rate(name, tmp_path) for name in ("eth0", "eth1", "veth0", "eth9", None)]
    assert rates == [1.25e9, None, None, None, None]


# Of 2 ranks: what each holds before and after.
DEMONSTRATED = {
    "send/recv": [("10 11 12 13", "20 21 22 23"), ("20 21 22 23", "10 11 12 13")],
    "broadcast": [("10 11 12 13", "10 11 12 13"), ("20 21 22 23", "10 11 12 13")],
    "scatter": [("10 11 12 13", "10 11"), ("-", "12 13")],
    "gather": [("10 11", "10 11 20 21"), ("20 21", "-")],
    "reduce": [("10 11 12 13", "30 32 34 36"), ("20 21 22 23", "not defined")],
    "all-reduce": [("10 11 12 13", "30 32 34 36"), ("20 21 22 23", "30 32 34 36")],
    "all-gather": [("10 11", "10 11 20 21"), ("20 21", "10 11 20 21")],
    "reduce-scatter": [("10 11 12 13", "30 32"), ("20 21 22 23", "34 36")],
    "all-to-all": [("10 11 12 13", "10 11 20 21"), ("20 21 22 23", "12 13 22 23")],
    "barrier": [("-", "-"), ("-", "-")],
}


# What shared memory leaves to gloo on one host.
LEFT = ("send/recv", "scatter", "gather", "all-to-all")


@pytest.mark.parametrize("transport", ["gloo", None])
def test_every_collective_is_shown_with_its_transport(
    transport: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an option over shared memory, as a job of ranks on one host."""
    options = ["--transport", transport] if transport is not None else []
    assert main(["comm", "demo", "all", "--processes", "2", "--device", "cpu", *options]) == 0
    output = capsys.readouterr().out
    rows = [tuple(cell.strip() for cell in line.split("│")[1:4]) for line in output.splitlines() if "│" in line]
    assert rows == [
        (str(rank), before, after) for shown in DEMONSTRATED.values() for rank, (before, after) in enumerate(shown)
    ]
    for name, collective in COLLECTIVES.items():
        left = ", which leaves it to gloo" if transport is None and name in LEFT else ""
        assert f"\n{name} over {transport or 'shared-memory'}{left}\n" in f"\n{output}"
        assert collective.summary in output


def test_a_job_gets_shared_memory_where_ranks_share_a_host_and_else_the_devices_back_end() -> None:
    cpu, device = torch.device("cpu"), torch.device("meta")
    assert (
        transports.default(transports.TransportContext(hosts=("a", "a"), device=cpu, backend="gloo"))
        == "shared-memory"
    )
    assert (
        transports.default(transports.TransportContext(hosts=("a", "a", "b"), device=cpu, backend="gloo"))
        == "shared-memory"
    )
    assert transports.default(transports.TransportContext(hosts=("a", "b"), device=cpu, backend="gloo")) == "gloo"
    assert (
        transports.default(transports.TransportContext(hosts=("a", "a"), device=device, backend="nccl"))
        == "accelerator"
    )


def test_a_transport_that_is_unavailable_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["demo", "barrier", "--processes", "2", "--device", "cpu", "--transport", "accelerator"]
    assert main(["comm", *words]) == 2
    assert (
        "--transport accelerator: the ranks compute on the CPU, whose back end is gloo; use gloo or shared-memory\n"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_what_a_back_end_has_is_found_by_trying(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "support.json"
    assert main(["comm", "support", "--device", "cpu", "--json", str(file)]) == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    verdicts = {(each["collective"], each["dtype"]): each["verdict"] for each in found["attempts"]}
    assert len(verdicts) == 1 + 9 * 12 + 1
    assert {verdicts[name, "float32"] for name in COLLECTIVES} == {"works"}
    # PyTorch's own table has long said that gloo has neither.
    assert verdicts["all-to-all", "bfloat16"] == verdicts["reduce-scatter", "bfloat16"] == "works"
    assert verdicts["all-reduce", "int16"] == "refused"
    output = capsys.readouterr().out
    assert "gloo with tensors on cpu, tried on 2 ranks" in output
    assert "mpi: not tried: this PyTorch is built without it" in output


@pytest.fixture
def bad_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "try_rank", comm_ranks.try_bad)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *sys.path]))


@pytest.mark.slow
@pytest.mark.usefixtures("bad_ranks")
def test_an_attempt_that_hangs_or_crashes_does_not_end_the_rest() -> None:
    found = support.supported("cpu", 2, limit=2.0)
    assert found is not None
    tried = [(each["transport"], each["collective"], each["dtype"], each["verdict"]) for each in found.attempts]
    assert tried == [
        (transport, *each)
        for transport in TRANSPORTS
        for each in (
            ("(process group)", "float32", "works"),
            ("broadcast", "float64", "crashes"),
            ("broadcast", "float32", "works"),
            ("all-reduce", "float64", "works"),
            ("all-reduce", "float32", "hangs"),
        )
    ]
    assert "SIGABRT" in found.attempts[1]["reason"]
    assert found.reasons()[1] == "gloo on cpu, all-reduce of float32: hangs: it did not return within the time limit"
    assert found.missing.keys() == {"accelerator", "mpi", "ucc"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1KB,1MB", (KB, MB)),
        ("1mb, 1 KiB,1k", (KB, MB)),
        ("1000", (1000,)),
        ("1.5KB", (1536,)),
        ("2GB", (2 * 1024**3,)),
    ],
)
def test_sizes_are_read(text: str, wanted: tuple[int, ...]) -> None:
    assert request.parse_sizes(text) == wanted


def test_numbers_are_told_in_words() -> None:
    assert [binary_size(size) for size in (8, KB, 1536, MB, 256 * MB)] == [
        "8 B",
        "1 KiB",
        "1.5 KiB",
        "1 MiB",
        "256 MiB",
    ]
    assert [seconds_in_words(value) for value in (1.234e-6, 9.996e-5, 0.01, 0.9999, 12.34)] == [
        "1.23 us",
        "100 us",
        "10.0 ms",
        "1.00 s",
        "12.3 s",
    ]
    assert [dtype_in_short(name) for name in ("float32", "bfloat16", "float8_e4m3fn", "uint8", "bool")] == [
        "f32",
        "bf16",
        "f8",
        "u8",
        "bool",
    ]


KNOWN = ", ".join(sorted(COLLECTIVES))

# What a user can give wrong, and what is said of it.
WRONG = {
    "--processes 1": "--processes is 1, and a collective needs 2; use --processes 2",
    "--processes two": 'argument --processes: "two" is no whole number; use a whole number from 1 to 1,024',
    "--sizes 1XB": '--sizes: "1XB" is no size; use a number of bytes, KiB, MiB or GiB, such as 1KiB,1MiB',
    "--sizes 1KB,,1MB": '--sizes: "" is no size',
    "--sizes=-1KB": '--sizes: "-1KB" is no size',
    "--sizes 0": '--sizes: "0" is 0 bytes; use a whole number of bytes, 1 or more',
    "--sizes 1.5": '--sizes: "1.5" is 1.5 bytes',
    "--sizes 8 --processes 4": "8 B gives each of 4 ranks less than one float32; use 16 bytes or more",
    "--collectives allreduce": f'unknown collective "allreduce"; did you mean "all-reduce"? known: {KNOWN}',
    "--collectives all-reduce,": 'unknown collective ""; known: ',
    "--seconds 0": '--seconds: "0" is no time; use seconds above 0',
    "--plot x.png": "--plot x.png: a picture is SVG or HTML; use a name that ends in .svg or .html",
    "--plot nowhere/x.svg": "there is no folder nowhere",
    "--json .": "--json .: this is a folder",
    "demo all-reduc": f'unknown collective "all-reduc"; did you mean "all-reduce"? known: {KNOWN}',
    "demo barrier --transport glo": 'unknown transport "glo"; did you mean "gloo"? known: accelerator, auto, gloo, ',
    "demo": "the following arguments are required: NAME",
    "--processes 1 demo barrier": "--processes is 1, and a collective needs 2",
    "suport": 'samestep comm has no command "suport"; did you mean "support"?',
    "support --time-limit 0": '--time-limit: "0" is no time; use seconds above 0',
}


@pytest.mark.parametrize("words", WRONG)
def test_a_mistake_is_told_in_one_message(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["comm", *words.split(" ")]) == 2
    errors = capsys.readouterr().err
    assert WRONG[words] in errors
    assert errors.count("\n") == 1


def test_a_size_too_large_for_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(request, "available_memory", lambda: 4 * 1024**3)
    assert main(["comm", "--processes", "4", "--device", "cpu", "--sizes", "1KB,1GB"]) == 2
    errors = capsys.readouterr().err
    assert "--sizes: 1 GiB on 4 processes of this host needs 13.2 GiB of memory, and 4 GiB are free" in errors
    fitting = re.search(r"use sizes up to ([\d.]+) MiB\n$", errors)
    assert fitting is not None
    assert 4 * (3 * float(fitting[1]) + 300) == pytest.approx(4096, rel=0.001)
    monkeypatch.setattr(request, "available_memory", lambda: 1024**3)
    assert main(["comm", "--processes", "4", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.endswith("use fewer processes\n")


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (4, "--processes is 2, and a launcher has started 4 ranks; leave it out"),
        (1, "--processes is 2, and a launcher has started 1 ranks; leave it out"),
    ],
)
def test_a_launcher_says_how_many_ranks_there_are(
    ranks: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert main(["comm", "--processes", "2"]) == 2
    assert told in capsys.readouterr().err
    if ranks == 1:
        assert main(["comm"]) == 2
        assert "a launcher has started 1 rank, and a collective needs 2" in capsys.readouterr().err
