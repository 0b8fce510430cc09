"""Temporarily replace attributes of an object."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_MISSING = object()


@contextlib.contextmanager
def swap_attributes(target: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of an instance, not of its class, and restore them on exit."""
    before = {name: vars(target).get(name, _MISSING) for name in attributes}
    for name, value in attributes.items():
        object.__setattr__(target, name, value)  # bypass Keras's tracking
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                object.__delattr__(target, name)
            else:
                object.__setattr__(target, name, value)
