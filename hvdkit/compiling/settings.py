"""The environment variable that decides for all models and steps whether XLA compiles them."""

from __future__ import annotations

import os

from hvdkit.errors import describe

VARIABLE = "HVDKIT_JIT_COMPILE"
_MODES = ("on", "off", "auto")


def mode() -> str:
    """Return HVDKIT_JIT_COMPILE: "on", "off" or "auto"; "" if it is not set. Other values are a ValueError."""
    text = os.environ.get(VARIABLE, "").strip().lower()
    if text and text not in _MODES:
        raise ValueError(describe(VARIABLE, text, "on, off or auto", "unset it, or write e.g. auto"))
    return text
