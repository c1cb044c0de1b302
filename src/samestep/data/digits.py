"""Handwritten digits, 1,797 images of 8 x 8, from scikit-learn."""

import numpy as np

from samestep.data.images import ImageSource, LabelledImages
from samestep.errors import UserError


def read() -> ImageSource:
    """Read the digits. Raises UserError where scikit-learn is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            'source "digits": package scikit-learn is not installed; pip install "samestep[images]" would do'
        ) from None
    found = load_digits()
    images = found.images.astype(np.uint8)  # [images, 8, 8], from 0 to 16
    return ImageSource(
        train=LabelledImages(pixels=list(images), labels=found.target.tolist()),
        names=tuple(str(number) for number in found.target_names.tolist()),
    )
