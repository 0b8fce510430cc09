"""Callbacks that run on the chief only."""

from __future__ import annotations

import keras

from hvdkit import cluster
from hvdkit.collectives.weak_registry import WeakRegistry
from hvdkit.errors import describe

_ON_CHIEF: WeakRegistry[bool] = WeakRegistry()


def on_chief(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Return ``callback`` on the chief, and a no-op callback on every other rank.

    Use it in ``hk.fit`` and plain ``model.fit`` for callbacks that write files or connect to a server. Such a callback
    must not call collectives or make decisions for all ranks: if it sets ``stop_training`` or the learning rate on the
    chief only, the end of the epoch raises an error.

    Args:
        callback: any Keras callback, created on every rank.

    Returns:
        A Keras callback.

    Raises:
        TypeError: ``callback`` is not a Keras callback.

    Examples:
        >>> import pathlib, tempfile
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x, y = np.ones((32, 4)), np.ones((32, 1))
        >>> log = pathlib.Path(tempfile.mkdtemp(), "log.csv")
        >>> history = hk.fit(model, x, y, verbose=0, callbacks=[hk.callbacks.on_chief(keras.callbacks.CSVLogger(log))])
        >>> log.exists() == hk.is_chief()
        True
    """
    if not isinstance(callback, keras.callbacks.Callback):
        raise TypeError(describe("callback", callback, "a Keras callback", "pass an object, not its class"))
    local = callback if cluster.is_chief() else keras.callbacks.Callback()
    _ON_CHIEF.set(local, True)
    return local


def is_on_chief(callback: keras.callbacks.Callback) -> bool:
    """Return True for callbacks returned by :func:`on_chief`, on any rank."""
    return callback in _ON_CHIEF
