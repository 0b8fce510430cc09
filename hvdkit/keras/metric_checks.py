"""Check that metric states can be combined over ranks: sums over examples, and variables declared as averages.

A sum grows by the same amount regardless of its previous value. With u(s) the state after an update of s,

    u(s) - s = u(t) - t    for all states s and t

Custom metrics are tested in their first update, inside the step: the update is repeated on two other states, and the
state is restored.

A state that counts batches, e.g. ``total += mean(values); count += 1``, is a sum over batches, not over examples: its
growth does not change if each example occurs twice. The growth on rank r with n_r of b rows is multiplied by n_r / b.
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
from hvdkit.collectives.batch_share import current_factor
from hvdkit.collectives.conversion import untracked_variable
from hvdkit.errors import describe
from hvdkit.internals import get_keras_mask, set_keras_mask
from hvdkit.keras.attribute_swap import swap_attributes

_REMEDY = "keep sums and counts in the metric's variables, as keras.metrics.Mean does, or compute it after hk.predict"
_UNKNOWN = 0
_SUM = 1
_NOT_SUM = 2
# kinds of sums; _UNKNOWN as long as they do not grow
_OF_ROWS = 1
_OF_BATCHES = 2
_TEST_OFFSET = 64.0  # offset of the test states, in units of 1 + the first growth
_TOLERANCE = 1e-3  # in the same units
_FRACTION_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}


def metric_states(model: Any) -> list[tuple[str, Any]]:
    """Return the distinct variables of a model's metrics, with the names of their metrics.

    Includes those of metrics passed to ``compile``, which Keras adds to the model's in the first step.
    """
    states: dict[int, tuple[str, Any]] = {}
    for metric in [*model.metrics, *_passed_metrics(model)]:
        for variable in metric.variables:
            # The path starts with the metric's name, also inside Keras's container of compiled metrics.
            states.setdefault(id(variable), (variable.path.rpartition("/")[0] or metric.name, variable))
    return list(states.values())


class MetricChecks:
    """Finds metrics of a compiled model whose state cannot be combined."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._outcomes: dict[int, tuple[Any, tf.Variable]] = {}
        self._kinds: dict[int, tf.Variable] = {}  # of the summed variables, by metric

    @contextlib.contextmanager
    def testing_updates(self) -> Iterator[None]:
        """Test the metrics that are updated by a step inside this context."""
        with contextlib.ExitStack() as stack:
            for metric in _custom_metrics(self._model) if cluster.size() > 1 else ():
                stack.enter_context(swap_attributes(metric, update_state=self._tested_update(metric)))
            yield

    def check(self) -> None:
        """Check that the state of all metrics can be combined. Call after a step, which creates their variables.

        Raises:
            ValueError: on several ranks, a state is declared or was observed not to be a sum over examples.
        """
        if cluster.size() == 1:
            return
        _check_aggregations(self._model)
        _check_initial_values(self._model)
        for metric, outcome in self._outcomes.values():
            if int(outcome) == _NOT_SUM:
                got = f"{metric.name!r} ({type(metric).__name__}), whose update depends on the state before it"
                raise ValueError(describe("metrics", got, "an update that adds to the state", _REMEDY))

    def _tested_update(self, metric: Any) -> Callable[..., Any]:
        update = metric.update_state

        def update_state(*args: Any, **kwargs: Any) -> Any:
            before = [tf.identity(v) for v in metric.variables]
            result = update(*args, **kwargs)
            if len(before) < len(metric.variables):  # created by the update, as zeros
                before = [tf.zeros(v.shape, v.dtype) for v in metric.variables]
            outcome = self._outcome(metric)
            new_outcome = tf.cond(
                tf.equal(outcome, _UNKNOWN),
                lambda: _test_update(metric, lambda: update(*args, **kwargs)),
                lambda: outcome.read_value(),
            )
            outcome.assign(new_outcome)
            twice = _each_row_twice((args, kwargs))
            if twice is not None:
                self._weigh(metric, before, lambda: update(*twice[0], **twice[1]))
            return result

        return update_state

    def _weigh(self, metric: Any, before: list[tf.Tensor], update_twice: Callable[[], Any]) -> None:
        """Multiply the growth of sums over batches by this rank's part of the rows.

        Args:
            metric: a metric that has been updated.
            before: the values of its variables before that.
            update_twice: updates it with each row twice.
        """
        summed = [i for i, v in enumerate(metric.variables) if _is_summed(v)]
        if not summed:
            return
        if id(metric) not in self._kinds:
            self._kinds[id(metric)] = untracked_variable(np.zeros(len(summed), np.int32), tf.int32, "hvdkit_kinds")
        kinds = self._kinds[id(metric)]
        after = [tf.identity(v) for v in metric.variables]
        new_kinds = tf.cond(
            tf.reduce_any(tf.equal(kinds, _UNKNOWN)),
            lambda: _kinds_of_sums(metric, before, after, update_twice, kinds.read_value()),
            lambda: kinds.read_value(),
        )
        kinds.assign(new_kinds)

        def scale() -> tf.Tensor:
            for number, i in enumerate(summed):
                part = _part_of_batch(after[i].dtype)
                scaled = _float64(before[i]) + part * (_float64(after[i]) - _float64(before[i]))
                is_of_batches = tf.equal(new_kinds[number], _OF_BATCHES)
                metric.variables[i].assign(tf.where(is_of_batches, tf.cast(scaled, after[i].dtype), after[i]))
            return tf.constant(True)

        tf.cond(tf.reduce_any(tf.equal(new_kinds, _OF_BATCHES)), scale, lambda: tf.constant(False))

    def _outcome(self, metric: Any) -> tf.Variable:
        if id(metric) not in self._outcomes:
            self._outcomes[id(metric)] = metric, untracked_variable(_UNKNOWN, tf.int32, "hvdkit_is_sum")
        return self._outcomes[id(metric)][1]


def _passed_metrics(model: Any) -> list[Any]:
    """Return the metrics that the user passed to ``compile`` as objects."""
    compiled = model._compile_metrics
    passed = [] if compiled is None else tree.flatten([compiled._user_metrics, compiled._user_weighted_metrics])
    return [m for m in passed if isinstance(m, keras.metrics.Metric)]


def _custom_metrics(model: Any) -> list[Any]:
    """Return the metrics with a custom update: those of the model, and those the user passed to ``compile``."""
    metrics = {id(m): m for m in [*model.metrics, *_passed_metrics(model)]}
    return [m for m in metrics.values() if not type(m).update_state.__module__.startswith("keras.")]


def _test_update(metric: Any, update: Callable[[], Any]) -> tf.Tensor:
    """Test whether a metric's summed variables grow by the same amount from three different states."""
    before = [tf.identity(v) for v in metric.variables]
    summed = [i for i, v in enumerate(metric.variables) if _is_summed(v)]

    def growth(starts: list[tf.Tensor]) -> list[tf.Tensor]:
        for variable, start in zip(metric.variables, starts, strict=True):
            variable.assign(start)
        update()
        return [_float64(metric.variables[i]) - _float64(starts[i]) for i in summed]

    first = growth(before)
    units = [1.0 + tf.abs(grown) for grown in first]
    is_sum = is_finite = tf.constant(True)
    for sign in (1.0, -1.0):
        starts = list(before)
        for i, unit in zip(summed, units, strict=True):
            starts[i] = before[i] + tf.cast(sign * _TEST_OFFSET * unit, before[i].dtype)
        for i, grown, other, unit in zip(summed, first, growth(starts), units, strict=True):
            rounding = 8.0 * _epsilon(before[i].dtype) * (tf.abs(_float64(before[i])) + _TEST_OFFSET * unit)
            is_sum &= tf.reduce_all(tf.abs(other - grown) <= _TOLERANCE * unit + rounding)
            is_finite &= tf.reduce_all(tf.math.is_finite(other) & tf.math.is_finite(grown))
    for variable, value in zip(metric.variables, before, strict=True):
        variable.assign(value)
    return tf.where(is_finite, tf.where(is_sum, _SUM, _NOT_SUM), _UNKNOWN)


def _kinds_of_sums(
    metric: Any, before: list[tf.Tensor], after: list[tf.Tensor], update_twice: Callable[[], Any], known: tf.Tensor
) -> tf.Tensor:
    """Return the kind of each summed variable, int32, by an update with each row twice; ``known`` ones are kept."""
    for variable, value in zip(metric.variables, before, strict=True):
        variable.assign(value)
    update_twice()
    kinds: list[tf.Tensor] = []
    for i, variable in enumerate(metric.variables):
        if _is_summed(variable):
            once = _float64(after[i]) - _float64(before[i])
            twice = _float64(variable) - _float64(before[i])
            size = tf.reduce_max(tf.abs(once))
            rounding = 8.0 * _epsilon(after[i].dtype) * (tf.reduce_max(tf.abs(_float64(after[i]))) + size)
            is_equal = tf.reduce_max(tf.abs(twice - once)) <= 0.01 * size + rounding
            kind = tf.where(is_equal, _OF_BATCHES, _OF_ROWS)
            kinds.append(tf.where(size > 200.0 * rounding, kind, _UNKNOWN))
    for variable, value in zip(metric.variables, after, strict=True):
        variable.assign(value)
    return tf.where(tf.equal(known, _UNKNOWN), tf.stack(kinds), known)


def _each_row_twice(arguments: Any) -> Any:
    """Return the arguments of an update with each row twice; None if they have no rows."""
    leaves = [x for x in tree.flatten(arguments) if isinstance(x, tf.Tensor) and x.shape.rank]
    if not leaves:
        return None
    rows = leaves[0].shape[0]

    def double(x: Any) -> Any:
        if not isinstance(x, tf.Tensor) or not x.shape.rank or x.shape[0] != rows:
            return x
        doubled = tf.concat([x, x], 0)
        if (mask := get_keras_mask(x)) is not None:
            set_keras_mask(doubled, tf.concat([mask, mask], 0))
        return doubled

    return tree.map_structure(double, arguments)


def _part_of_batch(dtype: tf.DType) -> tf.Tensor:
    """Return n_r / b, float64; for integers 1 on the last data rank, which always has rows, else 0."""
    group = cluster.group(cluster.DATA)
    if not dtype.is_floating:
        return tf.constant(float(group.index == group.size - 1), tf.float64)
    factor = current_factor()
    return tf.constant(1.0 / group.size, tf.float64) if factor is None else _float64(factor) / group.size


def _is_summed(variable: Any) -> bool:
    dtype = tf.as_dtype(variable.dtype)
    return getattr(variable, "aggregation", "sum") == "sum" and (dtype.name in _FRACTION_BITS or dtype.is_integer)


def _float64(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float64)


def _epsilon(dtype: tf.DType) -> float:
    return 2.0 ** -_FRACTION_BITS[dtype.name] if dtype.is_floating else 0.0


def _check_aggregations(model: Any) -> None:
    for name, variable in metric_states(model):
        how = getattr(variable, "aggregation", "sum")
        expected = "a state that is summed or averaged over ranks"
        got = f"{name!r}, whose variable {variable.path} has aggregation={how!r}"
        if how not in ("sum", "mean"):
            raise ValueError(describe("metrics", got, expected, _REMEDY))
        if tf.as_dtype(variable.dtype) in (tf.string, tf.bool):
            raise ValueError(describe("metrics", f"{got} and dtype {variable.dtype}", expected, _REMEDY))


def _check_initial_values(model: Any) -> None:
    """Reject sums that ``reset_state`` sets to a value other than 0, such as maxima.

    A metric whose ``reset_state`` does nothing keeps its state over epochs, which the session counts once.
    """
    variables = metric_states(model)
    before = [np.asarray(v) for _, v in variables]
    type(model).reset_metrics(model)
    first = [np.asarray(v) for _, v in variables]
    for (_, variable), value in zip(variables, before, strict=True):
        variable.assign(value)
    for (name, variable), old, value in zip(variables, before, first, strict=True):
        is_kept = np.array_equal(old, value)
        if getattr(variable, "aggregation", "sum") == "sum" and np.any(value) and not is_kept:
            got = f"{name!r}, whose variable {variable.path} is {value} after reset_state()"
            raise ValueError(describe("metrics", got, "0: states are summed over ranks", _REMEDY))
