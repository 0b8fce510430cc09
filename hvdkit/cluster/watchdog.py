"""The watchdog: a channel between the ranks that needs no collective, and what is done when one of them fails.

Rank 0 listens; every rank, rank 0 too, connects when the world begins, and says every few seconds that it is alive.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.cluster import checks, failure, wire
from hvdkit.cluster.ending import ENDING
from hvdkit.cluster.hub import Hub
from hvdkit.cluster.logs import get_logger
from hvdkit.cluster.member import Member
from hvdkit.cluster.progress import PROGRESS
from hvdkit.errors import describe
from hvdkit.machine import processes

HEARTBEAT = "HVDKIT_HEARTBEAT_SECONDS"
PATIENCE = "HVDKIT_WATCHDOG_SECONDS"
UNWIND = "HVDKIT_UNWIND_SECONDS"
_STALL = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_DEFAULTS = {HEARTBEAT: 10.0, PATIENCE: 600.0, UNWIND: 3.0}
_SHORTEST_HEARTBEAT = 1.0
# Horovod's own limit, which writes no stacks, serves if there is no watchdog.
_LATER_SECONDS, _MUCH_LATER_SECONDS = 60, 86_400


@dataclass
class Watchdog:
    """This rank's part in the channel."""

    member: Member | None = None
    hub: Hub | None = None

    def join(
        self, place: wire.Offer | None, rank: int, hosts: tuple[str, ...], ranks: Sequence[processes.Identity]
    ) -> None:
        """Connect to rank 0, where it made an offer; ``ranks`` are the processes of all."""
        if place is None:
            return
        link = wire.connect(place, {"rank": rank, "host": hosts[rank], "identity": processes.own_identity()})
        if link is None:
            get_logger().warning(
                "watchdog: rank %d on %s cannot reach rank 0 on %s at port %d of %s, so that its failure is noticed "
                "late or not at all; let ranks connect to each other, or name the network by HOROVOD_GLOO_IFACE",
                *(rank, hosts[rank], hosts[0], place.port, ", ".join(place.addresses)),
            )
            return
        beside = [process.place == ranks[0].place for process in ranks]
        may_speak = rank == next((r for r in range(1, len(hosts)) if beside[r] == beside[rank]), None)
        self.member = Member(
            link, place, rank=rank, hosts=hosts, chief=ranks[0], watched=sum(beside) > 1, may_speak=may_speak
        )
        self.member.start()
        processes.wake_with_parent_gone()
        failure.report_to(self.member)
        PROGRESS.tell, PROGRESS.tells_all = self.member.send, checks.enabled()
        _OPEN.append(self)

    def stay(self) -> None:
        """Wait, on rank 0, until the others have left; whoever fails before for want of it ends this process."""
        while self.hub is not None and self.member is not None and not ENDING.begun and not self.hub.empty.wait(1.0):
            pass

    def close(self) -> None:
        """Stop watching."""
        if self.member is not None:
            self.member.leave()
        if self.hub is not None:
            self.hub.close()
        self.member = self.hub = PROGRESS.tell = None
        if self in _OPEN:
            _OPEN.remove(self)


_OPEN: list[Watchdog] = []


def open_channel(rank: int, size: int, one_host: bool) -> tuple[Watchdog, wire.Offer | None]:
    """Return this rank's watchdog and, on rank 0, the offer for the others.

    Args:
        rank: this rank.
        size: number of ranks; alone there is nobody to watch.
        one_host: all ranks are on this host.

    Raises:
        ValueError: a setting is no number of seconds.
    """
    heartbeat, patience, unwind = seconds(HEARTBEAT), seconds(PATIENCE), seconds(UNWIND)
    if size == 1 or rank != 0 or heartbeat == 0:
        return Watchdog(), None
    try:
        listener = wire.listen(one_host)
    except OSError as error:
        get_logger().warning("watchdog: rank 0 cannot listen (%s), so that failures may go unnoticed", error)
        return Watchdog(), None
    place = wire.offer(listener, max(_SHORTEST_HEARTBEAT, heartbeat), patience)
    processes.allow_files(size)
    hub = Hub(listener, place, size, unwind)
    hub.start()
    return Watchdog(hub=hub), place


def seconds(name: str) -> float:
    """Return the setting ``name`` from the environment; 0 turns off what it is for.

    Raises:
        ValueError: it is no number of seconds.
    """
    text = os.environ.get(name)
    if text is None and name == PATIENCE and os.environ.get(_STALL):
        text = os.environ[_STALL]
    try:
        value = _DEFAULTS[name] if not text else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(describe(name, text or "", "a number of seconds, 0 for never", f"e.g. {name}=60"))
    return value


def set_stall_limit() -> None:
    """Set Horovod's own limit for a collective that some rank never joins, unless the user has."""
    patience = seconds(PATIENCE)
    os.environ.setdefault(PATIENCE, str(patience))  # a second world goes by the first one's
    # The watchdog waits for ranks that work, or are busy; Horovod would not. It still ends a job without a watchdog.
    later = _MUCH_LATER_SECONDS if seconds(HEARTBEAT) else _LATER_SECONDS
    os.environ.setdefault(_STALL, str(round(patience) + later if patience else 0))


def _forget() -> None:
    """In a forked child: the connections are its parent's, whose end must not wait for this process's."""
    for dog in _OPEN:
        if dog.member is not None:
            dog.member.forget()
        if dog.hub is not None:
            dog.hub.forget()
        dog.member = dog.hub = PROGRESS.tell = None
    failure.report_to(None)


os.register_at_fork(after_in_child=_forget)
