"""Refuse collectives where only some of the ranks run the code."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from hvdkit.errors import HvdkitError, describe


class _Refusal(threading.local):
    active = False


_refusal = _Refusal()


@contextlib.contextmanager
def refusing_collectives() -> Iterator[None]:
    """Make collectives on this thread raise in this context, which only some of the ranks enter."""
    before = _refusal.active
    _refusal.active = True
    try:
        yield
    finally:
        _refusal.active = before


def require_allowed(kind: str) -> None:
    """Raise HvdkitError if the collective ``kind`` is called inside :func:`refusing_collectives`."""
    if _refusal.active:
        raise HvdkitError(describe(kind, "a call on one rank", "calls on all ranks", "call it elsewhere"))
