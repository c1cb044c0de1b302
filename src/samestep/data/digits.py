"""Handwritten digits, 1,797 images of 8 x 8, from a file of scikit-learn; the package itself is not imported."""

import gzip
import hashlib

import numpy as np

from samestep.data.images import ImageSource, LabelledImages
from samestep.data.package_files import package_folder
from samestep.errors import UserError

_INSTALL = 'pip install "samestep[images]"'
_SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"


def read() -> ImageSource:
    """Read the digits (Alpaydin & Kaynak 1998). Raises UserError where scikit-learn is not installed."""
    folder = package_folder("sklearn")
    if folder is None:
        raise UserError(f'source "digits": package scikit-learn is not installed; use {_INSTALL}')
    path = folder / "datasets" / "data" / "digits.csv.gz"
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise UserError(f'source "digits": {path} can\'t be read: {error}; use {_INSTALL}') from None
    found = hashlib.sha256(content).hexdigest()
    if found != _SHA256:
        raise UserError(
            f'source "digits": {path} holds other digits (sha256 {found[:12]}..., not {_SHA256[:12]}...); use '
            f"{_INSTALL}"
        )
    rows = np.loadtxt(content.decode("ascii").splitlines(), delimiter=",", dtype=np.uint8)  # [images, 65]
    pixels = rows[:, :64].reshape(-1, 8, 8)  # from 0 to 16
    return ImageSource(
        train=LabelledImages(pixels=list(pixels), labels=rows[:, 64].tolist()), names=tuple("0123456789")
    )
