"""Training sessions: initialize or restore, save, write summaries, and stop all ranks at the same step.

A session gets a model, its optimizer and the data, and owns a ``logdir``: checkpoints and TensorBoard summaries. Ranks
exchange a message every few steps, as scheduled by ``pace.py``, and then save or stop at the same step. Start with
``session.py``; every other file holds one of its parts and can be read alone.

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
