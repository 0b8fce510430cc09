"""Rank 0's end of the watchdog: it hears every rank, finds who is at fault, says so, and ends the job."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from typing import Any

from hvdkit.cluster import processes
from hvdkit.cluster.checks import Difference, Waits
from hvdkit.cluster.fault import Fault, Rank
from hvdkit.cluster.logs import DIED, write_line
from hvdkit.cluster.progress import PROGRESS
from hvdkit.cluster.wire import LONE, LONGEST, LONGEST_HELLO, Link, Offer, knows

# Ranks that fail together are heard together, so that the one that failed first is not taken for the only one.
_GATHER_SECONDS = 0.25
# A rank that calls sys.exit(n) gives the others so long to do the same.
_EXIT_SECONDS = 2.0
# An error that another rank caused waits so long for that rank's own word.
_VICTIM_SECONDS = 2.0
_LOOK_SECONDS = 2.0
# Where all ranks of a host are silent and the host itself is not, they may hold Python's lock, as when all of them load
# one large file: so many heartbeats they have.
_UNSEEN = 6
# While one rank works the others may wait for it, as for a download on the chief: so many times the watchdog's limit.
_WAITING = 6
_STACKS_SECONDS = 3.0
_END_SECONDS = 1.0
# horovodrun stops to forward lines when the first rank ends: the last one has to be through by then.
_FORWARD_SECONDS = 0.2
_HELLO_SECONDS = 5.0
# More that have not said who they are than ranks are left to come, and so many, are turned away.
_STRANGERS = 64


class Hub:
    """Rank 0's second thread.

    Args:
        server: listening.
        place: the offer made to the ranks.
        size: number of ranks. Once all are in, the door is closed.
    """

    def __init__(self, server: socket.socket, place: Offer, size: int) -> None:
        server.setblocking(False)
        self._server, self._place, self._size = server, place, size
        self._ranks: dict[int, Rank] = {}
        self._faults: list[Fault] = []
        self._strangers: dict[Link, float] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ, None)
        self._beaten = self._ticked = time.monotonic()
        self._stuck: tuple[float, int, float] | None = None  # stacks are due; the rank that said so; its idle seconds
        self._waits = Waits()
        self._over = threading.Event()
        self._complete = threading.Event()
        self.empty = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdkit-watchdog-chief", daemon=True)

    def start(self) -> None:
        """Let ranks in, and begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching, once all ranks have come in; those that go on do so alone."""
        self._complete.wait(_HELLO_SECONDS)
        for rank in list(self._ranks.values()):
            rank.link.send("over")
        self._over.set()  # only now: the thread closes the connections at once, and one without a word is a death

    def forget(self) -> None:
        """In a forked child: the connections are its parent's."""
        self._over.set()
        for link in [rank.link for rank in self._ranks.values()] + list(self._strangers):
            link.close()
        self._server.close()

    # ---- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.is_set():
            for key, _ in self._selector.select(self._pause()):
                if key.fileobj is self._server:
                    self._admit()
                else:
                    self._hear(key.data)
            self._tick(time.monotonic())
        for link in [rank.link for rank in self._ranks.values()] + list(self._strangers):
            link.close()
        self._selector.close()
        self._server.close()

    def _pause(self) -> float:
        return 0.05 if self._faults or self._stuck else min(0.5, self._place.heartbeat / 10)

    def _admit(self) -> None:
        try:
            link = Link(self._server.accept()[0])
        except OSError:  # it is gone again, or this process has no file left: do not ask again and again for it
            time.sleep(0.01)
            return
        if len(self._strangers) >= self._size - len(self._ranks) + _STRANGERS:
            link.close()
            return
        link.longest = LONGEST_HELLO
        self._strangers[link] = time.monotonic()
        self._selector.register(link.socket, selectors.EVENT_READ, link)

    def _hear(self, link: Link) -> None:
        known = next((rank for rank in self._ranks.values() if rank.link is link), None)
        for message in link.receive():
            if known is not None:
                self._take(known, message)
            elif knows(self._place.token, message):
                known = self._let_in(link, message)
            else:
                message = {"kind": "closed"}
            if message["kind"] == "closed":
                self._strangers.pop(link, None)
                self._selector.unregister(link.socket)
                link.close()
                return

    def _let_in(self, link: Link, message: dict[str, Any]) -> Rank:
        del self._strangers[link]
        link.longest = LONGEST
        number, identity = message["rank"], processes.Identity(*message["identity"])
        now = time.monotonic()
        rank = self._ranks[number] = Rank(number, message["host"], link, identity, now, now)
        link.send("welcome")
        return rank

    def _take(self, rank: Rank, message: dict[str, Any]) -> None:
        now = rank.heard = rank.seen = time.monotonic()
        rank.asked = None
        rank.step, rank.idle = message.get("step", rank.step), message.get("idle", rank.idle)
        kind = message["kind"]
        if kind == "joined":
            rank.joined = True
            if len(self._ranks) == self._size and all(one.joined for one in self._ranks.values()):
                self._selector.unregister(self._server)
                self._server.close()
                self._complete.set()
        elif kind == "closed" and not rank.joined:  # it had waited too long for its welcome, and goes on without
            if self._ranks.get(rank.number) is rank:
                del self._ranks[rank.number]
        elif kind == "closed":
            self._lost(rank, now)
        elif kind == "left":
            rank.left = True
            self._forget_exits()
        elif kind == "failed":
            self._failed(rank, message, now)
        elif kind == "saw":
            self._saw(self._ranks[message["rank"]], message["condition"], now)
        elif kind == "stuck" and self._stuck is None and self._is_hung(message["idle"]):
            self._stuck = (now + _STACKS_SECONDS, rank.number, message["idle"])
            for other in self._ranks.values():
                other.link.send("stacks")
        elif kind == "waits":
            self._waits.begin(rank.number, message)
        elif kind == "came":
            self._waits.end(rank.number, message)
        elif kind == "stacks":
            rank.told = message

    def _lost(self, rank: Rank, now: float) -> None:
        """A connection ended: without a word before, the process did."""
        rank.closed = True
        _catch_up(rank)
        if not rank.left and not any(fault.rank is rank for fault in self._faults):
            self._faults.insert(0, Fault(rank, DIED, now))

    def _failed(self, rank: Rank, message: dict[str, Any], now: float) -> None:
        victim, leaving = message.get("victim", False), message.get("leaving", False)
        gone = next((other for other in self._ranks.values() if other.left), None)
        if victim and gone is not None:
            where = self._waits.waiting(rank.number)
            needed = f" in {where}" if where is not None else ""
            cause = f"ended before the others: rank {rank.number} on {rank.host} still needed it{needed}"
            self._faults.append(Fault(gone, cause, now, verb="left the job"))
            return
        wait = _EXIT_SECONDS if leaving else _VICTIM_SECONDS if victim else _GATHER_SECONDS
        self._faults.append(
            Fault(
                rank,
                message["cause"],
                now + wait,
                verb=message.get("verb", "failed"),
                code=message.get("code", 1),
                text=message.get("text", ""),
                leaving=leaving,
                victim=victim,
            )
        )
        self._forget_exits()

    def _forget_exits(self) -> None:
        """Where every rank ends by itself, whatever its exit code, nobody is at fault."""
        leaving = {fault.rank.number for fault in self._faults if fault.leaving}
        if len(leaving | {rank.number for rank in self._ranks.values() if rank.gone}) == len(self._ranks):
            for number in leaving:
                self._ranks[number].left = True
                self._ranks[number].link.send("leave")
            self._faults = [fault for fault in self._faults if not fault.leaving]

    # ---- time -------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        if now - self._ticked > self._place.heartbeat / 2:  # this process was stopped itself, and goes on
            for rank in self._ranks.values():
                rank.heard = rank.seen = now
        self._ticked = now
        for link, since in list(self._strangers.items()):
            if now - since > _HELLO_SECONDS:
                del self._strangers[link]
                self._selector.unregister(link.socket)
                link.close()
        if now - self._beaten >= self._place.heartbeat / 5:
            self._beaten = now
            for rank in self._ranks.values():
                if not rank.gone:
                    rank.link.send("beat")
        if self._ranks and all(rank.gone or rank.number == 0 for rank in self._ranks.values()):
            self.empty.set()
        else:
            self.empty.clear()
        self._seek_silent(now)
        self._seek_stuck(now)
        here = {rank.number for rank in self._ranks.values() if not rank.gone}
        if not self._faults:
            self._differ(self._waits.difference(here, now), now)
        self._settle(now)

    def _seek_silent(self, now: float) -> None:
        for rank in self._ranks.values():
            silent = now - rank.heard
            if rank.gone or silent <= self._place.heartbeat or rank.number == 0:
                continue
            beside = [
                other
                for other in self._ranks.values()
                if other is not rank and not other.gone and other.identity.place == rank.identity.place
            ]
            limit = self._place.heartbeat * (_UNSEEN if beside else LONE)
            if now - rank.seen > limit or rank.link.is_cut_off(self._place.heartbeat / 2):
                self._silent(rank, f"has not answered for {silent:.0f} s: it is stopped, or its host is cut off", now)
            elif beside and (rank.asked is None or now - rank.asked > _LOOK_SECONDS):
                rank.asked = now
                awake = max(beside, key=lambda other: other.heard)
                awake.link.send("look", rank=rank.number, identity=rank.identity)

    def _saw(self, rank: Rank, condition: str, now: float) -> None:
        silent = now - rank.heard
        if condition == "busy":
            rank.heard = rank.seen = now
        elif condition == "stopped":
            self._silent(rank, f"has been stopped (SIGSTOP) for {silent:.0f} s", now)
        elif condition == "idle" and not 0 < self._place.patience < silent:
            rank.seen = now  # it may wait for a file while it holds Python's lock
        elif silent > self._place.heartbeat:
            self._silent(rank, f"has not answered for {silent:.0f} s, and does not compute", now)

    def _silent(self, rank: Rank, cause: str, now: float) -> None:
        if not any(fault.kill for fault in self._faults):
            dead = [other.identity for other in self._ranks.values() if now - other.heard > self._place.heartbeat / 2]
            _catch_up(rank)
            self._faults.insert(0, Fault(rank, cause, now, kill=dead))

    def _is_hung(self, idle: float) -> bool:
        """Return True unless some rank works, and the one that has been idle for so long may be waiting for it."""
        here = [rank for rank in self._ranks.values() if not rank.gone]
        return all(rank.idle > self._place.patience for rank in here) or idle > _WAITING * self._place.patience

    def _seek_stuck(self, now: float) -> None:
        """Once every rank has written its stacks: the rank that has done least keeps the others waiting."""
        if self._stuck is None:
            return
        due, number, idle = self._stuck
        here = [rank for rank in self._ranks.values() if not rank.gone]
        if now < due and not all(rank.told for rank in here):
            return
        self._stuck = None
        told = [rank for rank in here if rank.told]

        def done(rank: Rank) -> tuple[int, int, bool]:
            return rank.step or 0, rank.told["count"], rank.told["waiting"]

        least = min(told, key=done, default=self._ranks[number])
        if told and done(least) == max(map(done, told)):
            least = self._ranks[number]
        words = least.told.get("words") if least.told else None
        cause = f"no progress for {idle:.0f} s" + (f" ({words})" if words else "")
        self._faults.insert(0, Fault(least, cause + "; every rank's stacks stand above", now, verb="hangs"))

    def _differ(self, found: Difference | None, now: float) -> None:
        """Put what ``HVDKIT_CHECK=1`` has found before all that follows from it."""
        rank = self._ranks.get(found.rank) if found is not None else None
        if found is not None and rank is not None:
            self._faults.insert(0, Fault(rank, found.cause, now))

    # ---- the end ----------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Say who is at fault and end every rank, once that is settled."""
        due = [fault for fault in self._faults if fault.due <= now]
        if not due or self._over.is_set():  # ranks that have heard that it is over may go as they like
            return
        self._differ(self._waits.unlike(), now)
        first = next((fault for fault in self._faults if not fault.victim), due[0])
        texts = {fault.text: None for fault in self._faults if fault.text and not fault.victim and fault is not first}
        said = list(dict.fromkeys([*texts, first.text]))
        write_line("\n".join([text for text in said if text] + [first.line()]))
        time.sleep(_FORWARD_SECONDS)
        elsewhere = any(identity.place != processes.own_identity().place for identity in first.kill)
        if elsewhere:
            processes.end_stuck_mpirun()
        others = [rank for rank in self._ranks.values() if not rank.closed and rank.number != 0]
        for rank in others:
            rank.link.send("end", code=first.code, kill=first.kill)
        until = time.monotonic() + _END_SECONDS
        for rank in others:
            self._await_end(rank, until)
        if elsewhere:
            processes.end_stuck_step()
        if 0 in self._ranks and not self._ranks[0].closed:
            self._ranks[0].link.send("end", code=first.code, kill=first.kill)
        else:
            os._exit(first.code)
        self._over.wait()

    @staticmethod
    def _await_end(rank: Rank, until: float) -> None:
        while time.monotonic() < until:
            if any(message["kind"] == "closed" for message in rank.link.receive()):
                return


def _catch_up(rank: Rank) -> None:
    """Ranks step together, and the last word of one that says no more is seconds old: go by rank 0's own step."""
    if PROGRESS.step is not None:
        rank.step = max(rank.step or 0, PROGRESS.step)
