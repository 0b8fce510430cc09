"""Each rank's end of the watchdog: it beats, hears rank 0's verdict, and ends this process."""

from __future__ import annotations

import faulthandler
import selectors
import tempfile
import threading
import time
from typing import Any

from hvdkit.cluster.ending import ENDING, end_process
from hvdkit.cluster.logs import DIED, write_line
from hvdkit.cluster.progress import PROGRESS
from hvdkit.cluster.report import FailureReport, hand_over
from hvdkit.cluster.wire import LONE, Link, Offer, interval
from hvdkit.machine import processes

# How much later than rank 0 says a rank ends that hears no more from it.
_SPARE_SECONDS = 1.0
# A rank that has waited so long in a collective says in which: others may wait for it in another one.
_WAITED_SECONDS = 3.0
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
        self._unwound = threading.Event()  # the script and its atexit handlers are done
        self._dismissed = threading.Event()  # all ranks have unwound, or had their time
        self._end_at: float | None = None
        self._heard = self._ticked = time.monotonic()
        self._interval = interval(place.heartbeat, len(hosts))
        # Ranks take turns, so that rank 0 does not hear all of them at once.
        self._beaten = self._heard - self._interval * rank / len(hosts)
        self._thread = threading.Thread(target=self._run, name="hvdkit-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def fail(self, **record: Any) -> None:
        """Tell rank 0 what went wrong on this rank, or what seems to have on another."""
        self._link.send("failed", step=PROGRESS.step, busy=PROGRESS.reason(), **record)

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message to rank 0."""
        self._link.send(kind, **fields)

    def leave(self) -> None:
        """Say that this rank needs no other any more."""
        self._over.set()
        self._link.send("left", step=PROGRESS.step)

    def wait(self, seconds: float) -> bool:
        """Wait for rank 0 to say that all ranks are leaving, or have to; True if it did."""
        return self._answered.wait(seconds)

    def unwound(self) -> None:
        """After a failure: say that this rank has unwound, and wait for the others; the thread ends the process."""
        self._unwound.set()
        self._link.send("unwound")
        self._dismissed.wait()

    def forget(self) -> None:
        """In a forked child: the connection is its parent's."""
        self._over.set()
        self._link.close()

    # ---- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._link.socket, selectors.EVENT_READ)
            while True:
                for _ in selector.select(self._pause()):
                    self._heard = time.monotonic()
                    for message in self._link.receive():
                        if not self._take(message):
                            return
                if self._end_at is not None and time.monotonic() > self._end_at:
                    self._dismiss()
                if not self._over.is_set():
                    self._tick(time.monotonic())

    def _pause(self) -> float:
        """Return the seconds until the next heartbeat, or until it is time to look at the clock."""
        if ENDING.begun:
            return 0.1
        due = self._beaten + self._interval - time.monotonic()
        return min(self._place.heartbeat / 5, max(0.0, due) if not self._over.is_set() else self._interval)

    def _take(self, message: dict[str, Any]) -> bool:
        """Act on what rank 0 says; return False at the end of the connection."""
        kind = message["kind"]
        if kind == "closed":
            if ENDING.begun:
                self._dismiss()
            elif not self._over.is_set():
                self._judge(DIED, died=True)
            return False
        if kind == "over":  # rank 0 has left, and whoever needs it finds out
            self._over.set()
        elif kind == "leave":
            self._answered.set()
            if ENDING.begun:
                self._dismiss()
        elif kind == "look":
            who = processes.Identity(*message["identity"])
            self._link.send("saw", rank=message["rank"], condition=processes.condition(who))
        elif kind == "waits?":
            self._link.send("still", key=PROGRESS.waits_in())
        elif kind == "stacks":
            write_stacks(self._rank)
            self._link.send("stacks", **PROGRESS.told())
        elif kind == "end":
            for identity in message["kill"]:
                processes.kill(identity)
            if not message["unwind"]:
                end_process(message["code"])
            self._over.set()
            seconds = message["unwind"] + _SPARE_SECONDS
            self._end_at = time.monotonic() + seconds
            ENDING.begin(message["code"], seconds)
            self._answered.set()
        return True

    def _dismiss(self) -> None:
        """Let this process go, which has unwound; or end it, since its time is over."""
        if not self._unwound.is_set():
            assert ENDING.code is not None
            end_process(ENDING.code)
        self._dismissed.set()
        self._end_at = None

    def _tick(self, now: float) -> None:
        if now - self._ticked > self._place.heartbeat / 2:  # this process was stopped itself, and goes on
            self._heard = now
        self._ticked = now
        if PROGRESS.waiting and now - PROGRESS.since > _WAITED_SECONDS:
            PROGRESS.tell_wait()
        if now - self._beaten >= self._interval:
            self._beaten = now
            idle = PROGRESS.idle()
            self._link.beat(PROGRESS.step, idle, PROGRESS.reason())
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

    def _judge(self, cause: str, *, died: bool = False) -> None:
        """End this rank for want of rank 0."""
        if self._may_speak:
            report = FailureReport(
                rank=0, host=self._hosts[0], verb="failed", cause=cause, step=PROGRESS.step, died=died
            )
            hand_over(report)
            write_line(report.line())
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
