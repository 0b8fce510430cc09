"""Callbacks that run on the chief only."""

from __future__ import annotations

from typing import Any

import keras

from hvdkit import cluster
from hvdkit.errors import describe
from hvdkit.marks import WeakRegistry

_ON_CHIEF: WeakRegistry[bool] = WeakRegistry()


def on_chief(callback: Any) -> keras.callbacks.Callback:
    """Return ``callback`` on the chief, and a callback that does nothing on every other rank.

    For callbacks that write files or talk to a server, in ``hk.fit`` and plain ``model.fit``. Such a callback may call
    no collective, and must not decide for all ranks: ``stop_training`` or a learning rate set on the chief alone is an
    error at the end of the epoch.

    Args:
        callback: any Keras callback. Every rank makes one.

    Raises:
        TypeError: ``callback`` is not a Keras callback.

    Example::

        model.fit(x, y, callbacks=[hk.callbacks.on_chief(keras.callbacks.ModelCheckpoint("best.keras"))])
    """
    if not isinstance(callback, keras.callbacks.Callback):
        raise TypeError(describe("callback", callback, "a Keras callback", "pass an object, not its class"))
    found = callback if cluster.is_chief() else keras.callbacks.Callback()
    _ON_CHIEF.set(found, True)
    return found


def is_on_chief(callback: Any) -> bool:
    """Return True for what :func:`on_chief` returned, on any rank."""
    return callback in _ON_CHIEF
