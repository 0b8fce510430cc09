"""Row-wise updates of tables and their slots, for Keras's optimizers.

Keras 3 treats a sparse gradient as a dense one with zeros and updates the whole table. SGD and Adagrad don't change
rows with a zero gradient, so updating only the other rows gives the same result. Other optimizers do change them:
moments decay and keep moving the weights. These support two modes:

* "lazy": update only the rows in the gradient. This is how tables of millions of rows are trained
  (TensorFlow 1's ``LazyAdamOptimizer``).
* "exact": Keras's own update of the whole shard, equal to that of a dense gradient.

TensorFlow writes rows ten times faster than it adds to them (0.02 vs. 0.2 microseconds per row of 64 floats on one
core), so each update reads its rows, computes, and writes them back. This requires distinct rows.

The formulas are those of ``keras.optimizers``: g, m, v, a, z are the rows of gradient, moments, accumulator and linear
term, and t is the number of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import keras
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.logs import warn_once
from hvdkit.optimizer.sparse import DividedRows
from hvdkit.sharding.shards import Shard

LearningRate: TypeAlias = "tf.Tensor | keras.Variable | float"
SparseUpdates = Literal["auto", "lazy", "exact"]
Rule = Callable[[keras.optimizers.Optimizer, tf.Variable, tf.IndexedSlices, tf.Tensor], None]


def rule_for(optimizer: keras.optimizers.Optimizer, sparse_updates: SparseUpdates) -> Rule | None:
    """Return the row-wise update for ``optimizer``, or None to use Keras's update of the whole shard.

    "auto" is lazy for Adam and AdamW, as is common for tables, and exact for the others. As the results are not those
    of Keras, the chief logs it once per process.
    """
    rule = _RULES.get(updating_class(optimizer))
    if rule is None:
        return None
    untouched_rows_stay = rule is _adagrad or (rule is _sgd and not optimizer.momentum)
    is_lazy = sparse_updates == "lazy" or (sparse_updates == "auto" and rule is _adam)
    if sparse_updates == "auto" and rule is _adam and cluster.is_chief():
        warn_once(
            f"{updating_class(optimizer).__name__} updates only those rows of sharded tables that a batch contains; in "
            "plain Keras, moments also move the other rows. For its results, pass hk.DistributedOptimizer(optimizer, "
            'sparse_updates="exact"), which updates the whole shard; to choose rows without this line, pass "lazy"'
        )
    return rule if untouched_rows_stay or is_lazy else None


def updating_class(optimizer: keras.optimizers.Optimizer) -> type:
    """Return the class that defines the optimizer's ``update_step``, excluding hvdkit's mixins."""
    return next(c for c in type(optimizer).__mro__ if "update_step" in vars(c) and "_hvdkit" not in vars(c))


def rows_of_gradient(gradient: tf.Tensor | tf.IndexedSlices) -> tf.IndexedSlices:
    """Return the distinct rows of a gradient; for a dense one (accumulated over steps) the nonzero rows."""
    if isinstance(gradient, tf.IndexedSlices):
        return _merge_duplicates(gradient)
    axes = list(range(1, gradient.shape.rank))
    rows = tf.where(tf.reduce_any(gradient != 0, axis=axes))[:, 0]
    return tf.IndexedSlices(tf.gather(gradient, rows), rows)


def _merge_duplicates(grad: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sum gradients of the same row, from several ranks or lookups; return them unchanged if all are distinct."""
    indices, positions = tf.unique(grad.indices)
    count = tf.size(indices)
    values = tf.cond(
        tf.equal(count, tf.size(grad.indices)),
        lambda: grad.values,
        lambda: tf.math.unsorted_segment_sum(grad.values, positions, count),
    )
    return tf.IndexedSlices(tf.ensure_shape(values, [None, *grad.values.shape[1:]]), indices)


def _sgd(optimizer: keras.optimizers.SGD, variable: tf.Variable, grad: tf.IndexedSlices, rate: tf.Tensor) -> None:
    """w -= lr g;  with momentum  m = mu m - lr g,  w += m,  with Nesterov's  w += mu m - lr g."""
    step = grad.values * rate
    if not optimizer.momentum:
        _add(variable, grad.indices, -step)
        return
    mu = tf.cast(optimizer.momentum, variable.dtype)
    m = _SlotRows(optimizer.momentums, optimizer, variable, grad.indices)
    moved = m.set(mu * m.values - step)
    _add(variable, grad.indices, mu * moved - step if optimizer.nesterov else moved)


def _adagrad(
    optimizer: keras.optimizers.Adagrad, variable: tf.Variable, grad: tf.IndexedSlices, rate: tf.Tensor
) -> None:
    """a += g^2;  w -= lr g / sqrt(a + eps)."""
    a = _SlotRows(optimizer._accumulators, optimizer, variable, grad.indices)
    total = a.set(a.values + tf.square(grad.values))
    _add(variable, grad.indices, -rate * grad.values / tf.sqrt(total + optimizer.epsilon))


def _adam(optimizer: keras.optimizers.Adam, variable: tf.Variable, grad: tf.IndexedSlices, rate: tf.Tensor) -> None:
    """m += (1 - b1)(g - m);  v += (1 - b2)(g^2 - v);  w -= lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps)."""
    dtype = variable.dtype
    g = grad.values
    t = tf.cast(optimizer.iterations + 1, dtype)
    decay = [tf.pow(tf.cast(beta, dtype), t) for beta in (optimizer.beta_1, optimizer.beta_2)]
    alpha = rate * tf.sqrt(1 - decay[1]) / (1 - decay[0])
    m = _SlotRows(optimizer._momentums, optimizer, variable, grad.indices)
    v = _SlotRows(optimizer._velocities, optimizer, variable, grad.indices)
    first = m.set(m.values + (g - m.values) * (1 - optimizer.beta_1))
    second = v.set(v.values + (tf.square(g) - v.values) * (1 - optimizer.beta_2))
    if optimizer.amsgrad:
        largest = _SlotRows(optimizer._velocity_hats, optimizer, variable, grad.indices)
        second = largest.set(tf.maximum(largest.values, second))
    _add(variable, grad.indices, -first * alpha / (tf.sqrt(second) + optimizer.epsilon))


def _rmsprop(
    optimizer: keras.optimizers.RMSprop, variable: tf.Variable, grad: tf.IndexedSlices, rate: tf.Tensor
) -> None:
    """v = rho v + (1 - rho) g^2;  w -= lr g / sqrt(v + eps);  centered: v minus the square of the mean gradient."""
    g = grad.values
    rho = optimizer.rho
    v = _SlotRows(optimizer._velocities, optimizer, variable, grad.indices)
    spread = v.set(rho * v.values + (1 - rho) * tf.square(g))
    if optimizer.centered:
        mean = _SlotRows(optimizer._average_gradients, optimizer, variable, grad.indices)
        spread -= tf.square(mean.set(rho * mean.values + (1 - rho) * g))
    step = rate * g / tf.sqrt(spread + optimizer.epsilon)
    if optimizer.momentum > 0:
        m = _SlotRows(optimizer._momentums, optimizer, variable, grad.indices)
        step = m.set(optimizer.momentum * m.values + step)
    _add(variable, grad.indices, -step)


def _ftrl(optimizer: keras.optimizers.Ftrl, variable: tf.Variable, grad: tf.IndexedSlices, rate: tf.Tensor) -> None:
    """The update of McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013, in Keras's form.

    z += g' - (a'^-p - a^-p) / lr w  with  a' = a + g^2  and  g' = g + 2 shrinkage w;
    w = (clip(z, -l1, l1) - z) / (a'^-p / lr + 2 l2).
    """
    power = -optimizer.learning_rate_power
    l1 = optimizer.l1_regularization_strength
    l2 = optimizer.l2_regularization_strength + optimizer.beta / (2.0 * rate)
    a = _SlotRows(optimizer._accumulators, optimizer, variable, grad.indices)
    z = _SlotRows(optimizer._linears, optimizer, variable, grad.indices)
    w = variable.sparse_read(grad.indices)
    total = a.values + tf.square(grad.values)
    shrunk = grad.values + 2 * optimizer.l2_shrinkage_regularization_strength * w
    linear = z.set(z.values + shrunk - (tf.pow(total, power) - tf.pow(a.values, power)) / rate * w)
    a.set(total)
    weights = (tf.clip_by_value(linear, -l1, l1) - linear) / (tf.pow(total, power) / rate + 2 * l2)
    variable.scatter_update(tf.IndexedSlices(weights, grad.indices))


def _add(variable: tf.Variable, indices: tf.Tensor, change: tf.Tensor) -> None:
    variable.scatter_update(tf.IndexedSlices(variable.sparse_read(indices) + change, indices))


class _SlotRows:
    """The rows of one slot that belong to the rows of a gradient."""

    def __init__(
        self,
        slots: Sequence[keras.Variable],
        optimizer: keras.optimizers.Optimizer,
        variable: tf.Variable,
        indices: tf.Tensor,
    ):
        self._slot = slots[optimizer._get_variable_index(variable)]._value
        self._indices = indices
        self.values = self._slot.sparse_read(indices)

    def set(self, values: tf.Tensor) -> tf.Tensor:
        """Write the rows and return them."""
        self._slot.scatter_update(tf.IndexedSlices(values, self._indices))
        return values


_RULES: dict[type, Rule] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adagrad: _adagrad,
    keras.optimizers.Adam: _adam,
    keras.optimizers.RMSprop: _rmsprop,
    keras.optimizers.Ftrl: _ftrl,
}

# Element-wise optimizers: a new weight depends only on its own gradient and slots. Others take norms of a whole
# variable, but a shard is only a part of it, and may belong to several tables.
ELEMENTWISE = {
    *_RULES,
    keras.optimizers.AdamW,
    keras.optimizers.Adadelta,
    keras.optimizers.Adamax,
    keras.optimizers.Lion,
    keras.optimizers.Nadam,
}


def update_rows(
    rule: Rule,
    optimizer: keras.optimizers.Optimizer,
    variable: tf.Variable,
    shard: Shard,
    gradient: tf.Tensor | tf.IndexedSlices,
    rate: LearningRate,
) -> None:
    """Update the rows of ``variable`` (which holds ``shard``) that are in ``gradient``, using ``rule``."""
    rate = tf.cast(rate, variable.dtype)
    read_rows = None if shard.rows_by_rank is None else shard.rows_by_rank()

    def update_at_once() -> None:
        rows = gradient
        if isinstance(gradient, DividedRows) and read_rows is not None:
            # Divide again inside this branch: TensorFlow then computes the quotient only if the branch runs.
            rows = DividedRows(tf.IndexedSlices(gradient.undivided, gradient.indices), gradient.divisor)
        grad = rows_of_gradient(rows)
        rule(optimizer, variable, tf.IndexedSlices(tf.cast(grad.values, variable.dtype), grad.indices), rate)

    if rule is not _sgd or optimizer.momentum or read_rows is None or not isinstance(gradient, tf.IndexedSlices):
        update_at_once()
        return

    def update_rank_by_rank() -> None:
        # Plain SGD is linear: applying rank after rank equals applying the sum, so don't compute the sum.
        values = gradient.values
        step_size = rate
        if isinstance(gradient, DividedRows):
            values = gradient.undivided
            step_size = rate / gradient.divisor
        for ids, part in read_rows.split(values):
            rule(optimizer, variable, tf.IndexedSlices(tf.cast(part, variable.dtype), ids), step_size)

    is_all = tf.equal(tf.size(gradient.indices), tf.size(read_rows.ids))
    same = tf.cond(is_all, lambda: tf.reduce_all(gradient.indices == read_rows.ids), lambda: tf.constant(False))

    def branch(update: Callable[[], None]) -> Callable[[], tf.Tensor]:
        def run() -> tf.Tensor:
            update()
            return tf.constant(0)

        return run

    tf.cond(same, branch(update_rank_by_rank), branch(update_at_once))
