"""Find the instances of a class that exist in this process."""

from __future__ import annotations

import gc
from typing import TypeVar

T = TypeVar("T")


def live_instances(kind: type[T]) -> list[T]:
    """Return the existing instances of ``kind`` and its subclasses. Any thread may call it.

    An instance refers to its class. ``gc.get_objects`` would also return all tuples that other threads are building,
    and CPython cannot finish a tuple with other references: ``SystemError: bad argument to internal function``.
    Objects that ``gc.freeze()`` has set aside are not found.

    Example:
        >>> class Shard:
        ...     pass
        >>> kept = Shard()
        >>> live_instances(Shard) == [kept]
        True
    """
    kinds: list[type] = [kind]
    for each in kinds:
        kinds.extend(type.__subclasses__(each))
    return [each for each in gc.get_referrers(*kinds) if issubclass(type(each), kind)]
