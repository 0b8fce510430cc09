"""State that a model updates from its batches without a gradient: codebooks, running means, queues, counters.

Each rank sees only its own rows, so such state differs between ranks unless a rule combines it. Ranks compare it at the
end of each epoch. Moving statistics of BatchNormalization and metrics have separate rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf
import xxhash
from keras import tree

from hvdkit import cluster
from hvdkit.cluster.agreement import agree, find_outlier
from hvdkit.collectives.batch_share import times_share
from hvdkit.collectives.digests import digest
from hvdkit.collectives.ops import ReduceOp
from hvdkit.collectives.tensors import grouped_allreduce
from hvdkit.collectives.weak_registry import WeakRegistry
from hvdkit.errors import CollectiveMismatchError, describe, listed, see
from hvdkit.sharding.shards import AnyVariable, differs_by_rank, holding_of
from hvdkit.sharding.variables import variable_name

Rule = Literal["mean", "sum", "chief"]
_RULES: WeakRegistry[Rule] = WeakRegistry()
_SUMS: WeakRegistry[bool] = WeakRegistry()  # variables that sum gradients
_NAMES_SHOWN = 3
_MAX_DEPTH = 3  # of lists and dicts in attributes of layers
_REMEDY = (
    "declare how ranks combine it in hk.fit, hk.synchronize(variable, 'mean'), 'sum' or 'chief'; or update it from "
    "hk.allreduce of the batch's sums; or let each rank keep its own, hk.register_local_variables(variable); "
    f"{see('pitfalls#weights-and-optimizer')}"
)
CONSTANTS_REMEDY = (
    "seed what draws it (keras.utils.set_random_seed, np.random.default_rng(seed)), give all ranks the chief's sample "
    "(hk.broadcast_object(sample)), or keep it in a weight, add_weight(trainable=False), of which all ranks get the "
    "chief's"
)


class StateVariable(NamedTuple):
    """A variable that batches may change without a gradient, with a name for messages."""

    name: str
    variable: AnyVariable


def synchronize(variables: AnyVariable | Iterable[AnyVariable], rule: Rule) -> None:
    """Declare how ``hk.fit`` combines state that a layer or ``train_step`` updates from its batch.

    With v_r the value on rank r after a training step, v the value before it, and n_r of the b rows of the global batch
    on rank r, all ranks continue with

        "mean"    sum_r (n_r / b) v_r       running means:  v_r = (1 - m) v + m mean(rows)
        "sum"     v + sum_r (v_r - v)       counters:       v_r = v + number(rows)
        "chief"   v_0                       what the chief's rows give, such as a queue of samples

    The first two give the value of one process for the updates on the right. A moving average of sums over rows is
    neither: pass these sums through ``hk.allreduce`` in the layer. Do the same in a layer that uses the state after its
    update in the same step: until the step ends, it is the state of the rank's rows. The chief logs a warning of such a
    layer. Plain ``fit`` and training loops do not apply the rule.

    Call it on every rank, in the layer's ``build`` or before ``hk.fit``. It has no effect with one rank.

    Args:
        variables: one or several TensorFlow or Keras variables that are not trained: Keras variables of the model, or
            ``tf.Variable`` in an attribute of the model or of one of its layers.
        rule: ``"mean"`` (floats only), ``"sum"`` or ``"chief"``.

    Raises:
        TypeError: ``variables`` contains something else.
        ValueError: ``rule`` is invalid, does not fit the dtype, or a variable is sharded or local.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> class RunningMean(keras.layers.Layer):
        ...     def build(self, shape):
        ...         self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)
        ...         hk.synchronize(self.mean, "mean")
        ...     def call(self, x):
        ...         centred = x - self.mean
        ...         self.mean.assign(0.5 * self.mean + 0.5 * keras.ops.mean(x, axis=0))
        ...         return centred
        >>> model = keras.Sequential([keras.Input((2,)), RunningMean(), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> history = hk.fit(model, np.ones((32, 2)), np.ones((32, 1)), batch_size=16, verbose=0)  # two steps
        >>> model.layers[0].mean.numpy().tolist()
        [0.75, 0.75]
    """
    if rule not in ("mean", "sum", "chief"):
        raise ValueError(describe("rule", repr(rule), "'mean', 'sum' or 'chief'", "pass one of them"))
    is_single = hasattr(variables, "assign") or not isinstance(variables, Iterable)
    for variable in [variables] if is_single else list(variables):
        if not isinstance(variable, (tf.Variable, keras.Variable)):
            remedy = "pass e.g. self.mean of a built layer"
            raise TypeError(describe("variables", type(variable).__name__, "TensorFlow or Keras variables", remedy))
        if differs_by_rank(variable):
            got = f"{variable_name(variable)}, which is sharded, local or the state of a random generator"
            raise ValueError(describe("variables", got, "variables with equal values on all ranks", "leave it out"))
        dtype = tf.as_dtype(variable.dtype)
        if not (dtype.is_floating or (rule != "mean" and dtype.is_integer)):
            expected = "a float, or with 'sum' and 'chief' an integer"
            got = f"{rule!r} for {variable_name(variable)} of dtype {dtype.name}"
            raise ValueError(describe("rule", got, expected, "use another rule or dtype"))
        _RULES.set(variable, rule)


def combine_sums(variable: AnyVariable) -> None:
    """Declare ``"mean"`` for a variable that sums gradients. A step may use it after its update."""
    synchronize(variable, "mean")
    _SUMS.set(variable, True)


def has_rule(variable: AnyVariable) -> bool:
    """Return True if :func:`synchronize` has declared how ranks combine a variable."""
    return _RULES.get(variable) is not None


class StateCombiner:
    """Combines the state of a model after a training step over a group, by the rules of :func:`synchronize`.

    Create it before the step, when the model has all its variables, and call :meth:`combine` after it.
    """

    def __init__(self, model: keras.Model, group: cluster.Group) -> None:
        self._model = model
        self._group = group
        self._before = {id(v): tf.identity(v) for v, rule in self._declared() if rule == "sum"}

    def _declared(self) -> list[tuple[AnyVariable, Rule]]:
        """Return the variables with a rule. The step may declare more of them."""
        state = [each.variable for each in state_of(self._model)] if self._group.size > 1 else []
        rules = [(v, _RULES.get(v)) for v in state if holding_of(v) is None]
        return [(v, rule) for v, rule in rules if rule is not None]

    @property
    def variables(self) -> list[AnyVariable]:
        """The variables that are combined, without sums of gradients."""
        return [variable for variable, _ in self._declared() if variable not in _SUMS]

    def combine(self, factor: tf.Tensor | None) -> None:
        """Assign the combined values. Every rank of the group must call it.

        Args:
            factor: f_r = n_r N / b, see :mod:`hvdkit.collectives.batch_share`; None for 1.
        """
        declared = [(v, rule) for v, rule in self._declared() if rule != "sum" or id(v) in self._before]
        parts: list[tf.Tensor] = []
        for variable, rule in declared:
            dtype = tf.float64 if tf.as_dtype(variable.dtype).is_floating else tf.int64
            value = tf.cast(tf.convert_to_tensor(variable), dtype)
            if rule == "mean":
                parts.append(value if factor is None else times_share(value, factor))
            elif rule == "sum":
                parts.append(value - tf.cast(self._before[id(variable)], dtype))
            else:
                parts.append(value if self._group.index == 0 else tf.zeros_like(value))
        group = None if self._group.size == cluster.size() else self._group
        for dtype in (tf.float64, tf.int64):
            indices = [i for i, part in enumerate(parts) if part.dtype == dtype]
            if not indices:
                continue
            name = f"hvdkit.state.{dtype.name}"
            totals = grouped_allreduce([parts[i] for i in indices], ReduceOp.Sum, name, group)
            for i, total in zip(indices, totals, strict=True):
                variable, rule = declared[i]
                if rule == "mean":
                    total /= self._group.size
                elif rule == "sum":
                    total += tf.cast(self._before[id(variable)], dtype)
                variable.assign(tf.cast(total, variable.dtype))


def state_of(model: keras.Model) -> list[StateVariable]:
    """Return the replicated variables of ``model`` that its layers and steps may change without a gradient.

    These are non-trainable Keras variables, and TensorFlow variables in attributes of layers, which Keras 3 does not
    track. Without metrics, statistics of BatchNormalization, states of stateful RNNs, which belong to the rows of a
    rank, and vectors of SpectralNormalization, which follow from the weights.
    """
    layers = list(model._flatten_layers())
    excluded = list(model.metrics_variables)
    for layer in layers:
        excluded += [v for metric in getattr(layer, "_metrics", ()) for v in metric.variables]
        if isinstance(layer, keras.layers.BatchNormalization):
            excluded += layer.non_trainable_variables
        elif isinstance(layer, keras.layers.RNN) and layer.stateful:
            excluded += [v for v in tree.flatten(layer.states) if v is not None]
        elif isinstance(layer, keras.layers.SpectralNormalization) and layer.built:
            excluded.append(layer.vector_u)
    known = {id(v) for v in excluded}
    known |= {id(getattr(v, "_value", v)) for v in [*excluded, *model.variables]}
    found = [StateVariable(variable_name(v), v) for v in model.non_trainable_variables if id(v) not in known]
    found += [each for layer in layers for each in untracked_variables(layer) if id(each.variable) not in known]
    distinct = {id(each.variable): each for each in found}.values()
    return [each for each in distinct if _is_comparable(each.variable)]


def untracked_variables(layer: keras.layers.Layer) -> list[StateVariable]:
    """Return the TensorFlow variables in attributes of ``layer``, which Keras 3 does not track."""
    held = [
        each
        for attribute, value in list(vars(layer).items())
        if not attribute.startswith("_hvdkit")
        for each in _held(f"{layer.name}.{attribute}", value)
    ]
    return [StateVariable(name, value) for name, value in held if isinstance(value, tf.Variable)]


def _held(name: str, value: object, depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield a value, or if it is a list, tuple or dict, what it contains, with names."""
    if isinstance(value, (list, tuple, dict)) and depth < _MAX_DEPTH:
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield from _held(f"{name}[{key!r}]", item, depth + 1)
    else:
        yield name, value


def recurrent_states(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Return the states that a stateful recurrent layer keeps for its rows, which are not among its variables."""
    states = tree.flatten(layer.states) if isinstance(layer, keras.layers.RNN) else []
    return [state for state in states if isinstance(state, keras.Variable)]


def compare_constants(model: keras.Model) -> None:
    """Compare arrays and tensors in attributes of layers, and vocabularies, which no variable holds.

    Every rank calls it. Attributes whose names begin with ``_`` are skipped, and so are hvdkit's layers, which hold
    parts of tables. If they differ, all ranks raise CollectiveMismatchError, which names the first.
    """
    constants: dict[str, str] = {}
    layers = list(model._flatten_layers())
    for number, layer in enumerate(layers):
        if type(layer).__module__.startswith("hvdkit."):
            continue
        for attribute, value in list(vars(layer).items()):
            for name, held in _held(f"{number}.{attribute}", value) if not attribute.startswith("_") else ():
                if isinstance(held, np.ndarray) or (isinstance(held, tf.Tensor) and not tf.is_symbolic_tensor(held)):
                    constants[name] = digest_of_array(held)
        if vocabulary := vocabulary_of(layer):
            constants[f"{number}.vocabulary"] = xxhash.xxh3_128_hexdigest(vocabulary.encode())
    if not constants:
        return

    def difference(odd: dict[str, str], usual: dict[str, str]) -> tuple[str, str]:
        name = next(key for key in {**usual, **odd} if odd.get(key) != usual.get(key))
        number, _, attribute = name.partition(".")
        owner = layers[int(number)].name if int(number) < len(layers) else f"layer {number}"
        return f"another {attribute} of layer {owner!r}", "an equal one"

    agree(cluster.exchange(), lambda: constants, "the model's constants", CONSTANTS_REMEDY, show=difference)


def digest_of_array(value: np.ndarray | tf.Tensor | tf.Variable) -> str:
    """Return a digest of an array's dtype, shape and values."""
    array = np.asarray(value)
    data = repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes()
    return f"{array.dtype.name}{array.shape}{xxhash.xxh3_128_hexdigest(data)}"


def vocabulary_of(layer: keras.layers.Layer) -> str:
    """Return the vocabulary of a layer that looks up words or numbers; "" for other layers."""
    lookups = (keras.layers.StringLookup, keras.layers.IntegerLookup, keras.layers.TextVectorization)
    return repr(layer.get_vocabulary()) if isinstance(layer, lookups) else ""


def digests_of(state: Sequence[StateVariable]) -> list[tuple[str, bytes]]:
    """Return the name and the digest of each variable."""
    return [(each.name, digest(each.variable)) for each in state]


def compare_state(ranks: Sequence[list[tuple[str, bytes]]], numbers: Sequence[int], *, remedy: str = "") -> None:
    """Raise CollectiveMismatchError if the state of the model differs between ranks.

    Args:
        ranks: the result of :func:`digests_of` on each rank.
        numbers: the numbers of these ranks.
        remedy: what to do first, for the message.
    """
    # Keras numbers layers per process, so the names of one variable may differ between ranks.
    outlier = find_outlier([[value for _, value in digests] for digests in ranks])
    if outlier is None:
        return
    odd, usual = outlier
    if len({len(digests) for digests in ranks}) > 1:
        names = ["a different number of variables"]
    else:
        names = [pairs[usual][0] for pairs in zip(*ranks, strict=True) if len({value for _, value in pairs}) > 1]
    got = f"different values of {listed(names, _NAMES_SHOWN)} on rank {numbers[odd]}"
    expected = f"those of rank {numbers[usual]}: a layer or train_step updates them from each rank's own rows"
    raise CollectiveMismatchError(describe("model", got, expected, f"{remedy}{_REMEDY}"))


def _is_comparable(variable: AnyVariable) -> bool:
    dtype = tf.as_dtype(variable.dtype)
    is_number = dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex
    return is_number and tf.TensorShape(variable.shape).is_fully_defined() and not differs_by_rank(variable)
