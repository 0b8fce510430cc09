"""Attributes of an object, changed for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_MISSING = object()


@contextlib.contextmanager
def swapped(target: Any, **attributes: Any) -> Iterator[None]:
    """Give one object, never its class, other attributes, and put back what it had."""
    before = {name: vars(target).get(name, _MISSING) for name in attributes}
    for name, value in attributes.items():
        object.__setattr__(target, name, value)  # past Keras's, which tracks what it is given
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                object.__delattr__(target, name)
            else:
                object.__setattr__(target, name, value)
