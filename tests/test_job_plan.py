"""`samestep plan JOB.yaml`: layouts of a job rehearsed and timed, and steps taken really beside them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_tasks import Points

from samestep.api import rehearse_job
from samestep.cli.main import main
from samestep.doctor.plan_and_run import furthest, terms
from samestep.doctor.run import read
from samestep.errors import UserError
from samestep.job import Job, Run
from samestep.job_plan.auto import check_here
from samestep.job_plan.display import page
from samestep.job_plan.machine import CAUSES, Rates, TargetMachine, devices_of, measured_rates, message_rates
from samestep.job_plan.measure import Measured, corrections, measured_plan
from samestep.job_plan.plan import JobPlan, layouts_of, plan_job
from samestep.job_plan.predict import Prediction
from samestep.layout import Layout
from samestep.planning.hardware import cluster_of
from samestep.recipe import Recipe
from samestep.training.rehearsal import Collectives
from samestep.training.step_work import CountedWork

RATES = Rates(flop=1e-10, byte=1e-10, operator=1e-5, message=1e-4, byte_sent=1e-9, speedup={1: 1.0, 2: 1.8})
PLACE = TargetMachine(name="this machine", devices=2, memory=1e9, rates=RATES, cores=2)


def job(**run: Any) -> Job:
    return Job(recipe=Recipe(task=Points(), batch=16, steps=4), run=Run(**run))


@pytest.fixture(scope="module")
def two() -> JobPlan:
    return plan_job(job(), PLACE)


@pytest.fixture
def shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan few layouts, by rates that are measured for less time and so are less exact."""
    monkeypatch.setattr("samestep.job_plan.plan._OTHERS", ("tp{}",))
    monkeypatch.setattr("samestep.job_plan.machine._SECONDS", 0.02)


@pytest.mark.quick
def test_products_and_passes_of_a_step_are_counted() -> None:
    model = torch.nn.Linear(8, 4)
    given = torch.zeros(3, 8)
    counted = CountedWork()
    with counted:
        model(given).relu().sum().backward()
    work = counted.found()
    # Forward, and the gradient of the weight; the input needs none.
    assert work.flops == 2 * (2 * 3 * 8 * 4)
    assert work.product_elements == 2 * (3 * 8 + 8 * 4 + 3 * 4)
    assert work.attention_flops == 0
    assert 2 <= sum(work.products.values()) < work.operators
    assert work.bytes > 2 * given.nbytes


@pytest.mark.quick
def test_attention_of_a_step_is_counted_by_itself() -> None:
    query, key, value = (torch.zeros(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    counted = CountedWork()
    with counted:
        torch.nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
    work = counted.found()
    assert work.attention_flops == (2 + 5) * 2 * (2 * 4 * 16 * 16 * 8)
    assert work.flops == work.attention_flops
    seconds = replace(RATES, attention_flop=1e-9).computing(work, 2)
    assert seconds["attention"] == pytest.approx(work.attention_flops * 1e-9 / 1.8)
    assert seconds["operators"] == pytest.approx(work.operators * 1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("devices", [1, 2, 6, 8, 64])
def test_layouts_have_as_many_ranks_as_there_are_devices(devices: int) -> None:
    found = list(layouts_of(devices))
    assert len(set(found)) == len(found)
    assert {Layout.parse(text).size for text in found} == {devices}


def test_layouts_that_the_job_can_have_are_ranked(two: JobPlan) -> None:
    seconds = [each.seconds for each in two.predictions]
    assert seconds == sorted(seconds)
    found = {each.layout: each for each in two.predictions}
    assert {"single", "dp2", "fsdp2", "pp2"} <= set(found)
    assert all(set(each.parts) == set(CAUSES) for each in two.predictions)
    assert found["single"].parts["messages"] == 0 < found["dp2"].parts["messages"]
    assert found["fsdp2"].usage[0].parameters < found["dp2"].usage[0].parameters
    refused = dict(two.refused)
    assert "cp2" in refused  # points have no tokens
    assert all(refused.values())


def test_pipelines_are_tried_with_other_schedules_and_more_micro_batches(two: JobPlan) -> None:
    tried = {(each.layout, each.micro_batch) for each in two.predictions}
    assert ("pp2", 2) in tried  # 16 samples in 8 micro-batches
    told = {*(layout for layout, _ in tried), *(layout for layout, _ in two.refused)}
    assert {"pp2 schedule=interleaved-1f1b stages=2", "pp2 schedule=zbv-zero-bubble stages=2"} <= told


@pytest.mark.slow
def test_what_does_not_fit_is_no_best_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.job_plan.plan._DATA", ("fsdp{}",))
    monkeypatch.setattr("samestep.job_plan.plan._OTHERS", ())
    found = plan_job(job(), replace(PLACE, memory=1.0))
    assert not found.fitting
    assert any(each.layout.endswith("recompute=full") for each in found.predictions)
    assert {each.micro_batch for each in found.predictions if each.layout == "single"} == {None, 4}
    assert {each.micro_batch for each in found.predictions if each.layout == "fsdp2 recompute=full"} == {None, 1}
    with pytest.raises(UserError, match=r'no layout fits on 2 x this machine: the smallest, ".*", needs'):
        _ = found.best


def test_layouts_are_left_out_for_want_of_time() -> None:
    found = plan_job(job(), PLACE, limit=0.0)
    assert [each.layout for each in found.predictions] == ["single"]
    assert "dp2" in found.untried


@pytest.mark.slow
@pytest.mark.usefixtures("shortly")
def test_devices_of_a_data_sheet(two: JobPlan) -> None:
    found = plan_job(job(), devices_of(cluster_of("h100", 2)))
    assert found.machine.rates is None
    assert "single" not in {each.layout for each in found.predictions}
    slower = found.again(job(), devices_of(cluster_of("h100", 2, inside="ethernet-10")))
    times = [{each.layout: each.seconds for each in every.predictions} for every in (found, slower)]
    assert times[0]["fsdp2"] < times[1]["fsdp2"]
    # What is held follows from the job alone.
    assert {each.layout: each.peak_bytes for each in found.predictions}.items() <= {
        each.layout: each.peak_bytes for each in two.predictions
    }.items()


def made(seconds: float | None, **parts: float) -> Measured:
    whole = {**dict.fromkeys(CAUSES, 0.0), **parts}
    return Measured(
        prediction=Prediction(layout="dp2", micro_batch=None, usage=(), fits=True, parts=whole), seconds=seconds
    )


@pytest.mark.timeout(120)
def test_hooks_and_copies_of_shards_are_counted() -> None:
    ranks = {layout: rehearse_job(job(layout=layout), 2)[0].work for layout in ("dp2", "zero2x2", "fsdp2")}
    assert ranks["dp2"].shard_messages == 0
    # Points is gathered at once, kept for the backward, and its gradients are scattered: six tensors either way.
    assert ranks["fsdp2"].shard_messages >= ranks["zero2x2"].shard_messages >= 2
    assert ranks["zero2x2"].shard_tensors >= 2 * 6
    rates = replace(RATES, shard_message=1e-3, shard_tensor=1e-4)
    work = ranks["zero2x2"]
    assert rates.computing(work, 1)["sharding"] == pytest.approx(
        work.shard_messages * 1e-3 + work.shard_tensors * 1e-4
    )
    assert rates.computing(work, 2)["sharding"] == rates.computing(work, 1)["sharding"]  # Python has one thread


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_rates_of_this_machine() -> None:
    rates = measured_rates("fp32")
    assert min(rates.flop, rates.byte, rates.operator, rates.shard_message + rates.shard_tensor) > 0
    assert rates.shard_message < 0.1
    assert set(rates.pass_speedup) == set(rates.speedup)
    assert not torch.distributed.is_initialized()


@pytest.mark.quick
def test_rates_are_corrected_by_what_steps_took() -> None:
    # All takes twice as long: every rate is half.
    found = corrections([made(2.0, products=1.0), made(4.0, products=1.0, operators=1.0)])
    assert found == pytest.approx(dict.fromkeys(CAUSES, 2.0))
    # Messages alone take ten times as long.
    rows = [made(1.0, products=1.0), made(2.0, products=2.0), made(11.0, products=1.0, messages=1.0)]
    factors = corrections(rows)
    assert 0.9 < factors["products"] < 1.1
    assert 5 < factors["messages"] < 10.5
    assert RATES.corrected(factors).message == pytest.approx(factors["messages"] * RATES.message)
    assert corrections([made(None)]) == dict.fromkeys(CAUSES, 1.0)


@pytest.mark.quick
def test_messages_as_comm_measured_them(tmp_path: Path) -> None:
    file = tmp_path / "comm.json"
    fit = {"collective": "all-reduce", "ranks": 2, "latency_seconds": 5e-5, "bytes_per_second": 1e9}
    file.write_text(json.dumps({"fits": [fit, {**fit, "bytes_per_second": 5e8}]}), encoding="utf-8")
    assert message_rates(file) == {"message": 5e-5, "byte_sent": 1e-9, "kinds": {}}
    # Of an all-gather a rank sends half of the message, of one to the next rank all; the faster transport counts.
    others = [
        {**fit, "collective": "all-gather", "latency_seconds": 2e-5, "bytes_per_second": 4e9},
        {**fit, "collective": "all-gather", "bytes_per_second": 1e9},
        {**fit, "collective": "send/recv"},
    ]
    file.write_text(json.dumps({"fits": [fit, *others]}), encoding="utf-8")
    rates = replace(RATES, **message_rates(file))
    sent = [Collectives(kind=kind, axis="shard", ranks=2, count=3, sent=1e6) for kind in ("all-gather", "all-to-all")]
    assert rates.sending(sent[:1]) == pytest.approx((3 * 2e-5, 1e6 / 2e9))
    assert rates.sending(sent[1:]) == pytest.approx((3 * 5e-5, 1e6 / 1e9))  # not measured: as an all-reduce
    assert rates.kinds["point-to-point"].byte_sent == pytest.approx(1e-9)
    assert rates.corrected({"messages": 2.0}).sending(sent[:1]) == pytest.approx((6 * 2e-5, 1e6 / 2e9))
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="samestep comm --json FILE"):
        message_rates(file)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_are_taken_beside_predictions(two: JobPlan) -> None:
    few = replace(two, predictions=[each for each in two.predictions if each.layout in ("dp2", "fsdp2")])
    again, found = measured_plan(job(threads=1), few, most=2)
    assert len(found) == 2
    for each in found:
        assert each.seconds is not None
        assert each.seconds > 0
        assert each.peak_bytes == pytest.approx(each.prediction.peak_bytes, rel=0.03)
    assert again.machine.rates != RATES
    text = page(again, found, "points")
    assert 'id="layouts"' in text
    assert 'id="measured"' in text


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("shortly")
def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out, html = tmp_path / "job.yaml", tmp_path / "out.json", tmp_path / "plan.html"
    file.write_text("recipe: {task: regression, epochs: 2, batch: 64}\n")
    words = ["--devices", "2", "--json", str(out), "--report", str(html), "--top", "3"]
    assert main(["plan", str(file), *words]) == 0
    told = json.loads(out.read_text(encoding="utf-8"))
    shown = capsys.readouterr().out
    assert told["layouts"][0]["layout"] in shown
    assert told["measured"] == []
    assert told["rates"]["flop"] > 0
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["JOB", "--model", "llama-3-8b"], "leave --model out"),
        (["JOB", "--precision", "fp16"], "leave --precision out"),
        (["JOB", "--program", "megatron-core"], "leave --program out"),
        (["JOB", "--gpu", "h100"], "--devices is missing"),
        (["JOB", "--gpu", "h100", "--devices", "8", "--measure"], "give one of them"),
        (["JOB", "--network", "ndr"], "add --gpu"),
        (["JOB", "--measure", "0"], '--measure: "0" is out of range'),
        (["JOB", "--devices", "0"], '--devices: "0" is out of range'),
        (["--measure"], "--measure goes with a job file"),
        (["--rows", "rows.json", "--devices", "8"], "--devices does not go with --rows"),
        (["--set", "recipe.batch=3"], "--set goes with a job file"),
    ],
)
def test_words_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], message: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("recipe: {task: regression}\n")
    assert main(["plan", *(str(file) if word == "JOB" else word for word in words)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("shortly")
def test_a_layout_is_found_and_told_before_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("recipe: {task: regression, steps: 3, batch: 64}\nrun: {layout: auto, processes: 2}\n")
    folder = tmp_path / "run"
    assert main(["train", str(file), "--folder", str(folder)]) == 0
    shown = capsys.readouterr()
    told = [line for line in shown.err.splitlines() if line.startswith("samestep: ")]
    (first,) = [number for number, line in enumerate(told) if "layout auto" in line]
    layout = told[first].partition('"')[2].partition('"')[0]
    assert told[first + 1].startswith("samestep: its step: ")
    assert told[first + 2].startswith("samestep: the next, ")
    assert Layout.parse(layout).size <= 2
    assert json.loads((folder / "report.json").read_text(encoding="utf-8"))["layout"] == layout
    # Beside the run, and again by doctor.
    assert "time of a step, planned and measured: step " in shown.out
    assert json.loads((folder / "plan.json").read_text(encoding="utf-8"))["layout"] == layout
    assert [each for each in read(folder) if each.subject == "plan"]


@pytest.mark.quick
def test_the_term_that_is_off_is_named() -> None:
    usage = {"parameters": 100, "optimizer_state": 200, "activations": 50, "gathered_and_gradients": 100}
    plan = {
        "step_seconds": 0.12,
        "seconds_by_cause": {
            "products": 0.05,
            "passes": 0.03,
            "operators": 0.02,
            "messages": 0.01,
            "bytes sent": 0.01,
        },
        "usage_bytes": [{**usage, "sent": {"all-reduce": 100}}],
    }
    held = [{**usage, "activations": 80, "sent": {"all-reduce": 100}}, {**usage, "sent": {"all-reduce": 90}}]
    report = {"own_step_seconds": [0.1, 0.09], "usage_bytes": held}
    found = {each.name: each for each in terms(plan, report, [9.0, 9.0, 9.0, 0.2, 0.2, 0.2])}
    assert found["step"].error == pytest.approx(-0.4)
    assert found["computing"].error == pytest.approx(0.0)
    assert found["messages and waiting"].planned == pytest.approx(0.02)
    assert found["messages and waiting"].measured == pytest.approx(0.1)
    time, memory = (furthest(list(found.values()), unit) for unit in ("s", "B"))
    assert time is not None
    assert time.name == "messages and waiting"
    assert memory is not None
    assert (memory.name, memory.planned, memory.measured) == ("activations", 50, 80)
    assert terms(plan, {}, []) == []


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dry-run", "--world", "4"], "name a layout"),
        (["--hostfile", "hosts"], "layout auto is chosen for one machine"),
    ],
)
def test_layouts_of_other_machines_are_not_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], message: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("recipe: {task: regression}\n")
    assert main(["train", str(file), "--layout", "auto", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.quick
def test_a_rank_finds_no_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.environment.ranks", lambda: object())
    with pytest.raises(UserError, match="a rank already"):
        check_here(job())
