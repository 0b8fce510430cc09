"""Find losses and metric functions whose value is not the mean of their rows' values: the ranks' mean is another value.

N ranks give the loss of one process if, for any two parts A and B of a batch, with a and b rows,

    L(A and B) = (a L(A) + b L(B)) / (a + b)      or for sums:   L(A and B) = L(A) + L(B)

Dice, F1, masked sums over counts, and losses that compare rows with each other don't satisfy this. The chief tests it
once for each function, on the halves of its first batch, at the end of the epoch: the step only stores that batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from hvdkit import cluster
from hvdkit.cluster.logs import warn_once
from hvdkit.collectives.calls import refusing_collectives
from hvdkit.collectives.conversion import untracked_variable
from hvdkit.errors import see
from hvdkit.keras.attribute_swap import swap_attributes

Values = Callable[[Any, Any], Any]
_TOLERANCE = 1e-4  # of the largest magnitude; 16-bit floats have 3 digits
_HALF_TOLERANCE = 2e-2


class RowMeans:
    """Tests the losses and metric functions of a model."""

    def __init__(self) -> None:
        # The functions are kept, so that no other object gets their id.
        self._stored: dict[int, tuple[Any, tf.Variable]] = {}
        self._pending: list[Callable[[], None]] = []

    def report(self) -> None:
        """Test what has been stored, and warn on the chief."""
        pending = self._pending
        self._pending = []
        for test in pending if cluster.is_chief() else ():
            test()

    def observe_loss(self, loss: keras.losses.Loss, y_true: Any, y_pred: Any, values: Any) -> None:
        """Test a loss with the given unreduced ``values``, unless it is one of Keras's with a value for each row."""
        function = getattr(loss, "fn", loss)
        if not _is_of_keras(function) or values.shape.rank == 0:
            self._observe(f"loss {loss.name!r}", loss, loss.call, y_true, y_pred, is_sum=loss.reduction == "sum")

    @contextlib.contextmanager
    def observing_metrics(self, metrics: Any) -> Iterator[None]:
        """Test the functions among Keras's compiled ``metrics`` that are updated inside this context."""
        with contextlib.ExitStack() as stack:

            def install() -> None:
                for metric in metrics.metrics:
                    if type(metric) is keras.metrics.MeanMetricWrapper and not _is_of_keras(metric._fn):
                        stack.enter_context(swap_attributes(metric, _fn=self._observed(metric, metric._fn)))

            def build(*args: Any, **kwargs: Any) -> None:
                original_build(*args, **kwargs)
                install()

            if metrics is not None:
                install()  # none before it is built
                if not metrics.built:
                    original_build = metrics.build
                    stack.enter_context(swap_attributes(metrics, build=build))
            yield

    def _observed(self, metric: Any, function: Any) -> Callable[..., Any]:
        def observed(y_true: Any, y_pred: Any, **options: Any) -> Any:
            def call(y_true: Any, y_pred: Any) -> Any:
                return function(y_true, y_pred, **options)

            self._observe(f"metric {metric.name!r}", function, call, y_true, y_pred, is_sum=False)
            return function(y_true, y_pred, **options)

        return observed

    def _observe(self, name: str, owner: Any, call: Values, y_true: Any, y_pred: Any, *, is_sum: bool) -> None:
        leaves = [*tree.flatten(y_true), *tree.flatten(y_pred)]
        if not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0 for leaf in leaves):
            return
        if id(owner) not in self._stored:
            self._stored[id(owner)] = owner, untracked_variable(False, tf.bool, "hvdkit_is_stored")
        is_stored = self._stored[id(owner)][1]
        true_count = len(tree.flatten(y_true))

        def store(*arrays: np.ndarray) -> np.bool_:
            copies = [array.copy() for array in arrays]
            y = tree.pack_sequence_as(y_true, copies[:true_count]), tree.pack_sequence_as(y_pred, copies[true_count:])

            def test() -> None:
                if is_mean_of_rows(call, *y, is_sum=is_sum) is False:
                    warn_once(_message(name))

            has_halves = min(map(len, arrays)) > 1
            if has_halves:
                self._pending.append(test)
            return np.bool_(has_halves)

        if tf.executing_eagerly():
            if not bool(is_stored):
                is_stored.assign(bool(store(*(leaf.numpy() for leaf in leaves))))
            return
        run = lambda: tf.ensure_shape(tf.numpy_function(store, leaves, tf.bool), [])  # noqa: E731
        is_stored.assign(tf.cond(is_stored, lambda: True, run))


def is_mean_of_rows(call: Values, y_true: Any, y_pred: Any, *, is_sum: bool = False) -> bool | None:
    """Return whether a function of a batch is the mean (or the sum) of that of its halves; None if it is unknown.

    Args:
        call: the function; returns a value for each row, or one for the batch.
        y_true, y_pred: arrays, or nests of them, with equal numbers of rows.
        is_sum: test for the sum.

    Example:
        >>> ones = np.float32([1, 1, 0, 1])
        >>> is_mean_of_rows(lambda y, p: abs(y - p), ones, ones / 2)
        True
        >>> is_mean_of_rows(lambda y, p: sum(y * p) / sum(y), ones, np.float32([0.5, 1.5, 1, 0.5]))
        False
    """
    rows = {len(leaf) for leaf in [*tree.flatten(y_true), *tree.flatten(y_pred)]}
    if len(rows) != 1 or min(rows) < 2:
        return None
    number = min(rows)
    half = min(rows) // 2

    def value(start: int, end: int) -> tuple[float, float]:
        parts = [tree.map_structure(lambda leaf: tf.constant(leaf[start:end]), y) for y in (y_true, y_pred)]
        values = tf.convert_to_tensor(call(*parts))
        precision = _HALF_TOLERANCE if values.dtype.size == 2 else _TOLERANCE
        array = np.asarray(tf.cast(values, tf.float64))
        return float(array.sum() if is_sum else array.mean()), precision

    try:
        with tf.device("CPU"), refusing_collectives():
            whole, tolerance = value(0, number)
            first, _ = value(0, half)
            second, _ = value(half, number)
    except Exception:  # e.g. a fixed batch size, or a collective
        return None
    expected = first + second if is_sum else (half * first + (number - half) * second) / number
    if not np.isfinite([whole, expected]).all():
        return None
    return bool(abs(whole - expected) <= tolerance * max(abs(whole), abs(first), abs(second)))


def _is_of_keras(function: Any) -> bool:
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).startswith("keras.")


def _message(name: str) -> str:
    number = cluster.group(cluster.DATA).size
    return (
        f"{name}: its value for a batch is not the mean of the values for its rows, so the mean over {number} ranks "
        "differs from one process; begin the function with y_true = hk.allgather(y_true) and y_pred = "
        f"hk.allgather(y_pred), which give it the global batch; {see('pitfalls#losses-layers-and-random-numbers')}"
    )
