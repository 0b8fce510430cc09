"""What all layers share whose weights are cut across ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.shards import PieceState, piece_states, shard_of
from hvdkit.errors import HvdkitError, describe


def memory(host: bool) -> Any:
    """Return the context in which variables are made: the host's memory, or wherever they would be made anyway."""
    return tf.device("CPU:0") if host else contextlib.nullcontext()


class ShardedLayer(keras.layers.Layer):
    """A layer whose weights are cut across ranks, in Keras's files: whole arrays by name, whatever the number of ranks.

    Files are written if this rank holds the whole, as it does in a world of one, and read at any number of ranks.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.supports_jit = False  # Horovod's ops and tf.unique have no XLA kernels; Keras's "auto" asks for this

    def save_own_variables(self, store: Any) -> None:
        """Save the weights for Keras.

        Raises:
            HvdkitError: this rank holds a part of a weight only.
        """
        if any(_is_cut(v) for v in self._own_variables()):
            got = f"{self.name}, whose weights are cut across {cluster.size()} ranks"
            expected = "layers whose weights are whole on this rank: Keras's file would hold one rank's part"
            remedy = (
                "save with hk.Supervisor or hk.checkpoint.save, and export with export_npy or export_saved_model; for "
                "a .keras file restore that checkpoint in one process, and save there"
            )
            raise HvdkitError(describe("model.save, model.save_weights", got, expected, remedy))
        for name, part in self._parts().items():
            store[name] = part.local if isinstance(part, PieceState) else part

    def load_own_variables(self, store: Any) -> None:
        """Load what Keras saved; each rank reads its part.

        Raises:
            ValueError: the file has other weights, or of another shape.
        """
        parts = self._parts()
        if set(store.keys()) != set(parts):
            remedy = "load into the model that was saved"
            raise ValueError(describe(f"weights of {self.name!r}", sorted(store.keys()), f"{sorted(parts)}", remedy))
        for name, part in parts.items():
            whole = store[name]
            if tuple(whole.shape) != tuple(part.shape):
                got, expected = f"shape {list(whole.shape)} of {name!r}", f"{list(part.shape)}"
                raise ValueError(describe(f"weights of {self.name!r}", got, expected, "load into the same model"))
            if isinstance(part, PieceState):
                part.assign_local(whole[tuple(slice(i.start, i.stop, i.step) for i in part.local_index)])
            else:
                part.assign(whole)

    def _own_variables(self) -> list[Any]:
        return [*self._trainable_variables, *self._non_trainable_variables]

    def _parts(self) -> dict[str, Any]:
        """Return what this rank holds of each weight: variables, or parts of them, by names that all ranks share."""
        pairs: list[tuple[str, Any]] = []
        for variable in self._own_variables():
            shard = shard_of(variable)
            if shard is None:
                pairs.append((variable.name, variable))
            else:
                prefix = "" if shard.slot is None else f"{shard.slot}."
                states = zip(shard.pieces, piece_states(variable), strict=True)
                pairs += [(f"{prefix}{piece.table}", state) for piece, state in states]
        found = dict(pairs)
        if len(found) < len(pairs):
            got = sorted(name for name, _ in pairs)
            raise ValueError(describe(f"weights of {self.name!r}", got, "names that differ", "rename a table"))
        return found


def _is_cut(variable: Any) -> bool:
    """Return whether this rank may hold a part of ``variable`` only."""
    shard = shard_of(variable)
    if shard is None:
        return False
    return (cluster.size() if shard.axis is None else cluster.group(shard.axis).size) > 1
