"""Where a step's time goes: categories that add up, the rank that holds the others up, files, and bad input."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from profiled import SLOW, STEPS, Net, SlowData, SlowForward, profiles
from small_jobs import job_file
from small_tasks import Points

import samestep
from samestep.cli.main import main
from samestep.profiling.breakdown import CATEGORIES, Profile, find_straggler, rank_profile
from samestep.profiling.clock import Interval, PhaseTime, StepTimes

pytestmark = pytest.mark.timeout(120)

LAYOUTS = ("dp2", "pp2")
MORE_LAYOUTS = ("zero1x2", "zero2x2", "fsdp2", "tp2")

# What is slow, under which layout: where the last rank's time goes, and in which category.
Planted = tuple[samestep.Task, str, str, str, str]
PLANTED: Mapping[str, Planted] = {
    "busy": (SlowForward(busy=True), "dp2", "forward", "busy", "compute"),
    "data": (SlowData(), "dp2", "data", "idle", "data"),
    "asleep-in-shards": (SlowForward(), "fsdp2", "forward", "idle", "idle"),
    "asleep": (SlowForward(), "dp2", "forward", "idle", "idle"),
    "asleep-in-slices": (SlowForward(), "tp2", "forward", "idle", "idle"),
}

Found = tuple[Path, dict[str, Profile]]  # the folder with what was written, and profiles by their names


def _profiled(
    folder: Path, transport: Any, layouts: Sequence[str], planted: Mapping[str, Planted], *more: Any
) -> Found:
    cases: list[Any] = [(Net(), layout, layout, {}) for layout in layouts]
    cases += [(task, layout, name, {}) for name, (task, layout, *_) in planted.items()]
    cases += more
    all_of_them = profiles(cases, folder, ranks=2, transport=transport)
    return folder, {name: profile for (_, _, name, _), profile in zip(cases, all_of_them, strict=True)}


@pytest.fixture(scope="module", params=[pytest.param("gloo", marks=pytest.mark.slow), "auto"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A profile of each layout, over gloo or shared memory."""
    small_buckets = (Net(), "dp2", "small-buckets", {"bucket_mb": 1e-3})
    return _profiled(tmp_path_factory.mktemp("profiles"), request.param, LAYOUTS, {}, small_buckets)


@pytest.fixture(scope="module", params=["gloo", "auto"])
def more_found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The same of those that slow tests look at, and of each planted case."""
    return _profiled(tmp_path_factory.mktemp("more-profiles"), request.param, MORE_LAYOUTS, PLANTED)


def adds_up(profile: Profile) -> None:
    for rank in profile.ranks:
        assert sum(rank.categories.values()) == pytest.approx(rank.seconds, rel=1e-6)
        assert sum(sum(kinds.values()) for kinds in rank.phases.values()) == pytest.approx(rank.seconds, rel=1e-6)
        assert all(seconds >= 0 for seconds in rank.categories.values())
        assert 0 <= rank.overlapped <= rank.seconds


@pytest.mark.parametrize("layout", LAYOUTS)
def test_categories_add_up_to_the_step(layout: str, found: Found) -> None:
    _assert_whole(found[1][layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_categories_add_up_to_the_step_under_more_layouts(layout: str, more_found: Found) -> None:
    _assert_whole(more_found[1][layout])


def _assert_whole(profile: Profile) -> None:
    adds_up(profile)
    assert profile.steps == (4, 5, 6, 7, 8)
    assert [rank.rank for rank in profile.ranks] == [0, 1]
    for rank in profile.ranks:
        for name in ("compute", "communication", "data", "optimizer"):
            assert rank.categories[name] > 0, name
        for phase in ("forward", "backward"):
            assert rank.phases[phase]["busy"] > 0, phase


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANTED)
def test_the_slow_rank_is_named_with_what_is_slow(case: str, more_found: Found) -> None:
    profile = more_found[1][case]
    _, _, phase, kind, category = PLANTED[case]
    adds_up(profile)
    fast, slow = profile.ranks
    assert slow.categories[category] > 0.8 * SLOW
    assert slow.typical[phase][kind] > 0.8 * SLOW
    assert fast.typical[phase][kind] < 0.5 * SLOW
    # The other rank waits for it, and waiting is no work of its own.
    waited = [sum(kinds["waited"] for kinds in rank.typical.values()) for rank in (fast, slow)]
    assert waited[0] > 0.5 * SLOW
    assert waited[1] < 0.5 * waited[0]
    assert profile.straggler is not None
    assert (profile.straggler.rank, profile.straggler.phase) == (1, phase)
    # Where other programs hold the cores, a rank at work also waits for one, perhaps for longer than it works.
    more = {each: slow.typical[phase][each] - fast.typical[phase][each] for each in ("busy", "idle")}
    assert profile.straggler.kind == (kind if more["idle"] < more[kind] else "idle")


def test_each_rank_leaves_a_trace_and_the_table_stands_in_json(found: Found) -> None:
    folder, profiles = found
    for rank in (0, 1):
        events = json.loads((folder / "dp2" / f"trace-rank{rank}.json").read_text(encoding="utf-8"))["traceEvents"]
        ours = [event for event in events if event.get("cat") == "samestep"]
        assert {"data", "forward", "backward", "optimizer"} <= {event["name"] for event in ours}
        # They stand at the time of the operators that ran in them.
        forwards = [event for event in ours if event["name"] == "forward"]
        products = [event for event in events if event.get("name") == "aten::addmm"]
        inside = [
            product
            for product in products
            if any(each["ts"] <= product["ts"] <= each["ts"] + each["dur"] for each in forwards)
        ]
        assert len(inside) == 4 * STEPS  # four layers, a micro-batch a step
    values = json.loads((folder / "dp2" / "profile.json").read_text(encoding="utf-8"))
    assert values == json.loads(json.dumps(profiles["dp2"].to_json()))
    for rank in values["ranks"]:
        assert sum(rank["categories_ms"].values()) == pytest.approx(rank["step_ms"])
        assert sum(rank["categories_share"].values()) == pytest.approx(1)
        assert set(rank["categories_ms"]) == set(CATEGORIES)


def test_small_buckets_are_more_messages(found: Found) -> None:
    events = {}
    for name in ("dp2", "small-buckets"):
        trace = json.loads((found[0] / name / "trace-rank0.json").read_text(encoding="utf-8"))["traceEvents"]
        # Over gloo PyTorch shows them, over shared memory samestep does.
        events[name] = sum(event.get("name") in ("gloo:all_reduce", "all-reduce") for event in trace)
    assert events["small-buckets"] >= events["dp2"] + STEPS


def step(phase_times: Mapping[str, PhaseTime], *, end: int = 100, waits: Any = (), phases: Any = ()) -> StepTimes:
    return StepTimes(step=0, start=0, end=end, phase_times=phase_times, phases=phases, waits=waits)  # pyright: ignore[reportArgumentType]


def test_waits_that_the_clock_was_not_told_of_move_from_their_phase() -> None:
    phase_times = {"forward": PhaseTime(wall=60, processor=30, waited=10), "other": PhaseTime(wall=30, processor=30)}
    phases = (Interval(name="forward", start=0, end=70), Interval(name="other", start=70, end=100))
    waits = (Interval(name="messages", start=10, end=20),)
    unseen = [Interval(name="wait_tensor", start=15, end=30), Interval(name="wait_tensor", start=69, end=71)]
    (rank,) = [rank_profile(0, [step(phase_times, waits=waits, phases=phases)], ran=[], unseen=unseen, idles=True)]
    nanoseconds = {name: round(seconds * 1e9, 6) for name, seconds in rank.categories.items()}
    # 5 of the first wait were known, and the second lies in two phases.
    assert nanoseconds == {"compute": 30, "communication": 22, "data": 0, "optimizer": 0, "other": 29, "idle": 19}


def test_what_runs_beside_the_work_is_overlapped_once() -> None:
    waits = (Interval(name="messages", start=40, end=50),)
    ran = [Interval(name=name, start=start, end=end) for name, start, end in (("a", -5, 20), ("b", 10, 45))]
    rank = rank_profile(0, [step({"forward": PhaseTime(wall=90, waited=10)}, waits=waits)], ran=ran, idles=True)
    assert rank.overlapped == pytest.approx(40e-9)


def test_ranks_that_are_alike_have_no_straggler() -> None:
    def ranks(*own: int) -> list[Any]:
        times = [step({"forward": PhaseTime(wall=wall, processor=wall, waited=100 - wall)}) for wall in own]
        return [rank_profile(number, [each], ran=[], idles=True) for number, each in enumerate(times)]

    assert find_straggler(ranks(80)) is None
    assert find_straggler(ranks(80, 85, 79)) is None
    late = find_straggler(ranks(60, 85, 59))
    assert late is not None
    assert (late.rank, late.phase, late.kind) == (1, "forward", "busy")


def test_one_process_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = job_file(tmp_path, steps=8, precision="fp32")
    assert main(["train", str(file), "--folder", str(tmp_path / "run"), "--profile"]) == 0
    out = capsys.readouterr().out
    assert "where a step's time goes" in out
    assert "straggler" not in out
    values = json.loads((tmp_path / "run" / "profile" / "profile.json").read_text(encoding="utf-8"))
    assert values["steps"] == [4, 5, 6, 7]
    (rank,) = values["ranks"]
    assert sum(rank["categories_ms"].values()) == pytest.approx(rank["step_ms"])
    # How much is communication depends on how often a loaded machine takes the processor away: no bound for it.
    assert all(milliseconds >= 0 for milliseconds in rank["categories_ms"].values())
    assert rank["categories_ms"]["compute"] > 0
    assert (tmp_path / "run" / "profile" / "trace-rank0.json").is_file()


def test_the_flag_keeps_what_the_file_says_and_names_the_folder(tmp_path: Path) -> None:
    file = job_file(tmp_path, run={"profile": {"steps": 2}}, steps=6)
    first, second, here = tmp_path / "first", tmp_path / "second", tmp_path / "here"
    for run, words, place in (first, (), first / "profile"), (second, (str(here),), here):
        assert main(["train", str(file), "--folder", str(run), "--profile", *words]) == 0
        assert json.loads((place / "profile.json").read_text(encoding="utf-8"))["steps"] == [4, 5]


WRONG = {
    "no steps": ({"profile": {"steps": 0}}, [], "run.profile.steps is 0; it should be greater than 0"),
    "no warm-up": (
        {"profile": {"warm_up": 2}},
        [],
        "run.profile.warm_up is 2; it should be greater than or equal to 4",
    ),
    "too short": (
        {},
        ["--profile", "--set", "recipe.steps=4"],
        "run.profile leaves the first 4 steps out, and the training takes 4; use recipe.steps: 5 or more",
    ),
    "twice": ({}, ["--profile", "a", "--profile", "b"], "argument --profile: it stands twice; keep one of them"),
    "dry run": ({}, ["--profile", "--dry-run"], "--profile goes with a training, and --dry-run takes three steps"),
    "a file": ({}, ["--profile", "job.yaml"], "run.profile.folder is job.yaml: job.yaml is a file"),
    "an engine that can't": (
        {"profile": True, "engine": "parameter-server", "layout": "dp2"},
        [],
        'run.profile is given, and engine "parameter-server" does not support profiling',
    ),
    "buckets of nothing": ({"bucket_mb": 0}, [], "run.bucket_mb is 0; it should be greater than 0"),
    "buckets of one rank": ({"bucket_mb": 5}, [], 'layout "single": run.bucket_mb is 5, and only replicas'),
    "buckets of shards": ({"bucket_mb": 5, "layout": "fsdp2"}, [], 'layout "fsdp2": run.bucket_mb is 5, and only'),
    "buckets of stages": ({"bucket_mb": 5, "layout": "pp2"}, [], "run.bucket_mb is 5, and only replicas"),
    "buckets of another": (
        {"bucket_mb": 5, "layout": "dp2", "engine": "parameter-server"},
        [],
        'run.bucket_mb is 5, and engine "parameter-server" has no such buckets; use engine native',
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_one_sentence(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, words, said = WRONG[case]
    monkeypatch.chdir(tmp_path)
    job_file(tmp_path, run=run)
    assert main(["train", "job.yaml", *words]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


def test_buckets_and_a_compressed_gradient_are_refused_together(tmp_path: Path) -> None:
    recipe = samestep.Recipe(task=Points(), batch=16, steps=20, communication={"kind": "powersgd"})  # pyright: ignore
    with pytest.raises(samestep.UserError, match=r"run.bucket_mb is 1, and recipe.communication is powersgd"):
        samestep.train(recipe, "dp2", bucket_mb=1, device="cpu")


def test_print_config_shows_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = job_file(tmp_path, run={"profile": True})
    assert main(["train", str(file), "--print-config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)["run"]["profile"]
    assert shown == {"folder": None, "warm_up": 4, "steps": 5}
