"""Image classification: a network assigns a class to each image.

From the top: the networks, the data (which images, how they are split, one size for all), and the task.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from numpy.typing import NDArray
from pydantic import model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from samestep.data import images
from samestep.data.images import ImageSource, LabelledImages, coloured, decoded, resized
from samestep.data.split import check_split, limited, split
from samestep.data.types import Batch, WholeDigest
from samestep.errors import UserError
from samestep.field_types import STRICT, Real, Whole, Width
from samestep.limits import MOST
from samestep.tasks.base import Classification, predict_each
from samestep.tasks.prediction import Model, Prediction, ToPredict
from samestep.tasks.registry import refuse_together

if TYPE_CHECKING:
    from torch import Tensor, nn


Norm = Callable[[int], nn.Module]  # from channels to a normalisation

NORMS: dict[str, Norm] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(GROUPS, channels),
    "none": lambda channels: nn.Identity(),
}


def small_net(*, channels: int, size: tuple[int, int], classes: int, width: int, norm: Norm) -> nn.Module:
    """Two stages of convolution, norm and pooling to a quarter of the size, then two dense layers."""
    height, breadth = size[0] // 4, size[1] // 4
    return nn.Sequential(
        _conv(channels, width),
        norm(width),
        nn.ReLU(),
        nn.MaxPool2d(2),  # [batch, width, size / 2, size / 2]
        _conv(width, 2 * width),
        norm(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),  # [batch, 2 width, size / 4, size / 4]
        nn.Flatten(),
        nn.Linear(2 * width * height * breadth, 8 * width),
        nn.ReLU(),
        nn.Linear(8 * width, classes),
    )


class ResNet18(nn.Module):
    """Deep residual learning (He et al. 2016, table 1): a stem and eight blocks of two convolutions.

    Not transformers' ResNet, which has batch norm alone and the large stem alone: `norm` and `stem` are choices here.

    With `small_stem` one 3 x 3 convolution stands in place of the 7 x 7 one of stride 2 and the pooling, as for
    images of 32 x 32 (section 4.2).
    """

    def __init__(self, *, channels: int, classes: int, width: int, norm: Norm, small_stem: bool) -> None:
        super().__init__()
        stem = _conv(channels, width) if small_stem else nn.Conv2d(channels, width, 7, 2, 3, bias=False)
        pool = nn.Identity() if small_stem else nn.MaxPool2d(3, 2, 1)
        self.stem = nn.Sequential(stem, norm(width), nn.ReLU(), pool)
        widths = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
        self.blocks = nn.Sequential(*(Residual(before, after, norm) for before, after in pairwise(widths)))
        self.head = nn.Linear(8 * width, classes)
        self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, classes]."""
        features = self.blocks(self.stem(images))  # [batch, 8 width, size / 8, size / 8]
        return self.head(features.mean(dim=(2, 3)))

    def _initialise(self) -> None:
        """As He et al. 2015, section 2.2, for networks of rectifiers."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class Residual(nn.Module):
    """Two convolutions and a shortcut around them; it halves the size where it doubles the channels."""

    def __init__(self, before: int, after: int, norm: Norm) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.first = nn.Sequential(_conv(before, after, stride), norm(after), nn.ReLU())
        self.second = nn.Sequential(_conv(after, after), norm(after))
        self.shortcut = (
            nn.Identity()
            if before == after
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after))
        )
        self.activation = nn.ReLU()

    def forward(self, features: Tensor) -> Tensor:
        return self.activation(self.second(self.first(features)) + self.shortcut(features))


def _conv(before: int, after: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride, 1, bias=False)


_WIDTHS = {"small": 16, "resnet18": 64}
GROUPS = 8  # of a group norm: channels are divided into so many
_LARGEST_FOR_SMALL_STEM = 64  # pixels


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImageModel:
    """A network for images, with random weights."""

    type: Literal["small", "resnet18"] = "small"
    width: Width | None = None  # channels of the first convolution; None: 16 of small, 64 of resnet18
    norm: Literal["group", "batch", "none"] = "group"
    stem: Literal["small", "large"] | None = None  # of resnet18; None: small for images up to 64 pixels

    @model_validator(mode="after")
    def _fits_together(self) -> "ImageModel":
        if self.stem is not None and self.type != "resnet18":
            raise ValueError(f'stem is given, but type is "{self.type}"; stem is for resnet18')
        if self.norm == "group" and self.width is not None and self.width % GROUPS:
            raise ValueError(
                f"width is {self.width} and norm is group, of {GROUPS} groups; "
                f"use a multiple of {GROUPS}, or another norm"
            )
        return self


def build(model: ImageModel, *, channels: int, size: tuple[int, int], classes: int) -> "nn.Module":
    """Build the network with random weights under torch's seed, for images [channels, *size]."""
    shared: dict[str, Any] = {
        "channels": channels,
        "classes": classes,
        "width": model.width or _WIDTHS[model.type],
        "norm": NORMS[model.norm],
    }
    if model.type == "small":
        return small_net(size=size, **shared)
    stem = model.stem or ("small" if max(size) <= _LARGEST_FOR_SMALL_STEM else "large")
    return ResNet18(small_stem=stem == "small", **shared)


def check(model: ImageModel, size: tuple[int, int]) -> None:
    """Raise UserError where the images are too small for the network."""
    if model.type == "small" and min(size) < 4:
        raise UserError(
            f"the images have {size[1]} x {size[0]} pixels, and the small network halves them twice; use "
            f"recipe.data.size of 4 or more"
        )


UNKNOWN = -1  # the class of an image that is to be classified
_HELD_OUT = 0.1  # where neither the job nor the source says what is held out


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImageData:
    """Labelled images, how they are split, and how they become one size. All are held in memory."""

    source: str = "digits"  # or fashion-mnist, or a folder with a folder of images a class, or with IDX files
    eval_source: str | None = None  # held-out images in a source of their own
    held_out: Annotated[Real, Ge(0), Lt(1)] | None = None  # fraction of `source`; None: its own, or else 0.1
    size: Annotated[Whole, Gt(0), Le(16384)] | None = None  # images become size x size; None: as they are
    color: Literal["grey", "rgb"] | None = None  # None: grey where every image is
    limit: Annotated[Whole, Ge(2), Le(MOST)] | None = None  # most images of a source, for quick tests

    @model_validator(mode="before")
    @classmethod
    def _one_way(cls, values: Any) -> Any:
        return refuse_together(values, "eval_source", ["held_out"], "is for held-out images taken from source")


class ImageSet(WholeDigest):
    """Samples are (pixels [channels, height, width] in bytes, class number)."""

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        self.pixels = pixels  # [images, channels, height, width]
        self.labels = labels  # [images]

    def digest(self) -> str:
        hasher = hashlib.sha256(f"{self.pixels.shape}".encode())
        hasher.update(self.pixels.tobytes())
        hasher.update(self.labels.astype("<i8").tobytes())
        return hasher.hexdigest()[:32]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        return self.pixels[index], int(self.labels[index])

    @cached_property
    def mean_and_deviation(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Of each channel, over all pixels: [channels, 1, 1] each. No deviation is 0."""
        counts = np.stack([np.bincount(channel.ravel(), minlength=256) for channel in self.pixels.swapaxes(0, 1)])
        weights = counts / counts.sum(axis=1, keepdims=True)  # [channels, 256]
        values = np.arange(256.0)
        mean = weights @ values
        deviation = np.sqrt((weights * (values - mean[:, None]) ** 2).sum(axis=1))
        deviation[deviation == 0] = 1
        return mean.astype(np.float32)[:, None, None], deviation.astype(np.float32)[:, None, None]


@plain_dataclass(frozen=True, kw_only=True)
class Pictures:
    """Images to train on and held-out ones, all of one size, and the names of the classes."""

    names: tuple[str, ...]
    train: ImageSet
    held_out: ImageSet | None


def read(data: ImageData) -> Pictures:
    """Read, split and resize the images.

    Raises UserError for a source that can't be read, for sources of other classes, for images of several sizes
    where no size is given, and where a side of the split is empty.
    """
    source = images.read(data.source, "recipe.data.source")
    train, held_out = _sides(data, source)
    every = [*train.pixels, *(held_out.pixels if held_out else [])]
    color = data.color or ("grey" if all(pixels.ndim == 2 for pixels in every) else "rgb")
    shape = _shape(every, data.size)
    sides = [None if side is None else _image_set(side, color, data.size, shape) for side in (train, held_out)]
    assert sides[0] is not None
    return Pictures(names=source.names, train=sides[0], held_out=sides[1])


def like(own: ImageSet, files: Sequence[Path], data: ImageData) -> ImageSet:
    """Images of files in the size and colours of known ones. Raises UserError where they have another size."""
    channels, height, width = own.pixels.shape[1:]
    images = LabelledImages(pixels=[decoded(file) for file in files], labels=[UNKNOWN] * len(files))
    for file, pixels in zip(files, images.pixels, strict=True):
        if data.size is None and pixels.shape[:2] != (height, width):
            raise UserError(
                f"{file} is {pixels.shape[1]} x {pixels.shape[0]}, and the model's images are {width} x {height}; "
                "resize it, or train with recipe.data.size"
            )
    return _image_set(images, "grey" if channels == 1 else "rgb", data.size, (height, width))


def _sides(data: ImageData, source: ImageSource) -> tuple[LabelledImages, LabelledImages | None]:
    """What is trained on, and what is held out."""
    if data.eval_source is not None:
        other = images.read(data.eval_source, "recipe.data.eval_source")
        if other.names != source.names:
            raise UserError(
                f"recipe.data.eval_source has the classes {', '.join(other.names)}, but recipe.data.source has "
                f"{', '.join(source.names)}; use the same classes"
            )
        return _limited(source.train, data.limit), _limited(other.train, data.limit)
    train = _limited(source.train, data.limit)
    if data.held_out is None and source.held_out is not None:
        return train, _limited(source.held_out, data.limit)
    fraction = _HELD_OUT if data.held_out is None else data.held_out
    if fraction == 0:
        return train, None
    chosen, held = split([pixels.tobytes() for pixels in train.pixels], fraction)
    check_split(len(chosen), len(held), fraction, "recipe.data.held_out")
    return train.pick(chosen), train.pick(held)


def _limited(side: LabelledImages, limit: int | None) -> LabelledImages:
    return side.pick(limited([pixels.tobytes() for pixels in side.pixels], limit)) if limit else side


def _shape(every: list[NDArray[np.uint8]], size: int | None) -> tuple[int, ...]:
    """Height and width that all images have. Raises UserError where they differ and no size is given."""
    shapes = sorted({pixels.shape[:2] for pixels in every})
    if size is None and len(shapes) > 1:
        (height, width), (other_height, other_width) = shapes[0], shapes[-1]
        raise UserError(
            f"recipe.data.size is missing, and images have {len(shapes)} sizes, from {width} x {height} to "
            f"{other_width} x {other_height}; use a size such as {max(shapes[0])}"
        )
    return shapes[0] if size is None else (size, size)


def _image_set(side: LabelledImages, color: str, size: int | None, shape: tuple[int, ...]) -> ImageSet:
    """Images as one array [samples, channels, height, width] uint8, with their classes."""
    channels = 1 if color == "grey" else 3
    pixels = np.empty((len(side.labels), *shape, channels), dtype=np.uint8)
    for index, image in enumerate(side.pixels):
        one = coloured(resized(image, size) if size else image, color)
        pixels[index] = one.reshape(*shape, channels)
    return ImageSet(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), np.array(side.labels, dtype=np.int64))


class ImageClassification(Classification):
    """Classify images. Everything is read once, at the first use."""

    predicts_from = "an image, or a folder with images"

    def __init__(self, *, data: ImageData, model: ImageModel) -> None:
        self._data = data
        self._model = model

    def check(self) -> None:
        """Raise UserError for what is wrong with the data, or where model and data don't fit."""
        check(self._model, self._size)

    def model(self) -> "nn.Module":
        return build(
            self._model,
            channels=self._pictures.train.pixels.shape[1],
            size=self._size,
            classes=len(self._pictures.names),
        )

    def train_set(self) -> ImageSet:
        return self._pictures.train

    def eval_set(self) -> ImageSet | None:
        return self._pictures.held_out

    def collate(self, samples: Sequence[tuple[Any, int]]) -> Batch:
        """Pixels of mean 0 and deviation 1 over the training images, channel by channel."""
        import torch

        mean, deviation = self._pictures.train.mean_and_deviation
        pixels = np.stack([pixels for pixels, _ in samples]).astype(np.float32)  # [batch, channels, height, width]
        return Batch(torch.from_numpy((pixels - mean) / deviation), torch.tensor([label for _, label in samples]))

    def class_names(self) -> Sequence[str]:
        return self._pictures.names

    def predict(self, model: Model, request: ToPredict) -> Iterator[Prediction]:
        """The class of each held-out image, or of each of a folder."""
        if request.file is None:
            yield from super().predict(model, request)
            return
        files = images.files_of(request.file, "--input")
        samples = like(self._pictures.train, files, self._data)
        for file, prediction in zip(files, predict_each(self, model, samples, request.batch), strict=True):
            yield {"file": str(file), **prediction}

    @property
    def _size(self) -> tuple[int, int]:
        height, width = self._pictures.train.pixels.shape[2:]
        return height, width

    @cached_property
    def _pictures(self) -> Pictures:
        return read(self._data)
