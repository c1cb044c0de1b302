"""`samestep checkpoint convert`: what can't be read, what is refused, and that nothing half-written stays."""

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from formats import classifier, job_file, model_of, points, points_file
from safetensors.torch import save_file
from small_tasks import Points

import samestep
from samestep.cli.main import main
from samestep.convert.convert import convert
from samestep.convert.formats import FORMATS
from samestep.errors import UserError
from samestep.job import Job

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to:UserWarning")
ALL = sorted(name for name, form in FORMATS.items() if form.holds != "adapters")


@pytest.fixture
def mlp_file(tmp_path: Path) -> Path:
    return points_file(tmp_path)


@pytest.fixture
def place(tmp_path: Path, mlp_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with good and bad files."""
    monkeypatch.chdir(tmp_path)
    state = torch.load(mlp_file, weights_only=True)
    Path("text.txt").write_text("something", encoding="utf-8")
    Path("cut.pt").write_bytes(mlp_file.read_bytes()[:-300])
    Path("zip.pt").write_bytes(b"PK\x03\x04" + bytes(50))
    Path("garbage.safetensors").write_bytes(bytes(range(200)))
    save_file(state, "good.safetensors")
    Path("cut.safetensors").write_bytes(Path("good.safetensors").read_bytes()[:-5])
    leads_out = {"weight_map": {"weight": "../elsewhere.safetensors"}}
    Path("out.safetensors.index.json").write_text(json.dumps(leads_out), encoding="utf-8")
    lacks = {"weight_map": {"weight": "missing.safetensors"}}
    Path("lacks.safetensors.index.json").write_text(json.dumps(lacks), encoding="utf-8")
    wrong = {"weight_map": {"weight": "good.safetensors"}}
    Path("wrong.safetensors.index.json").write_text(json.dumps(wrong), encoding="utf-8")
    Path("none.safetensors.index.json").write_text("[]", encoding="utf-8")
    torch.save({"epoch": 3, "name": "x"}, "no_tensors.pt")
    torch.save({"model": state, "average": state}, "two.pt")
    Path("empty").mkdir()
    Path("folder.pt").mkdir()
    convert(Path("mlp.pt"), Path("own"), to="samestep")
    shutil.copytree("own", "damaged")
    file = sorted(Path("damaged").glob("*.distcp"))[0]
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    job_file(tmp_path, classifier(tmp_path))
    Path("points.yaml").write_text("recipe: {task: regression, batch: 8, steps: 1}\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nowhere.pt new.safetensors", "there is no file or folder nowhere.pt"),
        ("text.txt new.safetensors", "is none of these: a checkpoint of samestep"),
        ("empty new.safetensors", "is none of these"),
        ("text.txt new.safetensors --from state-dict", "is damaged, or no file of torch.save"),
        ("text.txt new.safetensors --from safetensors", "is damaged, or no safetensors file"),
        ("text.txt new.safetensors --from samestep", "holds no checkpoint of samestep"),
        ("empty new.safetensors --from deepspeed", "has no *_model_states.pt"),
        ("empty new.safetensors --from accelerate", "has none of model.safetensors"),
        ("empty new.safetensors --from hugging-face", "has none of model.safetensors"),
        ("empty new.safetensors --from fsdp", "has no .metadata and no folder pytorch_model_fsdp_0"),
        ("mlp.pt new.safetensors --from ddp", "doesn't begin with module."),
        ("mlp.pt new.safetensors --from torch", '--from is "torch"'),
        ("mlp.pt new.safetensors --to safetensor", '--to is "safetensor"; did you mean "safetensors"'),
        ("mlp.pt new", "new doesn't say what is to be written; --to does: samestep"),
        ("mlp.pt good.safetensors", "good.safetensors is there already"),
        ("mlp.pt folder.pt", "folder.pt is there already"),
        ("mlp.pt text.txt/new.pt", "is a file; use another path"),
        ("mlp.pt step-7", "is the name of a later step"),
        ("mlp.pt new.pt --dtype float8", "--dtype is float8; use float64, float32"),
        ("mlp.pt new.safetensors --shard-size 4", "--shard-size is 4; use a size such as"),
        ("mlp.pt new.safetensors --shard-size 0GB", "more than nothing"),
        ("mlp.pt new --to hugging-face", "--job JOB.yaml"),
        ("mlp.pt new --to hugging-face --job job.yaml", "the job's model has bert.embeddings.word_embeddings.weight"),
        ("mlp.pt new --to hugging-face --job points.yaml", "none of transformers'"),
        ("mlp.pt new --to hugging-face --job nowhere.yaml", "no job file nowhere.yaml"),
        ("cut.pt new.safetensors", "cut.pt is damaged"),
        ("zip.pt new.safetensors --from state-dict", "zip.pt is damaged"),
        ("garbage.safetensors new.pt", "garbage.safetensors is damaged"),
        ("cut.safetensors new.pt", "cut.safetensors is damaged"),
        ("out.safetensors.index.json new.pt", "use names of files in its folder"),
        ("lacks.safetensors.index.json new.pt", "there is no file missing.safetensors"),
        ("wrong.safetensors.index.json new.pt", "says that a file holds 'weight', and it doesn't"),
        ("none.safetensors.index.json new.pt", "is no index of safetensors files"),
        ("no_tensors.pt new.safetensors", "in one section; it has none"),
        ("two.pt new.safetensors", "it has 2 of them: model, average"),
        ("damaged new.pt", "damaged is damaged: "),
        ("mlp.pt", "required: TARGET"),
    ],
)
def test_mistakes(place: Path, capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    before = sorted(path.name for path in place.iterdir())
    capsys.readouterr()
    assert main(["checkpoint", "convert", *words.split()]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert said in told[0]
    assert sorted(path.name for path in place.iterdir()) == before  # nothing half written


@pytest.mark.parametrize("form", ALL)
def test_files_have_the_users_permissions(form: str, tmp_path: Path) -> None:
    recipe = classifier(tmp_path)
    torch.save(model_of(recipe).state_dict(), tmp_path / "plain.pt")
    before = set(tmp_path.iterdir())
    umask = os.umask(0o027)
    try:
        convert(tmp_path / "plain.pt", tmp_path / "there", to=form, job=Job(recipe=recipe), shard_size="30KB")
    finally:
        os.umask(umask)
    new = [path for each in set(tmp_path.iterdir()) - before for path in (each, *each.rglob("*"))]
    assert new
    for path in new:
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


@pytest.mark.parametrize("form", ALL)
def test_a_full_disk_leaves_nothing(form: str, tmp_path: Path) -> None:
    recipe = classifier(tmp_path)
    torch.save(model_of(recipe).state_dict(), tmp_path / "plain.pt")
    before = sorted(path.name for path in tmp_path.iterdir())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))  # bytes of one file
    try:
        with pytest.raises(UserError, match="can't be written"):
            convert(tmp_path / "plain.pt", tmp_path / "there", to=form, job=Job(recipe=recipe))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_another_models_weights(tmp_path: Path, mlp_file: Path) -> None:
    state = torch.load(mlp_file, weights_only=True)
    torch.save({**state, "more": torch.ones(1)}, tmp_path / "more.pt")
    torch.save({**state, "0.bias": torch.ones(1)}, tmp_path / "shape.pt")
    torch.save({name: value for name, value in state.items() if name != "0.bias"}, tmp_path / "less.pt")
    for name, said in (
        ("more", "holds more, and the job's model has none"),
        ("shape", r"0.bias has shape \[1\], and in the job's model \[16\]"),
        ("less", "has no 0.bias, and the job's model has"),
    ):
        with pytest.raises(UserError, match=said):
            samestep.load_model(points(Points()), tmp_path / f"{name}.pt")
