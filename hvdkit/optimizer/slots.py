"""Slots of shards: create and initialize them in place, load them, and reset rows that are reassigned to another id."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from hvdkit.collectives.weak_registry import WeakRegistry
from hvdkit.errors import describe
from hvdkit.optimizer.gradients import Gradient
from hvdkit.sharding.shards import (
    AnyVariable,
    Local,
    assign_whole,
    inner_variable,
    is_local,
    piece_states,
    set_holding,
    shard_of,
    write_box,
)
from hvdkit.sharding.vocabulary import pop_new_rows

SlotInitializer: TypeAlias = "keras.initializers.Initializer | str"
"""What Keras's optimizers fill a new slot with."""
_BLOCK_NUMBERS = 1 << 22


def create_slot(
    create: Callable[..., keras.Variable], reference: AnyVariable, name: str | None, initializer: SlotInitializer
) -> keras.Variable:
    """Return the slot that Keras's ``create`` makes for ``reference``: sharded or local, like that variable."""
    shard = shard_of(reference)
    inner = getattr(reference, "_value", None)
    # The slots of a table in host memory are also in host memory.
    device = tf.device(inner.device) if isinstance(inner, tf.Variable) else contextlib.nullcontext()
    # In a step that is being traced, TensorFlow would initialize the slot later and lose what is assigned here.
    created = contextlib.nullcontext() if shard is None else tf.init_scope()
    with created, device:
        slot = create(reference, name=name, initializer=initializer if shard is None else "zeros")
    if is_local(reference):
        set_holding(slot, Local())
    if shard is not None:
        _initialize_slot(slot, initializer)
        set_holding(slot, shard.of_slot(name or "var"))
        if shard.usage is not None:
            _register_slot(reference, name or "", slot, initializer)
    return slot


def assign_saved(variable: AnyVariable, whole: np.ndarray) -> None:
    """Set ``variable`` to ``whole``, as Keras saved it, or a sharded one to this rank's part of it.

    Raises:
        ValueError: the variable holds several tables, or one of another shape than ``whole``.
    """
    parts = piece_states(variable)
    if not parts:
        assign_whole(variable, whole)
        return
    if len(parts) > 1 or tuple(whole.shape) != tuple(parts[0].shape):
        got = f"slots {list(whole.shape)} of {[part.name for part in parts]}"
        remedy = "pass compile=False and compile again, or continue from a hk.Supervisor's checkpoint"
        raise ValueError(describe("optimizer", got, "slots of one whole table", remedy))
    parts[0].assign_local(whole[tuple(slice(i.start, i.stop, i.step) for i in parts[0].local_index)])


def _initialize_slot(slot: keras.Variable, initializer: SlotInitializer) -> None:
    """Overwrite a zero slot with its constant initial value, one block at a time to save memory.

    Keras's initializers would hold two more copies of the slot in memory.
    """
    with tf.init_scope():
        value = _initial_value(slot, initializer)
        rows = slot.shape[0]
        width = max(1, math.prod(slot.shape[1:]))
        if not rows or not float(value):
            return
        rows_per_block = max(1, _BLOCK_NUMBERS // width)
        for start in range(0, rows, rows_per_block):
            end = min(rows, start + rows_per_block)
            write_box(slot._value, (slice(start, end),), tf.fill([end - start, *slot.shape[1:]], value))


def _initial_value(slot: keras.Variable, initializer: SlotInitializer) -> tf.Tensor:
    """Return the constant that ``initializer`` fills ``slot`` with."""
    return tf.convert_to_tensor(keras.initializers.get(initializer)((1,), dtype=slot.dtype)[0])


# For each TensorFlow variable with reassignable rows: name, slot and initializer of the slots of all optimizers.
_SLOTS: WeakRegistry[list[tuple[str, weakref.ref[keras.Variable], SlotInitializer]]] = WeakRegistry()


def _register_slot(reference: keras.Variable, name: str, slot: keras.Variable, initializer: SlotInitializer) -> None:
    """Reset rows of ``slot`` when the same rows of the variable ``reference`` are reassigned to other ids."""
    others = [entry for entry in _SLOTS.get(reference._value) or () if entry[1]() is not None]
    _SLOTS.set(reference._value, [*others, (name, weakref.ref(slot), initializer)])


def reset_reassigned_rows(grads: Sequence[Gradient], variables: Sequence[AnyVariable], *, all_rows: bool) -> None:
    """Reset the slots of rows that were reassigned to another id since the last update.

    Moments of the old id must not affect the new one. A row is reset only once: the optimizer that updates first resets
    the slots of all optimizers. If gradients are accumulated, ``all_rows`` are reset, not only those in the gradients.
    """
    for gradient, variable in zip(grads, variables, strict=False):
        shard = shard_of(variable)
        if gradient is None or shard is None or shard.usage is None:
            continue
        rows = pop_new_rows(shard.usage, gradient, all_rows)
        inner = inner_variable(variable)
        for name, slot_ref, initializer in _SLOTS.get(inner) or ():
            if (slot := slot_ref()) is None:  # of an optimizer that was freed
                continue
            if name == "average":  # Keras's moving average of the weights starts at the weights
                values = inner.sparse_read(rows)
            else:
                values = tf.fill([tf.size(rows), slot.shape[1]], _initial_value(slot, initializer))
            slot._value.scatter_update(tf.IndexedSlices(values, rows))
