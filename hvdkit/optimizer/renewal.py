"""Slots of rows that change hands: what an optimizer knew of the old id must not move the new one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdkit.collectives.shards import shard_of
from hvdkit.variable.vocabulary import take_fresh


class Slots:
    """The slots that an optimizer has beside variables whose rows change hands."""

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[str, Any, Any]]] = {}

    def add(self, reference: Any, name: str, slot: Any, initializer: Any) -> None:
        """Note a slot of ``reference``."""
        self._of.setdefault(id(reference._value), []).append((name, slot, initializer))

    def renew(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Give the gradients' rows that have gone to another id since the last update the slots' first values."""
        for gradient, variable in zip(grads, variables, strict=False):
            shard = shard_of(variable)
            if gradient is None or shard is None or shard.fresh is None:
                continue
            rows, inner = take_fresh(shard.fresh, gradient), getattr(variable, "_value", variable)
            for name, slot, initializer in self._of.get(id(inner), ()):
                if name == "average":  # Keras's moving average of the weights begins with the weights
                    first = inner.sparse_read(rows)
                else:
                    value = keras.initializers.get(initializer)((1,), dtype=slot.dtype)[0]
                    first = tf.fill([tf.size(rows), slot.shape[1]], tf.convert_to_tensor(value))
                slot._value.scatter_update(tf.IndexedSlices(first, rows))
