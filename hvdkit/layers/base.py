"""What all layers share of which ranks hold parts."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf

from hvdkit import cluster
from hvdkit.errors import HvdkitError


def memory(host: bool) -> Any:
    """Return the context in which variables are made: the host's memory, or wherever they would be made anyway."""
    return tf.device("CPU:0") if host else contextlib.nullcontext()


class ShardedLayer(keras.layers.Layer):
    """A layer whose weights are cut across ranks: no XLA, and Keras's own files in a world of one only."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.supports_jit = False  # Horovod's ops and tf.unique have no XLA kernels; Keras's "auto" asks for this

    def save_own_variables(self, store: Any) -> None:
        """Save for Keras in a world of one; refuse in others, where a file would hold one rank's part only."""
        self._refuse_keras_file()
        super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load what Keras saved, in a world of one; refuse in others."""
        self._refuse_keras_file()
        super().load_own_variables(store)

    def _refuse_keras_file(self) -> None:
        if cluster.size() > 1:
            raise HvdkitError(
                f"{self.name}: its weights are cut across {cluster.size()} ranks, which Keras's own files do not hold; "
                "save with hk.Supervisor or hk.checkpoint.save, and export with export_npy or export_saved_model"
            )
