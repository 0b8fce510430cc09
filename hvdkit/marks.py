"""What hvdkit knows about objects of other libraries: variables, datasets, models, callbacks.

A mark is kept in a registry outside the object, so that Keras and TensorFlow neither track, save nor copy it. A copy of
an object (``copy.copy``, ``copy.deepcopy``, a pickle, Keras's ``from_config``) is another object and has no mark:
what makes a copy that means the same marks it again.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class WeakRegistry(Generic[Value]):
    """Values by the identity of an object, each for as long as its object lives.

    Identity, because variables overload ``==`` and some cannot be hashed. A value must not refer to its own object,
    which would then never be freed; see :class:`Attached` for those that do.

    Example:
        >>> owners: WeakRegistry[str] = WeakRegistry()
        >>> import numpy as np
        >>> table = np.ones(1)
        >>> owners.set(table, "layer")
        >>> owners.get(table)
        'layer'
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def set(self, owner: Any, value: Value) -> None:
        """Replace the value of ``owner``.

        Raises:
            TypeError: Python has no weak references to ``owner``'s class.
        """
        key = id(owner)
        self._entries[key] = weakref.ref(owner, functools.partial(self._forget, key)), value

    def get(self, owner: Any) -> Value | None:
        """Return the value of ``owner``, any object; None if it has none."""
        found = self._entries.get(id(owner))
        return found[1] if found is not None and found[0]() is owner else None

    def discard(self, owner: Any) -> None:
        """Remove the value of ``owner`` if it has one."""
        self._entries.pop(id(owner), None)

    def __contains__(self, owner: Any) -> bool:
        found = self._entries.get(id(owner))
        return found is not None and found[0]() is owner

    def __len__(self) -> int:
        return len(self._entries)

    def _forget(self, key: int, dead: weakref.ref[Any]) -> None:
        found = self._entries.get(key)
        if found is not None and found[0] is dead:  # not of a newer object with the same id
            del self._entries[key]


class Attached(Generic[Value]):
    """A value kept in an attribute of its object, for values that refer to it, as compiled steps do to their model.

    A registry would keep both alive forever; a cycle of the two is found by the garbage collector. The attribute is set
    past Keras, which neither tracks nor saves it. ``copy.copy`` of a plain object copies the attribute; Keras makes
    copies of models from their configs, without it.

    Args:
        name: of the attribute.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def set(self, owner: Any, value: Value) -> None:
        """Replace the value of ``owner``."""
        object.__setattr__(owner, self._name, value)

    def get(self, owner: Any) -> Value | None:
        """Return the value of ``owner``; None if it has none."""
        found: Value | None = vars(owner).get(self._name)
        return found
