"""Callbacks that run on the chief only, and what they decide for all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import keras

from hvdkit import cluster
from hvdkit.cluster.agreement import for_all_ranks, run_on_all_ranks
from hvdkit.collectives.weak_registry import Attached
from hvdkit.errors import HvdkitError, describe
from hvdkit.watchdog.reporter import reporter

# In an attribute: tuners pass copies of callbacks, which run on the chief only, too.
_ON_CHIEF: Attached[bool] = Attached("_hvdkit_on_chief")


def on_chief(
    callback: keras.callbacks.Callback | Callable[[], keras.callbacks.Callback],
) -> keras.callbacks.Callback:
    """Return ``callback`` on the chief, and a no-op callback on every other rank.

    Use it in ``hk.fit`` and plain ``model.fit`` for callbacks that write files or connect to a server. With a function
    that makes the callback, only the chief opens the tracker's run.

    Such a callback may end training for all ranks. If it sets ``stop_training``, all ranks stop at the end of the
    epoch; in ``hk.fit``, after the batch, if a callback reads the logs of batches. If it raises an exception at the end
    of an epoch, all ranks raise it. It must not call collectives. If it changes the learning rate, the end of the epoch
    raises an error.

    Args:
        callback: any Keras callback, created on every rank; or a function without arguments that returns one, which the
            chief calls. With a function, every rank must call ``on_chief``.

    Returns:
        A Keras callback.

    Raises:
        TypeError: ``callback`` is neither a Keras callback nor a function that returns one.
        Exception: on the chief, what the function has raised. Every other rank raises the same, or an HvdkitError with
            its class and message if it cannot be pickled.

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

        With a function, e.g. one that calls ``wandb.init()``:

        >>> logger = hk.callbacks.on_chief(lambda: keras.callbacks.CSVLogger(log, append=True))
        >>> history = hk.fit(model, x, y, verbose=0, callbacks=[logger])
    """
    if isinstance(callback, keras.callbacks.Callback):
        local = callback if cluster.is_chief() else keras.callbacks.Callback()
    elif callable(callback) and not isinstance(callback, type):
        local = _made_on_chief(callback)
    else:
        remedy = "pass an object or a function that makes it, not its class"
        raise TypeError(describe("callback", callback, "a Keras callback", remedy))
    _ON_CHIEF.set(local, True)
    return local


def _made_on_chief(make: Callable[[], keras.callbacks.Callback]) -> keras.callbacks.Callback:
    """Return the callback that ``make`` returns on the chief, and a no-op callback on every other rank."""

    def made() -> keras.callbacks.Callback:
        if not cluster.is_chief():
            return keras.callbacks.Callback()
        with _running_alone(f"hk.callbacks.on_chief({getattr(make, '__qualname__', make)})"):
            callback = make()
            if not isinstance(callback, keras.callbacks.Callback):
                remedy = "return the callback from the function"
                raise TypeError(describe("callback", f"a function that returns {callback!r}", "a callback", remedy))
            return callback

    return run_on_all_ranks(cluster.exchange(), "hk.callbacks.on_chief", made, error=HvdkitError)


def is_on_chief(callback: keras.callbacks.Callback) -> bool:
    """Return True for callbacks returned by :func:`on_chief`, on any rank."""
    return _ON_CHIEF.get(callback) is not None


def mark_on_chief(callback: keras.callbacks.Callback) -> None:
    """Have a callback of the chief, which other ranks do not have, count as one returned by :func:`on_chief`."""
    _ON_CHIEF.set(callback, True)


@contextlib.contextmanager
def _running_alone(name: str) -> Iterator[None]:
    """Run a function of the chief. Reports of a hang name it; other ranks raise its exception in the next exchange."""
    before = reporter().doing
    reporter().doing = name
    try:
        yield
    except Exception as error:
        for_all_ranks(error)
        raise
    finally:
        reporter().doing = before


class StopRequest:
    """Whether a callback of the chief has set ``stop_training`` since the ranks last exchanged it.

    Until then, the model's ``stop_training`` stays as on other ranks, which would otherwise wait for the chief.
    """

    def __init__(self) -> None:
        self.is_made = False

    @contextlib.contextmanager
    def noticing(self, model: keras.Model, callback: keras.callbacks.Callback, hook: str) -> Iterator[None]:
        """Run a hook of a callback of the chief. Other ranks raise its exception, too, in the next exchange."""
        before = model.stop_training
        with _running_alone(f"{type(callback).__name__}.{hook}"):
            yield
        if model.stop_training and not before:
            model.stop_training = False
            self.is_made = True

    def grant(self, model: keras.Model) -> None:
        """Stop training. Every rank must call it."""
        model.stop_training = True
        self.is_made = False
