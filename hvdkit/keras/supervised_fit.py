"""The mark of a model whose ``fit`` a Supervisor runs. It does not outlast that ``fit``, also if it raises."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from hvdkit.collectives.weak_registry import Attached
from hvdkit.keras.attribute_swap import exchange_attributes
from hvdkit.keras.own_methods import as_plain

if TYPE_CHECKING:
    import keras

# The attributes that a marked model had before.
_BEFORE: Attached[dict[str, object] | None] = Attached("_hvdkit_before_supervision")


def is_supervised(model: keras.Model) -> bool:
    """Return True while a Supervisor runs the model's ``fit``: it saves moving statistics before averaging them."""
    return _BEFORE.get(model) is not None


def begin_supervision(model: keras.Model, *, of_plain_fit: bool) -> None:
    """Mark a model whose ``fit`` a Supervisor runs.

    Keras calls no hook at the end of its own ``fit`` if that raises. The model's next ``fit`` then first calls
    :func:`end_supervision`; ``hk.fit`` always calls it.
    """
    end_supervision(model)
    fit = model.fit

    @functools.wraps(fit)
    def next_fit(*args: object, **kwargs: object) -> keras.callbacks.History:
        end_supervision(model)
        return fit(*args, **kwargs)

    _BEFORE.set(model, exchange_attributes(model, {"fit": as_plain(next_fit)} if of_plain_fit else {}))


def end_supervision(model: keras.Model) -> None:
    """Remove the mark of a model, and the epoch at which its ``fit`` had to begin."""
    before = _BEFORE.get(model)
    if before is not None:
        model._initial_epoch = None
        exchange_attributes(model, before)
        _BEFORE.set(model, None)
