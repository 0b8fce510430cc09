"""The chief: initialises or restores, saves, writes summaries, and stops every rank at the same step.

``Supervisor`` is loaded when it is first used: signals, locks and the pace need no TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdkit.supervisor.signals import PREEMPTED

if TYPE_CHECKING:
    from hvdkit.supervisor.session import Supervisor

__all__ = ["PREEMPTED", "Supervisor"]


def __getattr__(name: str) -> Any:
    if name != "Supervisor":
        raise AttributeError(f"module 'hvdkit.supervisor' has no attribute {name!r}")
    from hvdkit.supervisor.session import Supervisor

    return Supervisor
