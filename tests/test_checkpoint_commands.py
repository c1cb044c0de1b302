"""`samestep checkpoint list`, `inspect` and `verify`: what is shown, what is found damaged, and wrong inputs."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_tasks import Points
from unsafe import lead_out, renew_sums, rewrite_info, trap_index

import samestep
from samestep.checkpoint.one_process import Tensors
from samestep.cli.main import main
from samestep.errors import CheckpointError

STEPS = (2, 4, 6, 7)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of seven steps with four checkpoints."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    recipe = samestep.Recipe(
        task=Points(),
        batch=33,
        steps=7,
        optimizer=samestep.AdamW(lr=1e-2),
        evaluation=samestep.Evaluation(every=2),
    )
    samestep.train(
        recipe,
        folder=folder,
        device="cpu",
        threads=1,
        log=(),
        checkpoint=samestep.Checkpointing(every=2, keep=9),
    )
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def command(*words: str | Path) -> int:
    return main(["checkpoint", *map(str, words)])


def mistake(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert command(*words) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    return told[0]


def asked(file: Path, *words: str | Path) -> Any:
    """What a command writes into a JSON file."""
    command(*words, "--json", file)
    return json.loads(file.read_text(encoding="utf-8"))


def metrics_of(run: Path) -> dict[int, dict[str, float]]:
    """The values of each evaluation, as the training wrote them down."""
    lines = (run / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return {values.pop("step"): values for values in found}


def test_list_says_what_the_training_said(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(tmp_path / "list.json", "list", trained)
    assert [each["step"] for each in found] == list(STEPS)
    assert {each["state"] for each in found} == {"complete"}
    for each in found:
        folder = trained / "checkpoints" / f"step-{each['step']}"
        assert each["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
        assert each["metrics"] == pytest.approx(metrics_of(trained)[each["step"]])
        assert (each["layout"], each["processes"], each["engine"]) == ("single", 1, "native")
        assert each["epoch"] == each["step"] // 7  # 200 samples in batches of 33
    shown = capsys.readouterr().out
    for step in STEPS:
        assert f"accuracy {metrics_of(trained)[step]['accuracy']:.4g}" in shown


def test_list_marks_the_best(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accuracies = {step: values["accuracy"] for step, values in metrics_of(trained).items() if step in STEPS}
    for flags, best in (([], max), (["--lowest"], min)):
        assert command("list", trained, "--best", "accuracy", *flags) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "the best" in line]
        assert int(line.split()[0]) == best(accuracies, key=lambda step: accuracies[step])


def test_list_shows_what_is_no_checkpoint(run: Path, tmp_path: Path) -> None:
    folder = run / "checkpoints"
    (folder / "step-6").rename(folder / "step-6.saving")
    (folder / "step-4" / "checkpoint.json").write_text("{", encoding="utf-8")
    found = {Path(each["path"]).name: each["state"] for each in asked(tmp_path / "list.json", "list", run)}
    assert found.keys() == {"step-2", "step-4", "step-6.saving", "step-7"}
    assert found["step-2"] == found["step-7"] == "complete"
    assert found["step-6.saving"] == "unfinished"
    assert "is damaged" in found["step-4"]


def test_inspect_shows_every_tensor(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(tmp_path / "found.json", "inspect", trained / "checkpoints" / "step-4")
    model = Points().model()
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    held = {
        kind: {each["name"]: tuple(each["shape"]) for each in found["tensors"] if each["kind"] == kind}
        for kind in ("model", "optimizer")
    }
    assert held["model"] == expected
    for name, shape in expected.items():
        assert held["optimizer"][f"{name}.exp_avg"] == held["optimizer"][f"{name}.exp_avg_sq"] == shape
        assert held["optimizer"][f"{name}.step"] == ()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert found["bytes"]["model"] == found["bytes"]["optimizer exp_avg"] == 4 * count
    assert found["info"]["step"] == 4
    assert found["info"]["versions"]["torch"]
    shown = capsys.readouterr().out
    assert "16 x 4" in shown
    assert "optimizer exp_avg_sq" in shown


def test_inspect_of_a_run_is_of_its_newest(trained: Path, tmp_path: Path) -> None:
    assert asked(tmp_path / "found.json", "inspect", trained)["info"]["step"] == 7


def test_verify_passes_what_is_whole(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, count in ((trained, 4), (trained / "checkpoints", 4), (trained / "checkpoints" / "step-2", 1)):
        assert command("verify", place) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.endswith(": whole") for line in lines] == [True] * count


def altered(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def shortened(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def emptied_sums(file: Path) -> None:
    rewrite_info(file.parent, lambda values: values.update(files={}))


def sums_without_tensors(file: Path) -> None:
    rewrite_info(file.parent, lambda values: values["files"].pop(file.name))


def sums_of_elsewhere(file: Path) -> None:
    rewrite_info(
        file.parent, lambda values: values["files"].update({"../step-2/.metadata": values["files"][".metadata"]})
    )


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("__0_0.distcp", altered, "checksum differs"),
        (".metadata", altered, "checksum differs"),
        ("__0_0.distcp", shortened, "were written"),
        ("__0_0.distcp", Path.unlink, "is missing"),
        ("__0_0.distcp", emptied_sums, "has no sum of .metadata"),
        ("__0_0.distcp", sums_without_tensors, "has no sum of __0_0.distcp"),
        ("checkpoint.json", shortened, "is damaged"),
        ("checkpoint.json", sums_of_elsewhere, "it has a sum of '../step-2/.metadata', outside of its folder"),
    ],
)
def test_verify_finds_damage(run: Path, tmp_path: Path, name: str, damage: Any, said: str) -> None:
    damage(run / "checkpoints" / "step-4" / name)
    assert command("verify", run) == 1
    found = asked(tmp_path / "found.json", "verify", run)
    faults = {Path(each["path"]).name: each["fault"] for each in found}
    assert said in faults.pop("step-4")
    assert faults == dict.fromkeys(["step-2", "step-6", "step-7"])


def test_verify_runs_nothing_of_an_index_whose_sum_fits(run: Path, tmp_path: Path) -> None:
    folder, trace = run / "checkpoints" / "step-7", tmp_path / "trace"
    trap_index(folder, trace)
    renew_sums(folder)
    (found,) = asked(tmp_path / "found.json", "verify", folder)
    assert "names posix.mkdir" in found["fault"]
    assert not trace.exists()


@pytest.mark.parametrize("absolute", [True, False])
def test_an_index_that_leads_out_of_its_folder_is_refused(run: Path, tmp_path: Path, absolute: bool) -> None:
    folder, elsewhere = run / "checkpoints" / "step-7", run / "checkpoints" / "step-6" / "__0_0.distcp"
    path = str(elsewhere) if absolute else "../step-6/__0_0.distcp"
    lead_out(folder, path)
    renew_sums(folder)
    (found,) = asked(tmp_path / "found.json", "verify", folder)
    assert f"it says that tensors are in {path!r}, outside of its folder" in found["fault"]
    with pytest.raises(CheckpointError, match="outside of its folder"):
        Tensors(folder)  # as commands read them that make other formats


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", "nowhere"], "there is no folder nowhere"),
        (["list", "."], "holds no checkpoint"),
        (["list", "RUN", "--best", "acuracy"], "no checkpoint has that metric; there are: accuracy"),
        (["list", "RUN", "--lowest"], "--lowest goes with --best"),
        (["list", "RUN", "--json", "."], "this is a folder"),
        (["inspect", "nowhere"], "there is no file or folder nowhere"),
        (["inspect", "file"], "is none of these"),
        (["inspect", "RUN", "--json", "nowhere/file"], "there is no folder nowhere"),
        (["verify", "nowhere"], "there is no folder nowhere"),
        (["verify", "file"], "holds no checkpoint"),
        (["verify"], "required: CHECKPOINT"),
        (["remove", "RUN"], 'samestep checkpoint has no command "remove"; there are list'),
        ([], "required: COMMAND"),
    ],
)
def test_mistakes(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: Sequence[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("something", encoding="utf-8")
    assert said in mistake(capsys, *[trained if word == "RUN" else word for word in words])
