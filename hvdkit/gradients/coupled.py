"""Layers that exchange values between ranks in the forward pass, so that a gradient depends on every rank's loss."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import keras

from hvdkit import cluster
from hvdkit.errors import describe

_coupled: weakref.WeakSet[Any] = weakref.WeakSet()
_was_coupled = False
_checked: set[int] = set()


def note_coupled(layer: Any) -> None:
    """Note that ``layer`` couples ranks: weights of ranks must then be applied to losses, not to their gradients."""
    global _was_coupled
    _was_coupled = True
    _coupled.add(layer)


def was_coupled() -> bool:
    """Return True if a layer has coupled ranks in this process, on whichever rank it has been freed since."""
    return _was_coupled


def any_coupled() -> bool:
    """Return True if a layer that couples ranks is in use in this process. It may take long."""
    if _coupled:
        gc.collect()  # ranks free layers at different times
    return len(_coupled) > 0


def check_coupled(variables: Iterable[Any]) -> None:
    """Refuse to combine gradients of layers that are to be synchronized over ranks, and are not.

    Keras gives variables no reference to their layers. So layers are looked for among all Python objects, once for each
    list of variables.

    Raises:
        ValueError: a ``BatchNormalization(synchronized=True)`` of ``variables`` uses the statistics of the local batch.
    """
    own = {id(v) for v in variables}
    key = hash(frozenset(own))
    if key in _checked or cluster.size() == 1:
        return
    for layer in [x for x in gc.get_objects() if issubclass(type(x), keras.layers.BatchNormalization)]:
        if not getattr(layer, "built", False) or not layer.synchronized:  # a constructor may have failed
            continue
        # A tape knows the variables inside Keras's.
        ids = {i for v in layer.trainable_variables for i in (id(v), id(getattr(v, "_value", v)))}
        if ids & own:
            refuse_local(layer)
    _checked.add(key)


def refuse_local(layer: Any) -> None:
    """Raise ValueError unless a ``BatchNormalization(synchronized=True)`` uses the statistics of the global batch."""
    if layer.synchronized and "_moments" not in vars(layer) and cluster.size() > 1:
        got = f"layer {layer.name!r}, which uses the statistics of each rank's batch"
        remedy = (
            "use hk.fit, pass hk.callbacks.BroadcastInitial() to fit, or call "
            "hk.layers.synchronize_batch_normalization(model) before the first step"
        )
        raise ValueError(describe("synchronized", got, "those of the global batch", remedy))
