"""Who has called an optimizer, from the frames of its callers: the only place in which hvdkit reads frames to train.

Keras passes an optimizer variables and gradients, and nothing that leads to what calls it:

* ``Model.compile`` stores the optimizer without calling it, so no method of it sees the model; ``Model.fit`` then calls
  ``apply`` from ``train_step`` and ``finalize_variable_values``, with variables, which do not know their model either.
* ``fit`` passes its data, its callbacks and its number of steps to no object that the optimizer could reach.
* A ``LossScaleOptimizer`` around an optimizer calls its ``build`` as a model does. In eager mode nothing else happens
  before it skips ``apply`` on the one rank that overflows, while the others wait in theirs. (From Keras 3.10 on its
  constructor also sets ``inner_optimizer.loss_scale_factor``; 3.5 to 3.9 give no sign.)

A function of Keras that is renamed gives None here, and the checks that need it are left out. Tests of all three would
fail then.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import keras


def calling_model() -> Any:
    """Return the outermost Keras model whose method has called, directly or not; None if there isn't one."""
    models = [owner for frame in _callers() if isinstance(owner := _owner(frame), keras.Model)]
    return models[-1] if models else None


def calling_object(callee: Any) -> Any:
    """Return the object whose method has called a method of ``callee``; None if a plain function has."""
    owners = map(_owner, _callers())  # up to the first: the locals of each frame cost a copy
    return next((owner for owner in owners if owner is not callee), None)


def locals_of(function: str, *, having: str) -> dict[str, Any]:
    """Return the local variables of the nearest caller of a name that has a certain variable; empty if there isn't one.

    Args:
        function: the caller's name.
        having: one of its variables, which distinguishes it from others of that name.
    """
    for frame in _callers():
        code = frame.f_code
        if code.co_name == function and having in (*code.co_varnames, *code.co_cellvars):
            return dict(frame.f_locals)
    return {}


def _callers() -> list[FrameType]:
    """Return the frames of the callers of the function of this module that calls it, nearest first."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _owner(frame: FrameType) -> Any:
    """Return the object of the method that a frame runs; None for a plain function."""
    return frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
