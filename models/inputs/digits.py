"""Handwritten digits from scikit-learn: real images without a download."""

from __future__ import annotations

import numpy as np

from .dataset import Dataset
from .distortion import CROP, Distortion

SIDE = 32
"""Height and width, in pixels, of the returned images: those of CIFAR-10."""


def load_digits(*, held_out: float = 0.2, seed: int = 0) -> Dataset:
    """Return 1,797 images of digits, 8x8 scaled up to 24x24 within a margin of 4, in three equal channels.

    The margin lets the random 24x24 crop shift a digit by up to 4 pixels; the central crop is the digit itself.
    Digits are not flipped, and standardized gray images do not change with contrast or brightness.

    Args:
        held_out: Fraction of each class to hold out.
        seed: Seed of the choice of held-out images.

    Source: scikit-learn ``load_digits`` (UCI "Optical Recognition of Handwritten Digits", test part).
    """
    from scipy.ndimage import zoom
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    digits = load()
    scaled = zoom(digits.images, (1, CROP / 8, CROP / 8), order=1, mode="nearest", grid_mode=True)
    margin = (SIDE - CROP) // 2
    gray = np.pad(scaled, ((0, 0), (margin, margin), (margin, margin)))
    images = np.repeat(np.rint(gray * (255 / 16)).astype(np.uint8)[..., None], 3, axis=-1)
    x_train, x_test, y_train, y_test = train_test_split(
        images, digits.target.astype(np.int32), test_size=held_out, random_state=seed, stratify=digits.target
    )
    return Dataset(
        name="digits",
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        classes=10,
        distortion=Distortion(flip=False, brightness=0.0, contrast=(1.0, 1.0)),
    )
