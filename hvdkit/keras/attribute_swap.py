"""Temporarily replace attributes of an object."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

_MISSING = object()


@contextlib.contextmanager
def swap_attributes(target: object, **attributes: object) -> Iterator[None]:
    """Replace attributes of an instance, not of its class, and restore them on exit."""
    before = exchange_attributes(target, attributes)
    try:
        yield
    finally:
        exchange_attributes(target, before)


def exchange_attributes(target: object, attributes: Mapping[str, object]) -> dict[str, object]:
    """Replace attributes of an instance, and return the previous ones; call it with these to restore them."""
    before = {name: vars(target).get(name, _MISSING) for name in attributes}
    for name, value in attributes.items():
        if value is not _MISSING:
            object.__setattr__(target, name, value)  # bypass Keras's tracking
        elif name in vars(target):
            object.__delattr__(target, name)
    return before
