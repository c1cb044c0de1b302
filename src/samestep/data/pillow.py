"""The package Pillow, for images that must be decoded or resized; a job may do without it."""

from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from samestep.errors import UserError


def pillow(needed_by: str) -> ModuleType:
    """Pillow's module Image. Raises UserError where it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError(
            f'{needed_by}: package pillow is not installed; pip install "samestep[images]" would do'
        ) from None
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
