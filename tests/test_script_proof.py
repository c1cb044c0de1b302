"""`samestep verify --script`: what records say, what is refused, and scripts of the zoo from end to end."""

import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import script_records as records
import torch
from script_records import Record, Step

from samestep.cli.main import main
from samestep.errors import UserError
from samestep.recording.record import RunRecord
from samestep.recording.samples import rows_of
from samestep.script_proof import runs
from samestep.script_proof.compare import Verdict, compare_runs
from samestep.script_proof.kinds import KINDS
from samestep.script_proof.runs import ScriptProof, ScriptStart, run_all, words
from samestep.script_proof.settings import RecordSettings
from samestep.subprocess_group import CommandOutcome

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS, GRADIENTS, MOVED = records.weights(0), records.weights(1), records.weights(2)


def step(*rows: str, **changed: Any) -> Step:
    return replace(Step(rows=rows, gradients=GRADIENTS, after=MOVED), **changed)


def record(*steps: Step, **changed: Any) -> Record:
    return Record(steps=steps, before=WEIGHTS, **changed)


def verdict(folder: Path, alone: Record, *split: Record) -> Verdict:
    return compare_runs(records.runs(folder, alone=alone, split=split))


def kind_of(found: Verdict) -> str | None:
    return found.finding.kind if found.finding is not None else None


def times(factor: float) -> dict[str, torch.Tensor]:
    return {name: factor * value for name, value in GRADIENTS.items()}


ALONE = record(step("a", "b", "c", "d"), step("e", "f", "g", "h"))
HALVES = (record(step("a", "c"), step("e", "g")), record(step("b", "d"), step("f", "h")))


def test_equal_records_are_the_same_step(tmp_path: Path) -> None:
    found = verdict(tmp_path, ALONE, *HALVES)
    assert found.same_step
    assert found.to_json()["first_difference"] is None
    assert (found.steps, found.processes) == (2, 2)


def test_what_was_not_compared_stands_with_the_same_step(tmp_path: Path) -> None:
    def not_compared(name: str, **changed: Any) -> list[str]:
        ranks = [replace(rank, **changed) for rank in (ALONE, *HALVES)]
        return verdict(tmp_path / name, ranks[0], *ranks[1:]).to_json()["not_compared"]

    assert not_compared("ended") == ["an evaluation", "a resumption"]
    assert not_compared("stopped", end="stopped") == ["steps after 2", "an evaluation", "a resumption"]
    assert not_compared("evaluated", evaluated=["e"]) == ["a resumption"]


def test_a_proof_that_stops_before_an_evaluation_names_the_steps_that_reach_it(tmp_path: Path) -> None:
    for size, more in ((40, "--steps 11 "), (4, None)):
        ranks = [
            replace(rank, end="stopped", size=size, iterations=[[[0, 1], [2, 3]]], evaluated=()) for rank in HALVES
        ]
        notes = " ".join(note.en for note in verdict(tmp_path / str(size), ALONE, *ranks).notes)
        assert "no evaluation was seen" in notes
        assert ("--steps" in notes) == (more is not None)
        assert more is None or more in notes


def test_a_run_of_several_ranks_may_be_what_a_split_run_is_compared_with(tmp_path: Path) -> None:
    ranks = [record(step(row, gradients=times(2))) for row in "abcd"]
    for name, factor, kind in (("same", 2.0, None), ("other", 1.0, "gradients-scaled")):
        pairs = [record(step(*rows, gradients=times(factor))) for rows in ("ab", "cd")]
        place = records.runs(tmp_path / name, alone=pairs[0], again=pairs[0], split=ranks)
        for run in ("alone", "again"):
            records.write(place / run, pairs)
        found = compare_runs(place)
        assert (found.processes, found.alone) == (4, 2)
        assert (kind_of(found) is None) is (kind is None)


def test_what_a_failed_script_wrote_is_told_without_the_provers_own_frames(tmp_path: Path) -> None:
    folder = Path(runs.__file__).parent
    own = [f'  File "{folder / name}.py", line 9, in main\n    run()\n' for name in ("server", "runner")]
    output = "".join(
        ["Traceback (most recent call last):\n", *own, '  File "train.py", line 1\nValueError: no data\n']
    )

    def starter(starts: Sequence[ScriptStart], proof: ScriptProof) -> list[CommandOutcome]:
        return [CommandOutcome(code=1, seconds=0.0, output=output)]

    with pytest.raises(UserError) as told:
        run_all(ScriptProof(script=("train.py",), device="cpu"), tmp_path / "runs", starter)
    assert str(told.value).splitlines()[1:] == [
        "Traceback (most recent call last):",
        '  File "train.py", line 1',
        "ValueError: no data",
    ]


def test_a_rank_that_ended_while_another_waited_is_named(tmp_path: Path) -> None:
    gone = "failed: RuntimeError: Connection closed by peer [127.0.0.1]"
    for other, early in ((gone, True), ("failed: ValueError: no such file", False)):

        def starter(starts: Sequence[ScriptStart], proof: ScriptProof, how: str = other) -> list[CommandOutcome]:
            outcomes = []
            for start in starts:
                ranks = (
                    [ALONE] if start.ranks == 1 else [replace(HALVES[0], end=how), replace(HALVES[1], end="ended")]
                )
                records.write(start.place, ranks)
                outcomes.append(CommandOutcome(code=start.ranks - 1, seconds=0.0, output="its last words"))
            return outcomes

        with pytest.raises(UserError) as told:
            run_all(ScriptProof(script=("train.py",), device="cpu"), tmp_path / str(early), starter)
        assert ("rank 1 ended after 2 steps, and rank 0, after 2 steps, waited" in str(told.value)) is early
        assert ("its last words" in str(told.value)) is not early


def test_rounding_is_no_difference_and_more_than_the_noise_is(tmp_path: Path) -> None:
    for number, (apart, same) in enumerate([(5e-6, True), (5e-4, False)]):
        noisy = {name: value * (1 + 1e-6) for name, value in GRADIENTS.items()}
        other = {**GRADIENTS, "head.bias": GRADIENTS["head.bias"] + apart * torch.tensor([1.0, -1, 1, -1, 1])}
        folder = records.runs(
            tmp_path / str(number),
            alone=record(step("a", "b")),
            again=record(step("a", "b", gradients=noisy)),
            split=[record(step("a", gradients=other)), record(step("b", gradients=other))],
        )
        found = compare_runs(folder)
        assert found.same_step is same
        if found.finding is not None:
            norm = GRADIENTS["head.bias"].double().norm().item()
            assert found.finding.module == "head.bias"
            assert found.finding.relative == pytest.approx(apart * 5**0.5 / norm, rel=1e-2)


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"gradients": times(2)}, "summed"),
        ({"gradients": times(0.5)}, "divided-twice"),
        ({"gradients": times(0.8)}, "gradients-scaled"),
        ({"gradients": {**GRADIENTS, "head.bias": 2 * GRADIENTS["head.bias"]}}, "some-gradients-scaled"),
        ({"gradients": {"body.weight": GRADIENTS["body.weight"]}}, "missing-gradient"),
        ({"after": {**MOVED, "head.bias": MOVED["head.bias"] + 0.1}}, "update-differs"),
        ({"after": records.weights(3), "lr": 0.2}, "learning-rate-scaled"),
        ({"after": records.weights(3), "decay": 0.1}, "weight-decay"),
    ],
)
def test_what_all_ranks_do_otherwise_has_a_kind(tmp_path: Path, changed: dict[str, Any], kind: str) -> None:
    ranks = [record(step(row, **changed)) for row in "ab"]
    found = verdict(tmp_path, record(step("a", "b")), *ranks)
    assert kind_of(found) == kind
    assert kind in KINDS


@pytest.mark.parametrize(
    ("alone", "factor", "kind"),
    [
        ([(0.5, 0), (0.5, 0)], 2.0, "summed"),  # one process has as many micro-batches: the ranks are it
        ([(0.5, 0), (0.5, 0)], 1.3, "summed"),  # clipped
        ([(1.0, 0)], 2.0, "accumulation-divisor"),
        ([(1.0, 0)], 1.3, "accumulation-divisor"),
        ([(2.0, 0), (2.0, 0)], 0.5, "accumulation-divisor"),
    ],
)
def test_a_multiple_of_the_ranks_and_of_the_micro_batches_is_told_by_those_of_one_process(
    tmp_path: Path, alone: list[tuple[float, int]], factor: float, kind: str
) -> None:
    twice = [(1.0, 0), (1.0, 0)]
    ranks = [record(step(row, gradients=times(factor), losses=twice)) for row in "ab"]
    assert kind_of(verdict(tmp_path, record(step("a", "b", losses=alone)), *ranks)) == kind


@pytest.mark.parametrize(
    ("alone", "split", "factor", "kind"),
    [
        (0.8, 1.6, 1.25, "summed"),  # 1.6 is clipped to 1
        (1.6, 0.8, 0.8, "divided-twice"),
        (0.8, 2.4, 1.25, "gradients-scaled"),  # by three, of two ranks
        (0.8, 1.6, 1.5, "gradients-scaled"),  # not by clipping
    ],
)
def test_a_multiple_that_clipping_has_reduced_is_told_by_the_norms_before_it(
    tmp_path: Path, alone: float, split: float, factor: float, kind: str
) -> None:
    ranks = [record(step(row, gradients=times(factor), clips=[(split, 1.0)])) for row in "ab"]
    assert kind_of(verdict(tmp_path, record(step("a", "b", clips=[(alone, 1.0)])), *ranks)) == kind


def test_ranks_with_gradients_of_their_own_are_told_by_the_module(tmp_path: Path) -> None:
    own = {**GRADIENTS, "head.bias": GRADIENTS["head.bias"] + 1}
    found = verdict(tmp_path, record(step("a", "b")), record(step("a")), record(step("b", gradients=own)))
    assert kind_of(found) == "parameter-not-reduced"
    assert found.finding is not None
    assert found.finding.module == "head.bias"
    both = times(2)
    none = verdict(tmp_path / "all", record(step("a", "b")), record(step("a")), record(step("b", gradients=both)))
    assert kind_of(none) == "not-reduced"


def test_a_mean_of_means_is_told_with_the_counts_that_explain_it(tmp_path: Path) -> None:
    # Over 6 and 2 targets the sums of losses are 12 and 8: 20 / 8 = 2.5 alone, (2 + 4) / 2 = 3 as a mean of means.
    alone = record(step("a", "b", losses=[(2.5, 8)]))
    other = records.weights(4)
    ranks = [record(step(row, losses=[loss], gradients=other)) for row, loss in (("a", (2.0, 6)), ("b", (4.0, 2)))]
    found = verdict(tmp_path, alone, *ranks)
    assert kind_of(found) == "mean-of-means"
    assert found.finding is not None
    assert "6, 2" in found.finding.words.en


def test_shards_are_joined_wherever_they_lie(tmp_path: Path) -> None:
    whole = GRADIENTS["body.weight"]  # 4 x 3: seven numbers here and five there, or a block of rows each
    for name, places, parts in (
        ("flat", [{"start": 0}, {"start": 7}], [whole.flatten()[:7], whole.flatten()[7:]]),
        ("blocks", [{"offset": [0, 0]}, {"offset": [3, 0]}], [whole[:3], whole[3:]]),
    ):
        ranks = [
            record(
                step(
                    "a",
                    gradients={"body.weight": part},
                    after={"body.weight": part},
                    places={"body.weight": {"whole": [4, 3], **place}},
                )
            )
            for place, part in zip(places, parts, strict=True)
        ]
        records.write(tmp_path / name, ranks)
        joined = RunRecord.read(tmp_path / name).joined(0, "gradient", "body.weight")
        assert joined is not None
        assert joined.value.equal(whole.double())


@pytest.mark.parametrize(
    ("alone", "split", "kind"),
    [
        (["ab cd"], ["ab", "ab"], "same-samples"),
        (["abcd", "efg"], ["ac eg", "bd fa"], "padded-sampler"),
        (["abcd", "ef"], ["ac e", "bd"], "lost-samples"),
        (["abcd", "efgh", "hgfe", "dcba"], ["ac eg ac eg", "bd fh bd fh"], "same-order-each-epoch"),
        (["abcd", "efgh"], ["ac ab", "bd ef"], "repeated-samples"),
    ],
)
def test_samples_that_are_others_have_a_kind(tmp_path: Path, alone: list[str], split: list[str], kind: str) -> None:
    one = record(*(step(*rows.replace(" ", "")) for rows in alone))
    ranks = [record(*(step(*rows) for rows in text.split(" "))) for text in split]
    ranks = [replace(rank, steps=[*rank.steps, *[step()] * (len(alone) - len(rank.steps))]) for rank in ranks]
    assert kind_of(verdict(tmp_path, one, *ranks)) == kind


def test_batches_of_another_size_are_a_mistake_that_names_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"batch sizes differ: 2 alone, 4 split, in step 1; pass --alone"):
        verdict(tmp_path, record(step("a", "b")), record(step("a", "c")), record(step("b", "d")))


@pytest.mark.parametrize(
    ("split", "told"),
    [
        (["xy", "zu"], "no sample of either run is in the other: .* augmentation seeded with its index"),
        (["bc ey", "dx fg"], r"1 of 4 are not .* the order is another; use one order .* or pass --alone"),
    ],
)
def test_samples_that_can_not_be_matched_are_told_with_a_hint(tmp_path: Path, split: list[str], told: str) -> None:
    steps = len(split[0].split())
    one = record(*(step(*rows) for rows in ("abcd", "efgh")[:steps]))
    with pytest.raises(UserError, match=told):
        verdict(tmp_path, one, *(record(*(step(*rows) for rows in ranks.split())) for ranks in split))


NOTHING = {name: torch.zeros_like(value) for name, value in GRADIENTS.items()}


def test_losses_that_are_always_0_are_refused(tmp_path: Path) -> None:
    silent = {"gradients": NOTHING, "losses": ((0.0, 0),)}
    one = record(step("a", "b", **silent), step("c", "d", **silent))
    ranks = [record(step(first, **silent), step(second, **silent)) for first, second in ("ac", "bd")]
    with pytest.raises(UserError, match=r"every loss .* in 2 steps is 0, and so is every gradient, .* not all -100"):
        verdict(tmp_path, one, *ranks)


def test_a_loss_of_0_with_gradients_is_judged_by_them(tmp_path: Path) -> None:
    zero = {"losses": ((0.0, 0),)}
    assert verdict(tmp_path, record(step("a", **zero)), record(step("a", **zero))).same_step


def test_evaluation_counts_every_sample_once(tmp_path: Path) -> None:
    alone = record(step("a", "b"), evaluated="xyz")
    twice = [record(step("a"), evaluated="xz"), record(step("b"), evaluated="yx")]
    assert kind_of(verdict(tmp_path, alone, *twice)) == "evaluation-repeats"


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        (("wx", "yz"), None),  # two batches of one sample on each rank, of one process as well
        (("wy", "za"), None),  # the same, shuffled
        (("wx", "xz"), "evaluation-repeats"),
        (("wx", "xx"), "evaluation-repeats"),
        (("w", "z"), "evaluation-loses"),  # no more than one process: another set
    ],
)
def test_an_evaluation_of_so_many_batches_of_each_rank_repeats_nothing(
    tmp_path: Path, ranks: tuple[str, str], kind: str | None
) -> None:
    split = [record(step(row), evaluated=rows, reduced=[3.0]) for row, rows in zip("ab", ranks, strict=True)]
    alone = record(step("a", "b"), evaluated="wx", reduced=[3.0])
    assert kind_of(verdict(tmp_path, alone, *split)) == kind


def test_other_first_weights_alone_want_a_seed(tmp_path: Path) -> None:
    folder = records.runs(
        tmp_path,
        alone=record(step("a")),
        again=replace(record(step("a")), before=records.weights(9)),
        split=[record(step("a"))],
    )
    with pytest.raises(UserError, match=r"two runs alone begin with different weights.*--seed 0"):
        compare_runs(folder)


def test_unseeded_weights_that_no_rank_sends_are_not_broadcast(tmp_path: Path) -> None:
    first = records.weights(0)
    heads = [{**first, "head.bias": records.weights(seed)["head.bias"]} for seed in (7, 8, 9)]
    folder = records.runs(
        tmp_path,
        alone=record(step("ab")),
        again=replace(record(step("ab")), before=heads[0]),
        split=[replace(record(step(row)), before=head) for row, head in zip("ab", heads[1:], strict=True)],
    )
    found = compare_runs(folder).finding
    assert found is not None
    assert (found.kind, found.module) == ("weights-not-broadcast", "head.bias")


def test_a_row_is_the_same_however_far_its_batch_is_padded() -> None:
    tokens = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 1]])
    mask = (tokens != 0).long()
    long = rows_of([], {"input_ids": tokens, "attention_mask": mask})
    short = rows_of([], {"input_ids": tokens[:1, :2], "attention_mask": mask[:1, :2]})
    assert long is not None
    assert short is not None
    assert long.hashes["input_ids"][0] == short.hashes["input_ids"][0]
    assert long.hashes["input_ids"][1] not in short.hashes["input_ids"]
    assert long.counts == {"rows": 2, "attention_mask != 0": 6}


# What is refused


MISTAKES = {
    "no such script": ('--script "nowhere.py"', "--script nowhere.py: there is no such script"),
    "no script": ('--script ""', "--script is empty; use --script"),
    "no module": ("--script=-m", '--script "-m" names no module'),
    "a program": ('--script "data.csv"', "no script of Python's"),
    "one process": (
        '--script "train.py" --processes 1',
        "--processes is '1'; a whole number from 2 to 1,024 is wanted",
    ),
    "steps": ('--script "train.py" --steps 0', 'argument --steps: "0" is out of range; use a whole number from 1 to'),
    "type": ('--script "train.py" --dtype int8', "--dtype int8: use float64"),
    "time": ('--script "train.py" --time-limit 0', '--time-limit: "0" is no time; use seconds above 0'),
    "engine": ('--script "train.py" --engine keres', "--engine keres: it can be torch"),
    "precision": ('--script "train.py" --precision bf16', "--precision goes with a job file"),
    "job option": ('--script "train.py" --layout dp2', "--layout goes with a job file"),
    "both": ('job.yaml --script "train.py"', "job.yaml is a job file, and --script names a script"),
    "neither": ("--steps 3", "verify needs a job file, or a script of your own"),
    "alone alone": ('job.yaml --alone "train.py"', "--alone goes with --script"),
    "kept": ('--script "train.py" --keep .', "--keep .: it is there already"),
}


@pytest.mark.parametrize(("line", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_message_before_anything_starts(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("", encoding="utf-8")
    Path("data.csv").write_text("", encoding="utf-8")
    monkeypatch.setattr(runs.subprocess_group, "run", None)  # what starts a process
    assert main(["verify", *shlex.split(line)]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (
            CommandOutcome(code=None, seconds=9.0, output=""),
            r"train.py with 1 process did not end within 9 s; --steps N",
        ),
        (
            CommandOutcome(code=1, seconds=1.0, output="\nValueError: no data\n"),
            r"(?s)1 process failed \(verify needs .* --alone-processes 2 compares with two\):.*no data",
        ),
        (
            CommandOutcome(code=2, seconds=1.0, output="error: --data is required"),
            r"(?s)failed .*:\nerror: --data is required",
        ),
    ],
)
def test_a_run_that_fails_or_never_ends_is_told(tmp_path: Path, outcome: CommandOutcome, message: str) -> None:
    def starter(starts: Sequence[ScriptStart], proof: ScriptProof) -> list[CommandOutcome]:
        return [outcome]

    with pytest.raises(UserError, match=message):
        run_all(ScriptProof(script=("train.py",), time_limit=9), tmp_path / "runs", starter)


def test_the_own_frames_of_the_runner_are_left_out(tmp_path: Path) -> None:
    printed = (
        "samestep: rank 0 on localhost failed first: exit code 1\n"
        "Traceback (most recent call last):\n"
        f'  File "{Path(runs.__file__).with_name("runner.py")}", line 35, in main\n'
        "    _run(command, engines)\n"
        "    ~~~~^^^^^^^^^^^^^^^^^^\n"
        '  File "train.py", line 1, in <module>\n'
        "    import nothing\n"
        "ModuleNotFoundError: No module named 'nothing'\n"
        "all that it wrote: localhost:/tmp/rank-0.err\n"
    )

    def starter(starts: Sequence[ScriptStart], proof: ScriptProof) -> list[CommandOutcome]:
        return [CommandOutcome(code=1, seconds=1.0, output=printed)]

    with pytest.raises(UserError) as caught:
        run_all(ScriptProof(script=("train.py",)), tmp_path / "runs", starter)
    assert str(caught.value).splitlines()[1:] == [
        "rank 0 on localhost failed first: exit code 1",
        "Traceback (most recent call last):",
        '  File "train.py", line 1, in <module>',
        "    import nothing",
        "ModuleNotFoundError: No module named 'nothing'",
    ]


def test_an_engine_that_is_not_installed_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("", encoding="utf-8")
    monkeypatch.setattr(runs.subprocess_group, "run", None)  # what starts a process
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["verify", "--script", "train.py", "--engine", "horovod"]) == 2
    told = capsys.readouterr().err
    assert told == "samestep: --engine horovod: the package horovod is not installed; use make horovod\n"


def test_rounding_that_grows_is_said(tmp_path: Path) -> None:
    noisy = {name: value * 1.05 for name, value in GRADIENTS.items()}
    folder = records.runs(
        tmp_path,
        alone=ALONE,
        again=record(step("a", "b", "c", "d"), step("e", "f", "g", "h", gradients=noisy)),
        split=HALVES,
    )
    notes = [note.en for note in compare_runs(folder).notes]
    assert any(note.startswith("from step 2 on rounding alone") for note in notes)
    assert not any("rounding alone" in note.en for note in verdict(tmp_path / "quiet", ALONE, *HALVES).notes)


@pytest.mark.parametrize(
    ("processes", "message"),
    [(0, r"alone, ended without a step of a torch.optim optimizer"), (2, r"took no step .* in its own process")],
)
def test_a_script_that_trains_nothing_here_is_told(tmp_path: Path, processes: int, message: str) -> None:
    nothing = record(processes=processes)
    with pytest.raises(UserError, match=message):
        verdict(tmp_path, nothing, nothing)


def test_python_before_a_script_is_taken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("", encoding="utf-8")
    assert words("--script", "python train.py --lr '1 2'") == ("train.py", "--lr", "1 2")


def test_variables_before_a_script_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("", encoding="utf-8")
    script = words("--script", "A_B=1 C='2 x=3' python train.py D=4")
    assert script == ("A_B=1", "C=2 x=3", "train.py", "D=4")
    start = runs.make_start(
        ScriptProof(script=script), tmp_path, "alone", script, RecordSettings(folder="", steps=1), 1
    )
    assert start.command == ("train.py", "D=4")
    assert RecordSettings.read(start.settings_file).variables == {"A_B": "1", "C": "2 x=3"}
    with pytest.raises(UserError, match="--script is empty"):
        words("--script", "A=1")


# From end to end


def launched_here(command: Sequence[str], *, limit: float) -> CommandOutcome:
    """`samestep launch` in this process, which starts the ranks."""
    return CommandOutcome(code=main(command[3:]), seconds=0.0, output="")


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # PyTorch's elastic agent leaves ranks' files
@pytest.mark.parametrize("here", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_script_is_proved_by_the_command(
    here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if here:
        monkeypatch.setattr(runs.subprocess_group, "run", launched_here)
    file, page = tmp_path / "verdict.json", tmp_path / "page.html"
    script = f"{ROOT}/zoo/fault_loss_times_ranks.py"
    command = ["verify", "--script", script, "--steps", "2", "--json", str(file), "--report", str(page)]
    code = main(command)
    printed = capsys.readouterr()
    assert code == 1, printed.out + printed.err
    assert "NOT the same step: step 1, gradient: gradients are 2.000 times as large" in printed.out
    found = json.loads(file.read_text(encoding="utf-8"))
    assert (found["kind"], found["same_step"], found["steps"]) == ("summed", False, 2)
    assert found["first_difference"]["relative"] == pytest.approx(1.0, rel=1e-3)
    assert found["noise"]["gradient"] < 1e-5
    text = page.read_text(encoding="utf-8")
    assert "gradients are 2.000 times as large" in text
    assert "梯度是 2.000 倍" in text


FEW = ("fault_clip_fsdp1_shards", "right_sliced_micro_batches")


def zoo(file: Path, *names: str, limit: float) -> list[dict[str, Any]]:
    command = [sys.executable, str(ROOT / "tools/zoo.py"), *names, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text(encoding="utf-8"))


def right_kind_and_module(found: dict[str, Any]) -> bool:
    wanted = found["wanted"]
    return found["kind"] == wanted["kind"] and (found["module"] or "").startswith(wanted["module"] or "")


@pytest.mark.timeout(240)
def test_a_few_of_the_zoo(tmp_path: Path) -> None:
    found = zoo(tmp_path / "zoo.json", *FEW, limit=220)
    assert [each["name"] for each in found] == sorted(FEW)
    assert [each["name"] for each in found if not right_kind_and_module(each)] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_zoo(tmp_path: Path) -> None:
    found = zoo(tmp_path / "zoo.json", limit=1180)
    faults = [each for each in found if each["wanted"]["kind"] is not None]
    assert len(faults) >= 30
    assert len(found) - len(faults) >= 15
    assert [each["name"] for each in found if not right_kind_and_module(each)] == []
