"""The base class of layers whose weights are sharded across ranks."""

from __future__ import annotations

import contextlib
from collections.abc import MutableMapping
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.errors import HvdkitError, describe
from hvdkit.sharding.shards import PieceState, piece_states, shard_of

WeightStore: TypeAlias = "MutableMapping[str, np.ndarray | tf.Tensor | keras.Variable]"
"""The arrays of a layer in a file of Keras, by name."""


def memory_device(host: bool) -> contextlib.AbstractContextManager[object]:
    """Return the context in which to create variables: host memory, or the default device."""
    return tf.device("CPU:0") if host else contextlib.nullcontext()


class ShardedLayer(keras.layers.Layer):
    """A layer with sharded weights. Keras files hold its unsharded arrays by name, for any number of ranks.

    Files can be written only if this rank holds the entire weights, as with a world size of 1, but can be read at any
    number of ranks.
    """

    def __init__(self, **kwargs: object):
        super().__init__(**kwargs)
        self.supports_jit = False  # Horovod's ops and tf.unique lack XLA kernels; read by Keras's jit_compile="auto"

    def save_own_variables(self, store: WeightStore) -> None:
        """Save the weights for Keras.

        Raises:
            HvdkitError: this rank holds only a part of a weight.
        """
        if any(_is_sharded(v) for v in self._own_variables()):
            got = f"{self.name}, whose weights are sharded across {cluster.size()} ranks"
            expected = "layers whose weights are whole on this rank: Keras's file would hold one rank's part"
            remedy = (
                "train with hk.fit(logdir=...) or hk.Supervisor, which save it; then run the same command on one rank, "
                "which restores whole tables, trains nothing and can save the file. hvdkit checkpoint export writes "
                ".npy files and SavedModels"
            )
            raise HvdkitError(describe("model.save, model.save_weights", got, expected, remedy))
        for name, part in self._parts().items():
            store[name] = part.local if isinstance(part, PieceState) else part

    def load_own_variables(self, store: WeightStore) -> None:
        """Load weights saved by Keras; each rank reads its part.

        Raises:
            ValueError: the file has different weights, or weights of a different shape.
        """
        parts = self._parts()
        if set(store.keys()) != set(parts):
            remedy = "load into the model that was saved"
            raise ValueError(describe(f"weights of {self.name!r}", sorted(store.keys()), f"{sorted(parts)}", remedy))
        for name, part in parts.items():
            whole = store[name]
            if tuple(whole.shape) != tuple(part.shape):
                got = f"shape {list(whole.shape)} of {name!r}"
                expected = f"{list(part.shape)}"
                raise ValueError(describe(f"weights of {self.name!r}", got, expected, "load into the same model"))
            if isinstance(part, PieceState):
                part.assign_local(whole[tuple(slice(i.start, i.stop, i.step) for i in part.local_index)])
            else:
                part.assign(whole)

    def _own_variables(self) -> list[keras.Variable]:
        return [*self._trainable_variables, *self._non_trainable_variables]

    def _parts(self) -> dict[str, keras.Variable | PieceState]:
        """Return this rank's variables, or its parts of sharded ones, by names that are the same on all ranks."""
        pairs: list[tuple[str, keras.Variable | PieceState]] = []
        for variable in self._own_variables():
            shard = shard_of(variable)
            if shard is None:
                pairs.append((variable.name, variable))
            else:
                prefix = "" if shard.slot is None else f"{shard.slot}."
                pairs += [(f"{prefix}{state.table}", state) for state in piece_states(variable)]
        parts = dict(pairs)
        if len(parts) < len(pairs):
            got = sorted(name for name, _ in pairs)
            raise ValueError(describe(f"weights of {self.name!r}", got, "names that differ", "rename a table"))
        return parts


def _is_sharded(variable: keras.Variable) -> bool:
    """Return whether this rank may hold only a part of ``variable``."""
    shard = shard_of(variable)
    if shard is None:
        return False
    return (cluster.size() if shard.axis is None else cluster.group(shard.axis).size) > 1
