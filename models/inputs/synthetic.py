"""Random images generated from a seed, to test speed and large data sets."""

from __future__ import annotations

import numpy as np

from .dataset import Dataset
from .distortion import Distortion


def synthetic_images(*, train: int = 10_000, test: int = 2_000, classes: int = 10, seed: int = 0) -> Dataset:
    """Return noisy images in the shape of CIFAR-10 with separable classes.

    Each class is a pattern of 4x4 colored squares, symmetric so that a flip does not change it. An image is its class's
    pattern, shifted by up to 3 pixels, at half strength, in noise.

    Args:
        train: Number of images to train on.
        test: Number of held-out images.
        classes: Number of classes, equally frequent.
        seed: The same seed gives the same images.
    """
    rng = np.random.default_rng(seed)
    halves = rng.integers(0, 256, (classes, 8, 4, 3))
    squares = np.concatenate([halves, halves[:, :, ::-1]], axis=2)
    patterns = squares.repeat(4, axis=1).repeat(4, axis=2).astype(np.float32)

    def make(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.permutation(np.arange(count) % classes).astype(np.int32)
        images = np.empty((count, 32, 32, 3), np.uint8)
        for start in range(0, count, 1000):  # limits the memory for the noise
            part = slice(start, min(start + 1000, count))
            noise = rng.random((part.stop - start, 32, 32, 3), np.float32) * 255
            images[part] = 0.5 * _shifted(patterns[labels[part]], rng.integers(-3, 4, (2, len(noise)))) + 0.5 * noise
        return images, labels

    x_train, y_train = make(train)
    x_test, y_test = make(test)
    return Dataset(
        name="synthetic",
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        classes=classes,
        distortion=Distortion(),
    )


def _shifted(images: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Roll each image by its offset (``[2, n]``: rows, columns)."""
    side = np.arange(images.shape[1])
    rows, columns = ((side - offset[:, None]) % images.shape[1] for offset in offsets)
    return images[np.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]
