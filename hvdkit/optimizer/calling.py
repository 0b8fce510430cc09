"""The model whose ``fit`` calls an optimizer: Keras gives optimizers no reference to it.

Keras 3 calls ``apply`` from ``Model.train_step`` and ``finalize_variable_values`` from ``Model.fit``. In those frames
the model is ``self``.
"""

from __future__ import annotations

import sys
from typing import Any

import keras


def calling_model() -> Any:
    """Return the outermost Keras model whose method has called, directly or not; None if there isn't one."""
    model, frame = None, sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        if isinstance(caller, keras.Model):
            model = caller
        frame = frame.f_back  # type: ignore[assignment]
    return model


def locals_of(function: str, *, having: str) -> dict[str, Any]:
    """Return the local variables of the nearest caller of a name that has a certain variable; empty if there isn't one.

    Args:
        function: the caller's name.
        having: one of its variables, which distinguishes it from others of that name.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == function and having in (*code.co_varnames, *code.co_cellvars):
            return dict(frame.f_locals)
        frame = frame.f_back  # type: ignore[assignment]
    return {}
