"""Attach information to objects of other libraries: variables, datasets, models, callbacks.

Values are stored in a registry outside the object, so that Keras and TensorFlow don't track, save or copy them. A copy
of an object (``copy.copy``, ``copy.deepcopy``, a pickle, Keras's ``from_config``) therefore has none; code that
makes equivalent copies must set them again.
"""

from __future__ import annotations

import functools
import weakref
from typing import Generic, TypeVar

Value = TypeVar("Value")


class WeakRegistry(Generic[Value]):
    """Values keyed by object identity, each kept for the lifetime of its object.

    Uses identity because variables overload ``==`` and some are not hashable. A value must not reference its own
    object, which would then never be freed; use :class:`Attached` in that case.

    Example:
        >>> owners: WeakRegistry[str] = WeakRegistry()
        >>> import numpy as np
        >>> table = np.ones(1)
        >>> owners.set(table, "layer")
        >>> owners.get(table)
        'layer'
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[object], Value]] = {}

    def set(self, owner: object, value: Value) -> None:
        """Replace the value of ``owner``.

        Raises:
            TypeError: the class of ``owner`` does not support weak references.
        """
        key = id(owner)
        self._entries[key] = weakref.ref(owner, functools.partial(self._forget, key)), value

    def get(self, owner: object) -> Value | None:
        """Return the value of ``owner``; None if it doesn't have one."""
        found = self._entries.get(id(owner))
        return found[1] if found is not None and found[0]() is owner else None

    def discard(self, owner: object) -> None:
        """Remove the value of ``owner``, if any."""
        self._entries.pop(id(owner), None)

    def __contains__(self, owner: object) -> bool:
        found = self._entries.get(id(owner))
        return found is not None and found[0]() is owner

    def __len__(self) -> int:
        return len(self._entries)

    def _forget(self, key: int, dead: weakref.ref[object]) -> None:
        found = self._entries.get(key)
        if found is not None and found[0] is dead:  # keep the entry of a newer object with the same id
            del self._entries[key]


class Attached(Generic[Value]):
    """A value stored in an attribute of its object, for values that reference the object, e.g. compiled steps.

    A registry would keep both alive forever, but the garbage collector can free a cycle of the two. The attribute
    bypasses Keras's tracking and is not saved. ``copy.copy`` of a plain object copies it; Keras copies models from
    their configs, without it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def set(self, owner: object, value: Value) -> None:
        """Replace the value of ``owner``."""
        object.__setattr__(owner, self._name, value)

    def get(self, owner: object) -> Value | None:
        """Return the value of ``owner``, or None."""
        found: Value | None = vars(owner).get(self._name)
        return found

    def remove(self, owner: object) -> None:
        """Remove the value of ``owner``, if it has one."""
        if self._name in vars(owner):
            object.__delattr__(owner, self._name)
