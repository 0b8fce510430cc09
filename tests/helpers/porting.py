"""Run programs and their ports (:mod:`helpers.ports`), and compare the results of both."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import io
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np


def execute(name: str, path: Path) -> dict[str, Any]:
    """Run the script at ``path`` as a separate module after resetting Keras; return its `result`."""
    import keras

    keras.utils.clear_session()
    keras.config.set_dtype_policy("float32")
    spec = importlib.util.spec_from_file_location(f"program_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
        return as_values(result_of(module))
    finally:
        del sys.modules[module.__name__]
        keras.config.set_dtype_policy("float32")


def result_of(module: ModuleType) -> dict[str, Any]:
    """Return the values of a program that are compared."""
    result = module.result
    if not isinstance(result, dict) or not result:
        raise TypeError(f"{module.__name__}: `result` is to be a dict that is not empty, got {result!r}")
    return result


def as_values(result: Any) -> Any:
    """Return ``result`` with tensors and lists of numbers converted to arrays."""
    if isinstance(result, dict):
        return {str(key): as_values(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        values = [as_values(value) for value in result]
        if values and all(isinstance(v, np.ndarray) and v.ndim == 0 and v.dtype.kind in "iufb" for v in values):
            return np.array([v.item() for v in values])
        return values
    if isinstance(result, (str, type(None))):
        return result
    return np.asarray(result)


def digest(value: Any) -> str:
    """Return a digest of a nested result of as_values, equal if and only if all bits are equal."""
    made = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, dict):
            made.update(f"dict {sorted(item)}".encode())
            for key in sorted(item):
                add(item[key])
        elif isinstance(item, list):
            made.update(f"list {len(item)}".encode())
            for each in item:
                add(each)
        elif isinstance(item, np.ndarray):
            made.update(f"array {item.dtype} {item.shape}".encode() + item.tobytes())
        else:
            made.update(repr(item).encode())

    add(value)
    return made.hexdigest()


@dataclass
class Comparison:
    """The differences between a port's results and the plain script's."""

    tolerance: float
    """Allowed difference of floats, relative to the largest magnitude in the array or 0.01, whichever is larger."""
    problems: list[str] = field(default_factory=list)
    largest: float = 0.0
    """The largest relative difference of floats so far."""

    def values(self, got: Any, expected: Any, where: str = "result") -> None:
        """Compare two nested results of as_values."""
        if isinstance(expected, dict):
            if not isinstance(got, dict) or set(got) != set(expected):
                self.problems.append(f"{where}: keys {keys_of(got)}, expected {sorted(expected)}")
                return
            for key, value in expected.items():
                self.values(got[key], value, f"{where}[{key!r}]")
        elif isinstance(expected, list):
            if not isinstance(got, list) or len(got) != len(expected):
                length = len(got) if hasattr(got, "__len__") else got
                self.problems.append(f"{where}: length {length}, expected {len(expected)}")
                return
            for index, value in enumerate(expected):
                self.values(got[index], value, f"{where}[{index}]")
        elif isinstance(expected, np.ndarray):
            self.arrays(np.asarray(got), expected, where)
        elif got != expected:
            self.problems.append(f"{where}: {got!r}, expected {expected!r}")

    def arrays(self, got: np.ndarray, expected: np.ndarray, where: str) -> None:
        """Compare two arrays: floats up to the tolerance, other dtypes exactly."""
        if got.shape != expected.shape:
            self.problems.append(f"{where}: shape {got.shape}, expected {expected.shape}")
        elif expected.dtype.kind != "f" or got.dtype.kind != "f":
            if not np.array_equal(got, expected):
                self.problems.append(f"{where}: {brief(got)}, expected {brief(expected)}")
        elif expected.size:
            if not np.array_equal(np.isfinite(got), np.isfinite(expected)):
                self.problems.append(f"{where}: {brief(got)}, expected {brief(expected)}")
                return
            finite = np.isfinite(expected)
            scale = max(float(np.abs(expected[finite]).max(initial=0.0)), 1e-2)
            difference = float(np.abs(got[finite] - expected[finite]).max(initial=0.0)) / scale
            self.largest = max(self.largest, difference)
            if difference > self.tolerance:
                self.problems.append(f"{where}: differs by {difference:.2g}: {brief(got)}, expected {brief(expected)}")

    def folders(self, got: Path, expected: Path) -> None:
        """Compare the files that both runs left in their folders."""
        ours, theirs = files_of(got), files_of(expected)
        if set(ours) != set(theirs):
            self.problems.append(f"files: {sorted(ours)}, expected {sorted(theirs)}")
        for name in sorted(set(ours) & set(theirs)):
            self.values(contents(ours[name]), contents(theirs[name]), name)


def keys_of(value: Any) -> Any:
    """Return a dict's keys, or the value itself if it is not a dict."""
    return sorted(value) if isinstance(value, dict) else type(value).__name__


def brief(array: np.ndarray) -> str:
    """Return an array as a short string."""
    return np.array2string(array.ravel()[:6], precision=6, separator=", ") + ("..." if array.size > 6 else "")


def files_of(folder: Path) -> dict[str, Path]:
    """Return a folder's files by name; names of TensorBoard files without time and host."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = "events" if path.name.startswith("events.out.tfevents") else path.name
            found[str(path.parent.relative_to(folder) / name)] = path
    return found


def contents(path: Path) -> Any:
    """Return the contents of a file that are compared: rows, weights, or summaries."""
    if path.suffix == ".csv":
        with path.open() as opened:
            return as_values([[number(cell) for cell in row] for row in csv.reader(opened)])
    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            return weights_in(io.BytesIO(archive.read("model.weights.h5")))
    if path.suffix == ".h5":
        return weights_in(io.BytesIO(path.read_bytes()))
    if path.name.startswith("events.out.tfevents"):
        return summaries_in(path)
    return {}


def number(cell: str) -> float | str:
    """Return a cell of a CSV file, as a float if it is a number."""
    try:
        return float(cell)
    except ValueError:
        return cell


def weights_in(opened: io.BytesIO) -> dict[str, Any]:
    """Return the arrays of an HDF5 file by path."""
    import h5py

    found: dict[str, Any] = {}
    with h5py.File(opened) as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return as_values(found)


def summaries_in(path: Path) -> dict[str, Any]:
    """Return the scalars of a TensorBoard file: a list of (step, value) per tag."""
    import tensorflow as tf

    found: dict[str, Any] = {}
    for event in tf.compat.v1.train.summary_iterator(str(path)):
        for value in event.summary.value:
            array = tf.make_ndarray(value.tensor)
            if array.dtype.kind == "f":
                found.setdefault(value.tag, []).append([float(event.step), float(array)])
    return as_values(found)
