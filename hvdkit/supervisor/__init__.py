"""The chief: initialises or restores, saves, writes summaries, and stops every rank at the same step."""

from hvdkit.supervisor.session import Supervisor
from hvdkit.supervisor.signals import PREEMPTED

__all__ = ["PREEMPTED", "Supervisor"]
