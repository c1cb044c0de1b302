"""`recipe.communication`: every method beside a plain loop over simulated ranks, bytes, checkpoints, mistakes."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from proving import prove
from resuming import job_of, train_all
from safetensors.torch import load_file
from simulated_replicas import (
    OPTIMIZER,
    Simulation,
    apart,
    begin_diloco,
    diloco,
    few_bits,
    half,
    local_sgd,
    one_bit_adam,
    plain,
    powersgd,
    resized,
    zero_one_adam,
)
from small_tasks import Points, ScoredWords
from torch.func import functional_call

import samestep
from samestep import jobfile
from samestep.checkpoint.compatibility import changes
from samestep.checkpoint.folder import name_of
from samestep.checkpoint.info import read_info
from samestep.display.proofs import print_proof
from samestep.errors import CheckpointError, UserError
from samestep.job import Job
from samestep.validation import checked

BATCH, SAMPLES, STEPS, EVALUATED, SAVED, CLIP = 10, 45, 12, 5, 7, 0.5
TENSORS = {"0.weight": 64, "0.bias": 16, "1.weight": 16, "1.bias": 16, "4.weight": 48, "4.bias": 3}
NUMBERS = sum(TENSORS.values())
HALVES = (["0.weight", "0.bias", "1.weight"], ["1.bias", "4.weight", "4.bias"])

METHODS: Mapping[str, dict[str, Any]] = {
    "bf16": {"kind": "bf16"},
    "fp16": {"kind": "fp16"},
    "local-sgd": {"kind": "local-sgd", "every": 3, "start": 2},
    "diloco": {"kind": "diloco", "every": 4, "outer_lr": 0.6, "outer_momentum": 0.8},
    "streaming": {"kind": "diloco", "every": 4, "fragments": 2, "overlap": 2, "mixing": 0.25},
    "four-bits": {"kind": "diloco", "every": 3, "outer_lr": 0.6, "outer_momentum": 0.8, "bits": 4},
    "streaming-8": {"kind": "diloco", "every": 4, "fragments": 2, "overlap": 2, "mixing": 0.5, "bits": 8},
    "powersgd": {"kind": "powersgd", "rank": 2, "start": 2},
    "one-bit-adam": {"kind": "one-bit-adam", "warmup": 2},
    "zero-one-adam": {
        "kind": "zero-one-adam",
        "variance_scaler": 2,
        "variance_stop": 6,
        "local_scaler": 3,
        "local_most": 4,
    },
}
SIMULATED: Mapping[str, Any] = {
    "bf16": half(torch.bfloat16),
    "fp16": half(torch.float16),
    "local-sgd": local_sgd(every=3, start=2),
    "diloco": diloco(every=4, lr=0.6, momentum=0.8, parts=[list(TENSORS)]),
    "streaming": diloco(every=4, lr=0.7, momentum=0.9, parts=HALVES, overlap=2, mixing=0.25),
    "four-bits": diloco(every=3, lr=0.6, momentum=0.8, parts=[list(TENSORS)], told=few_bits(7)),
    "streaming-8": diloco(every=4, lr=0.7, momentum=0.9, parts=HALVES, overlap=2, mixing=0.5, told=few_bits(127)),
    "powersgd": powersgd(rank=2, start=2),
    "one-bit-adam": one_bit_adam(warmup=2),
    # The variance in the steps 0, 1, 2, 4 and 6, the last of which is beyond the stop; an exchange every second step
    # from the seventh on, and every fourth after three steps.
    "zero-one-adam": zero_one_adam(renewals=(1, 2, 3, 5), exchanges=(4, 6, 8, 12)),
}
KEEPS_NOTHING = ("bf16", "fp16")  # from one step to the next
# Each is beside a fast one: of the other half precision, without fragments, and with more bits.
SLOW = ("fp16", "diloco", "streaming-8")
FAST = tuple(name for name in METHODS if name not in SLOW)
# Fast tests go on with another number of ranks by a method of a round, and by one of an optimizer of its own.
FAST_ON_THREE = ("streaming", "zero-one-adam")
MICRO_BATCH = 3  # of up to five samples on a rank
CLOSE = 1e-9


def task() -> samestep.Task:
    return ScoredWords(samples=SAMPLES)


def recipe(communication: dict[str, Any] | None, **more: Any) -> samestep.Recipe:
    values = {
        "task": task(),
        "batch": BATCH,
        "steps": STEPS,
        "precision": "fp64",
        "clip": CLIP,
        "optimizer": OPTIMIZER,
        "evaluation": {"every": EVALUATED},
        "communication": communication,
        **more,
    }
    return checked(samestep.Recipe, values, prefix=("recipe",))


def simulated(name: str) -> Simulation:
    run = Simulation(task(), ranks=2, batch=BATCH, clip=CLIP)
    if METHODS.get(name, {}).get("kind") == "diloco":
        begin_diloco(run)
    return run


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / name_of(step)


def sent(folder: Path) -> list[int]:
    return [json.loads(line)["sent_bytes"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def model_of(run: Simulation) -> dict[str, torch.Tensor]:
    """What all simulated ranks together stand for: each part of the model by its own weights."""
    parts = HALVES if 1 in run.ranks[0].kept else [list(TENSORS)]
    found: dict[str, torch.Tensor] = {}
    for number, names in enumerate(parts):
        weights = [rank.kept.get(number, rank.weight) for rank in run.ranks]
        mean = run.mean(lambda rank: rank.x, weights if any(weights) else None)
        found |= {name: mean[name] for name in names}
    return {name: found[name] for name in TENSORS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compression")


class OnDemand(dict[Any, samestep.TrainResult]):
    """Trainings by what they are called; the first one that is wanted of a group has the whole group trained."""

    def __init__(self, groups: Sequence[Sequence[Any]], job: Callable[[Any], Job]) -> None:
        super().__init__()
        self.groups, self.job = groups, job

    def __missing__(self, key: Any) -> samestep.TrainResult:
        (group,) = (group for group in self.groups if key in group)
        self.update(zip(group, train_all([self.job(each) for each in group]), strict=True))
        return self[key]


@pytest.fixture(scope="module")
def trained(folder: Path) -> Mapping[str, samestep.TrainResult]:
    """Every method on two ranks, in one start of them; evaluated and saved in the middle of every round."""

    def job(name: str) -> Job:
        saving = {"every": SAVED, "keep": 9}
        return job_of(recipe(METHODS[name]), "dp2", folder / name, micro_batch=MICRO_BATCH, checkpoint=saving)

    return OnDemand([FAST, SLOW], job)


@pytest.fixture(scope="module")
def resumed(folder: Path, trained: Mapping[str, Any]) -> Mapping[tuple[str, int], samestep.TrainResult]:
    """The same from the checkpoints after step 7, on two and on three ranks."""

    def job(case: tuple[str, int]) -> Job:
        name, ranks = case
        return job_of(
            recipe(METHODS[name]),
            f"dp{ranks}",
            folder / f"{name}-on-{ranks}",
            micro_batch=MICRO_BATCH,
            checkpoint={"resume": str(checkpoint_of(trained[name].folder, SAVED))},
        )

    more = [name for name in METHODS if name not in (*KEEPS_NOTHING, *FAST_ON_THREE)]
    groups = [[(name, 2) for name in FAST], [(name, 2) for name in SLOW]]
    groups += [[(name, 3) for name in FAST_ON_THREE], [(name, 3) for name in more]]
    return OnDemand(groups, job)


def methods(fast: Sequence[str] = FAST, *, left_out: Sequence[str] = ()) -> pytest.MarkDecorator:
    """A test of every method, of which those that are not among the fast ones are slow."""
    names = [name for name in METHODS if name not in left_out]
    marked = [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", marked)


@methods()
def test_a_method_takes_the_steps_of_simulated_ranks(name: str, trained: Mapping[str, Any]) -> None:
    run = simulated(name)
    run.take(STEPS, SIMULATED[name])
    assert trained[name].losses == pytest.approx(run.losses, rel=CLOSE)
    assert apart(load_file(trained[name].model_file), model_of(run)) < CLOSE


def test_methods_take_other_steps_than_plain_replicas_and_each_other(trained: Mapping[str, Any]) -> None:
    run = simulated("plain")
    run.take(STEPS, plain)
    last = [run.losses[-1], *(trained[name].losses[-1] for name in FAST)]
    assert min(abs(a - b) for i, a in enumerate(last) for b in last[:i]) > 1000 * CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_an_evaluation_in_a_round_is_of_the_mean_of_all_ranks(
    name: str, folder: Path, trained: Mapping[str, Any]
) -> None:
    run = simulated(name)
    run.take(EVALUATED, SIMULATED[name])
    inputs, labels = zip(*task().eval_set(), strict=True)  # type: ignore[misc]
    scores = functional_call(run.model, model_of(run), (torch.stack(inputs).double(),))
    right = (scores.argmax(dim=1) == torch.stack(labels)).double().mean().item()
    assert trained[name].steps == STEPS
    lines = (folder / name / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    assert {"step": EVALUATED, "accuracy": pytest.approx(right)}.items() <= json.loads(lines[0]).items()


# Bytes that one of two ranks sends in a step: an all-reduce of b bytes is 2 b (n - 1) / n = b.
_LOSSES = 8 * 2  # the sum of losses and their number
_LOCAL = 8 * 4  # the same, and the norms with their weights, after backward
_FLAGS = len(TENSORS)  # which parameters a step used, a byte each; of DistributedDataParallel's hooks 8
# 163 numbers in two chunks of 88, of which half go to the other rank and all of the sum come back; 8 scales to the
# other rank, 3 of the first chunk and 5 of the second, and as many of the sum as the chunk with most has.
_ONE_BIT = 88 // 8 + 4 * 8 + 88 // 8 + 4 * 5


def expected_bytes(name: str, step: int) -> int:
    """Of step `step`, counted from 1."""
    part = [sum(TENSORS[key] for key in names) for names in HALVES]
    return {
        "bf16": _LOSSES + 8 * _FLAGS + 2 * NUMBERS,
        "fp16": _LOSSES + 8 * _FLAGS + 2 * NUMBERS,
        "local-sgd": _LOCAL + 8 * (NUMBERS + 1) * (step <= 2 or step % 3 == 0),
        "diloco": _LOCAL + 8 * (NUMBERS + 1) * (step % 4 == 0),
        "streaming": _LOCAL + 8 * (part[0] + 1) * (step % 4 == 0) + 8 * (part[1] + 1) * (step % 4 == 2),
        # 163 numbers in two chunks of 128: codes and scales of one of them each way, with a weight there.
        "four-bits": _LOCAL + ((64 + 8 + 8) + (64 + 8)) * (step % 3 == 0),
        # 96 and 67 numbers, in two chunks of 64.
        "streaming-8": _LOCAL + ((64 + 4 + 8) + (64 + 4)) * (step % 2 == 0),
        # 51 numbers of biases and norms; P and Q of 16 x 4 and 3 x 16 numbers with two columns each.
        "powersgd": _LOSSES + _FLAGS + 8 * (NUMBERS if step <= 2 else 51 + 2 * (16 + 3) + 2 * (4 + 16)),
        "one-bit-adam": _LOSSES + _FLAGS + (8 * NUMBERS if step <= 2 else _LOCAL + _ONE_BIT),
        "zero-one-adam": _LOSSES
        + _FLAGS
        + (8 * NUMBERS if step in (1, 2, 3, 5) else _LOCAL + _ONE_BIT * (step in (4, 6, 8, 12))),
    }[name]


@methods()
def test_the_bytes_that_are_recorded_are_those_of_the_formula(
    name: str, folder: Path, trained: Mapping[str, Any]
) -> None:
    wanted = [expected_bytes(name, step) for step in range(1, STEPS + 1)]
    assert trained[name].sent_bytes == sum(wanted)
    assert sent(folder / name) == wanted
    assert json.loads((folder / name / "report.json").read_text())["sent_bytes"] == sum(wanted)


@methods()
def test_the_bytes_that_are_recorded_are_those_that_are_seen_on_their_way(
    name: str, trained: Mapping[str, Any], folder: Path
) -> None:
    assert trained[name].usage[0].sent_in_all == sent(folder / name)[2]  # the third step is measured


@pytest.mark.slow
@methods()
def test_a_training_goes_on_as_if_it_had_not_ended(
    name: str, folder: Path, trained: Mapping[str, Any], resumed: Mapping[Any, Any]
) -> None:
    again = resumed[name, 2]
    assert again.first_step == SAVED
    assert list(again.losses) == list(trained[name].losses[SAVED:])
    found, wanted = load_file(again.model_file), load_file(trained[name].model_file)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert sent(folder / f"{name}-on-2") == sent(folder / name)[SAVED:]


@pytest.mark.slow
@methods(FAST_ON_THREE, left_out=KEEPS_NOTHING)
def test_a_training_goes_on_with_another_number_of_ranks(name: str, resumed: Mapping[Any, Any]) -> None:
    run = simulated(name)
    run.take(SAVED, SIMULATED[name])
    resized(run, 3, model_of(run))
    run.take(STEPS - SAVED, SIMULATED[name])
    assert resumed[name, 3].losses == pytest.approx(run.losses[SAVED:], rel=CLOSE)
    assert apart(load_file(resumed[name, 3].model_file), model_of(run)) < CLOSE


class Normed(Points):
    """With batch norm."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, self.classes))


@pytest.fixture(scope="module")
def proofs() -> Mapping[str, Any]:
    cases = {
        "apart": recipe({"kind": "powersgd", "rank": 2, "start": 1}),
        "warm-up": recipe({"kind": "one-bit-adam", "warmup": 50}),
        "normed": recipe({"kind": "local-sgd"}, task=Normed()),
    }
    return prove({name: (each, "dp2", {}) for name, each in cases.items()}, steps=3)


def test_verify_says_what_a_method_is_and_how_far_its_steps_are(
    proofs: Mapping[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    apart_, warm = proofs["apart"], proofs["warm-up"]
    assert not apart_.same_step
    assert max(apart_.max_relative_difference.values()) > 1e-4
    (words,) = [line for line in apart_.words() if "recipe.communication" in line]
    assert "is powersgd, which does not take the same step as one process; in these 3 steps" in words
    # Steps of a warm-up are those of one process; the method's are not, and that is what it is called.
    assert max(warm.max_relative_difference.values()) < 1e-10
    assert not warm.same_step
    assert warm.to_json()["communication"] == "one-bit-adam"
    print_proof(apart_)
    told = capsys.readouterr().out
    assert told.startswith("dp2 does NOT take the same step as one process\n")
    for name in ("loss", "parameters"):
        assert f"{apart_.max_relative_difference[name]:.1e}" in " ".join(told.split())


@pytest.mark.parametrize(
    ("communication", "layout", "run", "more", "message"),
    [
        ({"kind": "diloco"}, "fsdp2", {}, {}, "is diloco, which is for plain replicas; use dp2"),
        ({"kind": "diloco"}, "single", {}, {}, "is diloco, which is for plain replicas; use dp2"),
        ({"kind": "bf16"}, "dp2 tp2", {}, {}, "is bf16, which is for plain replicas; use dp4"),
        ({"kind": "bf16"}, "dp2 offload=optimizer", {}, {}, "use dp2 without offload=optimizer"),
        ({"kind": "bf16"}, "single", {"engine": "data-parallel"}, {}, 'engine "data-parallel" does not have'),
        ({"kind": "fp16"}, "dp2", {}, {"precision": "fp16"}, "is fp16 and recipe.precision is fp16"),
    ],
)
def test_what_a_method_can_not_have_is_refused_before_any_process_starts(
    communication: dict[str, Any], layout: str, run: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        samestep.train(recipe(communication, **more), layout, **run)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("communication", "message"),
    [
        ({"kind": "dilco"}, "recipe.communication.kind is 'dilco'; did you mean \"diloco\"?"),
        ({"every": 3}, "recipe.communication.kind is missing"),
        ({"kind": "powersgd", "rnk": 3}, 'unknown key "recipe.communication.rnk"; did you mean "rank"?'),
        ({"kind": "powersgd", "rank": 0}, "recipe.communication.rank is 0; it should be greater than 0"),
        ({"kind": "local-sgd", "every": True}, "recipe.communication.every is true; it should be a number"),
        ({"kind": "diloco", "every": 3, "fragments": 5}, "fragments is 5 and every is 3"),
        ({"kind": "diloco", "every": 3, "overlap": 3}, "overlap is 3 and every is 3"),
        ({"kind": "diloco", "bits": 2}, "recipe.communication.bits is 2; it should be 32, 16, 8 or 4"),
        (
            "bf16",
            "recipe.communication is 'bf16'; it should be a section of keys and values, such as {kind: bf16}",
        ),
    ],
)
def test_wrong_options_are_told_in_one_sentence(communication: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe(communication)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_kinds_of_adam_want_adam() -> None:
    with pytest.raises(UserError, match="which is a kind of Adam, and optimizer is sgd; use adamw"):
        recipe({"kind": "one-bit-adam"}, optimizer={"name": "sgd"})


def test_ranks_that_step_by_themselves_have_no_batch_norm(proofs: Mapping[str, Any]) -> None:
    assert "local-sgd, whose ranks step by themselves, and 1 (BatchNorm1d)" in proofs["normed"]


def test_another_method_does_not_go_on_from_a_checkpoint(trained: Mapping[str, Any]) -> None:
    saved = read_info(checkpoint_of(trained["four-bits"].folder, SAVED)).recipe
    other = jobfile.plain(recipe({**METHODS["four-bits"], "outer_momentum": 0.9}))
    with pytest.raises(CheckpointError, match=r"recipe\.communication\.outer_momentum is 0\.9, and was 0\.8"):
        changes(saved, {**other, "task": saved["task"]})


def test_a_job_file_with_a_method_is_printed_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("recipe: {task: x.py:X, communication: {kind: diloco, every: 7}}\n", encoding="utf-8")
    loaded = jobfile.load(file)
    again = tmp_path / "again.yaml"
    again.write_text(jobfile.dump(loaded), encoding="utf-8")
    assert jobfile.load(again).job.recipe.communication == loaded.job.recipe.communication
