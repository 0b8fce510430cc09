"""CIFAR-10 in its binary version."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hvdkit.data import Concatenated
from hvdkit.errors import describe

from .dataset import Dataset
from .distortion import Distortion

CLASSES = 10
FOLDER = "cifar-10-batches-bin"
TRAIN_FILES = [f"data_batch_{i}.bin" for i in range(1, 6)]
TEST_FILES = ["test_batch.bin"]
RECORD = np.dtype([("label", np.uint8), ("image", np.uint8, (3, 32, 32))])
"""One example, 3,073 bytes: the label, then the red, green and blue planes row by row."""
DOWNLOAD = (
    f"download cifar-10-binary.tar.gz (https://www.cs.toronto.edu/~kriz/cifar.html), unpack it and pass "
    f"the folder that holds {FOLDER}; or use --data digits"
)


def load_cifar10(data_dir: str | Path) -> Dataset:
    """Return CIFAR-10 from its binary files, memory-mapped: images are read on access.

    Args:
        data_dir: The folder with ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, or its parent.

    Raises:
        FileNotFoundError: Files are missing; the message names them.
        ValueError: A file is truncated, or a label is not 0 to 9; the message names the file (and record).

    Source: https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version".
    """
    folder = Path(data_dir)
    if (folder / FOLDER).is_dir():
        folder /= FOLDER
    missing = [name for name in TRAIN_FILES + TEST_FILES if not (folder / name).is_file()]
    if missing:
        got = f"{folder} without {', '.join(missing)}"
        raise FileNotFoundError(describe("data_dir", got, "CIFAR-10's binary files", DOWNLOAD))
    x_train, y_train = _read(folder, TRAIN_FILES)
    x_test, y_test = _read(folder, TEST_FILES)
    return Dataset(
        name="cifar10",
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        classes=CLASSES,
        distortion=Distortion(),
    )


def _read(folder: Path, names: list[str]) -> tuple[Concatenated, np.ndarray]:
    """Return the images (uint8 ``[n, 32, 32, 3]``, mapped) and labels (int32 ``[n]``) of some files."""
    files = [_records(folder / name) for name in names]
    images = Concatenated([records["image"].transpose(0, 2, 3, 1) for records in files])
    labels = np.concatenate([records["label"] for records in files]).astype(np.int32)
    return images, labels


def _records(path: Path) -> np.ndarray:
    size = path.stat().st_size
    if size == 0 or size % RECORD.itemsize:
        raise ValueError(
            describe(str(path), f"{size} bytes", f"a multiple of {RECORD.itemsize} (a label byte and 3072 of pixels)",
                     "the file is truncated: copy or unpack it again")
        )  # fmt: skip
    records = np.asarray(np.memmap(path, RECORD, "r"))
    wrong = np.flatnonzero(records["label"] >= CLASSES)
    if wrong.size:
        raise ValueError(
            describe(f"{path}, record {wrong[0]}", f"the label {records['label'][wrong[0]]}", "0 to 9",
                     "the file is damaged, or is not CIFAR-10's binary version: unpack it again")
        )  # fmt: skip
    return records
