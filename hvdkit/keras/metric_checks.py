"""Check that metric states can be combined over ranks: sums over examples, and variables declared as averages.

A sum grows by the same amount regardless of its previous value. With u(s) the state after an update of s,

    u(s) - s = u(t) - t    for all states s and t

Custom metrics are tested in their first update, inside the step: the update is repeated on two other states, and the
state is restored.

A state that counts batches, e.g. ``total += f1(labels, predictions); count += 1``, is a sum over batches, not over
examples: a batch adds something else than its parts do. Every rank then updates it with the gathered rows, which adds
G, and keeps G n_r / b for its n_r of b rows. Which metrics these are is found out as for losses (loss_scopes.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from hvdkit import cluster
from hvdkit.collectives.batch_share import current_factor
from hvdkit.collectives.conversion import untracked_variable
from hvdkit.errors import describe
from hvdkit.keras.attribute_swap import swap_attributes
from hvdkit.keras.loss_scopes import LossScopes, by_scope
from hvdkit.keras.losses import gather_nests
from hvdkit.keras.source_checks import is_of_keras

_REMEDY = "keep sums and counts in the metric's variables, as keras.metrics.Mean does, or compute it after hk.predict"
_UNKNOWN = 0
_SUM = 1
_NOT_SUM = 2
_TEST_OFFSET = 64.0  # offset of the test states, in units of 1 + the first growth
_TOLERANCE = 1e-3  # in the same units
_FRACTION_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}


def metric_states(model: keras.Model) -> list[tuple[str, keras.Variable]]:
    """Return the distinct variables of a model's metrics, with the names of their metrics.

    Includes those of metrics passed to ``compile``, which Keras adds to the model's in the first step.
    """
    states: dict[int, tuple[str, keras.Variable]] = {}
    for metric in [*model.metrics, *_passed_metrics(model)]:
        for variable in metric.variables:
            # The path starts with the metric's name, also inside Keras's container of compiled metrics.
            states.setdefault(id(variable), (variable.path.rpartition("/")[0] or metric.name, variable))
    return list(states.values())


class MetricChecks:
    """Finds metrics of a compiled model whose state cannot be combined. ``scopes`` knows which need all rows."""

    def __init__(self, model: keras.Model, scopes: LossScopes) -> None:
        self._model = model
        self._scopes = scopes
        self._outcomes: dict[int, tuple[keras.Metric, tf.Variable]] = {}

    @contextlib.contextmanager
    def testing_updates(self) -> Iterator[None]:
        """Test the metrics that are updated by a step inside this context."""
        with contextlib.ExitStack() as stack:
            for metric in _custom_metrics(self._model) if cluster.size() > 1 else ():
                stack.enter_context(swap_attributes(metric, update_state=self._tested_update(metric)))
            yield

    def check(self) -> None:
        """Raise ValueError if a state is declared, or was observed, not to be a sum over examples.

        Call after a step, which creates the variables of metrics. On one rank it does nothing.
        """
        if cluster.size() == 1:
            return
        _check_aggregations(self._model)
        _check_initial_values(self._model)
        for metric, outcome in self._outcomes.values():
            if int(outcome) == _NOT_SUM:
                got = f"{metric.name!r} ({type(metric).__name__}), whose update depends on the state before it"
                raise ValueError(describe("metrics", got, "an update that adds to the state", _REMEDY))

    def _tested_update(self, metric: keras.Metric) -> Callable[..., object]:
        update = metric.update_state

        def update_state(*args: object, **kwargs: object) -> object:
            arguments = _Arguments(args, kwargs)
            growth = functools.partial(_growth, metric, update, arguments)
            scope = self._scopes.of_update(metric, growth, arguments.rows)
            result = None
            if isinstance(scope, int):
                result = update(*args, **kwargs)
            else:
                on_batch = functools.partial(_update_with_batch, metric, update, arguments)
                by_scope(scope, lambda: arguments.passed_to(update), on_batch)
            outcome = self._outcome(metric)
            new_outcome = tf.cond(
                tf.equal(outcome, _UNKNOWN),
                lambda: _test_update(metric, lambda: update(*args, **kwargs)),
                lambda: outcome.read_value(),
            )
            outcome.assign(new_outcome)
            return result

        return update_state

    def _outcome(self, metric: keras.Metric) -> tf.Variable:
        if id(metric) not in self._outcomes:
            self._outcomes[id(metric)] = metric, untracked_variable(_UNKNOWN, tf.int32, "hvdkit_is_sum")
        return self._outcomes[id(metric)][1]


def _passed_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics that the user passed to ``compile`` as objects."""
    compiled = model._compile_metrics
    passed = [] if compiled is None else tree.flatten([compiled._user_metrics, compiled._user_weighted_metrics])
    return [m for m in passed if isinstance(m, keras.metrics.Metric)]


def _custom_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics with a custom update: those of the model, and those the user passed to ``compile``."""
    metrics = {id(m): m for m in [*model.metrics, *_passed_metrics(model)]}
    return [m for m in metrics.values() if not is_of_keras(type(m).update_state)]


def _test_update(metric: keras.Metric, update: Callable[[], object]) -> tf.Tensor:
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


class _Arguments:
    """The arguments of an update, and ``rows``, the tensors among them that are as long as the first one."""

    def __init__(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._arguments = args, kwargs
        leaves = tree.flatten(self._arguments)
        shaped = [number for number, leaf in enumerate(leaves) if len(getattr(leaf, "shape", ()))]
        self._numbers = [number for number in shaped if leaves[number].shape[0] == leaves[shaped[0]].shape[0]]
        self.rows = [leaves[number] for number in self._numbers]

    def passed_to(self, update: Callable[..., object], rows: Sequence[tf.Tensor] | None = None) -> tf.Tensor:
        """Call ``update`` with the arguments, or with other ``rows``."""
        leaves = tree.flatten(self._arguments)
        for number, leaf in zip(self._numbers, self.rows if rows is None else rows, strict=True):
            leaves[number] = leaf
        args, kwargs = tree.pack_sequence_as(self._arguments, leaves)
        update(*args, **kwargs)
        return tf.constant(True)


def _update_with_batch(metric: keras.Metric, update: Callable[..., object], arguments: _Arguments) -> tf.Tensor:
    """Update a metric with the rows of all ranks, and keep this rank's part of the growth of its sums."""
    before = [tf.identity(v) for v in metric.variables]
    rows, _ = gather_nests(tuple(arguments.rows))
    arguments.passed_to(update, rows)
    if len(before) < len(metric.variables):  # created by the update, as zeros
        before = [tf.zeros(v.shape, v.dtype) for v in metric.variables]
    for variable, old in zip(metric.variables, before, strict=True):
        if _is_summed(variable):
            growth = _float64(variable) - _float64(old)
            variable.assign(tf.cast(_float64(old) + _part_of_batch(old.dtype) * growth, old.dtype))
    return tf.constant(True)


def _growth(
    metric: keras.Metric,
    update: Callable[..., object],
    arguments: _Arguments,
    rows: Sequence[np.ndarray | tf.Tensor],
) -> list[np.ndarray]:
    """Return, in eager mode, by what an update with other rows changes the sums."""
    summed = [v for v in metric.variables if _is_summed(v)]
    before = [(v, np.asarray(v)) for v in metric.variables]
    try:
        for variable in summed:
            variable.assign(tf.zeros(variable.shape, variable.dtype))
        arguments.passed_to(update, [tf.convert_to_tensor(each) for each in rows])
        return [np.asarray(_float64(v)) for v in summed]
    finally:
        for variable, value in before:
            variable.assign(value)


def _part_of_batch(dtype: tf.DType) -> tf.Tensor:
    """Return n_r / b, float64; for integers 1 on the last data rank, which always has rows, else 0."""
    group = cluster.group(cluster.DATA)
    if not dtype.is_floating:
        return tf.constant(float(group.index == group.size - 1), tf.float64)
    factor = current_factor()
    return tf.constant(1.0 / group.size, tf.float64) if factor is None else _float64(factor) / group.size


def _is_summed(variable: keras.Variable) -> bool:
    dtype = tf.as_dtype(variable.dtype)
    return getattr(variable, "aggregation", "sum") == "sum" and (dtype.name in _FRACTION_BITS or dtype.is_integer)


def _float64(value: tf.Tensor | keras.Variable) -> tf.Tensor:
    return tf.cast(value, tf.float64)


def _epsilon(dtype: tf.DType) -> float:
    return 2.0 ** -_FRACTION_BITS[dtype.name] if dtype.is_floating else 0.0


def _check_aggregations(model: keras.Model) -> None:
    for name, variable in metric_states(model):
        how = getattr(variable, "aggregation", "sum")
        expected = "a state that is summed or averaged over ranks"
        got = f"{name!r}, whose variable {variable.path} has aggregation={how!r}"
        if how not in ("sum", "mean"):
            raise ValueError(describe("metrics", got, expected, _REMEDY))
        if tf.as_dtype(variable.dtype) in (tf.string, tf.bool):
            raise ValueError(describe("metrics", f"{got} and dtype {variable.dtype}", expected, _REMEDY))


def _check_initial_values(model: keras.Model) -> None:
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
