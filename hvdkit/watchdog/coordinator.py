"""Collects the reports of all sentinels, and decides whether the job has failed and which rank is at fault.

It runs in ``hvdkit run``, or in the sentinel of rank 0. The cost of a message and of a timer tick is independent of
the number of ranks; ``benchmarks/control_plane.py`` measures it.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, takewhile

from hvdkit.machine import processes
from hvdkit.watchdog import hang
from hvdkit.watchdog.channel import NO_ANSWER, Closed, Output, Peer, Server
from hvdkit.watchdog.events import (
    Collectives,
    End,
    Exited,
    Failed,
    Flight,
    GiveStacks,
    Joined,
    Leaving,
    Message,
    Release,
    Signal,
    Stacks,
    Status,
    Training,
    Unwound,
    Welcome,
)
from hvdkit.watchdog.job_end import TEXTS, JobEnd
from hvdkit.watchdog.lines import Lines
from hvdkit.watchdog.member import Member, order
from hvdkit.watchdog.settings import WatchdogSettings
from hvdkit.watchdog.verdict import PREEMPTED, Alive, Judged, Lost, RankEvent, Verdict, verdict
from hvdkit.watchdog.waits import Waits

# Seconds to collect failures before a verdict: nearly simultaneous ones are compared to find the first.
_GATHER_SECONDS = 0.25
# Seconds that a leaving rank waits for the others to leave as well; and seconds that an error caused by another rank
# waits for that rank's own report.
_LEAVE_SECONDS = 2.0
# Seconds for other ranks to report their own errors after a program that does not use hvdkit has failed.
_LAST_WORDS_SECONDS = 1.0
# Without hvdkit run: seconds for a rank whose sentinel was killed to start another one.
_RETURN_SECONDS = 5.0
# Limit for a silent sentinel whose host still answers, in heartbeats.
_SILENT = 1.5
# Limit for ranks that wait for a working rank, e.g. for a download on the chief; a multiple of the watchdog's limit.
_WAITING = 6
_STACKS_SECONDS = 3.0
# Seconds after the deadline for sentinels to report that their ranks have ended.
_GONE_SECONDS = 12.0
_TICK_SECONDS = 0.5
# Signals that schedulers send to end a program, and the exit codes that follow from them.
_ENDING = {int(signal.SIGTERM), int(signal.SIGINT), int(signal.SIGHUP)}
_ENDED_BY_SIGNAL = {-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGKILL}


class Coordinator:
    """Watches the ranks of one job.

    Args:
        size: number of ranks.
        settings: the watchdog's settings.
        selector: waits for the sentinels' connections.
        listeners: listening sockets for the sentinels.
        token: the job's token.
        welcome: returns the answer to a sentinel that joins.
        output: called with a rank and its program's output.
        lines: writes lines for the user.
        writes_end: also write the last line.
        hosts: display names of the ranks' hosts; by default the names that the hosts report.
        returns: a killed sentinel may be replaced (only without ``hvdkit run``).

    Attributes:
        members: the ranks that have joined.
        verdict: how the job has failed, or None.
        messages: number of messages received.
        ordered: whether all further events result from an order, or from a signal to the job.
        notified: True once a scheduler has announced the end of the job.
    """

    def __init__(
        self,
        size: int,
        settings: WatchdogSettings,
        selector: selectors.BaseSelector,
        listeners: Sequence[socket.socket],
        token: str,
        *,
        welcome: Callable[[Joined], Welcome] | None = None,
        output: Callable[[int, Output], None] | None = None,
        lines: Lines,
        writes_end: bool = True,
        hosts: Mapping[int, str] | None = None,
        returns: bool = True,
    ) -> None:
        self._size, self.settings = size, settings
        self.server = Server(selector, listeners, token, size)
        self._welcome = welcome or (lambda joined: settings.welcome(size))
        self._output, self._lines, self._returns = output or (lambda rank, output: None), lines, returns
        self._hosts = hosts or {}
        self.members: dict[int, Member] = {}
        # Connected, running ranks; least recently heard first.
        self._here: OrderedDict[int, Member] = OrderedDict()
        self._lost: set[int] = set()
        # Ranks whose scripts have ended but that are not released yet, in the order in which they ended.
        self._leaving: dict[int, Member] = {}
        self._left: set[int] = set()  # ranks whose scripts have ended
        self._stopped: set[int] = set()
        self._suspended = 0.0  # when all ranks were last seen stopped
        self._entries: dict[int, list[RankEvent]] = defaultdict(list)
        self._due: float | None = None
        self._claim: int | None = None  # the rank that has been idle longest, and longer than allowed
        self._stacks_due: float | None = None
        self._waits = Waits(lambda rank: self.members[rank].heard)
        self._ticked = time.monotonic()
        self.ordered = self.notified = False
        self.verdict: Verdict | None = None
        self._end = JobEnd(size, settings, self.members, self.judge, self._lines, writes_last=writes_end)
        self.messages = 0
        self._gone_at: float | None = None  # after the verdict: when the remaining ranks count as lost

    # ---- messages ---------------------------------------------------------------------------------------------

    def ready(self, key: selectors.SelectorKey, events: int) -> None:
        """Serve a connection or listener that the selector reports as ready."""
        if isinstance(key.data, socket.socket):
            self.server.admit(key.data)
            return
        peer: Peer = key.data
        if events & selectors.EVENT_WRITE:
            peer.connection.flush()
        if not events & selectors.EVENT_READ:
            return
        try:
            for message in self.server.receive(peer):
                if isinstance(message, Joined):
                    self._join(peer, message)
                elif isinstance(message, Output):
                    self._output(peer.rank, message)
                else:
                    self.take(self.members[peer.rank], message, time.monotonic())
        except Closed as closed:
            member = self.members[peer.rank]
            if member.peer is peer and member.here:
                self._connection_ended(member, time.monotonic(), closed.errno)

    def _join(self, peer: Peer, joined: Joined) -> None:
        """Admit a sentinel, unless its rank is invalid or already watched."""
        before = self.members.get(joined.rank)
        why = ""
        if joined.size != self._size:
            why = f"this rank was started as one of {joined.size} ranks, the job has {self._size}"
        elif not 0 <= joined.rank < self._size:
            why = f"rank {joined.rank} is not one of its {self._size} ranks"
        elif before is not None and before.here:
            why = f"another sentinel, on {before.joined.host}, watches rank {joined.rank}"
        if why:
            self.server.reject(peer, why)
            return
        self.server.welcome(peer, joined.rank, self._welcome(joined))
        self.join(joined, peer.connection.send, peer)
        if self.verdict is not None or self.ordered:  # it missed the order to end
            peer.connection.send(End(code=1 if self.verdict is None else self.verdict.code))

    def join(self, joined: Joined, send: Callable[[Message], None], peer: Peer | None = None) -> Member:
        """Watch the rank of ``joined``; ``send`` sends an order to its sentinel."""
        now = time.monotonic()
        joined = replace(joined, host=self._hosts.get(joined.rank, joined.host))
        member = Member(joined, send, now, peer)
        before = self.members.get(joined.rank)
        if before is not None:
            member.trains, member.status = before.trains, before.status
        self.members[joined.rank] = self._here[joined.rank] = member
        self._lost.discard(joined.rank)
        return member

    def take(self, member: Member, message: Message, now: float) -> None:
        """Handle a message of a sentinel."""
        self.messages += 1
        member.heard = now
        if member.here:
            self._here.move_to_end(member.rank)
        if isinstance(message, Status):
            self._status(member, message, now)
        elif isinstance(message, Collectives):
            for key in message.ended:
                self._waits.end(member.rank, key, now)
            for record in message.begun:
                self._waits.begin(member.rank, record, now)
                if record.end is not None:
                    self._waits.end(member.rank, record.key, now)
        elif isinstance(message, Training):
            if member.leaving is not None:  # a second world of the same process
                self._leaving.pop(member.rank, None)
                self._left.discard(member.rank)
                entries = self._entries[member.rank]
                entries[:] = [one for one in entries if not isinstance(one.event, Leaving)]
            member.trains, member.leaving = True, None
            member.released, member.unwound = None, False
            self._note(member, message, now)
        elif isinstance(message, Failed):
            self._note(member, message, now)
            is_explained = not message.follows or bool(self._left)
            self._decide_at(now + (_GATHER_SECONDS if is_explained else _LEAVE_SECONDS))
        elif isinstance(message, Leaving):
            member.leaving = now
            self._leaving[member.rank] = member
            self._left.add(member.rank)
            self._note(member, message, now)
        elif isinstance(message, Exited):
            self._exited(member, message, now)
        elif isinstance(message, Unwound):
            member.unwound = True
        elif isinstance(message, Stacks):
            member.stacks = message
        elif isinstance(message, Flight):
            member.flight = message

    def _status(self, member: Member, status: Status, now: float) -> None:
        member.status = status
        member.clock = min(member.clock, now - status.now)
        (self._stopped.discard if status.stopped is None else self._stopped.add)(member.rank)
        if not self.settings.check:
            self._waits.only(member.rank, status.waits, now)
        patience = self.settings.patience
        if patience and status.idle > patience and member.here:
            claimed = None if self._claim is None else self.members[self._claim]
            if claimed is None or claimed.status.idle < status.idle:
                self._claim = member.rank

    def _exited(self, member: Member, message: Exited, now: float) -> None:
        member.exited = message
        self._gone(member)
        self.notified = self.notified or bool(message.signals)
        follows_signal = bool(_ENDING & set(message.signals)) and message.code in _ENDED_BY_SIGNAL
        self._note(member, message, now, ordered=follows_signal)
        is_done = message.code == 0 and (member.leaving is not None or not member.trains)  # no os._exit(0)
        if is_done and self.verdict is None and not self.ordered:
            member.send(Release())
        if member.released is not None and member.released.all_leave:
            return
        if message.code == PREEMPTED or follows_signal:
            wait = self.settings.grace
        elif is_done:
            return
        else:
            wait = _GATHER_SECONDS if member.trains else _LAST_WORDS_SECONDS
        self._decide_at(now + wait)

    def _connection_ended(self, member: Member, now: float, number: int | None = None) -> None:
        """Handle a lost sentinel. ``number`` is the connection's error, e.g. if the sentinel's host does not answer."""
        member.lost, member.is_silent = now, number in NO_ANSWER
        self._gone(member)
        if member.is_silent:
            why = f"has not answered for {now - member.heard:.0f} s: its host is down, or the network is cut"
            self._judge(member, Judged(cause=why, dead=True), member.heard)
        elif self._returns:
            self._lost.add(member.rank)
        else:
            self._blame_lost(member)

    def _blame_lost(self, member: Member) -> None:
        assert member.lost is not None
        self._lost.discard(member.rank)
        self._note(member, Lost(), member.lost)
        self._decide_at(time.monotonic() + _GATHER_SECONDS)

    def _gone(self, member: Member) -> None:
        self._here.pop(member.rank, None)
        self._leaving.pop(member.rank, None)
        self._stopped.discard(member.rank)

    def _give_up(self, member: Member, now: float) -> None:
        """Close the connection to a sentinel that does not answer."""
        member.lost, member.is_silent = now, True
        self._gone(member)
        if member.peer is not None:
            member.peer.connection.close()

    def _note(self, member: Member, event: Message, at: float, *, ordered: bool = False) -> None:
        follows = ordered or self.ordered or self.verdict is not None
        self._entries[member.rank].append(RankEvent(member.rank, at, event, follows))

    def _every_entry(self) -> Iterator[RankEvent]:
        return chain.from_iterable(self._entries.values())

    def _decide_at(self, at: float) -> None:
        self._due = at if self._due is None else min(self._due, at)

    # ---- timers -----------------------------------------------------------------------------------------------

    def pause(self, now: float) -> float:
        """Return the seconds until :meth:`tick` must be called next."""
        ahead = (at - now for at in (self._due, self._end.due) if at is not None)
        return max(0.0, min([_TICK_SECONDS, *ahead]))

    def tick(self, now: float) -> None:
        """Check all deadlines and limits."""
        elapsed, self._ticked = now - self._ticked, now
        if elapsed > max(2.0, self.settings.heartbeat / 2):  # this process itself was stopped and has resumed
            self.server.extend(elapsed)
            self._hear_later(elapsed)
        self.server.forget_strangers(now)
        if self._gone_at is not None and now >= self._gone_at:
            self._gone_at = None
            for member in list(self._here.values()):  # its sentinel is stopped or cut off
                self._give_up(member, now)
        self._end.tick(now)
        if self.verdict is not None:
            return
        self._release_leavers(now)
        if self.ordered:
            return
        for rank in list(self._lost):
            if now - (self.members[rank].lost or now) > _RETURN_SECONDS:
                self._blame_lost(self.members[rank])
        self._seek_silent(now)
        self._seek_stopped(now)
        self._seek_hung(now)
        if self._due is None and (unlike := self._waits.difference(self._here.keys(), now)) is not None:
            self._judge(self.members[unlike.rank], Judged(cause=unlike.cause), now)
        if self._due is not None and now >= self._due:
            self._due = None
            self._decide(now)

    def _release_leavers(self, now: float) -> None:
        """Release ranks whose scripts have ended: immediately once all have ended, otherwise after a delay."""
        all_leave = len(self._leaving) == len(self._here) and len(self.members) == self._size
        while self._leaving:
            member = next(iter(self._leaving.values()))
            if not all_leave and now - (member.leaving or now) <= _LEAVE_SECONDS:
                return  # the others ended later
            del self._leaving[member.rank]
            member.released = Release(all_leave=all_leave)
            member.send(member.released)

    def _hear_later(self, seconds: float) -> None:
        for member in self._here.values():
            member.heard += seconds

    def _seek_silent(self, now: float) -> None:
        limit = self.settings.heartbeat
        if not limit or not self._here:
            return
        # A job that was suspended together with its sentinels will resume. The kernel reports hosts that are down.
        least = now - next(reversed(self._here.values())).heard
        if least > limit:
            self._hear_later(least)
        for member in list(takewhile(lambda one: now - one.heard > limit, self._here.values())):
            silent = now - member.heard
            if member.peer is None:
                continue
            if silent > _SILENT * limit or member.peer.connection.is_cut_off(limit / 2):
                self._give_up(member, now)  # the end of the job does not wait for it
                why = f"has not answered for {silent:.0f} s: its host is cut off, or it was stopped with its sentinel"
                self._judge(member, Judged(cause=why, dead=True), member.heard)

    def _seek_stopped(self, now: float) -> None:
        """Blame a rank that is stopped while others run. A job that is suspended as a whole will resume."""
        if not self._stopped or not self.settings.heartbeat:
            return
        if self._stopped >= self._here.keys():
            self._suspended = now
            return
        for rank in sorted(self._stopped):
            member = self.members[rank]
            seconds = (member.status.stopped or 0.0) + now - member.heard
            # The ranks of a suspended job resume one after another.
            if min(seconds, now - self._suspended) > self.settings.heartbeat:
                why = f"has been stopped (SIGSTOP) for {seconds:.0f} s"
                self._judge(member, Judged(cause=why, code=137, dead=True, busy=member.status.busy), now - seconds)

    def _seek_hung(self, now: float) -> None:
        """Request all stacks if a rank has been idle for too long, unless it may be waiting for a working rank."""
        if self._stacks_due is not None:
            if now >= self._stacks_due or all(member.stacks is not None for member in self._here.values()):
                self._stacks_due = None
                self._blame_hung(now)
            return
        claim, self._claim = self._claim, None
        if claim is None or claim not in self._here:
            return
        patience, idle = self.settings.patience, self.members[claim].status.idle
        here = self._here.values()
        is_long = idle > _WAITING * patience or all(member.status.idle > patience for member in here)
        if is_long and not any(member.status.busy for member in here):
            self._claim, self._stacks_due = claim, now + _STACKS_SECONDS
            for member in here:
                member.stacks = None
                member.send(GiveStacks())

    def _blame_hung(self, now: float) -> None:
        """Blame the rank that is furthest behind: the others wait for it."""
        found = {rank: member.stacks for rank, member in self._here.items() if member.stacks is not None}
        claimed = self.members[self._claim or 0]
        self._claim = None
        least = hang.least_done({rank: member.status for rank, member in self._here.items()}, found, claimed.rank)
        member, idle = self.members[least], claimed.status.idle
        where = f" ({found[least].where})" if least in found and found[least].where else ""
        shown = sorted(found, key=lambda rank: (rank != least, rank))[:TEXTS]
        texts = hang.texts({rank: found[rank] for rank in shown})
        if len(found) > TEXTS:
            texts.append(f"hvdkit: the stacks of {len(found) - TEXTS} more ranks are left out")
        for text in texts:
            self._lines.line(text)
        whose = f"{TEXTS}" if len(found) > TEXTS else "all"
        cause = f"no progress for {idle:.0f} s{where}; the stacks of {whose} ranks are above"
        self._judge(member, Judged(cause=cause, verb="hangs", dead=True), now - idle)

    def _judge(self, member: Member, judged: Judged, since: float) -> None:
        if any(isinstance(one.event, Judged) for one in self._entries[member.rank]):
            return
        self._note(member, replace(judged, step=self._step(member)), since)
        self._decide_at(time.monotonic())

    def _step(self, member: Member) -> int | None:
        """Return a rank's steps; for a rank that is gone, the maximum of all ranks, because ranks step together."""
        steps = [other.status.step for other in self.members.values() if other.status.step is not None]
        return max(steps, default=None) if member.rank not in self._here else member.status.step

    # ---- the end ----------------------------------------------------------------------------------------------

    def judge(self) -> Verdict:
        """Return the verdict on the events so far."""
        now = time.monotonic()
        alive = [RankEvent(rank, now, Alive()) for rank in self._here]
        hosts = {rank: member.joined.host for rank, member in self.members.items()}
        return verdict([*self._every_entry(), *alive], self._size, hosts)

    def _decide(self, now: float) -> None:
        """End the job if a rank has failed."""
        there = {processes.place(), *(member.joined.place for member in self._here.values())}
        for member in [self.members[rank] for rank in self._lost]:
            if member.joined.place not in there:  # all sentinels of a host are gone: none was only killed
                self._blame_lost(member)
        unlike = self._waits.mismatch() if self.settings.check else None
        if unlike is not None:
            member = self.members[unlike.rank]
            self._note(member, Judged(cause=unlike.cause, step=self._step(member)), 0.0)
        found = self.judge()
        if found.code == 0 or (found.rank is None and not any(map(self._calls_for_an_end, self._every_entry()))):
            return
        self.verdict = found
        self._gone_at = now + self.settings.unwind + _GONE_SECONDS
        self._end.begin(found)

    def _calls_for_an_end(self, entry: RankEvent) -> bool:
        """Return True for a failure, even if it is unknown which rank failed first."""
        event = entry.event
        if isinstance(event, Exited):  # after the script's end, an unknown exit code does not count as a failure
            return event.code != 0 and (event.code is not None or self.members[entry.rank].leaving is None)
        return not entry.ordered and isinstance(event, (Failed, Lost))

    @property
    def flight(self) -> str:
        """The line about the flight recorder's file, or ""."""
        return self._end.flight

    def signal(self, number: int) -> None:
        """Send a signal to the programs of all ranks."""
        order(self.members, Signal(number=number))

    def release(self) -> None:
        """Allow all sentinels to exit."""
        for member in self.members.values():
            member.send(Release())

    def close(self) -> None:
        """Stop listening, and close all connections. Sentinels of ``hvdkit run`` then end their programs."""
        self.server.close()
        for member in self.members.values():
            if member.peer is not None:
                member.peer.connection.close()

    @property
    def launcher_waits(self) -> bool:
        """True if the last line is written, but the launcher waits for a rank on another host that does not exit.

        A launcher detects that a host has died, but not that a host is cut off or that a rank is stopped.
        """
        found = self.verdict
        if found is None or found.orderly or not self._end.has_written:
            return False
        there = (one for one in self.members.values() if one.joined.place != processes.place() and one.exited is None)
        return any(one.is_silent or (self.has_ended and one.lost is None and one.rank == found.rank) for one in there)

    @property
    def has_ended(self) -> bool:
        """True once the job has been ended after a failure: every sentinel has the order to end its rank."""
        return self.verdict is not None and self._end.due is None

    @property
    def all_ended(self) -> bool:
        """True once all ranks have joined and ended."""
        return len(self.members) == self._size and not self._here

    @property
    def over(self) -> bool:
        """True once every rank that joined has ended, and no decision or step is pending."""
        waits = (self._due is not None or bool(self._lost)) and self.verdict is None
        return not self._here and self._end.due is None and not waits and bool(self.members)
