"""`samestep checkpoint convert`: to and from every format, what can't be read, and what is refused."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import READERS, RECIPES, classifier, job_file, language, model_of
from safetensors.torch import load_file, save_file
from small_tasks import Points
from torch import Tensor, nn
from unsafe import renew_sums, trap_index, trap_tensors, trapped_state

import samestep
from samestep.cli.main import main
from samestep.convert.conversion import convert
from samestep.convert.formats import FORMATS
from samestep.errors import UserError
from samestep.job import Job

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to:UserWarning")
ALL = sorted(FORMATS)


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and the same bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.fixture(params=sorted(RECIPES))
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> samestep.Recipe:
    return RECIPES[request.param](tmp_path)


@pytest.fixture
def plain_file(tmp_path: Path, recipe: samestep.Recipe) -> Path:
    """A state dict of the recipe's model, saved as one does."""
    file = tmp_path / "plain.pt"
    torch.save(model_of(recipe).state_dict(), file)
    return file


@pytest.fixture
def mlp_file(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    file = tmp_path / "mlp.pt"
    torch.save(Points().model().state_dict(), file)
    return file


def test_every_format_and_back(tmp_path: Path, recipe: samestep.Recipe, plain_file: Path) -> None:
    expected = model_of(recipe).state_dict()
    for form in ALL:
        file = tmp_path / ("there" if FORMATS[form].is_folder else f"there.{form.partition('-')[0]}")
        there = convert(plain_file, file, to=form, job=Job(recipe=recipe))
        assert there.from_format == "state-dict"
        if form in READERS:
            same(READERS[form](file, model_of(recipe, seed=4)), expected)
        same(samestep.load_model(recipe, file).state_dict(), expected)
        back = convert(file, tmp_path / "back.pt")
        assert back.from_format == form  # which was found by looking
        found = torch.load(tmp_path / "back.pt", weights_only=True)
        same(model_of_state(recipe, found), expected)
        assert there.bytes == sum(parameter.nbytes for parameter in model_of(recipe).parameters())
        assert not list(tmp_path.glob("*.writing"))
        shutil.rmtree(file) if file.is_dir() else file.unlink()
        (tmp_path / "back.pt").unlink()


def model_of_state(recipe: samestep.Recipe, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A model with this state, of which a folder of transformers may leave out names that are tied."""
    model = model_of(recipe, seed=4)
    lacking, unknown = model.load_state_dict(dict(state), strict=False)
    assert not unknown
    assert set(lacking) <= {"lm_head.weight"}
    return model.state_dict()


def test_the_folder_of_a_checkpoint_needs_no_job(tmp_path: Path) -> None:
    recipe = classifier(tmp_path)
    result = trained(recipe, tmp_path / "run")
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hugging-face"]) == 0
    same(READERS["hugging-face"](tmp_path / "hf", model_of(recipe)), load_file(result.model_file))


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from samestep.tasks.resolve import resolve

    recipe = classifier(tmp_path)
    torch.save(model_of(recipe).state_dict(), tmp_path / "plain.pt")
    convert(tmp_path / "plain.pt", tmp_path / "hf", to="hugging-face", job=Job(recipe=recipe))
    task, text = resolve(recipe), "word3 word6 word9"
    (tmp_path / "lines.txt").write_text(text, encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        probabilities = model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0]
    from samestep.inference import predict_job

    (found,) = predict_job(Job(recipe=recipe), tmp_path / "plain.pt", tmp_path / "lines.txt")
    assert found["class"] == model.config.id2label[int(probabilities.argmax())]
    assert found["probability"] == pytest.approx(float(probabilities.max()), rel=1e-6)
    assert list(task.class_names() or ()) == list(model.config.id2label.values())


def trained(recipe: samestep.Recipe, folder: Path, layout: str = "single", **checkpoint: Any) -> samestep.TrainResult:
    return samestep.train(
        recipe,
        layout,
        folder=folder,
        device="cpu",
        threads=1,
        tensorboard=False,
        checkpoint=samestep.Checkpointing(**checkpoint),
    )


class Started(Points):
    """The same points, with a model that begins with the weights of a file."""

    def __init__(self, *, file: Path) -> None:
        super().__init__()
        self.file = file

    def model(self) -> nn.Module:
        model = super().model()
        model.load_state_dict(torch.load(self.file, weights_only=True))
        return model


def points(task: samestep.Task, **rest: Any) -> samestep.Recipe:
    return samestep.Recipe(task=task, batch=33, steps=5, optimizer=samestep.AdamW(lr=1e-2), **rest)


def test_a_training_begins_with_converted_weights(tmp_path: Path, mlp_file: Path) -> None:
    convert(mlp_file, tmp_path / "step-0")
    resumed = trained(points(Points()), tmp_path / "resumed", resume=str(tmp_path / "step-0"))
    plain = trained(points(Started(file=mlp_file)), tmp_path / "plain")
    assert resumed.first_step == 0
    assert resumed.losses == plain.losses
    assert resumed.metrics == plain.metrics
    assert resumed.losses != trained(points(Points()), tmp_path / "other").losses


def test_it_begins_under_any_layout_and_ends_as_one_model(tmp_path: Path, mlp_file: Path) -> None:
    convert(mlp_file, tmp_path / "step-0", dtype="float64")
    recipe = points(Points(), precision="fp64")
    resumed = trained(recipe, tmp_path / "resumed", "fsdp2", resume=str(tmp_path / "step-0"))
    plain = trained(points(Started(file=mlp_file), precision="fp64"), tmp_path / "plain")
    assert resumed.losses == pytest.approx(plain.losses, rel=1e-10)
    convert(tmp_path / "resumed", tmp_path / "whole.safetensors")
    same(load_file(tmp_path / "whole.safetensors"), load_file(resumed.model_file))


def test_other_types(tmp_path: Path, mlp_file: Path) -> None:
    state = torch.load(mlp_file, weights_only=True)
    state["count"] = torch.tensor(7)
    torch.save(state, tmp_path / "counted.pt")
    convert(tmp_path / "counted.pt", tmp_path / "half.safetensors", dtype="bfloat16")
    expected = {name: value.bfloat16() if value.is_floating_point() else value for name, value in state.items()}
    same(load_file(tmp_path / "half.safetensors"), expected)


def test_weights_of_another_type_are_no_beginning(tmp_path: Path, mlp_file: Path) -> None:
    convert(mlp_file, tmp_path / "half", to="samestep", dtype="bfloat16")
    with pytest.raises(UserError, match=r"of bfloat16, and .* of float32; .* --dtype float32 makes it so"):
        trained(points(Points()), tmp_path / "run", resume=str(tmp_path / "half"))
    convert(tmp_path / "half", tmp_path / "step-0", dtype="float32")
    assert trained(points(Points()), tmp_path / "run", resume=str(tmp_path / "step-0")).steps == 5


def test_shards_of_a_bounded_size_with_an_index(tmp_path: Path, mlp_file: Path) -> None:
    convert(mlp_file, tmp_path / "model.safetensors", shard_size="0.3KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    files = sorted(tmp_path.glob("model-*-of-*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    assert len(files) > 2
    found = [load_file(file) for file in files]
    assert all(sum(value.nbytes for value in each.values()) <= 300 or len(each) == 1 for each in found)
    expected = torch.load(mlp_file, weights_only=True)
    same({name: value for each in found for name, value in each.items()}, expected)
    convert(tmp_path / "model.safetensors.index.json", tmp_path / "back.pt")
    same(torch.load(tmp_path / "back.pt", weights_only=True), expected)


def test_a_state_dict_in_a_section_of_a_file(tmp_path: Path, mlp_file: Path) -> None:
    state = torch.load(mlp_file, weights_only=True)
    optimizer = torch.optim.AdamW(Points().model().parameters()).state_dict()
    torch.save({"net": state, "optimizer": optimizer, "epoch": 3}, tmp_path / "all.pt")
    convert(tmp_path / "all.pt", tmp_path / "weights.safetensors")
    same(load_file(tmp_path / "weights.safetensors"), state)


def test_a_file_of_former_times(tmp_path: Path, mlp_file: Path) -> None:
    state = torch.load(mlp_file, weights_only=True)
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    convert(tmp_path / "old.pt", tmp_path / "weights.safetensors")
    same(load_file(tmp_path / "weights.safetensors"), state)


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
        ("mlp.pt text.txt/new.pt", "is a file; another path would do"),
        ("mlp.pt step-7", "is the name of a later step"),
        ("mlp.pt new.pt --dtype float8", "--dtype is float8; float64, float32"),
        ("mlp.pt new.safetensors --shard-size 4", "--shard-size is 4; a size such as"),
        ("mlp.pt new.safetensors --shard-size 0GB", "more than nothing would do"),
        ("mlp.pt new --to hugging-face", "--job JOB.yaml"),
        ("mlp.pt new --to hugging-face --job job.yaml", "the job's model has bert.embeddings.word_embeddings.weight"),
        ("mlp.pt new --to hugging-face --job points.yaml", "none of transformers'"),
        ("mlp.pt new --to hugging-face --job nowhere.yaml", "no job file nowhere.yaml"),
        ("cut.pt new.safetensors", "cut.pt is damaged"),
        ("zip.pt new.safetensors --from state-dict", "zip.pt is damaged"),
        ("garbage.safetensors new.pt", "garbage.safetensors is damaged"),
        ("cut.safetensors new.pt", "cut.safetensors is damaged"),
        ("out.safetensors.index.json new.pt", "the names of files beside it alone would do"),
        ("lacks.safetensors.index.json new.pt", "there is no file missing.safetensors"),
        ("wrong.safetensors.index.json new.pt", "says that a file holds weight, and it doesn't"),
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


def test_a_recipe_in_a_checkpoint_runs_no_file(tmp_path: Path, mlp_file: Path) -> None:
    own = _of_own(tmp_path, mlp_file)
    code = tmp_path / "code.py"
    code.write_text("import os\nos.mkdir('trace')\n", encoding="utf-8")
    info = json.loads((own / "checkpoint.json").read_text(encoding="utf-8"))
    info["recipe"] = {"task": f"{code}:Task", "batch": 4}
    (own / "checkpoint.json").write_text(json.dumps(info), encoding="utf-8")
    with pytest.raises(UserError, match=r"--job JOB\.yaml"):
        convert(own, tmp_path / "hf", to="hugging-face")
    assert not (tmp_path / "trace").exists()


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


def test_language_models_tie(tmp_path: Path) -> None:
    """What others wrote may have a tied tensor under one of its names, or the other; a training takes both."""
    recipe = language(tmp_path, steps=1)
    state = model_of(recipe).state_dict()
    lost: list[float] = []
    for left_out in ("lm_head.weight", "model.embed_tokens.weight"):
        part = {name: value for name, value in state.items() if name != left_out}
        torch.save(part, tmp_path / "part.pt")
        convert(tmp_path / "part.pt", tmp_path / left_out, to="samestep")
        same(samestep.load_model(recipe, tmp_path / left_out).state_dict(), state)
        result = trained(recipe, tmp_path / f"run-{left_out}", resume=str(tmp_path / left_out))
        lost += result.losses
        for source, name in (("part.pt", "hf"), (left_out, "hf-again")):
            folder = tmp_path / f"{name}-{left_out}"
            convert(tmp_path / source, folder, to="hugging-face", job=Job(recipe=recipe))
            same(READERS["hugging-face"](folder, model_of(recipe)), state)
        (tmp_path / "part.pt").unlink()
    assert lost[0] == lost[1]


# Converts from file to file, and says how much memory of its own the process had at most, beyond what it began with.
STREAMING = """
import json, sys, threading
from pathlib import Path
from samestep.convert.conversion import convert

def own_bytes():
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024

folder = Path(sys.argv[1])
convert(folder / "small.pt", folder / "small.safetensors")  # loads what there is to load
convert(folder / "small.safetensors", folder / "small", to="samestep")
most = {}
for source, target, form in json.loads(sys.argv[2]):
    before = most[target] = own_bytes()
    done = threading.Event()
    def watch():
        while not done.wait(0.002):
            most[target] = max(most[target], own_bytes())
    thread = threading.Thread(target=watch)
    thread.start()
    convert(folder / source, folder / target, to=form, shard_size="5MB")
    done.set()
    thread.join()
    most[target] -= before
print(json.dumps(most))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_more_than_memory_holds_is_converted(tmp_path: Path, mlp_file: Path) -> None:
    mlp_file.rename(tmp_path / "small.pt")
    size = 96 << 20
    state = {f"layer.{number}": torch.full((1 << 20,), float(number)) for number in range(size >> 22)}
    torch.save(state, tmp_path / "large.pt")
    steps = [
        ("large.pt", "own", "samestep"),
        ("own", "large.safetensors", "safetensors"),
        ("large.safetensors.index.json", "ds", "deepspeed"),
        ("ds", "fsdp", "fsdp"),
        ("fsdp", "again.pt", "state-dict"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", STREAMING, str(tmp_path), json.dumps(steps)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    most = json.loads(done.stdout)
    assert most.keys() == {target for _, target, _ in steps}
    assert max(most.values()) < size / 3, most
    same(torch.load(tmp_path / "again.pt", weights_only=True, mmap=True), state)
