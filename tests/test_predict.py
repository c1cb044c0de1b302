"""`samestep evaluate` and `samestep predict`: the training's own metrics, single predictions, and wrong inputs."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formats import classifier, job_file, language, model_of, points, trained
from small_tasks import Points
from torch import nn

import samestep
from samestep.cli.main import main
from samestep.inference import predict_job
from samestep.job import Job
from samestep.tasks.prediction import ToPredict
from samestep.tasks.registry import resolve


def predicted(recipe: samestep.Recipe, weights: Path, file: Path | None = None, new_tokens: int = 0) -> list[Any]:
    return list(predict_job(Job(recipe=recipe), weights, file, new_tokens))


def written(recipe: samestep.Recipe, folder: Path) -> Path:
    """A file with weights for the recipe's model."""
    torch.save(model_of(recipe).state_dict(), folder / "weights.pt")
    return folder / "weights.pt"


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_the_metrics_are_those_of_the_training(tmp_path: Path, precision: Any) -> None:
    recipe = points(precision=precision)
    result = trained(recipe, tmp_path / "run")
    assert samestep.evaluate(recipe, tmp_path / "run", device="cpu", threads=1) == result.metrics


def test_whatever_layout_saved_it(tmp_path: Path) -> None:
    recipe = points(precision="fp64")
    result = trained(recipe, tmp_path / "run", "fsdp2")
    assert samestep.evaluate(recipe, tmp_path / "run" / "checkpoints" / "step-5") == result.metrics


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = classifier(tmp_path)
    result = trained(recipe, tmp_path / "run")
    job, out = job_file(tmp_path, recipe), tmp_path / "metrics.json"
    assert main(["evaluate", str(job), "--checkpoint", str(tmp_path / "run"), "--json", str(out)]) == 0
    assert json.loads(out.read_text(encoding="utf-8")) == json.loads(json.dumps(result.metrics))
    shown = capsys.readouterr()
    assert f"{result.metrics['accuracy']:.4f}" in shown.out
    assert shown.err == ""
    other = ["--set", "recipe.evaluation.batch=1", "--set", "recipe.data.held_out=0.5"]
    assert main(["evaluate", str(job), "--checkpoint", str(tmp_path / "run"), *other]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told == ["samestep: the checkpoint was trained otherwise: recipe.data.held_out is 0.5, and was not given"]


def test_texts(tmp_path: Path) -> None:
    recipe = classifier(tmp_path)
    weights, file = written(recipe, tmp_path), tmp_path / "lines.txt"
    lines = ["word3 word6", "word1", "", "word9 " * 40, "unheard of"]
    file.write_text("\n".join(lines), encoding="utf-8")
    task: Any = resolve(recipe)
    model = model_of(recipe).eval()
    found = predicted(recipe, weights, file)
    assert [each["text"] for each in found] == lines
    for line, each in zip(lines, found, strict=True):
        ids = torch.from_numpy(task._tokenizer.encode([line], 16)[0].astype(np.int64))[None]
        with torch.no_grad():
            probabilities = model(input_ids=ids).logits.softmax(-1)[0]
        assert each["probability"] == pytest.approx(float(probabilities.max()), rel=1e-5)
        assert each["class"] == "abc"[int(probabilities.argmax())]
        assert "target" not in each


def test_held_out_texts(tmp_path: Path) -> None:
    recipe = classifier(tmp_path)
    weights = written(recipe, tmp_path)
    found = predicted(recipe, weights)
    accuracy = samestep.evaluate(recipe, weights)["accuracy"]
    assert sum(each["class"] == each["target"] for each in found) / len(found) == pytest.approx(accuracy)


def test_the_loss_of_a_text_and_how_it_goes_on(tmp_path: Path) -> None:
    recipe = language(tmp_path, steps=30, optimizer=samestep.AdamW(lr=1e-2))
    trained(recipe, tmp_path / "run")
    file = tmp_path / "lines.txt"
    lines = ["word3 word6 word9 word12", "w", "word1 " * 9]
    file.write_text("\n".join(lines), encoding="utf-8")
    model: Any = samestep.load_model(recipe, tmp_path / "run")
    task: Any = resolve(recipe)
    tokenizer = task._tokenizer.tokenizer
    found = predicted(recipe, tmp_path / "run", file, new_tokens=5)
    for line, each in zip(lines, found, strict=True):
        ids = torch.tensor([*tokenizer.encode(line).ids, 1])
        assert each["tokens"] == len(ids) - 1
        losses = []
        for start in range(0, len(ids) - 1, 11):  # blocks of 11 tokens, as it learned
            block = ids[start : start + 12]
            with torch.no_grad():
                logits = model(input_ids=block[None, :-1]).logits[0]
            losses.append(nn.functional.cross_entropy(logits, block[1:], reduction="sum"))
        assert each["loss"] == pytest.approx(float(sum(losses)) / (len(ids) - 1), rel=1e-5)
    model.config.use_cache = True
    ids = torch.tensor([tokenizer.encode(lines[1]).ids])
    written_on = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    assert found[1]["continuation"] == tokenizer.decode(written_on[0, ids.shape[1] :].tolist())
    assert "continuation" not in predicted(recipe, tmp_path / "run", file)[0]


def test_held_out_blocks_have_the_loss_of_the_evaluation(tmp_path: Path) -> None:
    recipe = language(tmp_path)
    weights = written(recipe, tmp_path)
    found = predicted(recipe, weights)
    total, count = sum(each["loss"] * each["tokens"] for each in found), sum(each["tokens"] for each in found)
    assert total / count == pytest.approx(samestep.evaluate(recipe, weights)["token_loss"], rel=1e-6)


def pictures(folder: Path) -> samestep.Recipe:
    """Images of 8 x 8, and 3 of them in a folder of their own."""
    image = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(0)
    (folder / "new").mkdir()
    for name in ("dark", "light"):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(6):
            pixels = draw.integers(0, 99, (8, 8)) + (120 if name == "light" else 0)
            image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / name / f"{number}.png")
            if number < 2:
                image.fromarray(pixels.astype(np.uint8)).save(folder / "new" / f"{name}-{number}.png")
    return samestep.Recipe(
        task="image-classification",
        data={"source": str(folder / "images"), "held_out": 0.25},
        model={},
        batch=4,
        steps=2,
    )


def test_images(tmp_path: Path) -> None:
    recipe = pictures(tmp_path)
    weights = written(recipe, tmp_path)
    found = predicted(recipe, weights, tmp_path / "new")
    assert [Path(each["file"]).name for each in found] == ["dark-0.png", "dark-1.png", "light-0.png", "light-1.png"]
    task: Any = resolve(recipe)
    model = model_of(recipe).eval()
    train = task.train_set()
    mean, deviation = train.mean_and_deviation
    for each in found:
        image = pytest.importorskip("PIL.Image").open(each["file"])
        pixels = torch.from_numpy((np.asarray(image)[None, None] - mean) / deviation).float()
        with torch.no_grad():
            probabilities = model(pixels).softmax(-1)[0]
        assert each["probability"] == pytest.approx(float(probabilities.max()), rel=1e-5)
        assert each["class"] == ("dark", "light")[int(probabilities.argmax())]
    assert predicted(recipe, weights, Path(found[0]["file"])) == [pytest.approx(found[0])]
    assert "target" in predicted(recipe, weights)[0]


def test_a_task_of_ones_own_predicts_its_held_out_samples(tmp_path: Path) -> None:
    recipe = points(precision="fp64")
    weights = written(recipe, tmp_path)
    model, held_out = model_of(recipe).double().eval(), Points().held_out
    found = predicted(recipe, weights)
    assert len(found) == len(held_out)
    for (point, label), each in zip(held_out, found, strict=True):
        with torch.no_grad():
            assert each["prediction"] == pytest.approx(model(point.double()).tolist(), rel=1e-10)
        assert each["target"] == label


class Doubled(Points):
    """Predicts for a file of numbers, four a line."""

    predicts_from = "a text file with four numbers in each line"

    def predict(self, model: Any, request: ToPredict) -> Any:
        assert request.file is not None
        for line in request.file.read_text(encoding="utf-8").splitlines():
            yield {"logits": model(torch.tensor([[float(word) for word in line.split()]]))[0].tolist()}


def test_a_task_may_predict_in_its_own_way(tmp_path: Path) -> None:
    recipe = points(Doubled(), precision="fp64")
    weights = written(recipe, tmp_path)
    (tmp_path / "numbers.txt").write_text("1 2 3 4\n0 0 0 1\n", encoding="utf-8")
    found = predicted(recipe, weights, tmp_path / "numbers.txt")
    model = model_of(recipe).double().eval()
    with torch.no_grad():
        expected = model(torch.tensor([[1.0, 2, 3, 4], [0, 0, 0, 1]], dtype=torch.float64)).tolist()
    assert [each["logits"] for each in found] == [pytest.approx(each) for each in expected]


def test_lines_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = classifier(tmp_path)
    weights, job = written(recipe, tmp_path), job_file(tmp_path, recipe)
    (tmp_path / "in.txt").write_text("词 word3\nword1\n", encoding="utf-8")
    words = ["predict", str(job), "--checkpoint", str(weights), "--input", str(tmp_path / "in.txt")]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert main([*words, "--output", str(tmp_path / "out.jsonl")]) == 0
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == shown
    assert "2 predictions" in capsys.readouterr().out
    lines = [json.loads(line) for line in shown.splitlines()]
    assert lines == predicted(recipe, weights, tmp_path / "in.txt")


def test_a_reader_that_has_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = classifier(tmp_path)
    weights, job = written(recipe, tmp_path), job_file(tmp_path, recipe)
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["predict", str(job), "--checkpoint", str(weights)]) == 0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    recipe = classifier(tmp_path)
    job_file(tmp_path, recipe)
    written(recipe, tmp_path)
    torch.save(Points().model().state_dict(), "other.pt")
    regression = "recipe: {task: regression, args: {held_out: 0}, batch: 8, steps: 1}\n"
    Path("regression.yaml").write_text(regression, encoding="utf-8")
    Path("empty.txt").write_text("", encoding="utf-8")
    Path("latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    Path("in.txt").write_text("word3\n", encoding="utf-8")
    Path("empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("evaluate job.yaml", "required: --checkpoint"),
        ("evaluate job.yaml --checkpoint nowhere", "there is no file or folder nowhere"),
        ("evaluate job.yaml --checkpoint empty", "empty is none of these"),
        ("evaluate job.yaml --checkpoint other.pt", "has no bert.embeddings"),
        ("evaluate nowhere.yaml --checkpoint weights.pt", "no job file nowhere.yaml"),
        ("evaluate job.yaml --checkpoint weights.pt --json empty", "this is a folder"),
        ("evaluate job.yaml --checkpoint weights.pt --set recipe.model.hidden=14", "has shape"),
        ("evaluate job.yaml --checkpoint weights.pt --set recipe.data.held_out=0", "has no held-out samples"),
        ("evaluate job.yaml --checkpoint weights.pt --layout dp2", "samestep evaluate has no option --layout"),
        ("predict job.yaml", "required: --checkpoint"),
        ("predict job.yaml --checkpoint weights.pt --input nowhere", "there is no such file or folder"),
        ("predict job.yaml --checkpoint weights.pt --input empty.txt", "is empty; use a text in each line"),
        ("predict job.yaml --checkpoint weights.pt --input latin.txt", "is not UTF-8"),
        (
            "predict job.yaml --checkpoint weights.pt --input empty",
            "--input: empty is a folder; a text file is wanted",
        ),
        ("predict job.yaml --checkpoint weights.pt --input in.txt --output in.txt", "which is read"),
        ("predict job.yaml --checkpoint weights.pt --output empty", "this is a folder"),
        ("predict job.yaml --checkpoint weights.pt --new-tokens 5", "writes no text"),
        (
            "predict job.yaml --checkpoint weights.pt --new-tokens -1",
            '"-1" is out of range; use a whole number from 0 to',
        ),
        ("predict regression.yaml --checkpoint weights.pt", "has no held-out samples; use --input"),
        ("predict regression.yaml --checkpoint weights.pt --input in.txt", "predicts its held-out samples alone"),
    ],
)
def test_mistakes(place: Path, capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    before = {path: path.read_bytes() for path in place.iterdir() if path.is_file()}
    assert main(words.split()) == 2
    told = capsys.readouterr().err.splitlines()
    assert said in told[-1]
    assert {path: path.read_bytes() for path in place.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    ("name", "said"), [("small", "and the model's images are 8 x 8"), ("text", "can't be decoded")]
)
def test_images_that_do_not_fit(tmp_path: Path, name: str, said: str) -> None:
    recipe = pictures(tmp_path)
    weights = written(recipe, tmp_path)
    pytest.importorskip("PIL.Image").fromarray(np.zeros((4, 6), dtype=np.uint8)).save(tmp_path / "small.png")
    (tmp_path / "text.png").write_text("no image", encoding="utf-8")
    with pytest.raises(samestep.UserError, match=said):
        predicted(recipe, weights, tmp_path / f"{name}.png")
    with pytest.raises(samestep.UserError, match="has no images"):
        predicted(recipe, weights, tmp_path / "images")
