"""Images in IDX files, the format of MNIST and its kin (LeCun, Cortes & Burges: The MNIST database, file formats)."""

import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from samestep.data.images import ImageSource, LabelledImages
from samestep.errors import UserError

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
            f'source "fashion-mnist": no folder {_FASHION}; on Debian and Ubuntu apt-get install '
            f"dataset-fashion-mnist would do; elsewhere a folder with the same four files, given as source"
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
