"""Each rank's end of the watchdog: it beats, hears rank 0's verdict, and ends this process."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import selectors
import sys
import tempfile
import threading
import time
from typing import Any

from hvdkit.cluster import processes
from hvdkit.cluster.logs import DIED, last_line, write_line
from hvdkit.cluster.progress import PROGRESS
from hvdkit.cluster.wire import LONE, Link, Offer

_FLUSH_SECONDS = 0.5
# Rank 0 is silent: so long the ranks beside it, and then those of other hosts, leave it to the first that looks.
_LOOK_SECONDS = 2.0


class Member:
    """A rank's thread. It holds Python's lock for some microseconds every few seconds.

    Args:
        link: the connection to rank 0.
        place: rank 0's offer, with its settings.
        rank: this rank.
        hosts: the host of each rank.
        chief: rank 0's process.
        watched: others stand beside rank 0.
        may_speak: this rank writes the last line where rank 0 is gone.
    """

    def __init__(
        self,
        link: Link,
        place: Offer,
        *,
        rank: int,
        hosts: tuple[str, ...],
        chief: processes.Identity,
        watched: bool,
        may_speak: bool,
    ) -> None:
        self._link, self._place, self._rank, self._hosts = link, place, rank, hosts
        self._chief, self._watched, self._may_speak = chief, watched, may_speak
        self._over = threading.Event()  # no more watching, or the verdict is here
        self._answered = threading.Event()
        self._heard = self._beaten = self._ticked = time.monotonic()
        self._interval = place.heartbeat / 5
        self._thread = threading.Thread(target=self._run, name="hvdkit-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def fail(self, **record: Any) -> None:
        """Tell rank 0 what went wrong on this rank, or what seems to have on another."""
        self._link.send("failed", step=PROGRESS.step, **record)

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message to rank 0."""
        self._link.send(kind, **fields)

    def leave(self) -> None:
        """Say that this rank needs no other any more."""
        self._over.set()
        self._link.send("left", step=PROGRESS.step)

    def wait(self, seconds: float) -> bool:
        """Wait for rank 0 to say that all ranks are leaving; True if it did. A verdict ends this process."""
        return self._answered.wait(seconds)

    def forget(self) -> None:
        """In a forked child: the connection is its parent's."""
        self._over.set()
        self._link.close()

    # ---- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._link.socket, selectors.EVENT_READ)
            while True:
                for _ in selector.select(self._interval / 2):
                    self._heard = time.monotonic()
                    for message in self._link.receive():
                        if not self._take(message):
                            return
                if not self._over.is_set():
                    self._tick(time.monotonic())

    def _take(self, message: dict[str, Any]) -> bool:
        """Act on what rank 0 says; return False at the end of the connection."""
        kind = message["kind"]
        if kind == "closed":
            if not self._over.is_set():
                self._judge(DIED)
            return False
        if kind == "over":  # rank 0 has left, and whoever needs it finds out
            self._over.set()
        elif kind == "leave":
            self._answered.set()
        elif kind == "look":
            who = processes.Identity(*message["identity"])
            self._link.send("saw", rank=message["rank"], condition=processes.condition(who))
        elif kind == "stacks":
            write_stacks(self._rank)
            self._link.send("stacks", **PROGRESS.told())
        elif kind == "end":
            for identity in message["kill"]:
                processes.kill(identity)
            end_process(message["code"])
        return True

    def _tick(self, now: float) -> None:
        if now - self._ticked > self._place.heartbeat / 2:  # this process was stopped itself, and goes on
            self._heard = now
        self._ticked = now
        if now - self._beaten >= self._interval:
            self._beaten = now
            idle = PROGRESS.idle()
            self._link.send("beat", step=PROGRESS.step, idle=idle)
            if self._place.patience and idle > self._place.patience:
                self._link.send("stuck", idle=idle, **PROGRESS.told())
        if now - self._heard > self._place.heartbeat:
            self._look_at_chief(now - self._heard)

    def _look_at_chief(self, silent: float) -> None:
        """Rank 0 is silent: one rank of its host sees whether it is stopped or busy; the others wait for that."""
        is_late = silent > self._place.heartbeat + _LOOK_SECONDS
        is_hung = 0 < self._place.patience < silent
        if self._chief.place == processes.own_identity().place:
            if self._may_speak or is_late:
                state = processes.condition(self._chief)
                if state == "busy":
                    self._heard = time.monotonic()
                elif state != "idle" or is_hung:
                    self._judge(f"has been {_SHOWN[state]} for {silent:.0f} s")
            return
        is_lone = not self._watched and silent > LONE * self._place.heartbeat + _LOOK_SECONDS
        if is_hung or is_lone or (is_late and self._link.is_cut_off(self._place.heartbeat / 2)):
            self._judge(f"has not answered for {silent:.0f} s: it is stopped, or one of the two hosts is cut off")

    def _judge(self, cause: str) -> None:
        """End this rank for want of rank 0."""
        if self._may_speak:
            write_line(last_line(0, self._hosts[0], "failed", PROGRESS.step, cause))
        processes.kill(self._chief)
        end_process(1)


_SHOWN = {"stopped": "stopped", "gone": "gone", "idle": "silent"}


def write_stacks(rank: int) -> None:
    """Write what this rank did last, and the Python stacks of all its threads, in one piece."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace")
    lines = [f"{PROGRESS}; its stacks, most recent call first:", *stacks.splitlines()]
    write_line("\n".join(f"[rank {rank}] {line}" for line in lines))


def end_process(code: int) -> None:
    """End this process with ``code``, whatever its main thread waits in."""
    # Another thread may hold the stream while it waits in a full pipe.
    flusher = threading.Thread(target=_flush, daemon=True)
    flusher.start()
    flusher.join(_FLUSH_SECONDS)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
