"""Slots of shards: initialize them in place, and reset rows that are reassigned to another id."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from hvdkit.collectives.weak_registry import WeakRegistry
from hvdkit.optimizer.gradients import Gradient
from hvdkit.sharding.shards import AnyVariable, inner_variable, shard_of, write_box
from hvdkit.sharding.vocabulary import pop_new_rows

SlotInitializer: TypeAlias = "keras.initializers.Initializer | str"
"""What Keras's optimizers fill a new slot with."""
_BLOCK_NUMBERS = 1 << 22


def initialize_slot(slot: keras.Variable, initializer: SlotInitializer) -> None:
    """Overwrite a zero slot with its constant initial value, one block at a time to save memory.

    Keras's initializers would hold two more copies of the slot in memory.
    """
    with tf.init_scope():
        value = initial_value(slot, initializer)
        rows = slot.shape[0]
        width = max(1, math.prod(slot.shape[1:]))
        if not rows or not float(value):
            return
        rows_per_block = max(1, _BLOCK_NUMBERS // width)
        for start in range(0, rows, rows_per_block):
            end = min(rows, start + rows_per_block)
            write_box(slot._value, (slice(start, end),), tf.fill([end - start, *slot.shape[1:]], value))


def initial_value(slot: keras.Variable, initializer: SlotInitializer) -> tf.Tensor:
    """Return the constant that ``initializer`` fills ``slot`` with."""
    return tf.convert_to_tensor(keras.initializers.get(initializer)((1,), dtype=slot.dtype)[0])


# For each TensorFlow variable with reassignable rows: name, slot and initializer of the slots of all optimizers.
_SLOTS: WeakRegistry[list[tuple[str, weakref.ref[keras.Variable], SlotInitializer]]] = WeakRegistry()


def register_slot(reference: keras.Variable, name: str, slot: keras.Variable, initializer: SlotInitializer) -> None:
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
                values = tf.fill([tf.size(rows), slot.shape[1]], initial_value(slot, initializer))
            slot._value.scatter_update(tf.IndexedSlices(values, rows))
