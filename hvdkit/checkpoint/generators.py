"""The states of Python's and NumPy's random generators as JSON, checked when they are restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdkit.checkpoint.schema import FieldError
from hvdkit.errors import CorruptCheckpointError, describe

# The largest value of some keys of NumPy's generators; MT19937 has 624 numbers, Philox a buffer of 4.
_LARGEST: Mapping[str, int] = {
    "pos": 624,
    "buffer_pos": 4,
    "has_uint32": 1,
    "has_gauss": 1,
    "uinteger": 2**32 - 1,
}


def state_to_json(state: object) -> object:
    """Return a generator's state with its arrays as lists, for JSON."""
    if isinstance(state, Mapping):
        return {key: state_to_json(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return {"array": state.tolist(), "dtype": state.dtype.name}
    return state.item() if isinstance(state, np.generic) else state


def numpy_state(saved: object, current: object, key: str = "state") -> Any:
    """Return a saved state of a NumPy generator, which must be like the ``current`` one.

    NumPy takes any numbers: with a position beyond the end it would read other memory.

    Raises:
        CorruptCheckpointError: it is the state of no generator of this kind.
        ValueError: it is the state of a generator of another kind.
    """
    if isinstance(current, Mapping):
        if not isinstance(saved, Mapping):
            raise _wrong(key, saved, "an object")
        kind = saved.get("bit_generator")
        expected = current.get("bit_generator")
        if kind != expected and isinstance(kind, str):
            raise ValueError(describe("generator", ascii(kind)[:40], repr(expected), "create the one that was saved"))
        if set(saved) != set(current):
            raise _wrong(key, ", ".join(map(str, saved)), ", ".join(map(str, current)))
        return {name: numpy_state(saved[name], part, name) for name, part in current.items()}
    if isinstance(current, np.ndarray):
        return _array(saved, current, key)
    if isinstance(current, float):
        if type(saved) not in (int, float):
            raise _wrong(key, saved, "a number")
    elif isinstance(current, int):
        largest = _LARGEST.get(key, 2**128 - 1)
        if type(saved) is not int or not 0 <= saved <= largest:
            raise _wrong(key, saved, f"an integer from 0 to {largest}")
    elif type(saved) is not type(current):
        raise _wrong(key, saved, f"a {type(current).__name__}")
    return saved


def _array(saved: object, current: np.ndarray, key: str) -> np.ndarray:
    found = saved if isinstance(saved, Mapping) else {}
    array = found.get("array")
    largest = np.iinfo(current.dtype).max if current.dtype.kind in "iu" else np.inf
    is_valid = (
        isinstance(array, list)
        and len(array) == current.size
        and found.get("dtype") == current.dtype.name
        and all(type(each) in (int, float) and 0 <= each <= largest for each in array)
    )
    if not is_valid:
        raise _wrong(key, array, f"{current.size} numbers of {current.dtype.name}")
    return np.array(array, current.dtype)


def python_state(saved: object) -> tuple[int, tuple[int, ...], float | None]:
    """Return a checked state of a ``random.Random``: its version, 624 words and their position, and a normal number."""
    if not isinstance(saved, list) or len(saved) != 3 or not isinstance(saved[1], list):
        raise _wrong("state", saved, "a version, words and a number")
    version, words, normal = saved
    if type(version) is not int:
        raise _wrong("version", version, "an integer")
    if len(words) != 625 or not all(type(each) is int and 0 <= each < 2**32 for each in words) or words[-1] > 624:
        raise _wrong("words", words, "624 words of 32 bits and a position up to 624")
    if normal is not None and type(normal) not in (int, float):
        raise _wrong("gauss_next", normal, "a number or null")
    return version, tuple(words), normal


def _wrong(key: str, got: object, expected: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{key}: {FieldError(got, expected)}")
