"""Labelled images: what a source gives, folders of a user's own images, and IDX files.

Sources by name, and readers by what a folder holds, stand in two tables, a line each. IDX is the format of MNIST and
others (LeCun, Cortes & Burges: The MNIST database, file formats).
"""

import gzip
import pkgutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from samestep.data.package_files import locate
from samestep.errors import UserError, closest

# Called without arguments: one line each.
SOURCES = {
    "digits": "samestep.data.bundled:read_digits",
    "fashion-mnist": "samestep.data.images:read_fashion_mnist",
}

# Called with the path of a folder: what the folder must hold, and who reads it then.
_READERS = (
    ("train-images-idx3-ubyte*", "samestep.data.images:read_folder"),
    ("*/", "samestep.data.images:read_class_folders"),
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
    """Training images, held-out ones if the source has its own, and the class names."""

    train: LabelledImages
    held_out: LabelledImages | None = None
    names: tuple[str, ...]


def read(source: str, where: str) -> ImageSource:
    """Read a source: a name of the table, or a folder. `where` is the key that names it, for messages.

    Raises UserError where there is no such source, or it can't be read.
    """
    if source in SOURCES:
        return pkgutil.resolve_name(SOURCES[source])()
    path = locate(source, where)
    if path.is_dir():
        for pattern, reader in _READERS:
            if any(path.glob(pattern)):
                return pkgutil.resolve_name(reader)(path)
        raise UserError(f"{where} is {source}: that folder has no folders in it; use one a class, with images")
    if path.exists():
        raise UserError(f"{where} is {source}, which is a file; use a folder with a folder of images a class")
    raise UserError(f'{where} is "{source}"; {closest(source, SOURCES)}, or a path to a folder with a folder a class')


_SUFFIXES = (".png", ".jpg", ".jpeg")


def read_class_folders(folder: Path) -> ImageSource:
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
            raise UserError(f"{of_class} has no images; use files that end in {', '.join(_SUFFIXES)}")
        pixels += [decoded(path) for path in files]
        labels += [number] * len(files)
    return ImageSource(train=LabelledImages(pixels=pixels, labels=labels), names=tuple(path.name for path in classes))


def files_of(place: Path, where: str) -> list[Path]:
    """An image, or those of a folder in the order of their names. Raises UserError where there are none."""
    if not place.exists():
        raise UserError(f"{where} {place}: there is no such file or folder")
    files = _images_in(place) if place.is_dir() else [place]
    if not files:
        raise UserError(f"{where} {place} has no images; use files that end in {', '.join(_SUFFIXES)}")
    return files


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)


def decoded(path: Path) -> NDArray[np.uint8]:
    """Decode an image: [height, width] if it is grey, else [height, width, 3]."""
    library = pillow(f"{path.parent.parent}")
    try:
        with library.open(path) as image:
            return np.asarray(image.convert("L" if image.mode in ("L", "1") else "RGB"))
    except (OSError, SyntaxError, ValueError, library.DecompressionBombError) as error:
        raise UserError(f"{path} can't be decoded: {error}; remove it, or save it again") from None


_FASHION = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package puts it
_CLOTHES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
_BYTES = 0x08  # the code of unsigned bytes in the third byte of a file


def read_fashion_mnist() -> ImageSource:
    """Read Fashion-MNIST (Xiao, Rasul & Vollgraf 2017): 60,000 images of 28 x 28 of clothes, and 10,000 held out.

    Raises UserError where Debian's package is not installed.
    """
    if not _FASHION.is_dir():
        raise UserError(
            f'source "fashion-mnist": no folder {_FASHION}; install dataset-fashion-mnist (Debian, '
            "Ubuntu), or use a folder with the same four files as source"
        )
    return read_folder(_FASHION, names=_CLOTHES)


def read_folder(folder: Path, names: tuple[str, ...] | None = None) -> ImageSource:
    """Read train-images-idx3-ubyte and its three neighbours, each also with .gz behind.

    Raises UserError with the file for what is missing or wrong in it.
    """
    train, held_out = (_part(folder, part) for part in ("train", "t10k"))
    highest = max(*train.labels, *held_out.labels)
    return ImageSource(
        train=train, held_out=held_out, names=names or tuple(str(number) for number in range(highest + 1))
    )


def _part(folder: Path, part: str) -> LabelledImages:
    """Read the train or test part of an IDX data set: pixels [height, width] and a label for each image."""
    images = _read(folder / f"{part}-images-idx3-ubyte", dimensions=3)
    labels = _read(folder / f"{part}-labels-idx1-ubyte", dimensions=1)
    if len(images) != len(labels):
        raise UserError(f"{folder}: {len(images)} images and {len(labels)} labels for {part}; both must be as many")
    if not len(images):
        raise UserError(f"{folder}: no images for {part}")
    return LabelledImages(pixels=list(images), labels=labels.tolist())


def _read(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array in a file: two zeros, type, number of dimensions, each dimension in four bytes, then the values."""
    packed = path.with_name(path.name + ".gz")
    try:
        content = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no data file {path} or {packed.name}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{packed if packed.exists() else path} can't be read: {error}") from None
    header = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, _BYTES, dimensions]) or len(content) < header:
        raise UserError(f"{path} is no IDX file of unsigned bytes in {dimensions} dimensions")
    shape = tuple(np.frombuffer(content, dtype=">u4", count=dimensions, offset=4).tolist())
    values = np.frombuffer(content, dtype=np.uint8, offset=header)
    if len(values) != np.prod(shape):
        raise UserError(f"{path} has {len(values)} values where its header says {' x '.join(map(str, shape))}")
    return values.reshape(shape)


def pillow(needed_by: str) -> ModuleType:
    """Return Pillow's module Image. Raises UserError if it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError(f'{needed_by}: package pillow is not installed; use pip install "samestep[images]"') from None
    return Image


def resized(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """An image [height, width] or [height, width, 3] as `size` x `size`, by bilinear interpolation."""
    if pixels.shape[:2] == (size, size):
        return pixels
    library = pillow("recipe.data.size")
    return np.asarray(library.fromarray(pixels).resize((size, size), library.Resampling.BILINEAR))


def coloured(pixels: NDArray[np.uint8], color: str) -> NDArray[np.uint8]:
    """An image as "grey" [height, width] or "rgb" [height, width, 3]."""
    if (pixels.ndim == 2) == (color == "grey"):
        return pixels
    if color == "rgb":
        return np.repeat(pixels[:, :, None], 3, axis=2)
    return np.asarray(pillow("recipe.data.color").fromarray(pixels).convert("L"))
