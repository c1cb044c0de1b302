"""Nothing that stands in a checkpoint is run, whatever its format."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from formats import points_file
from unsafe import renew_sums, rewrite_info, trap_index, trap_tensors, trapped_state

from samestep.cli.main import main
from samestep.convert.convert import convert
from samestep.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to:UserWarning")


@pytest.fixture
def mlp_file(tmp_path: Path) -> Path:
    return points_file(tmp_path)


def _of_own(folder: Path, source: Path) -> Path:
    convert(source, folder / "own", to="samestep")
    return folder / "own"


def _of_fsdp(folder: Path, source: Path) -> Path:
    convert(source, folder / "fsdp", to="fsdp")
    return folder / "fsdp"


def state_dict(folder: Path, trace: Path, _: Path) -> Path:
    torch.save(trapped_state(trace), folder / "bad.pt")
    return folder / "bad.pt"


def ddp(folder: Path, trace: Path, _: Path) -> Path:
    torch.save(trapped_state(trace, "module."), folder / "bad.pt")
    return folder / "bad.pt"


def former_file(folder: Path, trace: Path, _: Path) -> Path:
    torch.save(trapped_state(trace), folder / "bad.pt", _use_new_zipfile_serialization=False)
    return folder / "bad.pt"


def hugging_face(folder: Path, trace: Path, _: Path) -> Path:
    (folder / "bad").mkdir()
    (folder / "bad" / "config.json").write_text("{}", encoding="utf-8")
    torch.save(trapped_state(trace), folder / "bad" / "pytorch_model.bin")
    return folder / "bad"


def accelerate(folder: Path, trace: Path, _: Path) -> Path:
    (folder / "bad").mkdir()
    torch.save({}, folder / "bad" / "random_states_0.pkl")
    torch.save(trapped_state(trace), folder / "bad" / "pytorch_model.bin")
    return folder / "bad"


def deepspeed_model(folder: Path, trace: Path, _: Path) -> Path:
    (folder / "bad").mkdir()
    torch.save({"module": trapped_state(trace)}, folder / "bad" / "mp_rank_00_model_states.pt")
    return folder / "bad"


def deepspeed_optimizer(folder: Path, trace: Path, source: Path) -> Path:
    (folder / "bad").mkdir()
    torch.save({"module": torch.load(source)}, folder / "bad" / "mp_rank_00_model_states.pt")
    file = folder / "bad" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": trapped_state(trace)}, file)
    return folder / "bad"


def fsdp_index(folder: Path, trace: Path, source: Path) -> Path:
    place = _of_fsdp(folder, source)
    trap_index(place / "pytorch_model_fsdp_0", trace)
    return place


def fsdp_tensors(folder: Path, trace: Path, source: Path) -> Path:
    place = _of_fsdp(folder, source)
    trap_tensors(place / "pytorch_model_fsdp_0", trace)
    return place


def own_index(folder: Path, trace: Path, source: Path) -> Path:
    place = _of_own(folder, source)
    trap_index(place, trace)
    renew_sums(place)
    return place


def own_tensors(folder: Path, trace: Path, source: Path) -> Path:
    place = _of_own(folder, source)
    trap_tensors(place, trace)
    renew_sums(place)
    return place


@pytest.mark.parametrize(
    "make",
    [
        state_dict,
        ddp,
        former_file,
        hugging_face,
        accelerate,
        deepspeed_model,
        deepspeed_optimizer,
        fsdp_index,
        fsdp_tensors,
        own_index,
        own_tensors,
    ],
)
@pytest.mark.parametrize("words", [["convert", "BAD", "out.safetensors"], ["inspect", "BAD"]])
def test_nothing_in_a_pickle_is_run(
    make: Callable[[Path, Path, Path], Path],
    words: Sequence[str],
    tmp_path: Path,
    mlp_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "trace"
    bad = make(tmp_path, trace, mlp_file)
    capsys.readouterr()
    code = main(["checkpoint", *[str(bad) if word == "BAD" else word for word in words]])
    told = capsys.readouterr().err.splitlines()
    assert not trace.exists()
    if "tensors" in make.__name__ and words[0] == "inspect":
        assert code == 0  # no tensor is read to say what there is
        return
    assert code == 2
    assert len(told) == 1
    assert "posix.mkdir" in told[0]
    assert not (tmp_path / "out.safetensors").exists()


def test_the_traps_would_run(tmp_path: Path) -> None:
    file = state_dict(tmp_path, tmp_path / "trace", tmp_path)
    torch.load(file, weights_only=False)
    assert (tmp_path / "trace").is_dir()


def test_a_recipe_in_a_checkpoint_runs_no_file(tmp_path: Path, mlp_file: Path) -> None:
    own = _of_own(tmp_path, mlp_file)
    code = tmp_path / "code.py"
    code.write_text("import os\nos.mkdir('trace')\n", encoding="utf-8")
    rewrite_info(own, lambda values: values.update(recipe={"task": f"{code}:Task", "batch": 4}))
    with pytest.raises(UserError, match=r"--job JOB\.yaml"):
        convert(own, tmp_path / "hf", to="hugging-face")
    assert not (tmp_path / "trace").exists()
