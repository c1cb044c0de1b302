"""Labelled images as a source gives them, and the sources by name."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from samestep.data.installed import locate
from samestep.errors import UserError, closest

# Called without arguments: one line each.
SOURCES = {
    "digits": "samestep.data.digits:read",
    "fashion-mnist": "samestep.data.idx:read_fashion_mnist",
}

# Called with the path of a folder: what the folder must hold, and who reads it then.
_READERS = (
    ("train-images-idx3-ubyte*", "samestep.data.idx:read_folder"),
    ("*/", "samestep.data.image_folder:read"),
)


@dataclass(frozen=True, kw_only=True)
class LabelledImages:
    """Images and the numbers of their classes, in the source's order."""

    pixels: Sequence[NDArray[np.uint8]]  # each [height, width], or [height, width, 3] in colour
    labels: Sequence[int]

    def pick(self, indices: Sequence[int]) -> "LabelledImages":
        return LabelledImages(
            pixels=[self.pixels[index] for index in indices], labels=[self.labels[index] for index in indices]
        )


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """What a source has: images to train on, held-out ones where it has its own, and the names of the classes."""

    train: LabelledImages
    held_out: LabelledImages | None = None
    names: tuple[str, ...]


def read(source: str, where: str) -> ImageSource:
    """Read a source: a name of the table, or a folder. `where` is the key that names it, for messages.

    Raises UserError where there is no such source, or it can't be read.
    """
    if source in SOURCES:
        return _function(SOURCES[source])()
    path = locate(source, where)
    if path.is_dir():
        for pattern, reader in _READERS:
            if any(path.glob(pattern)):
                return _function(reader)(path)
        raise UserError(f"{where} is {source}: that folder has no folders in it; one a class, with images, would do")
    if path.exists():
        raise UserError(f"{where} is {source}, which is a file; a folder with a folder of images a class would do")
    raise UserError(f'{where} is "{source}"; {closest(source, SOURCES)}, or a path to a folder with a folder a class')


def _function(name: str) -> Callable[..., ImageSource]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
