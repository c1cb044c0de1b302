"""`samestep checkpoint convert`: to and from every format, in one file or many, whatever wrote it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from formats import READERS, RECIPES, classifier, language, model_of, points_file, same, trained
from safetensors.torch import load_file
from small_tasks import Points
from torch import Tensor

import samestep
from samestep.cli.main import main
from samestep.convert.convert import convert
from samestep.convert.formats import FORMATS
from samestep.job import Job

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to:UserWarning")
ALL = sorted(name for name, form in FORMATS.items() if form.holds != "adapters")


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
    return points_file(tmp_path)


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

    from samestep.tasks.registry import resolve

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


def test_other_types(tmp_path: Path, mlp_file: Path) -> None:
    state = torch.load(mlp_file, weights_only=True)
    state["count"] = torch.tensor(7)
    torch.save(state, tmp_path / "counted.pt")
    convert(tmp_path / "counted.pt", tmp_path / "half.safetensors", dtype="bfloat16")
    expected = {name: value.bfloat16() if value.is_floating_point() else value for name, value in state.items()}
    same(load_file(tmp_path / "half.safetensors"), expected)


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


@pytest.mark.slow
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
from samestep.convert.convert import convert

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
@pytest.mark.slow
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
