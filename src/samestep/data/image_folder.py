"""A user's own images: a folder with a folder for each class, with PNG or JPEG files in it."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from samestep.data.images import ImageSource, LabelledImages
from samestep.data.pillow import pillow
from samestep.errors import UserError

_SUFFIXES = (".png", ".jpg", ".jpeg")


def read(folder: Path) -> ImageSource:
    """Read all images, class by class in the order of their names.

    Raises UserError where a class has no images, there are fewer than two, or an image can't be decoded.
    """
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(classes) < 2:
        raise UserError(
            f"{folder}: {len(classes)} folder{'s' if len(classes) != 1 else ''}; at least two classes, each a folder "
            f"with images, are needed"
        )
    pixels: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for number, of_class in enumerate(classes):
        files = _images_in(of_class)
        if not files:
            raise UserError(f"{of_class} has no images; files that end in {', '.join(_SUFFIXES)} would do")
        pixels += [decoded(path) for path in files]
        labels += [number] * len(files)
    return ImageSource(train=LabelledImages(pixels=pixels, labels=labels), names=tuple(path.name for path in classes))


def files_of(place: Path, where: str) -> list[Path]:
    """An image, or those of a folder in the order of their names. Raises UserError where there are none."""
    if not place.exists():
        raise UserError(f"{where} {place}: there is no such file or folder")
    files = _images_in(place) if place.is_dir() else [place]
    if not files:
        raise UserError(f"{where} {place} has no images; files that end in {', '.join(_SUFFIXES)} would do")
    return files


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)


def decoded(path: Path) -> NDArray[np.uint8]:
    """[height, width] of a grey image, [height, width, 3] of any other."""
    library = pillow(f"{path.parent.parent}")
    try:
        with library.open(path) as image:
            return np.asarray(image.convert("L" if image.mode in ("L", "1") else "RGB"))
    except (OSError, SyntaxError, ValueError, library.DecompressionBombError) as error:
        raise UserError(f"{path} can't be decoded: {error}; remove it, or save it again") from None
