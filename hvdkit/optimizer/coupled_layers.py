"""Track layers that exchange values between ranks in the forward pass: their gradients depend on all ranks' losses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import keras

from hvdkit import cluster
from hvdkit.cluster.live_objects import live_instances
from hvdkit.errors import describe
from hvdkit.sharding.shards import inner_variable

_coupled: weakref.WeakSet[keras.layers.Layer] = weakref.WeakSet()
_was_coupled = False
_checked: set[int] = set()


def note_coupled(layer: keras.layers.Layer) -> None:
    """Record that ``layer`` couples ranks, so that rank weights must be applied to losses instead of gradients."""
    global _was_coupled
    _was_coupled = True
    _coupled.add(layer)


def was_coupled() -> bool:
    """Return True if a layer has ever coupled ranks in this process, even if it has been freed."""
    return _was_coupled


def any_coupled() -> bool:
    """Return True if a layer that couples ranks is alive in this process. May be slow."""
    if _coupled:
        gc.collect()  # ranks free layers at different times
    return len(_coupled) > 0


def check_coupled(variables: Iterable[object]) -> None:
    """Check that layers with ``synchronized=True`` are actually synchronized over ranks.

    Keras variables don't reference their layers, so layers are searched among all Python objects, once per list of
    variables.

    Raises:
        ValueError: a ``BatchNormalization(synchronized=True)`` of ``variables`` uses the statistics of the local batch.
    """
    variable_ids = {id(v) for v in variables}
    key = hash(frozenset(variable_ids))
    if key in _checked or cluster.size() == 1:
        return
    for layer in live_instances(keras.layers.BatchNormalization):
        if not getattr(layer, "built", False) or not layer.synchronized:  # a constructor may have failed
            continue
        # A tape may be called with the TensorFlow variables inside Keras variables.
        ids = {i for v in layer.trainable_variables for i in (id(v), id(inner_variable(v)))}
        if ids & variable_ids:
            require_synchronized(layer)
    _checked.add(key)


def require_synchronized(layer: keras.layers.BatchNormalization) -> None:
    """Raise ValueError unless a ``BatchNormalization(synchronized=True)`` uses the statistics of the global batch."""
    if layer.synchronized and "_moments" not in vars(layer) and cluster.size() > 1:
        got = f"layer {layer.name!r}, which uses the statistics of each rank's batch"
        remedy = (
            "use hk.fit, pass hk.callbacks.BroadcastInitial() to fit, or call "
            "hk.layers.synchronize_batch_normalization(model) before the first step"
        )
        raise ValueError(describe("synchronized", got, "those of the global batch", remedy))
