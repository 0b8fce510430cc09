"""Flatten a state of variables, models, optimizers, generators, arrays and plain values for saving."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import keras
import numpy as np
import tensorflow as tf

from hvdkit.checkpoint.entries import Allowed, Kind, Resize, State, StateTensor, Value
from hvdkit.checkpoint.generators import numpy_state, python_state, state_to_json
from hvdkit.checkpoint.schema import FieldError
from hvdkit.checkpoint.tensorfile import storable
from hvdkit.errors import CorruptCheckpointError, describe
from hvdkit.optimizer.inner_optimizers import gradient_sums_of, updater_of
from hvdkit.sharding.shards import (
    AnyVariable,
    FlatShardState,
    PieceState,
    flat_shard_of,
    holding_of,
    is_local,
    is_seed_state,
    piece_states,
    shard_of,
)
from hvdkit.sharding.variables import variable_name


@runtime_checkable
class ShardedState(Protocol):
    """Protocol of a sharded variable that can be saved and restored at any number of ranks.

    Attributes:
        shape: global shape.
        dtype: dtype, or its name.
        partition: the name of the partition rule; "flat" means that ``local_index`` is one range of elements in
            row-major order.
        local_index: the global indices that this rank holds along each axis, in local order; may be empty. Over all
            ranks they cover the global array.
        local: this rank's part, a tensor or variable ``[len(i) for i in local_index]``.

    Examples:
        Each rank holds every N-th of 10 numbers:

        >>> import tempfile
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> class Numbers:
        ...     shape, dtype, partition = (10,), "float32", "mod"
        ...     def __init__(self):
        ...         self.local_index = (range(hk.rank(), 10, hk.size()),)
        ...         self.local = np.float32(self.local_index[0])
        ...     def assign_local(self, values):
        ...         self.local = np.asarray(values)
        >>> numbers = Numbers()
        >>> isinstance(numbers, hk.checkpoint.ShardedState)
        True
        >>> path = hk.checkpoint.save(hk.broadcast_object(tempfile.mkdtemp()), {"numbers": numbers})
        >>> numbers.assign_local(np.zeros_like(numbers.local))
        >>> restored = hk.checkpoint.restore(path, {"numbers": numbers})
        >>> numbers.local.tolist() == list(range(hk.rank(), 10, hk.size()))
        True
    """

    shape: tuple[int, ...] | tf.TensorShape
    dtype: str | np.dtype | tf.DType
    partition: str

    @property
    def local_index(self) -> tuple[range, ...]:
        """Global indices along each axis."""

    @property
    def local(self) -> np.ndarray | tf.Tensor | tf.Variable | keras.Variable:
        """This rank's part."""

    def assign_local(self, values: np.ndarray | tf.Tensor) -> None:
        """Set this rank's part.

        Args:
            values: the new values, with the shape of ``local``.
        """


def flatten(state: Mapping[str, object]) -> State:
    """Flatten a user-defined ``state``.

    Args:
        state: a mapping of names to: Keras models, layers and optimizers; TensorFlow and Keras variables; objects that
            satisfy :class:`ShardedState`; arrays and tensors; random generators (``random``, NumPy, TensorFlow,
            ``keras.random.SeedGenerator``); objects with ``state`` and ``restore``; objects whose
            ``checkpoint_state()`` returns one of these; plain JSON values; mappings and sequences of all of these.

    Raises:
        TypeError: it contains anything else; the message names it.
    """
    if not isinstance(state, Mapping):
        raise TypeError(describe("state", type(state).__name__, "a dict of names", "pass e.g. {'model': model}"))
    flattened = State()
    _walk(flattened, "", state)
    return flattened


def _walk(state: State, name: str, item: object) -> None:
    if hasattr(item, "checkpoint_state"):
        _walk(state, name, item.checkpoint_state())
    elif isinstance(item, keras.Model | keras.layers.Layer):
        _add_layer(state, name, item)
    elif isinstance(item, keras.optimizers.Optimizer):
        _add_optimizer(state, name, item)
    elif isinstance(item, np.ndarray | np.generic | tf.Tensor):  # before the next, slow check of a protocol
        _add_array(state, name, np.asarray(item))
    elif isinstance(item, ShardedState):
        _add_sharded(state, name, item, "finite" if getattr(_variable_of(item), "trainable", False) else "any")
    elif isinstance(item, tf.Variable | keras.Variable):
        _add_variable(state, name, item, "replicated", allowed="finite" if item.trainable else "any")
    elif _add_generator(state, name, item):
        pass
    elif hasattr(item, "state") and hasattr(item, "restore"):
        state.values[name] = Value(lambda: item.state, item.restore)
    elif isinstance(item, Mapping):
        for key, child in item.items():
            _walk(state, f"{name}/{key}" if name else str(key), child)
    elif isinstance(item, list | tuple):
        for number, child in enumerate(item):
            key = variable_name(child) if isinstance(child, tf.Variable | keras.Variable) else number
            _walk(state, f"{name}/{key}", child)
    elif item is None or isinstance(item, bool | int | float | str):
        state.values[name] = Value(lambda: item, lambda value: state.restored.__setitem__(name, _scalar(value)))
    else:
        raise TypeError(
            describe(
                f"state[{name!r}]",
                type(item).__name__,
                "variables, a model, an optimizer, a generator, arrays or JSON values",
                "give it `state` and `restore`, or a `checkpoint_state()`",
            )
        )


def _add_layer(state: State, name: str, layer: keras.layers.Layer) -> None:
    statistics = _moving_statistics(layer)
    done = _add_sharded_layers(state, name, layer)
    # A constant weight may be infinite, such as an attention mask; a metric may be NaN.
    allowed: dict[int, Allowed] = {id(v): "finite" if v.trainable else "infinite" for v in layer.weights}
    for variable in layer.variables:
        path = f"{name}/{variable_name(variable)}"
        if id(variable) in done:
            continue
        if is_seed_state(variable):
            _add_variable(state, path, variable, "per_rank", key=name)
        elif id(variable) in statistics:
            _add_variable(state, path, variable, "per_rank", "mean", key=name, allowed="finite")
        else:
            _add_variable(state, path, variable, "replicated", key=name, allowed=allowed.get(id(variable), "any"))


def _add_sharded_layers(state: State, name: str, layer: keras.layers.Layer) -> set[int]:
    """Add the sublayers of ``layer`` that define ``checkpoint_state()``; return their variables' ids."""
    added: set[int] = set()
    for sublayer in layer._flatten_layers(include_self=False):
        if hasattr(sublayer, "checkpoint_state"):
            _walk(state, f"{name}/{sublayer.path or sublayer.name}", sublayer)
            added |= {id(v) for v in sublayer.variables}
    return added


def _moving_statistics(layer: keras.layers.Layer) -> set[int]:
    """Return the ids of BatchNormalization's moving statistics, which differ between ranks."""
    return {
        id(v)
        for sublayer in layer._flatten_layers()
        if isinstance(sublayer, keras.layers.BatchNormalization)
        for v in sublayer.non_trainable_variables
        if v.name.startswith("moving_")
    }


def _add_optimizer(state: State, name: str, optimizer: keras.optimizers.Optimizer) -> None:
    inner = updater_of(optimizer)
    reduction = getattr(inner, "_hvdkit", None)
    if reduction is None and any(holding_of(v) is not None for v in inner._trainable_variables):
        remedy = "wrap it; with hk.DistributedGradientTape as hk.DistributedOptimizer(optimizer, op=None)"
        got = f"{type(inner).__name__}, which does not support slots that are sharded or local"
        raise ValueError(describe(f"optimizer {name!r}", got, "an hk.DistributedOptimizer", remedy))
    if reduction is not None and reduction.group is not None:
        got = f"{type(inner).__name__} with process_set={list(reduction.group.ranks)}, outside of which weights differ"
        remedy = "save with model.save on one rank of each set"
        raise ValueError(describe(f"optimizer {name!r}", got, "one that combines gradients of all ranks", remedy))
    accumulators = {id(v) for v in gradient_sums_of(optimizer)}
    # Preserve sum_r a_r / N if gradients are averaged over ranks, and sum_r a_r if they are summed.
    resize: Resize = "sum" if reduction is not None and reduction.op.name == "Sum" else "mean"
    steps = getattr(inner, "gradient_accumulation_steps", None) or 1
    state.values[f"{name}/accumulate_steps"] = Value(lambda: steps, lambda saved: _check_accumulation(steps, saved))
    for variable in optimizer.variables:
        path = f"{name}/{variable_name(variable)}"
        if id(variable) in accumulators:
            _add_variable(state, path, variable, "per_rank", resize, key=name, allowed="finite")
        else:
            _add_variable(state, path, variable, "replicated", key=name, allowed="finite")


def _scalar(value: object) -> bool | int | float | str | None:
    """Return a saved value that was no mapping or sequence. Its type may differ from that of the current one."""
    if value is not None and not isinstance(value, bool | int | float | str):
        raise CorruptCheckpointError(str(FieldError(value, "a number, a string, true, false or null")))
    return value


def _check_accumulation(steps: int, saved: object) -> None:
    """Check the number of accumulation steps: accumulated gradients are valid only for the same number."""
    if type(saved) is not int or saved < 1:
        raise CorruptCheckpointError(str(FieldError(saved, "an integer of at least 1")))
    if steps != saved:
        raise ValueError(describe("accumulate_steps", steps, f"{saved}, as saved", "restore with the same number"))


def _add_variable(
    state: State,
    name: str,
    variable: AnyVariable,
    kind: Kind,
    resize: Resize = "keep",
    *,
    key: str | None = None,
    allowed: Allowed = "any",
) -> None:
    """Add a variable; for a shard, add each of its tables under ``key``, as the shard's name is arbitrary."""
    if is_local(variable):
        kind = "per_rank"
        resize = "keep"
    if (shard := flat_shard_of(variable)) is not None:
        _add_sharded(state, name, FlatShardState(variable, shard), allowed)
        return
    if shard_of(variable) is not None:
        for piece in piece_states(variable):
            _add_sharded(state, f"{key}/{piece.name}" if key else name, piece, allowed)
        return
    inner = variable.value if isinstance(variable, keras.Variable) else variable

    def read() -> np.ndarray:
        return _array(inner.read_value())

    dtype = np.dtype(tf.as_dtype(inner.dtype).as_numpy_dtype)
    shape = tuple(inner.shape)
    options = {"resize": resize, "variable": inner, "allowed": allowed}
    _add(state, StateTensor(name, kind, dtype, shape, read, inner.assign, **options))


def _array(tensor: tf.Tensor) -> np.ndarray:
    """Return a tensor as an array that shares its memory. TensorFlow cannot do this for a bfloat16 scalar."""
    return np.asarray(tf.reshape(tensor, [-1])).reshape(tensor.shape) if tensor.shape.rank == 0 else np.asarray(tensor)


def _add_sharded(state: State, name: str, item: ShardedState, allowed: Allowed) -> None:
    def read() -> np.ndarray:
        part = item.local
        if isinstance(part, np.ndarray):
            return part.copy()
        part = part.value if isinstance(part, keras.Variable) else part
        return _array(part.read_value() if isinstance(part, tf.Variable) else part)

    variable = _variable_of(item)
    value = variable.value if isinstance(variable, keras.Variable) else variable
    tensor = StateTensor(
        name,
        "sharded",
        np.dtype(tf.as_dtype(item.dtype).as_numpy_dtype),
        tuple(int(n) for n in item.shape),
        read,
        item.assign_local,
        index=tuple(item.local_index),
        partition=item.partition,
        variable=value if isinstance(value, tf.Variable) else None,
        rows=getattr(item, "read_rows", None),
        writes=getattr(item, "is_writer", True),
        allowed=allowed,
    )
    _add(state, tensor)


def _variable_of(item: ShardedState) -> AnyVariable | None:
    """Return the variable that is the part of this rank, or None. A part of a larger variable is not read."""
    if isinstance(item, FlatShardState | PieceState):
        return item.variable
    local = item.local
    return local if isinstance(local, tf.Variable | keras.Variable) else None


def _add_array(state: State, name: str, array: np.ndarray) -> None:
    def assign(values: np.ndarray) -> None:
        state.restored[name] = values

    # Copy: unlike a variable, an array is updated in place.
    _add(state, StateTensor(name, "replicated", array.dtype, array.shape, array.copy, assign))


def _add_generator(state: State, name: str, item: Any) -> bool:
    """Add a random generator's per-rank state; return False if ``item`` is not a generator."""
    if isinstance(item, keras.random.SeedGenerator | tf.random.Generator):
        _add_variable(state, f"{name}/state", item.state, "per_rank")
    elif isinstance(item, np.random.Generator):
        bits = item.bit_generator
        state.values[name] = Value(
            lambda: state_to_json(bits.state),
            lambda saved: setattr(bits, "state", numpy_state(saved, bits.state)),
            per_rank=True,
        )
    elif isinstance(item, np.random.RandomState) or item is np.random:
        state.values[name] = Value(
            lambda: state_to_json(item.get_state(legacy=False)),
            lambda saved: item.set_state(numpy_state(saved, item.get_state(legacy=False))),
            per_rank=True,
        )
    elif isinstance(item, random.Random) or item is random:
        state.values[name] = Value(item.getstate, lambda saved: item.setstate(python_state(saved)), per_rank=True)
    else:
        return False
    return True


def _add(state: State, tensor: StateTensor) -> None:
    if not storable(tensor.dtype):
        raise TypeError(
            describe(
                f"state[{tensor.name!r}]", f"dtype {tensor.dtype}", "numbers or bool", "save it as numbers or JSON"
            )
        )
    base = tensor.name
    number = 1
    while tensor.name in state.tensors:  # variables with the same name are numbered in order
        number += 1
        tensor.name = f"{base}~{number}"
    state.tensors[tensor.name] = tensor
