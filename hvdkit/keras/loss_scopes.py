"""Decide whether a loss or a metric function is computed on each rank's rows, or on the gathered rows of the batch.

The mean of the ranks' values is the value of one process if, for any two parts A and B of a batch, with a and b rows,

    L(A and B) = (a L(A) + b L(B)) / (a + b)      or for sums:   L(A and B) = L(A) + L(B)

Dice, F1, masked sums over counts, and losses that compare rows with each other don't satisfy this. Every rank computes
them on the gathered labels and predictions, which is exact for any function. So the first step gathers all that is not
known, and stores some of this rank's rows. After it, the ranks test the functions on parts of these rows. What all of
them find to be a mean of its rows is computed on each rank's rows from then on, and tested again in each epoch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import tensorflow as tf
from keras import tree

from hvdkit import cluster
from hvdkit.cluster.logs import get_logger
from hvdkit.collectives.conversion import untracked_variable
from hvdkit.collectives.graphs import function_graph
from hvdkit.collectives.refusal import refusing_collectives
from hvdkit.errors import HvdkitError, see
from hvdkit.keras.rank_functions import store_once
from hvdkit.keras.source_checks import is_of_keras

if TYPE_CHECKING:
    import keras

    from hvdkit.collectives.conversion import TensorLike
    from hvdkit.keras.data_types import Arrays, Tensors

LossScope = Literal["auto", "rows", "batch"]
Values: TypeAlias = Callable[[Any, Any], "TensorLike"]
"""A function of labels and predictions, in a structure that it knows; returns a value for each row, or one for all."""
UNKNOWN = 0
ROWS = 1
BATCH = 2
_TOLERANCE = 2e-5  # of the largest magnitude; 16-bit floats have 3 digits
_HALF_TOLERANCE = 2e-2
_ROWS = 8  # of a step that are tested
_PADDING = (0, -1, -100, 255, np.nan)  # labels by which programs mark what their losses leave out
# Keras's losses with a value for each row that depends on the other rows.
_COUPLED = ("circle",)


@dataclass(eq=False)
class _Function:
    """A loss or a metric function.

    Attributes:
        name: for messages.
        owner: the object whose id is its key, which must not be deleted.
        shown: the scope that its graph shows.
        scope: UNKNOWN, ROWS or BATCH; int32.
        is_stored: whether the rows to test it have been stored.
        keepers: for each call in a graph, the function that stores its rows.
        test: returns the scope that this rank's rows show.
        local_bytes: of the arrays that a step gathers from this rank.
        needs_batch: whether it could not be traced on this rank's rows.
        is_reported: whether the chief has logged it.
    """

    name: str
    owner: object
    shown: int
    scope: tf.Variable
    is_stored: tf.Variable
    keepers: list[Callable[..., None]] = field(default_factory=list)
    test: Callable[[], int] | None = None
    local_bytes: int = 0
    needs_batch: bool = False
    is_reported: bool = False


class LossScopes:
    """The scopes of a model's losses and metric functions.

    Args:
        loss_scope: "auto" tests losses; "rows" and "batch" decide for all of them. Metric functions are always tested.
        may_gather: False if batches have tensors that every rank gets whole: nothing is gathered in "auto".
    """

    def __init__(self, loss_scope: str, *, may_gather: bool = True) -> None:
        self.loss_scope = loss_scope
        self.may_gather = may_gather
        self._stands_in = False
        self._functions: dict[int, _Function] = {}

    def of_loss(
        self, loss: keras.Loss, call: Values, y_true: Tensors, y_pred: Tensors, sample_weight: TensorLike | None
    ) -> int | _Function:
        """Return the scope of a loss in this step: ROWS, BATCH, or a function whose scope may be unknown.

        ``call`` computes its unreduced values, or all of the loss if its class has its own ``__call__``.
        """
        if self.loss_scope != "auto":
            return ROWS if self.loss_scope == "rows" else BATCH
        if not self.may_gather:
            return ROWS
        function = getattr(loss, "fn", loss)
        is_own = not is_of_keras(function) or not is_of_keras(type(loss).call)
        is_known = not is_own and getattr(function, "__name__", "") not in _COUPLED
        if is_known and tf.convert_to_tensor(call(y_true, y_pred)).shape.rank != 0:
            return ROWS
        if call is loss and sample_weight is not None:
            return BATCH  # its own reduction of weighted values is not tested
        return self._scope(f"loss {loss.name!r}", loss, call, y_true, y_pred, is_sum=loss.reduction == "sum")

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Replace losses that are not known to be means of rows by a mean of rows, in tests of a whole step."""
        self._stands_in = True
        try:
            yield
        finally:
            self._stands_in = False

    def stands_in_for(self, scope: int | _Function) -> bool:
        """Return True if a loss of this scope is replaced now."""
        return self._stands_in and int(scope.scope if isinstance(scope, _Function) else scope) != ROWS

    def of_update(
        self,
        metric: keras.Metric,
        growth: Callable[[Sequence[np.ndarray | tf.Tensor]], list[np.ndarray]],
        rows: list[tf.Tensor],
    ) -> int | _Function:
        """Return the scope of a metric's update in this step: ROWS, or a function whose scope may be unknown.

        Args:
            metric: one whose class has its own ``update_state``.
            growth: returns by what an update with arrays of rows changes each summed variable.
            rows: the tensors of the update.
        """
        is_in_branch = function_graph() is not tf.compat.v1.get_default_graph()  # or a loop: other ranks may not run it
        if not self.may_gather or is_in_branch or not rows or not all(map(_has_movable_rows, rows)):
            return ROWS

        def scope_of_arrays(arrays: list[np.ndarray], _: list[np.ndarray]) -> int:
            def scope_of_sum(index: int) -> int:
                return scope_of(lambda x, _: growth(x)[index], arrays, [], is_sum=True)

            try:
                with refusing_collectives():
                    number = len(growth(arrays))
            except HvdkitError:  # it combines ranks itself
                return ROWS
            except Exception:  # e.g. a fixed number of rows
                return BATCH
            return max(map(scope_of_sum, range(number)), default=ROWS)

        function = self._function(f"metric {metric.name!r}", metric, lambda: UNKNOWN)
        if not self._stands_in:
            self._store(function, scope_of_arrays, rows, [])
        return function

    def test(self) -> list[int]:
        """Return the scopes that this rank's stored rows show, in the order of the functions."""
        found: list[int] = []
        for function in self._functions.values():
            test = function.test
            function.test = None
            if function.needs_batch:
                found.append(BATCH)
            else:
                found.append(UNKNOWN if test is None else test())
        return found

    def decide(self, scopes: Sequence[Sequence[int]]) -> None:
        """Take the widest scope that :meth:`test` has found on a rank; log it on the chief. Each epoch is tested."""
        for function, found in zip(self._functions.values(), zip(*scopes, strict=True), strict=True):
            scope = max(int(function.scope), *found)
            function.scope.assign(scope)
            function.is_stored.assign(scope == BATCH)
            if int(function.scope) == BATCH and not function.is_reported and cluster.is_chief():
                function.is_reported = True
                get_logger().info(_message(function))

    def of_metric(
        self, metric: keras.metrics.MeanMetricWrapper, on_batch: Callable[[Values, Tensors, Tensors], tf.Tensor]
    ) -> Values:
        """Return the function of a metric, computed by its scope; ``on_batch`` computes it on gathered rows."""
        function = metric._fn

        def decided(y_true: Tensors, y_pred: Tensors, **options: object) -> tf.Tensor:
            def call(y_true: Tensors, y_pred: Tensors) -> tf.Tensor:
                return tf.convert_to_tensor(function(y_true, y_pred, **options))

            scope = self._scope(f"metric {metric.name!r}", function, call, y_true, y_pred, is_sum=False)
            return by_scope(scope, lambda: call(y_true, y_pred), lambda: on_batch(call, y_true, y_pred))

        return decided

    def _scope(
        self, name: str, owner: object, call: Values, y_true: Tensors, y_pred: Tensors, *, is_sum: bool
    ) -> int | _Function:
        if not self.may_gather or not all(map(_has_movable_rows, tree.flatten((y_true, y_pred)))):
            return ROWS
        function = self._function(name, owner, lambda: _scope_of_graph(call, y_true, y_pred))
        if function.shown != UNKNOWN:
            return function.shown
        if not self._stands_in:
            self._store(function, functools.partial(scope_of, call, is_sum=is_sum), y_true, y_pred)
        return function

    def _function(self, name: str, owner: object, shown: Callable[[], int]) -> _Function:
        if id(owner) not in self._functions:
            scope = untracked_variable(UNKNOWN, tf.int32, "hvdkit_scope")
            is_stored = untracked_variable(False, tf.bool, "hvdkit_is_stored")
            self._functions[id(owner)] = _Function(name, owner, shown(), scope, is_stored)
        return self._functions[id(owner)]

    def _store(
        self, function: _Function, scope_of_rows: Callable[[Any, Any], int], y_true: Tensors, y_pred: Tensors
    ) -> None:
        """Store some rows of this step for a test, unless rows are already stored."""
        leaves = tree.flatten((y_true, y_pred))
        structure = tree.map_structure(lambda leaf: None, (y_true, y_pred))

        def keep(number: np.ndarray, *arrays: np.ndarray) -> None:
            rows = tree.pack_sequence_as(structure, list(arrays))
            function.local_bytes = sum(array.nbytes // max(1, len(array)) for array in arrays) * int(number)
            function.test = lambda: scope_of_rows(*rows)

        stored = [tf.shape(leaves[0])[0], *(leaf[:_ROWS] for leaf in leaves)]
        if tf.inside_function():
            function.keepers.append(keep)
        store_once(function.is_stored, stored, keep)


def by_scope(scope: int | _Function, on_rows: Callable[[], tf.Tensor], on_batch: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Return the value of a function by its scope.

    A function that cannot be traced on this rank's rows, e.g. because it has the size of the global batch, is computed
    on the gathered rows, on all ranks.
    """
    if isinstance(scope, int):
        return on_rows() if scope == ROWS else on_batch()
    if tf.executing_eagerly():
        return on_rows() if int(scope.scope) == ROWS else on_batch()
    try:
        return tf.cond(tf.equal(scope.scope, ROWS), on_rows, on_batch)
    except HvdkitError:
        raise
    except Exception:
        scope.needs_batch = True
        return on_batch()


def scope_of(call: Values, y_true: Arrays, y_pred: Arrays, *, is_sum: bool = False) -> int:
    """Return the scope that the rows of a batch show for a function; UNKNOWN if they do not show it.

    The function is computed on parts of the rows, also with padding in place of some labels and predictions: a masked
    mean, and a quotient of sums, are means of the rows' values in batches without padding.

    Args:
        call: the function; returns a value for each row, or one for the batch.
        y_true, y_pred: arrays, or nests of them, with equal numbers of rows.
        is_sum: test for the sum of its values, otherwise for their mean.

    Example:
        >>> ones = np.float32([1, 1, 0, 1])
        >>> scope_of(lambda y, p: abs(y - p), ones, ones / 2) == ROWS
        True
        >>> scope_of(lambda y, p: sum(y * p) / sum(y), ones, np.float32([0.5, 1.5, 1, 0.5])) == BATCH
        True
    """
    rows = {len(leaf) for leaf in tree.flatten((y_true, y_pred))}
    if len(rows) != 1:
        return UNKNOWN
    number = min(rows)
    splits = [split for split in {number // 2, max(1, number // 3) | 1} if 0 < split < number]
    found: list[bool | None] = []
    with tf.device("CPU"), refusing_collectives():
        for index, variant in enumerate(_variants(y_true, y_pred, number)):
            try:
                call(*tree.map_structure(tf.constant, variant))
                found += [_is_additive(call, *variant, number, split, is_sum=is_sum) for split in splits]
            except Exception:  # e.g. a fixed number of rows; labels that are no padding for this function
                if index == 0:
                    return BATCH
    if False in found:
        return BATCH
    return ROWS if True in found else UNKNOWN


def _variants(y_true: Arrays, y_pred: Arrays, number: int) -> Iterator[tuple[Arrays, Arrays]]:
    """Yield labels and predictions: the given ones, and those with padding in the first quarter of one of them."""

    def begins_with(array: np.ndarray, value: float) -> np.ndarray:
        copy = array.copy()
        copy[: max(1, number // 4)] = value
        return copy

    yield y_true, y_pred
    for value in _PADDING:
        if all(_holds(array.dtype, value) for array in tree.flatten(y_true)):
            yield tree.map_structure(lambda array: begins_with(array, value), y_true), y_pred  # noqa: B023
    yield y_true, tree.map_structure(lambda array: begins_with(array, 0), y_pred)


def _holds(dtype: np.dtype, value: float) -> bool:
    if dtype.kind in "iu":
        return bool(np.iinfo(dtype).min <= value <= np.iinfo(dtype).max)
    return dtype.kind == "f" or value == 0


def _is_additive(call: Values, y_true: Arrays, y_pred: Arrays, number: int, split: int, *, is_sum: bool) -> bool | None:
    """Return whether a function of the rows is the mean (or sum) of its parts; None if its values do not show it."""

    def value(start: int, end: int) -> tuple[float, float]:
        parts = tree.map_structure(lambda leaf: tf.constant(leaf[start:end]), (y_true, y_pred))
        values = tf.convert_to_tensor(call(*parts))
        precision = _HALF_TOLERANCE if values.dtype.size == 2 else _TOLERANCE
        array = np.asarray(tf.cast(values, tf.float64))
        return float(array.sum() if is_sum else array.mean()), precision

    whole, tolerance = value(0, number)
    first, _ = value(0, split)
    second, _ = value(split, number)
    expected = first + second if is_sum else (split * first + (number - split) * second) / number
    if not np.isfinite(whole):
        return None
    if not np.isfinite(expected):
        return False  # e.g. 0 / 0 in a part without labels
    smallest_difference = tolerance * max(abs(whole), abs(first), abs(second))
    if abs(whole - expected) > smallest_difference:
        return False
    return True if abs(first - second) > 10 * smallest_difference else None


def _scope_of_graph(call: Values, y_true: Tensors, y_pred: Tensors) -> int:
    """Return the scope that the graph of a function shows.

    ROWS if it calls collectives, e.g. gathers the rows itself; BATCH if it assigns to variables, which then follow from
    all rows on every rank.
    """
    leaves = tree.flatten((y_true, y_pred))

    @tf.function(autograph=False)
    def scratch(*rows: tf.Tensor) -> None:
        call(*tree.pack_sequence_as((y_true, y_pred), list(rows)))

    try:
        with refusing_collectives():
            specs = [tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in leaves]
            graph = scratch.get_concrete_function(*specs).graph.as_graph_def()
    except HvdkitError:
        return ROWS
    except Exception:  # e.g. a fixed number of rows
        return UNKNOWN
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return BATCH if any(node.op.startswith("Assign") for node in nodes) else UNKNOWN


def _has_movable_rows(x: object) -> bool:
    if not isinstance(x, tf.Tensor) or x.shape.rank == 0:
        return False
    return bool(x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_bool)


def _message(function: _Function) -> str:
    number = cluster.group(cluster.DATA).size
    total = function.local_bytes * number
    return (
        f"{function.name}: its value for a batch is not the mean of the values for its rows, so every rank computes it "
        f"on the labels and predictions of all {number} ranks: about {total:,} bytes per step; "
        f"{see('keras#losses-that-couple-the-rows-of-a-batch')}"
    )
