"""Compare hk.fit with plain Keras: the same program alone on all the data in each process, and on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import pytest

import hvdkit as hk
from hvdkit import cluster
from hvdkit.cluster.agreement import run_on_all_ranks

SEED = 11


def line(rng: np.random.Generator, rows: int = 22) -> tuple[np.ndarray, np.ndarray]:
    """Return examples on a plane."""
    x = rng.normal(size=(rows, 3)).astype("float32")
    return x, (x @ np.ones((3, 1)) + 0.1).astype("float32")


def mine(array: Any, rank: int, size: int) -> Any:
    """Return a rank's part of a global batch, in the order of ``hk.data.GlobalBatches``."""
    return array[rank * len(array) // size : (rank + 1) * len(array) // size]


def plain(
    build: Callable[[], Any], *args: Any, on_each_rank: bool = False, **kwargs: Any
) -> tuple[Any, dict[str, list[float]]]:
    """Return the model and the History of plain ``model.fit`` on all the data, without other ranks.

    The chief trains it, and other ranks get its weights and History. Each rank trains it if it has callbacks, which
    tests read, or no weights until it is trained. Pass ``on_each_rank`` if the test trains it further or reads more of
    it, or if its step has collectives.
    """
    keras.utils.set_random_seed(SEED)
    model = build()
    if on_each_rank or "callbacks" in kwargs or not model.built:
        return model, model.fit(*_made(args), verbose=0, **_made(kwargs)).history

    def train_on_chief() -> tuple[dict[str, list[float]], list[np.ndarray]] | None:
        if not hk.is_chief():
            return None
        history = model.fit(*_made(args), verbose=0, **_made(kwargs)).history
        return history, [np.asarray(weight) for weight in model.weights]

    trained = run_on_all_ranks(cluster.exchange(), "plain Keras", train_on_chief)
    history, weights = hk.broadcast_object(trained)
    for weight, value in zip(model.weights, weights, strict=True):
        weight.assign(value)
    return model, history


def ported(build: Callable[[], Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, list[float]]]:
    """Return the model and the History of ``hk.fit``."""
    keras.utils.set_random_seed(SEED)
    model = build()
    return model, hk.fit(model, *_made(args), verbose=0, **_made(kwargs)).history


def compare(
    build: Callable[[], Any],
    *args: Any,
    rtol: float = 2e-4,
    atol: float = 2e-5,
    on_each_rank: bool = False,
    **kwargs: Any,
) -> Any:
    """Check that both ways give the same History and weights; return both models.

    Arguments named ``make_...`` are called for each. ``on_each_rank`` is that of :func:`plain`.
    """
    one, expected = plain(build, *args, on_each_rank=on_each_rank, **kwargs)
    many, found = ported(build, *args, **kwargs)
    same_logs(found, expected, rtol=rtol, atol=atol)
    same_weights(many, one, rtol=rtol, atol=atol)
    hk.compare_variables(many.trainable_variables)
    return one, many


def same_logs(found: Any, expected: Any, *, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    assert list(found) == list(expected)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=rtol, atol=atol, err_msg=name)


def same_weights(found: Any, expected: Any, *, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    same_values(found.weights, expected.weights, rtol=rtol, atol=atol)


def same_values(found: Iterable[Any], expected: Iterable[Any], *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Compare arrays, tensors or variables one by one, exactly unless a tolerance is given."""
    for mine, theirs in zip(found, expected, strict=True):
        name = getattr(theirs, "path", "")
        if rtol or atol:
            np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=atol, err_msg=name)
        else:
            np.testing.assert_array_equal(mine, theirs, err_msg=name)


def same_nests(found: Any, expected: Any, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Compare nested tuples, lists and dicts of arrays or tensors."""
    keras.tree.assert_same_structure(found, expected)
    same_values(keras.tree.flatten(found), keras.tree.flatten(expected), rtol=rtol, atol=atol)


def raises_on_several(error: Any, match: str) -> contextlib.AbstractContextManager[Any]:
    """Expect an error on every rank; a single rank cannot differ from others, so expect none there."""
    return pytest.raises(error, match=match) if hk.size() > 1 else contextlib.nullcontext()


def assert_mismatch(call: Callable[[], object], words: list[str]) -> None:
    """Check that the call fails on every rank, with an error that names the last rank and has all ``words``."""
    with raises_on_several(hk.CollectiveMismatchError, f"rank {hk.size() - 1}") as error:
        call()
    assert error is None or all(word in str(error.value) for word in words), error


def _made(arguments: Any) -> Any:
    made = {key: value() if is_maker(value) else value for key, value in _items(arguments)}
    return made if isinstance(arguments, dict) else list(made.values())


def _items(arguments: Any) -> Any:
    return arguments.items() if isinstance(arguments, dict) else enumerate(arguments)


def is_maker(value: Any) -> bool:
    return callable(value) and getattr(value, "__name__", "").startswith("make_")
