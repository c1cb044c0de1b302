"""Image classification: sources, sizes and colours, networks, training, mistakes."""

import gzip
import importlib.util
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import samestep
import samestep.data.images
from samestep.data.types import Batch
from samestep.errors import UserError
from samestep.jobfile import load
from samestep.recipe import Recipe
from samestep.tasks.base import call
from samestep.tasks.image_classification import ImageClassification
from samestep.tasks.registry import resolve

EXAMPLES = Path(__file__).parent.parent / "examples"
FASHION = Path("/usr/share/datasets/fashion-mnist")


def drawn(count: int, *shape: int) -> Any:
    return np.random.default_rng(3).integers(0, 256, (count, *shape), dtype=np.uint8)


def write_idx(folder: Path, part: str, images: Any, labels: Any, packed: bool = False) -> None:
    for name, values in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
        header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
        content = header + values.tobytes()
        path = folder / (name + (".gz" if packed else ""))
        path.write_bytes(gzip.compress(content) if packed else content)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of IDX files: 90 images of 9 x 6 in three classes, that many brighter columns, and 31 held out."""
    folder = tmp_path / "idx"
    folder.mkdir()
    labels = np.arange(121) % 3
    images = drawn(121, 9, 6) // 2
    for image, label in zip(images, labels, strict=True):
        image[:, : 2 * label] += 120
    write_idx(folder, "train", images[:90], labels[:90].astype(np.uint8))
    write_idx(folder, "t10k", images[90:], labels[90:].astype(np.uint8), packed=True)
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder a class, of images in colour and in grey."""
    folder = tmp_path / "photos"
    for name, shape in (("dog", (8, 8, 3)), ("cat", (8, 8))):
        (folder / name).mkdir(parents=True)
        for number, pixels in enumerate(drawn(6, *shape)):
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    (folder / ".hidden").mkdir()
    (folder / "dog" / "notes.txt").write_text("no image", encoding="utf-8")
    return folder


def recipe(source: Path | str, model: dict[str, Any] | None = None, data: Any = None, **rest: Any) -> Recipe:
    small = {"width": 8} if model is None else model
    return Recipe(task="image-classification", data={"source": str(source), **(data or {})}, model=small, **rest)


def task(source: Path | str, model: dict[str, Any] | None = None, **data: Any) -> ImageClassification:
    made = resolve(recipe(source, model, data))
    assert isinstance(made, ImageClassification)
    return made


def mistake(source: Path | str, model: dict[str, Any] | None = None, **data: Any) -> str:
    with pytest.raises(UserError) as caught:
        task(source, model, **data).check()
    return str(caught.value)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"width": 8}, id="small"),
        pytest.param({"type": "resnet18", "width": 8, "norm": "group"}, id="resnet18", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_take_the_same_step(source: Path, model: dict[str, Any]) -> None:
    job = recipe(source, model, batch=7, optimizer=samestep.SGD(lr=0.05, momentum=0.9), clip=0.5)
    proof = samestep.verify(job, layout="dp2", steps=3, micro_batch=2)
    assert max(proof.max_relative_difference.values()) < 1e-10


def test_it_learns_and_reports_by_class(source: Path, tmp_path: Path) -> None:
    job = recipe(source, batch=16, epochs=8, optimizer=samestep.AdamW(lr=0.01))
    result = samestep.train(job, folder=tmp_path / "run")
    assert result.metrics["accuracy"] > 0.9
    assert result.metrics["support"] == {"0": 11, "1": 10, "2": 10}
    assert result.speeds == {}


def test_idx_files_are_read_as_they_were_written(source: Path) -> None:
    made = task(source)
    made.check()
    labels = np.arange(121) % 3
    held_out = made.eval_set()
    assert held_out is not None
    assert made.train_set().pixels.shape == (90, 1, 9, 6)
    assert held_out.pixels.shape == (31, 1, 9, 6)
    images = drawn(121, 9, 6) // 2
    for image, label in zip(images, labels, strict=True):
        image[:, : 2 * label] += 120
    pixels, label = made.train_set()[4]
    assert np.array_equal(pixels[0], images[4])
    assert label == 1
    assert np.array_equal(held_out.pixels[:, 0], images[90:])
    assert held_out.labels.tolist() == labels[90:].tolist()
    assert made.class_names() == ("0", "1", "2")


def test_pixels_have_mean_0_and_deviation_1_over_the_training_images(photos: Path) -> None:
    made = task(photos, held_out=0.3)
    train = made.train_set()
    batch = made.collate([train[index] for index in range(len(train))])
    assert batch.inputs.dtype == torch.float32
    assert batch.inputs.shape == (len(train), 3, 8, 8)
    channels = batch.inputs.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(channels.mean(1), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(channels.std(1, correction=0), torch.ones(3, dtype=torch.float64), rtol=1e-6, atol=0)
    assert torch.equal(made.collate([train[2]]).inputs[0], batch.inputs[2])
    assert batch.targets.tolist() == train.labels.tolist()


def test_images_of_one_value_have_no_deviation(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4), 7).save(tmp_path / name / "0.png")
    made = task(tmp_path, held_out=0)
    assert not made.collate([made.train_set()[0]]).inputs.any()


def test_a_folder_of_images_has_its_classes_colours_and_sizes(photos: Path) -> None:
    made = task(photos, held_out=0)
    assert made.class_names() == ("cat", "dog")
    assert Counter(made.train_set().labels.tolist()) == {0: 6, 1: 6}
    grey, colour = drawn(6, 8, 8), drawn(6, 8, 8, 3)
    assert all(np.array_equal(made.train_set().pixels[0, channel], grey[0]) for channel in range(3))
    assert np.array_equal(made.train_set().pixels[6], colour[0].transpose(2, 0, 1))
    made = task(photos, held_out=0, color="grey", size=5)
    assert made.train_set().pixels.shape == (12, 1, 5, 5)
    expected = Image.fromarray(grey[1]).resize((5, 5), Image.Resampling.BILINEAR)
    assert np.array_equal(made.train_set().pixels[1, 0], np.asarray(expected))


def test_jpeg_and_black_and_white_are_decoded(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    Image.new("RGB", (4, 4), (200, 10, 10)).save(tmp_path / "a" / "0.JPG")
    Image.new("1", (4, 4), 1).save(tmp_path / "b" / "0.png")
    made = task(tmp_path, held_out=0)
    red, white = made.train_set().pixels[:, :, 0, 0].tolist()
    assert red == pytest.approx([200, 10, 10], abs=3)
    assert white == [255, 255, 255]


def test_the_split_is_by_content_and_copies_stand_on_one_side(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        for number, pixels in enumerate(drawn(40, 4, 4)):
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")  # both classes have the same images
    made = task(tmp_path, held_out=0.3)
    held_out = made.eval_set()
    assert held_out is not None
    train, held = ({pixels.tobytes() for pixels in side.pixels} for side in (made.train_set(), held_out))
    assert not train & held
    assert len(train) + len(held) == 40
    assert len(made.train_set()) + len(held_out) == 80
    assert 4 <= len(held) <= 22
    assert len(task(tmp_path, held_out=0, limit=30).train_set()) == 30
    assert task(tmp_path, held_out=0).eval_set() is None


def test_a_source_with_held_out_images_of_its_own_can_be_split_otherwise(source: Path, tmp_path: Path) -> None:
    made = task(source, held_out=0.2)
    held_out = made.eval_set()
    assert held_out is not None
    assert len(made.train_set()) + len(held_out) == 90
    other = tmp_path / "other"
    other.mkdir()
    for part in ("train", "t10k"):
        write_idx(other, part, drawn(12, 9, 6), (np.arange(12) % 3).astype(np.uint8))
    held_out = task(source, eval_source=str(other)).eval_set()
    assert held_out is not None
    assert len(held_out) == 12


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
@pytest.mark.slow
def test_digits_are_learned_in_a_second(tmp_path: Path) -> None:
    made = task("digits")
    assert made.train_set().pixels.shape[1:] == (1, 8, 8)
    assert made.class_names() == tuple("0123456789")
    result = samestep.train(
        recipe("digits", batch=32, epochs=4, optimizer=samestep.AdamW(lr=0.004)), folder=tmp_path / "run"
    )
    assert result.metrics["accuracy"] > 0.93
    assert sum(result.metrics["support"].values()) + len(made.train_set()) == 1797


@pytest.mark.skipif(not FASHION.is_dir(), reason="dataset-fashion-mnist is not installed")
def test_fashion_mnist_is_what_debian_has() -> None:
    made = task("fashion-mnist")
    held_out = made.eval_set()
    assert held_out is not None
    assert (len(made.train_set()), len(held_out)) == (60_000, 10_000)
    assert Counter(held_out.labels.tolist()) == dict.fromkeys(range(10), 1000)
    assert made.class_names()[9] == "ankle boot"


def test_resnet18_has_the_parameters_of_the_paper() -> None:
    """11,689,512 is what every implementation of it has for 1,000 classes of images in three colours."""
    from samestep.tasks.image_classification import ImageModel, build

    with torch.device("meta"):
        model = build(ImageModel(type="resnet18", norm="batch"), channels=3, size=(224, 224), classes=1000)
        output = model(torch.empty(2, 3, 224, 224))
    assert parameters(model) == 11_689_512
    assert output.shape == (2, 1000)


@pytest.mark.parametrize(
    ("model", "norm", "norms"),
    [
        ({"norm": "group"}, nn.GroupNorm, 2),
        ({"norm": "batch"}, nn.BatchNorm2d, 2),
        ({"norm": "none"}, nn.GroupNorm, 0),
        ({"type": "resnet18", "norm": "group"}, nn.GroupNorm, 20),
        ({"type": "resnet18", "norm": "batch"}, nn.BatchNorm2d, 20),
    ],
    ids=str,
)
def test_networks_have_the_norms_that_were_asked_for(
    source: Path, model: dict[str, Any], norm: type[nn.Module], norms: int
) -> None:
    made = task(source, {"width": 8, **model})
    made.check()
    built = made.model()
    assert sum(isinstance(module, norm) for module in built.modules()) == norms
    batch = made.collate([made.train_set()[index] for index in range(5)])
    output = call(built.eval(), batch.inputs)
    assert output.shape == (5, 3)
    summed, count = made.loss(output, batch)
    assert count == 5
    expected = -output.double().log_softmax(-1)[range(5), batch.targets].sum()
    torch.testing.assert_close(summed, expected.float())
    probabilities, targets = made.scores(output, batch)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(5))
    assert targets is batch.targets


@pytest.mark.parametrize(
    ("stem", "size", "kernel"), [(None, 64, 3), (None, 65, 7), ("large", 32, 7), ("small", 80, 3)]
)
def test_the_stem_follows_the_size_unless_it_is_given(photos: Path, stem: str | None, size: int, kernel: int) -> None:
    made = task(photos, {"type": "resnet18", "width": 8, "stem": stem}, size=size, held_out=0)
    first = next(module for module in made.model().modules() if isinstance(module, nn.Conv2d))
    assert first.kernel_size == (kernel, kernel)
    assert first.in_channels == 3


def test_losses_are_wide(source: Path) -> None:
    made = task(source)
    summed, count = made.loss(torch.zeros(2, 3, dtype=torch.bfloat16), Batch(None, torch.tensor([0, 2])))
    assert (summed.dtype, count) == (torch.float32, 2)
    assert summed.item() == pytest.approx(2 * np.log(3), rel=1e-6)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"type": "resnet"}, "recipe.model.type is 'resnet'; it should be 'small' or 'resnet18'"),
        ({"norm": "layer"}, "recipe.model.norm is 'layer'; it should be 'group', 'batch' or 'none'"),
        ({"width": 0}, "recipe.model.width is 0; it should be greater than 0"),
        (
            {"width": 12},
            "recipe.model: width is 12 and norm is group, of 8 groups; use a multiple of 8, or another norm",
        ),
        ({"stem": "small"}, 'recipe.model: stem is given, but type is "small"; stem is for resnet18'),
        ({"layers": 3}, 'unknown key "recipe.model.layers"; known: norm, stem, type, width'),
    ],
)
def test_mistakes_in_the_model(source: Path, model: dict[str, Any], said: str) -> None:
    assert mistake(source, model) == said


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"held_out": 1}, "recipe.data.held_out is 1; it should be less than 1"),
        ({"size": 0}, "recipe.data.size is 0; it should be greater than 0"),
        (
            {"size": 3},
            "the images have 3 x 3 pixels, and the small network halves them twice; use recipe.data.size of 4",
        ),
        ({"color": "red"}, "recipe.data.color is 'red'; it should be 'grey' or 'rgb'"),
        ({"limit": 1}, "recipe.data.limit is 1; it should be greater than or equal to 2"),
        ({"colour": "rgb"}, 'unknown key "recipe.data.colour"; did you mean "color"?'),
        ({"held_out": 0.1, "eval_source": "x"}, "recipe.data: eval_source and held_out are both given; "),
        ({"held_out": 1e-9}, "recipe.data.held_out is 1e-09: it leaves no held-out samples of 90; use a larger"),
        (
            {"eval_source": "digit"},
            'recipe.data.eval_source is "digit"; did you mean "digits"? known: digits, fashion',
        ),
    ],
)
def test_mistakes_in_the_data_section(source: Path, data: dict[str, Any], said: str) -> None:
    assert mistake(source, **data).startswith(said)


def test_folders_that_are_no_sources(tmp_path: Path, photos: Path, source: Path) -> None:
    assert mistake("digit") == (
        'recipe.data.source is "digit"; did you mean "digits"? known: digits, fashion-mnist, or a path to a folder '
        "with a folder a class"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert mistake(empty) == (
        f"recipe.data.source is {empty}: that folder has no folders in it; use one a class, with images"
    )
    file = photos / "dog" / "0.png"
    assert mistake(file) == (
        f"recipe.data.source is {file}, which is a file; use a folder with a folder of images a class"
    )
    (empty / "one").mkdir()
    assert mistake(empty) == f"{empty}: 1 folder; at least two classes, each a folder with images, are needed"
    (empty / "two").mkdir()
    assert mistake(empty) == f"{empty}/one has no images; use files that end in .png, .jpg, .jpeg"
    assert mistake(photos, eval_source=str(source)) == (
        "recipe.data.eval_source has the classes 0, 1, 2, but recipe.data.source has cat, dog; use the same classes"
    )


def test_images_that_are_broken_or_of_several_sizes(photos: Path) -> None:
    Image.new("L", (20, 12)).save(photos / "cat" / "9.png")
    assert mistake(photos) == (
        "recipe.data.size is missing, and images have 2 sizes, from 8 x 8 to 20 x 12; use a size such as 8"
    )
    task(photos, size=8).check()
    broken = photos / "dog" / "9.jpeg"
    broken.write_bytes((photos / "dog" / "0.png").read_bytes()[:40])
    said = mistake(photos, size=8)
    assert said.startswith(f"{broken} can't be decoded: ")
    assert said.endswith("; remove it, or save it again")


def test_idx_files_that_are_broken(source: Path) -> None:
    images = source / "train-images-idx3-ubyte"
    whole = images.read_bytes()
    images.write_bytes(whole[:-1])
    assert mistake(source) == f"{images} has 4859 values where its header says 90 x 9 x 6"
    images.write_bytes(b"\x00\x00\x09\x03" + whole[4:])
    assert mistake(source) == f"{images} is no IDX file of unsigned bytes in 3 dimensions"
    images.write_bytes(whole[:10])
    assert mistake(source) == f"{images} is no IDX file of unsigned bytes in 3 dimensions"
    write_idx(source, "train", drawn(3, 9, 6), np.array([0, 1], dtype=np.uint8))
    assert mistake(source) == f"{source}: 3 images and 2 labels for train; both must be as many"
    write_idx(source, "train", drawn(0, 9, 6), np.array([], dtype=np.uint8))
    assert mistake(source) == f"{source}: no images for train"
    packed = source / "t10k-labels-idx1-ubyte.gz"
    write_idx(source, "train", drawn(2, 9, 6), np.array([0, 1], dtype=np.uint8))
    packed.write_bytes(packed.read_bytes()[:9])
    assert mistake(source).startswith(f"{packed} can't be read: ")
    packed.unlink()
    assert mistake(source) == f"no data file {source}/t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte.gz"


def test_what_is_not_installed_is_named(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samestep.data.images, "_FASHION", tmp_path / "nowhere")
    assert mistake("fashion-mnist").startswith(
        f'source "fashion-mnist": no folder {tmp_path}/nowhere; install dataset-fashion-mnist (Debian, '
        "Ubuntu), or use "
    )
    # None there is how Python says that a module can't be imported.
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert mistake(photos) == f'{photos}: package pillow is not installed; use pip install "samestep[images]"'


def test_digits_of_another_version_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path_without = [entry for entry in sys.path if "site-packages" not in entry]
    monkeypatch.setattr(sys, "path", path_without)
    fix = 'pip install "samestep[images]"'
    assert mistake("digits") == f'source "digits": package scikit-learn is not installed; use {fix}'
    path = tmp_path / "sklearn" / "datasets" / "data" / "digits.csv.gz"
    path.parent.mkdir(parents=True)
    (tmp_path / "sklearn" / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *path_without])
    assert mistake("digits").startswith(f'source "digits": {path} can\'t be read: ')
    path.write_bytes(gzip.compress(b"another file"))
    said = mistake("digits")
    assert said.startswith(f'source "digits": {path} holds other digits (sha256 ')
    assert said.endswith(f"..., not 6ebb3d2fee24...); use {fix}")


@pytest.mark.parametrize("name", ["digits.yaml", "fashion.yaml"])
def test_the_examples_are_jobs(name: str) -> None:
    job = load(EXAMPLES / name).job
    assert isinstance(resolve(job.recipe), ImageClassification)
    assert job.run.layout == "dp2"
