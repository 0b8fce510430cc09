"""Announces work that the watchdog cannot see: ``with hk.busy("uploading")``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from hvdkit.errors import describe
from hvdkit.watchdog.reporter import reporter


def busy(reason: str) -> AbstractContextManager[None]:
    """Suspend hang detection inside the context, for this rank and for ranks that wait for it.

    Use it around work that neither computes nor transfers data in this process or its child processes, such as waiting
    for another service. It does not require ``hk.init``, may be nested, and works in any thread. A rank that is
    killed, is stopped (SIGSTOP) or raises still ends the job, and the last line then includes the reason.

    Args:
        reason: what the rank is doing, for messages, e.g. ``"uploading"``.

    Returns:
        A context manager.

    Raises:
        TypeError: ``reason`` is not a string.
        ValueError: ``reason`` is empty.

    Examples:
        >>> import time
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> if hk.is_chief():
        ...     with hk.busy("waiting for the archive"):
        ...         time.sleep(0.1)  # or hours
        >>> hk.barrier()  # other ranks wait here as long
    """
    expected = "a non-empty string"
    remedy = 'describe what the rank does: hk.busy("uploading")'
    if not isinstance(reason, str):
        raise TypeError(describe("reason", f"{reason!r} ({type(reason).__name__})", expected, remedy))
    if not reason.strip():
        raise ValueError(describe("reason", repr(reason), expected, remedy))
    return _announced(" ".join(reason.split()))


@contextmanager
def _announced(reason: str) -> Iterator[None]:
    with reporter().busy(reason):  # only now: a program may fork between a decorator and the call
        yield
