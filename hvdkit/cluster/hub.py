"""Rank 0's end of the watchdog: it hears every rank, finds who is at fault, says so, and ends the job.

The cost of a message, and of a look at the clock, does not depend on the number of ranks. The more ranks there are, the
less frequent are their heartbeats (``wire.interval``), and rank 0 reads those of many ranks at one wake-up. So it takes
less than 1 % of a core at 1,000 ranks; ``benchmarks/control_plane.py`` measures it.
"""

from __future__ import annotations

import os
import secrets
import selectors
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.cluster.checks import Difference, Waits
from hvdkit.cluster.fault import Fault, Rank
from hvdkit.cluster.logs import DIED, write_line
from hvdkit.cluster.progress import PROGRESS
from hvdkit.cluster.report import hand_over
from hvdkit.cluster.wire import LONE, LONGEST, LONGEST_HELLO, Link, Listener, Offer, interval, proof, proves
from hvdkit.machine import processes

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
# Tracebacks of ranks that failed together; those of a thousand would hide the last line.
_TEXTS = 16
# More that have not said who they are than ranks are left to come, and so many, are turned away.
_STRANGERS = 64
# A wake-up costs as much as some messages do: in a job of so many ranks, or more, what they send is read together, so
# often. In a smaller one it is read as much sooner as there are fewer ranks.
_MANY, _TOGETHER_SECONDS = 256, 0.25


@dataclass(eq=False)
class _Stranger:
    """A connection that has not proved yet to be a rank of this job."""

    link: Link
    since: float
    nonces: tuple[str, str] | None = None  # its own and rank 0's, once it has said hello


class Hub:
    """Rank 0's second thread.

    Args:
        listener: where ranks connect.
        place: the offer made to the ranks.
        size: number of ranks. Once all have joined, rank 0 stops listening.
        unwind: seconds that ranks have to exit normally after one has failed.

    Attributes:
        empty: set while every rank but rank 0 is gone.
        wakeups: how often the thread has looked at its connections.
        messages: that ranks have sent.
        beats: sent to ranks.
    """

    def __init__(self, listener: Listener, place: Offer, size: int, unwind: float = 3.0) -> None:
        self._listener, self._place, self._size = listener, place, size
        self._unwind = unwind
        self._ranks: dict[int, Rank] = {}
        # Those that are not gone, by the time when they were last heard: of all hosts, and of each.
        self._here: OrderedDict[int, Rank] = OrderedDict()
        self._hosts: dict[str, OrderedDict[int, Rank]] = {}
        self._joined: set[int] = set()  # they know that they were let in
        self._first_left: Rank | None = None
        self._leaving: set[int] = set()  # they are here, and have called sys.exit
        self._claim: tuple[float, int] | None = None  # idle seconds, and the rank that says that the job hangs
        self._faults: list[Fault] = []
        self._faulty: set[int] = set()
        self._strangers: OrderedDict[_Stranger, None] = OrderedDict()
        self._selector = selectors.DefaultSelector()
        for server in listener.sockets:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ, None)
        self._interval = interval(place.heartbeat, size)
        self._to_beat: deque[Rank] = deque()
        self._owed = 0.0  # heartbeats that are due
        self._looked = self._ticked = time.monotonic()
        self._stuck: tuple[float, int, float] | None = None  # stacks are due; the rank that said so; its idle seconds
        self._waits = Waits()
        self._over = threading.Event()
        self._complete = threading.Event()
        self.empty = threading.Event()
        self.wakeups = self.messages = self.beats = 0
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
        for link in self._links():
            link.close()
        self._listener.close()

    def _links(self) -> list[Link]:
        return [rank.link for rank in self._ranks.values()] + [stranger.link for stranger in self._strangers]

    # ---- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.is_set():
            ready = self._selector.select(self._pause())
            self.wakeups += 1
            for key, _ in ready:
                if key.data is None:
                    self._admit(key.fileobj)
                else:
                    self._hear(key.data)
            self._tick(time.monotonic())
            if ready and self._complete.is_set() and not self._faults:
                time.sleep(_TOGETHER_SECONDS * min(1.0, self._size / _MANY))
        for link in self._links():
            link.close()
        self._selector.close()
        self._listener.close()

    def _pause(self) -> float:
        return 0.05 if self._faults or self._stuck else min(0.5, self._place.heartbeat / 10)

    def _admit(self, server: Any) -> None:
        """Accept the connections that wait, up to the limit on those that have not proved to be ranks."""
        while True:
            try:
                link = Link(server.accept()[0], waits=False)
            except BlockingIOError:
                return
            except OSError:  # the peer has gone, or this process has no descriptors left: do not spin
                time.sleep(0.01)
                return
            if len(self._strangers) >= self._size - len(self._ranks) + _STRANGERS:
                link.close()
                return
            link.longest = LONGEST_HELLO
            stranger = _Stranger(link, time.monotonic())
            self._strangers[stranger] = None
            self._selector.register(link.socket, selectors.EVENT_READ, stranger)

    def _hear(self, sender: Rank | _Stranger) -> None:
        link = sender.link
        for message in link.receive():
            self.messages += 1
            if isinstance(sender, Rank):
                self._take(sender, message)
            elif (rank := self._greeted(sender, message)) is not None:
                sender = rank
            elif sender not in self._strangers:
                return
            if message["kind"] == "closed":
                self._selector.unregister(link.socket)
                link.close()
                return

    def _greeted(self, stranger: _Stranger, message: dict[str, Any]) -> Rank | None:
        """Take rank 0's part in the handshake; return the rank that has proved to be one."""
        token, kind = self._place.token, message["kind"]
        if kind == "hello" and stranger.nonces is None:
            mine, theirs = secrets.token_hex(16), str(message.get("nonce"))
            stranger.nonces, stranger.since = (theirs, mine), time.monotonic()
            self._strangers.move_to_end(stranger)
            stranger.link.send("challenge", nonce=mine, proof=proof(token, "rank 0", theirs, mine))
        elif kind == "proof" and stranger.nonces is not None and proves(message, token, "rank", *stranger.nonces):
            return self._let_in(stranger, message)
        else:
            self._turn_away(stranger)
        return None

    def _turn_away(self, stranger: _Stranger) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger.link.socket)
        stranger.link.close()

    def _let_in(self, stranger: _Stranger, message: dict[str, Any]) -> Rank:
        del self._strangers[stranger]
        link = stranger.link
        link.longest = LONGEST
        number, identity = message["rank"], processes.Identity(*message["identity"])
        now = time.monotonic()
        if number in self._ranks:  # it had waited too long for its welcome, and comes again
            self._gone(self._ranks[number])
        rank = self._ranks[number] = Rank(number, message["host"], link, identity, now, now)
        self._here[number] = rank
        self._hosts.setdefault(identity.place, OrderedDict())[number] = rank
        self._to_beat.append(rank)
        self._selector.modify(link.socket, selectors.EVENT_READ, rank)
        link.send("welcome")
        return rank

    def _gone(self, rank: Rank) -> None:
        """Stop expecting messages from a rank."""
        if self._here.get(rank.number) is rank:
            del self._here[rank.number]
            del self._hosts[rank.identity.place][rank.number]
            self._leaving.discard(rank.number)

    def _heard(self, rank: Rank, now: float) -> None:
        """Note that a rank is alive, and move it to the end of those ordered by when they were last heard."""
        rank.heard = rank.seen = now
        if self._here.get(rank.number) is rank:
            self._here.move_to_end(rank.number)
            self._hosts[rank.identity.place].move_to_end(rank.number)

    def _take(self, rank: Rank, message: dict[str, Any]) -> None:
        now = time.monotonic()
        self._heard(rank, now)
        rank.asked = None
        rank.step, rank.idle = message.get("step", rank.step), message.get("idle", rank.idle)
        kind = message["kind"]
        if kind == "beat":
            rank.busy = message.get("busy")
        elif kind == "joined":
            rank.joined = True
            self._joined.add(rank.number)
            if len(self._joined) == self._size:
                for server in self._listener.sockets:
                    self._selector.unregister(server)
                self._listener.close()
                self._complete.set()
        elif kind == "closed" and not rank.joined:  # it had waited too long for its welcome, and goes on without
            self._gone(rank)
            if self._ranks.get(rank.number) is rank:
                del self._ranks[rank.number]
        elif kind == "closed":
            self._lost(rank, now)
        elif kind == "left":
            rank.left = True
            self._first_left = self._first_left or rank
            self._gone(rank)
            self._forget_exits()
        elif kind == "failed":
            rank.busy = message.get("busy")
            self._failed(rank, message, now)
        elif kind == "saw":
            self._saw(self._ranks[message["rank"]], message["condition"], now)
        elif kind == "stuck" and (self._claim is None or self._claim[0] < message["idle"]):
            self._claim = message["idle"], rank.number
        elif kind == "waits":
            self._waits.begin(rank.number, message)
        elif kind == "came":
            self._waits.end(rank.number, message)
        elif kind == "still":
            self._waits.still(rank.number, message["key"])
        elif kind == "stacks":
            rank.told = message
        elif kind == "unwound":
            rank.unwound = True

    def _lost(self, rank: Rank, now: float) -> None:
        """A connection ended: without a word before, the process did."""
        rank.closed = True
        self._gone(rank)
        _catch_up(rank)
        if not rank.left and rank.number not in self._faulty:
            self._blame(Fault(rank, DIED, now, died=True), first=True)

    def _blame(self, fault: Fault, *, first: bool = False) -> None:
        """Note a fault; ``first``: before all others, which may follow from it."""
        self._faults.insert(0 if first else len(self._faults), fault)
        self._faulty.add(fault.rank.number)

    def _failed(self, rank: Rank, message: dict[str, Any], now: float) -> None:
        victim, leaving = message.get("victim", False), message.get("leaving", False)
        if victim and self._first_left is not None:
            where = self._waits.waiting(rank.number)
            needed = f" in {where}" if where is not None else ""
            cause = f"ended before the others: rank {rank.number} on {rank.host} still needed it{needed}"
            self._blame(Fault(self._first_left, cause, now, verb="left the job", orderly=True))
            return
        wait = _EXIT_SECONDS if leaving else _VICTIM_SECONDS if victim else _GATHER_SECONDS
        self._blame(
            Fault(
                rank,
                message["cause"],
                now + wait,
                verb=message.get("verb", "failed"),
                code=message.get("code", 1),
                text=message.get("text", ""),
                leaving=leaving,
                victim=victim,
                orderly=True,
            )
        )
        if leaving and rank.number in self._here:
            self._leaving.add(rank.number)
        self._forget_exits()

    def _forget_exits(self) -> None:
        """If every rank ends with ``sys.exit`` or at its script's end, whatever its exit code, none is at fault."""
        if len(self._leaving) < len(self._here):
            return
        for fault in [fault for fault in self._faults if fault.leaving]:
            fault.rank.left = True
            fault.rank.link.send("leave")
            self._gone(fault.rank)
        self._faults = [fault for fault in self._faults if not fault.leaving]
        self._faulty = {fault.rank.number for fault in self._faults}

    # ---- time -------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        elapsed, self._ticked = now - self._ticked, now
        if elapsed > self._place.heartbeat / 2:  # this process was stopped itself, and goes on
            for rank in self._ranks.values():
                rank.heard = rank.seen = now
            for stranger in self._strangers:
                stranger.since = now
        while self._strangers and now - (oldest := next(iter(self._strangers))).since > _HELLO_SECONDS:
            self._turn_away(oldest)
        self._beat(elapsed)
        if self._ranks and not len(self._here) - (0 in self._here):
            self.empty.set()
        else:
            self.empty.clear()
        if now - self._looked >= min(0.5, self._place.heartbeat / 10):
            self._looked = now
            self._seek_silent(now)
        self._seek_hung(now)
        self._seek_stuck(now)
        if not self._faults:
            self._differ(self._waits.difference(self._here.keys(), now), now)
            while self._waits.to_ask:
                self._ranks[self._waits.to_ask.pop()].link.send("waits?")
        self._settle(now)

    def _beat(self, elapsed: float) -> None:
        """Send each rank its heartbeat once in an interval: some ranks at each tick, so that no tick is long."""
        self._owed = min(self._owed + len(self._to_beat) * elapsed / self._interval, float(len(self._to_beat)))
        while self._owed >= 1.0 and self._to_beat:
            self._owed -= 1.0
            rank = self._to_beat.popleft()
            if self._here.get(rank.number) is rank:
                self.beats += 1
                rank.link.beat()
                self._to_beat.append(rank)

    def _seek_silent(self, now: float) -> None:
        for rank in self._here.values():
            silent = now - rank.heard
            if silent <= self._place.heartbeat:
                return  # those behind it were heard later
            if rank.number == 0:
                continue
            # The other rank of its host that was heard last.
            neighbours = reversed(self._hosts[rank.identity.place].values())
            awake = next((other for other in neighbours if other is not rank), None)
            limit = self._place.heartbeat * (LONE if awake is None else _UNSEEN)
            if now - rank.seen > limit or rank.link.is_cut_off(self._place.heartbeat / 2):
                self._silent(rank, f"has not answered for {silent:.0f} s: it is stopped, or its host is cut off", now)
            elif awake is not None and (rank.asked is None or now - rank.asked > _LOOK_SECONDS):
                rank.asked = now
                awake.link.send("look", rank=rank.number, identity=rank.identity)

    def _saw(self, rank: Rank, condition: str, now: float) -> None:
        silent = now - rank.heard
        if condition == "busy":
            self._heard(rank, now)
        elif condition == "stopped":
            self._silent(rank, f"has been stopped (SIGSTOP) for {silent:.0f} s", now)
        elif condition == "idle" and not 0 < self._place.patience < silent:
            rank.seen = now  # it may wait for a file while it holds Python's lock
        elif silent > self._place.heartbeat:
            self._silent(rank, f"has not answered for {silent:.0f} s, and does not compute", now)

    def _silent(self, rank: Rank, cause: str, now: float) -> None:
        if not any(fault.kill for fault in self._faults):
            limit = max(self._place.heartbeat / 2, 1.5 * self._interval)
            dead = [other.identity for other in self._ranks.values() if now - other.heard > limit]
            _catch_up(rank)
            self._blame(Fault(rank, cause, now, kill=dead), first=True)

    def _seek_hung(self, now: float) -> None:
        """Once a rank has said that the job hangs: ask all for their stacks, unless it may wait for one that works."""
        claim, self._claim = self._claim, None
        if claim is None or self._stuck is not None:
            return
        idle, number = claim
        patience = self._place.patience
        here = self._here.values()
        is_long = idle > _WAITING * patience or all(rank.idle > patience for rank in here)
        if is_long and not any(rank.busy for rank in here):
            self._stuck = (now + _STACKS_SECONDS, number, idle)
            for rank in self._ranks.values():
                rank.link.send("stacks")

    def _seek_stuck(self, now: float) -> None:
        """Once every rank has written its stacks: the rank that has done least keeps the others waiting."""
        if self._stuck is None:
            return
        due, number, idle = self._stuck
        here = self._here.values()
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
        self._blame(Fault(least, cause + "; every rank's stacks stand above", now, verb="hangs"), first=True)

    def _differ(self, found: Difference | None, now: float) -> None:
        """Put what ``HVDKIT_CHECK=1`` has found before all that follows from it."""
        rank = self._ranks.get(found.rank) if found is not None else None
        if found is not None and rank is not None:
            self._blame(Fault(rank, found.cause, now, orderly=True), first=True)

    # ---- the end ----------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Say who is at fault and end every rank, once that is settled."""
        due = [fault for fault in self._faults if fault.due <= now]
        if not due or self._over.is_set():  # ranks that have heard that it is over may go as they like
            return
        self._differ(self._waits.unlike(), now)
        first = next((fault for fault in self._faults if not fault.victim), due[0])
        others = (fault for fault in self._faults if not fault.victim and fault is not first)
        texts = {fault.text: None for fault in others if fault.text and fault.text != first.text}
        said = list(texts)[:_TEXTS]
        if len(texts) > _TEXTS:
            said.append(f"hvdkit: {len(texts) - _TEXTS} more ranks failed; their tracebacks are left out")
        said += [first.text] if first.text else []
        report = first.report()
        hand_over(report)
        if first.orderly and self._unwind and all(rank.left or not rank.closed for rank in self._ranks.values()):
            self._end_orderly(first.code, said, report.line())
        else:
            write_line("\n".join([*said, report.line()]))
            self._end_at_once(first)
        self._over.wait()

    def _end_at_once(self, first: Fault) -> None:
        """End every rank, which cannot exit normally, and kill those that do not answer; rank 0 comes last."""
        time.sleep(_FORWARD_SECONDS)
        elsewhere = any(identity.place != processes.own_identity().place for identity in first.kill)
        if elsewhere:
            processes.end_stuck_mpirun()
        kill: dict[str, list[processes.Identity]] = {}
        for identity in first.kill:
            kill.setdefault(identity.place, []).append(identity)
        rest = [rank for rank in self._ranks.values() if not rank.closed and rank.number != 0]
        for rank in rest:
            rank.link.send("end", code=first.code, kill=kill.get(rank.identity.place, []), unwind=0)
        self._await_ends(rest, time.monotonic() + _END_SECONDS)
        if elsewhere:
            processes.end_stuck_step()
        if 0 in self._ranks and not self._ranks[0].closed:
            mine = kill.get(self._ranks[0].identity.place, [])
            self._ranks[0].link.send("end", code=first.code, kill=mine, unwind=0)
        else:
            os._exit(first.code)

    def _end_orderly(self, code: int, said: list[str], line: str) -> None:
        """Have all ranks unwind, wait until they have, for a limited time, write the last line, and let them go."""
        if said:
            write_line("\n".join(said))
        for rank in self._ranks.values():
            rank.link.send("end", code=code, kill=[], unwind=self._unwind)
        here = [rank for rank in self._ranks.values() if not rank.closed]
        until = time.monotonic() + self._unwind
        # One that ends early has its launcher end the others, unless its script had ended before.
        while (
            time.monotonic() < until
            and not all(rank.unwound or rank.closed for rank in here)
            and not any(rank.closed and not rank.left for rank in here)
        ):
            time.sleep(0.02)  # all ranks are looked through once for many messages
            for key, _ in self._selector.select(0.05):
                if key.data is not None:
                    self._hear(key.data)
        write_line(line)
        time.sleep(_FORWARD_SECONDS)
        for rank in here:
            rank.link.send("leave")

    @staticmethod
    def _await_ends(ranks: Sequence[Rank], until: float) -> None:
        """Wait until the connections of ``ranks`` have ended, or until then."""
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(rank.link.socket, selectors.EVENT_READ, rank)
            while selector.get_map() and (left := until - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if any(message["kind"] == "closed" for message in key.data.link.receive()):
                        selector.unregister(key.fileobj)


def _catch_up(rank: Rank) -> None:
    """Ranks step together, and the last word of one that says no more is seconds old: go by rank 0's own step."""
    if PROGRESS.step is not None:
        rank.step = max(rank.step or 0, PROGRESS.step)
