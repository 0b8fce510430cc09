"""Find the caller of an optimizer by inspecting stack frames. Only this module inspects frames during training.

Keras passes variables and gradients to an optimizer, but no reference to its caller:

* ``Model.compile`` stores the optimizer without calling it, so the optimizer never sees the model. ``Model.fit`` then
  calls ``apply`` (from ``train_step``) and ``finalize_variable_values`` with variables, which don't reference their
  model either.
* The optimizer cannot reach the data, the callbacks and the number of steps of ``fit``.
* A ``LossScaleOptimizer`` around an optimizer calls its ``build`` just as a model does. In eager mode that is the only
  call before it skips ``apply`` on the rank that overflows, while the other ranks wait in ``apply``. (Since Keras 3.10
  its constructor also sets ``inner_optimizer.loss_scale_factor``; 3.5 to 3.9 leave no trace.)

If Keras renames one of these functions, the lookup returns None and the checks that depend on it are skipped; the tests
of all three cases would then fail.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import keras


def calling_model() -> Any:
    """Return the outermost Keras model with a method on the call stack; None if there isn't one."""
    models = [owner for frame in _callers() if isinstance(owner := _owner(frame), keras.Model)]
    return models[-1] if models else None


def calling_object(callee: Any) -> Any:
    """Return the object whose method called a method of ``callee``; None if the caller is a plain function."""
    owners = map(_owner, _callers())  # lazy: reading a frame's locals copies them
    return next((owner for owner in owners if owner is not callee), None)


def locals_of(function: str, *, having: str) -> dict[str, Any]:
    """Return the local variables of the nearest caller with the given name and variable; empty if there isn't one.

    Args:
        function: name of the caller.
        having: name of a local variable that distinguishes it from other functions of that name.
    """
    for frame in _callers():
        code = frame.f_code
        if code.co_name == function and having in (*code.co_varnames, *code.co_cellvars):
            return dict(frame.f_locals)
    return {}


def _callers() -> list[FrameType]:
    """Return the frames above the calling function of this module, nearest first."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _owner(frame: FrameType) -> Any:
    """Return ``self`` of the method that a frame runs; None for a plain function."""
    return frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
