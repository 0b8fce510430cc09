"""Common argument checks."""

from __future__ import annotations

import numbers
from typing import Any

from hvdkit.errors import describe


def integer(name: str, value: Any, *, minimum: int) -> int:
    """Return ``value`` as an int. Raises TypeError if it is not an integer, ValueError if it is below ``minimum``.

    Example:
        >>> integer("size", 3, minimum=1)
        3
    """
    expected = f"an integer of at least {minimum}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(describe(name, value, expected, "pass an int"))
    if value < minimum:
        raise ValueError(describe(name, value, expected, "raise it"))
    return int(value)
