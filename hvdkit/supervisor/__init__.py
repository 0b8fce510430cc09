"""Training sessions: initialize or restore, save, write summaries, and stop all ranks at the same step.

``Supervisor`` is imported on first use: signals, locks and the pace don't need TensorFlow.
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
