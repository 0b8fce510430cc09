"""Find the instances of a class that exist in this process."""

from __future__ import annotations

import gc
import threading
from typing import TypeVar

T = TypeVar("T")

_lock = threading.Lock()  # of the state of the garbage collector


def live_instances(kind: type[T]) -> list[T]:
    """Return the existing instances of ``kind`` and its subclasses. Any thread may call it.

    An instance refers to its class. ``gc.get_objects`` would also return all tuples that other threads are building,
    and CPython cannot finish a tuple with other references: ``SystemError: bad argument to internal function``.
    Objects that ``gc.freeze()`` has set aside are not found.

    ``gc.get_referrers`` asks each object for what it refers to. TensorFlow's eager tensors allocate objects to answer,
    and in Python before 3.12 an allocation may start a collection, which moves the objects that are being looked at:
    a segmentation fault. Hence no collection meanwhile.

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
    with _lock:
        enabled = gc.isenabled()
        gc.disable()
        try:
            found = gc.get_referrers(*kinds)
        finally:
            if enabled:
                gc.enable()
    return [each for each in found if issubclass(type(each), kind)]
