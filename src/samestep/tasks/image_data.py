"""The data of an image classification: which images, how they are split, and how they become one size."""

from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Lt
from numpy.typing import NDArray
from pydantic import model_validator
from pydantic.dataclasses import dataclass

from samestep.data import image_folder, images
from samestep.data.images import ImageSource, LabelledImages
from samestep.data.pillow import coloured, resized
from samestep.data.split import check_split, limited, split
from samestep.errors import UserError
from samestep.recipe import STRICT, Positive, Real, Whole
from samestep.tasks.sections import refuse_together

UNKNOWN = -1  # the class of an image that is to be classified
_HELD_OUT = 0.1  # where neither the job nor the source says what is held out


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImageData:
    """Labelled images, how they are split, and how they become one size. All are held in memory."""

    source: str = "digits"  # or fashion-mnist, or a folder with a folder of images a class, or with IDX files
    eval_source: str | None = None  # held-out images in a source of their own
    held_out: Annotated[Real, Ge(0), Lt(1)] | None = None  # fraction of `source`; None: its own, or else 0.1
    size: Positive | None = None  # images become size x size; None: they are left as they are
    color: Literal["grey", "rgb"] | None = None  # None: grey where every image is
    limit: Annotated[Whole, Ge(2)] | None = None  # most images of a source, for quick tests

    @model_validator(mode="before")
    @classmethod
    def _one_way(cls, given: Any) -> Any:
        return refuse_together(given, "eval_source", ["held_out"], "is for held-out images taken from source")


class ImageSet:
    """Samples are (pixels [channels, height, width] in bytes, class number)."""

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        self.pixels = pixels  # [images, channels, height, width]
        self.labels = labels  # [images]

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


def like(known: ImageSet, files: Sequence[Path], data: ImageData) -> ImageSet:
    """Images of files in the size and colours of known ones. Raises UserError where they have another size."""
    channels, height, width = known.pixels.shape[1:]
    images = LabelledImages(pixels=[image_folder.decoded(file) for file in files], labels=[UNKNOWN] * len(files))
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
                f"{', '.join(source.names)}; the same classes would do"
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
            f"{other_width} x {other_height}; a size such as {max(shapes[0])} would do"
        )
    return shapes[0] if size is None else (size, size)


def _image_set(side: LabelledImages, color: str, size: int | None, shape: tuple[int, ...]) -> ImageSet:
    channels = 1 if color == "grey" else 3
    pixels = np.empty((len(side.labels), *shape, channels), dtype=np.uint8)
    for index, image in enumerate(side.pixels):
        one = coloured(resized(image, size) if size else image, color)
        pixels[index] = one.reshape(*shape, channels)
    return ImageSet(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), np.array(side.labels, dtype=np.int64))
