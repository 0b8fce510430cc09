"""Images in TFRecord files, of which each rank reads its own rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorflow as tf

import hvdkit as hk
from hvdkit.errors import describe

from .dataset import Dataset
from .distortion import Distortion

CLASSES, SHAPE = 10, (32, 32, 3)
TRAIN, TEST = "train-*.tfrecord", "test-*.tfrecord"
FEATURES = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
"""Of a ``tf.train.Example``: the pixels, uint8 ``[32, 32, 3]``, row by row, and the class."""


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """Images in files; the attributes are those of :class:`inputs.dataset.Dataset`."""

    train: Any
    test: Any
    name: str = "images in TFRecord files"
    classes: int = CLASSES
    shape: tuple[int, ...] = SHAPE
    distortion: Distortion = field(default_factory=Distortion)
    shuffle: Literal["blocks"] = "blocks"

    @property
    def examples(self) -> tuple[int, int]:
        """Number of images to train on, and of held-out ones."""
        return self.train.examples, self.test.examples


def image_files(data_dir: Path) -> ImageFiles:
    """Return the images in ``train-*.tfrecord`` and ``test-*.tfrecord``.

    Raises:
        ValueError: Files are missing, or an example is not an image with a class of 0 to 9.
    """
    train, test = (hk.data.tfrecord(data_dir / name, FEATURES).map(_decode) for name in (TRAIN, TEST))
    return ImageFiles(train=train, test=test)


def write_images(data: Dataset, folder: Path, files: int) -> None:
    """Write images as TFRecord files: ``files`` to train on, and one that is held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern, (images, labels), count in ((TRAIN, data.train, files), (TEST, data.test, 1)):
        for number, rows in enumerate(np.array_split(np.arange(len(labels)), count)):
            with tf.io.TFRecordWriter(str(folder / pattern.replace("*", f"{number:03}"))) as file:
                for image, label in zip(images[rows], labels[rows], strict=True):
                    pixels = tf.train.Feature(bytes_list=tf.train.BytesList(value=[image.tobytes()]))
                    features = {
                        "image": pixels,
                        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                    }
                    example = tf.train.Example(features=tf.train.Features(feature=features))
                    file.write(example.SerializeToString())


def _decode(batch: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    images, labels = batch["image"], batch["label"]
    pixels = int(np.prod(SHAPE))
    for image, label in zip(images, labels, strict=True):
        if len(image) != pixels or not 0 <= label < CLASSES:
            got = f"an image of {len(image)} bytes with the label {label}"
            expected = f"{pixels} bytes, uint8 {SHAPE}, and 0 to {CLASSES - 1}"
            raise ValueError(
                describe("--data-dir", got, expected, "write such files with models/write_files.py images")
            )
    rows = np.frombuffer(b"".join(images), np.uint8).reshape(-1, *SHAPE)
    return rows, labels.astype(np.int32)
