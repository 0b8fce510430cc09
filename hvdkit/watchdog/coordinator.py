"""Collects the reports of all sentinels, and decides whether the job has failed and which rank is at fault.

It runs in ``hvdkit run``, or in the sentinel of rank 0. The cost of a message and of a timer tick is independent of
the number of ranks; ``benchmarks/control_plane.py`` measures it.
"""

from __future__ import annotations

import math
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
    End,
    Exited,
    Failed,
    Flight,
    GiveStacks,
    Joined,
    Leaving,
    Message,
    Raised,
    Refused,
    Release,
    Signal,
    Stacks,
    Status,
    Training,
    Unwound,
    Welcome,
    WriteLine,
)
from hvdkit.watchdog.job_end import TEXTS, JobEnd
from hvdkit.watchdog.leaving import LEAVE_SECONDS, LeavingRanks
from hvdkit.watchdog.left_behind import LeftBehind
from hvdkit.watchdog.lines import Lines
from hvdkit.watchdog.member import Member, broadcast
from hvdkit.watchdog.settings import WatchdogSettings
from hvdkit.watchdog.verdict import PREEMPTED, Alive, Judged, Lost, RankEvent, Verdict, verdict
from hvdkit.watchdog.waits import Waits

# Seconds to collect failures before a verdict: nearly simultaneous ones are compared to find the first.
_GATHER_SECONDS = 0.25
# Seconds for other ranks to report their own errors after a program that does not use hvdkit has failed.
_OTHERS_SECONDS = 1.0
# Seconds for a rank to replace its killed sentinel; with hvdkit run, sentinels are not replaced.
_REPLACE_SECONDS = 5.0
# The same for a rank of this host whose process is alive: on a busy host, starting a process takes long.
_REPLACE_HERE_SECONDS = 60.0
# Limits for a silent sentinel, in heartbeats: on this host, where the kernel knows whether the rank is stopped, and on
# another one that still acknowledges packets: there, the sentinel may be waiting for a core, for memory or for a disk.
_SILENT_HERE_FACTOR = 1.5
_SILENT_FACTOR = 6
# Limit for ranks that wait for a working rank, e.g. for a download on the chief; a multiple of the watchdog's limit.
_WAITING_FACTOR = 6
_STACKS_SECONDS = 3.0
# Seconds after the deadline for sentinels to report that their ranks have ended.
_REPORT_END_SECONDS = 12.0
_TICK_SECONDS = 0.5
# Signals that schedulers send to end a program, and the exit codes that follow from them.
_ENDING_SIGNALS = {int(signal.SIGTERM), int(signal.SIGINT), int(signal.SIGHUP)}
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
        hosts: display names of the ranks' hosts; by default the names that the hosts report.
        under_run: this is ``hvdkit run``, which writes the last line itself, and whose sentinels are not replaced.

    Attributes:
        members: the ranks that have joined.
        verdict: how the job has failed, or None.
        messages: number of messages received.
        stop_requested: whether all further events result from an order, or from a signal to the job.
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
        hosts: Mapping[int, str] | None = None,
        under_run: bool = False,
    ) -> None:
        self._size = size
        self.settings = settings
        self.server = Server(selector, listeners, token, size)
        self._welcome = welcome or (lambda joined: settings.welcome(size))
        self._output = output or (lambda rank, output: None)
        self._lines = lines
        self._under_run = under_run
        self._hosts = hosts or {}
        self.members: dict[int, Member] = {}
        # Running ranks with a sentinel, in the order of their last messages.
        self._running: OrderedDict[int, Member] = OrderedDict()
        self._lost_ranks: set[int] = set()  # ranks whose sentinel is gone and may be replaced
        self._leaving = LeavingRanks(self._running, self._record)
        self._stopped_ranks: set[int] = set()
        self._suspended_at = 0.0  # when all ranks were last seen stopped
        self._events: dict[int, list[RankEvent]] = defaultdict(list)
        self._decision_due: float | None = None
        self._longest_idle: int | None = None  # the rank that has been idle longest, and longer than allowed
        self._hung_rank: int | None = None  # the one for which stacks have been requested
        self._stacks_due: float | None = None
        self._waits = Waits(lambda rank: self.members[rank].last_heard)
        self._ticked_at = time.monotonic()
        self._left_behind = LeftBehind(self._running)
        self.stop_requested = self.notified = False
        self.verdict: Verdict | None = None
        self._end = JobEnd(size, settings, self.members, self.judge, self._lines, writes_last=not under_run)
        self.messages = 0
        self._give_up_at: float | None = None  # after the verdict: when the remaining ranks count as lost

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
                    self.handle(self.members[peer.rank], message, time.monotonic())
        except Closed as closed:
            member = self.members[peer.rank]
            if member.peer is peer and member.is_running:
                self._connection_ended(member, time.monotonic(), closed.errno)

    def _join(self, peer: Peer, joined: Joined) -> None:
        """Admit a sentinel, unless its rank is invalid or already watched."""
        before = self.members.get(joined.rank)
        why = ""
        if joined.size != self._size:
            why = f"this rank was started as one of {joined.size} ranks, the job has {self._size}"
        elif not 0 <= joined.rank < self._size:
            why = f"rank {joined.rank} is not one of its {self._size} ranks"
        elif before is not None and before.is_running:
            why = f"another sentinel, on {before.joined.host}, watches rank {joined.rank}"
        if why:
            peer.connection.send(Refused(why=why))
            return
        self.server.welcome(peer, joined.rank, self._welcome(joined))
        self.join(joined, peer.connection.send, peer)
        if self.verdict is not None or self.stop_requested:  # it missed the order to end
            peer.connection.send(End(code=1 if self.verdict is None else self.verdict.code))

    def join(self, joined: Joined, send: Callable[[Message], None], peer: Peer | None = None) -> Member:
        """Watch the rank of ``joined``; ``send`` sends an order to its sentinel."""
        now = time.monotonic()
        joined = replace(joined, host=self._hosts.get(joined.rank, joined.host))
        member = Member(joined, send, now, peer)
        before = self.members.get(joined.rank)
        if before is not None:
            member.is_training = before.is_training
            member.status = before.status
            member.pid = before.pid
        self.members[joined.rank] = self._running[joined.rank] = member
        self._lost_ranks.discard(joined.rank)
        return member

    def handle(self, member: Member, message: Message, now: float) -> None:
        """Handle a message of a sentinel."""
        self.messages += 1
        member.last_heard = now
        if member.is_running:
            self._running.move_to_end(member.rank)
        if isinstance(message, Status):
            self._handle_status(member, message, now)
        elif isinstance(message, Training):
            if member.script_ended_at is not None:  # a second world of the same process
                self._leaving.trains_again(member)
                events = self._events[member.rank]
                events[:] = [one for one in events if not isinstance(one.event, Leaving)]
            member.is_training = True
            member.script_ended_at = None
            member.holding = None
            member.pid = message.pid
            member.released = None
            member.unwound = False
            self._record(member, message, now)
        elif isinstance(message, Failed):
            self._record(member, message, now)
            is_explained = not message.follows or self._leaving.have_ended
            # An error caused by another rank waits for that rank's own report.
            self._decide_at(now + (_GATHER_SECONDS if is_explained else LEAVE_SECONDS))
        elif isinstance(message, Raised):
            member.raised = message
            member.raised_at = now
        elif isinstance(message, Leaving):
            self._leaving.add(member, message, now)
        elif isinstance(message, Exited):
            self._handle_exit(member, message, now)
        elif isinstance(message, Unwound):
            member.unwound = True
        elif isinstance(message, Stacks):
            member.stacks = message
        elif isinstance(message, Flight):
            member.flight = message

    def _handle_status(self, member: Member, status: Status, now: float) -> None:
        member.status = status
        member.status_at = now
        member.clock_difference = min(member.clock_difference, now - status.now)
        (self._stopped_ranks.discard if status.stopped is None else self._stopped_ranks.add)(member.rank)
        self._waits.replace(member.rank, member.waits, now)
        member.raised = member.raised if status.has_raised else None
        self._left_behind.note(member, now)
        patience = self.settings.patience
        if patience and (status.is_late or status.idle > patience) and member.is_running:
            longest = None if self._longest_idle is None else self.members[self._longest_idle].status
            if longest is None or (not longest.is_late, longest.idle) < (not status.is_late, status.idle):
                self._longest_idle = member.rank

    def _handle_exit(self, member: Member, message: Exited, now: float) -> None:
        member.exited = message
        self._forget_running(member)
        self.notified = self.notified or bool(message.signals)
        follows_signal = bool(_ENDING_SIGNALS & set(message.signals)) and message.code in _ENDED_BY_SIGNAL
        self._record(member, message, now, ordered=follows_signal)
        is_done = message.code == 0 and (member.script_ended_at is not None or not member.is_training)  # no os._exit(0)
        if is_done and self.verdict is None and not self.stop_requested:
            member.send(Release())
        if member.released is not None and member.released.all_leave:
            return
        if message.code == PREEMPTED or follows_signal:
            wait = self.settings.grace
        elif is_done:
            return
        else:
            wait = _GATHER_SECONDS if member.is_training else _OTHERS_SECONDS
        self._decide_at(now + wait)

    def _connection_ended(self, member: Member, now: float, number: int | None = None) -> None:
        """Handle a lost sentinel. ``number`` is the connection's error, e.g. if the sentinel's host does not answer."""
        self._lose(member, now, is_silent=number in NO_ANSWER)
        if member.is_silent:
            why = f"has not answered for {now - member.last_heard:.0f} s: its host is down, or the network is cut"
            self._blame(member, Judged(cause=why, dead=True), member.last_heard)
        elif self._under_run:
            self._blame_lost(member)
        else:
            self._lost_ranks.add(member.rank)

    def _blame_lost(self, member: Member) -> None:
        assert member.lost_at is not None
        self._lost_ranks.discard(member.rank)
        self._record(member, Lost(), member.lost_at)
        self._decide_at(time.monotonic() + _GATHER_SECONDS)

    def _forget_running(self, member: Member) -> None:
        self._running.pop(member.rank, None)
        self._leaving.has_stopped(member)
        self._left_behind.has_stopped(member)
        self._stopped_ranks.discard(member.rank)

    def _lose(self, member: Member, now: float, *, is_silent: bool) -> None:
        member.lost_at = now
        member.is_silent = is_silent
        self._forget_running(member)

    def _give_up(self, member: Member, now: float) -> None:
        """Close the connection to a sentinel that does not answer."""
        self._lose(member, now, is_silent=True)
        if member.peer is not None:
            member.peer.connection.close()

    def _record(self, member: Member, event: Message, at: float, *, ordered: bool = False) -> None:
        ordered = ordered or self.stop_requested or self.verdict is not None
        self._events[member.rank].append(RankEvent(member.rank, at, event, ordered))

    def _all_events(self) -> Iterator[RankEvent]:
        return chain.from_iterable(self._events.values())

    def _decide_at(self, at: float) -> None:
        self._decision_due = at if self._decision_due is None else min(self._decision_due, at)

    # ---- timers -----------------------------------------------------------------------------------------------

    def pause(self, now: float) -> float:
        """Return the seconds until :meth:`tick` must be called next."""
        pauses = (at - now for at in (self._decision_due, self._end.due) if at is not None)
        return max(0.0, min([_TICK_SECONDS, *pauses]))

    def tick(self, now: float) -> None:
        """Check all deadlines and limits."""
        elapsed = now - self._ticked_at
        self._ticked_at = now
        if elapsed > max(2.0, self.settings.heartbeat / 2):  # this process itself was stopped and has resumed
            self.server.extend_deadlines(elapsed)
            self._postpone_silence(elapsed)
        self.server.close_unauthenticated(now)
        if self._give_up_at is not None and now >= self._give_up_at:
            self._give_up_at = None
            for member in list(self._running.values()):  # its sentinel is stopped or cut off
                self._give_up(member, now)
        self._end.tick(now)
        if self.verdict is not None:
            return
        self._leaving.release(now, all_joined=len(self.members) == self._size)
        if self.stop_requested:
            return
        for rank in list(self._lost_ranks):
            member = self.members[rank]
            limit = _REPLACE_HERE_SECONDS if self._state_here(member) else _REPLACE_SECONDS
            if now - (member.lost_at or now) > limit:
                self._blame_lost(member)
        self._check_silent(now)
        self._check_stopped(now)
        self._check_hung(now)
        if self._decision_due is None and self.settings.patience:
            self._check_left_behind(now)
        if self._decision_due is None and (difference := self._waits.difference(self._running.keys(), now)) is not None:
            self._blame(self.members[difference.rank], Judged(cause=difference.cause), now)
        if self._decision_due is not None and now >= self._decision_due:
            self._decision_due = None
            self._decide(now)

    def _postpone_silence(self, seconds: float) -> None:
        for member in self._running.values():
            member.last_heard += seconds

    def _check_silent(self, now: float) -> None:
        limit = self.settings.heartbeat
        if not limit or not self._running:
            return
        # A job that was suspended together with its sentinels will resume. The kernel reports hosts that are down.
        shortest_silence = now - next(reversed(self._running.values())).last_heard
        if shortest_silence > limit:
            self._postpone_silence(shortest_silence)
        for member in list(takewhile(lambda one: now - one.last_heard > limit, self._running.values())):
            silent = now - member.last_heard
            if member.peer is None or self._state_here(member) not in ("", "T"):
                continue
            if silent > self._longest_silence(member) or member.peer.connection.is_cut_off(limit / 2):
                self._give_up(member, now)  # the end of the job does not wait for it
                why = f"has not answered for {silent:.0f} s: its host is cut off, or it was stopped with its sentinel"
                self._blame(member, Judged(cause=why, dead=True), member.last_heard)

    def _longest_silence(self, member: Member) -> float:
        limit = self.settings.heartbeat
        if self._is_here(member):
            return _SILENT_HERE_FACTOR * limit
        # Less than the limit for hangs, which would blame a rank that waits for the silent one.
        patience = self.settings.patience or math.inf
        return max(_SILENT_HERE_FACTOR * limit, min(_SILENT_FACTOR * limit, patience / 2))

    @staticmethod
    def _is_here(member: Member) -> bool:
        return member.joined.place == processes.place()

    @classmethod
    def _state_here(cls, member: Member) -> str:
        """Return the state of a rank's process, one letter, if it lives on this host; otherwise "".

        Silence of such a rank's sentinel means that the sentinel gets no core, because the kernel reports its end.
        """
        if member.pid is None or not cls._is_here(member):
            return ""
        process = processes.stat(member.pid)
        return "" if process is None or process.state in "ZX" else process.state

    def _check_stopped(self, now: float) -> None:
        """Blame a rank that is stopped while others run. A job that is suspended as a whole will resume."""
        if not self._stopped_ranks or not self.settings.heartbeat:
            return
        if self._stopped_ranks >= self._running.keys():
            self._suspended_at = now
            return
        for rank in sorted(self._stopped_ranks):
            member = self.members[rank]
            seconds = (member.status.stopped or 0.0) + now - member.last_heard
            # The ranks of a suspended job resume one after another.
            if min(seconds, now - self._suspended_at) > self.settings.heartbeat:
                why = f"has been stopped (SIGSTOP) for {seconds:.0f} s"
                self._blame(member, Judged(cause=why, code=137, dead=True, busy=member.status.busy), now - seconds)

    def _check_hung(self, now: float) -> None:
        """Request all stacks if a rank has been idle for too long, unless it may be waiting for a working rank."""
        if self._stacks_due is not None:
            if now >= self._stacks_due or all(member.stacks is not None for member in self._running.values()):
                self._stacks_due = None
                rank = self._hung_rank
                if rank is not None and self._is_hung(rank):  # it may have gone on, or ended, meanwhile
                    self._blame_hung(rank, now)
            return
        rank = self._longest_idle
        self._longest_idle = None
        if rank is not None and self._is_hung(rank):
            self._hung_rank = rank
            self._stacks_due = now + _STACKS_SECONDS
            for member in self._running.values():
                member.stacks = None
                member.send(GiveStacks())

    def _is_hung(self, rank: int) -> bool:
        """Return True if a rank has been idle for too long, and no rank works that it may be waiting for."""
        if rank not in self._running:
            return False
        patience = self.settings.patience
        longest = self.members[rank].status
        running = self._running.values()
        is_long = not longest.is_late and longest.idle > _WAITING_FACTOR * patience
        has_all = len(self.members) == self._size and not self._lost_ranks
        if not is_long and (has_all or not longest.is_late):
            is_long = all(member.status.is_late or member.status.idle > patience for member in running)
        return is_long and not any(member.status.busy for member in running)

    def _check_left_behind(self, now: float) -> None:
        """Blame a rank that has left the others by an exception; report waits that last long."""
        if (left := self._left_behind.by_exception(now)) is not None:
            if left.text:
                self._lines.line(left.text)
            self._blame(left.member, Judged(cause=left.cause), left.member.raised_at)
            return
        for rank, line in self._left_behind.report(now):
            self.members[rank].send(WriteLine(text=line))

    def _blame_hung(self, rank: int, now: float) -> None:
        """Blame the rank that is furthest behind: the others wait for it, ``rank`` for the longest time."""
        stacks = {rank: member.stacks for rank, member in self._running.items() if member.stacks is not None}
        status = {rank: member.status for rank, member in self._running.items()}
        longest = self.members[rank]
        culprit = hang.furthest_behind(status, stacks, longest.rank)
        idle = longest.status.idle
        where = f" ({stacks[culprit].where})" if culprit in stacks and stacks[culprit].where else ""
        shown = sorted(stacks, key=lambda rank: (rank != culprit, rank))[:TEXTS]
        texts = hang.texts({rank: stacks[rank] for rank in shown})
        if len(stacks) > TEXTS:
            texts.append(f"hvdkit: the stacks of {len(stacks) - TEXTS} more ranks are left out")
        for text in texts:
            self._lines.line(text)
        whose = f"{TEXTS}" if len(stacks) > TEXTS else "all"
        cause = f"no progress for {idle:.0f} s{where}; the stacks of {whose} ranks are above"
        verb = "did not exit" if status[culprit].is_late else "hangs"
        self._blame(self.members[culprit], Judged(cause=cause, verb=verb, dead=True), now - idle)

    def _blame(self, member: Member, judged: Judged, since: float) -> None:
        """Record that a rank cannot continue since this time, unless that is recorded already."""
        if any(isinstance(one.event, Judged) for one in self._events[member.rank]):
            return
        self._record(member, replace(judged, step=self._steps_of(member)), since)
        self._decide_at(time.monotonic())

    def _steps_of(self, member: Member) -> int | None:
        """Return a rank's step; if the rank no longer runs, the maximum of all ranks, because ranks step together."""
        steps = [other.status.step for other in self.members.values() if other.status.step is not None]
        return max(steps, default=None) if member.rank not in self._running else member.status.step

    # ---- the end ----------------------------------------------------------------------------------------------

    def judge(self) -> Verdict:
        """Return the verdict on the events so far."""
        now = time.monotonic()
        alive = [RankEvent(rank, now, Alive()) for rank in self._running]
        hosts = {rank: member.joined.host for rank, member in self.members.items()}
        return verdict([*self._all_events(), *alive], self._size, hosts)

    def _decide(self, now: float) -> None:
        """End the job if a rank has failed."""
        places = {processes.place(), *(member.joined.place for member in self._running.values())}
        for member in [self.members[rank] for rank in self._lost_ranks]:
            if member.joined.place not in places:  # all sentinels of a host are gone: none was only killed
                self._blame_lost(member)
        verdict = self.judge()
        if verdict.code == 0 or (verdict.rank is None and not any(map(self._is_failure, self._all_events()))):
            return
        self.verdict = verdict
        self._give_up_at = now + self.settings.unwind + _REPORT_END_SECONDS
        self._end.begin(verdict)

    def _is_failure(self, rank_event: RankEvent) -> bool:
        """Return True for an event that must end the job even if it is unknown which rank failed first."""
        event = rank_event.event
        member = self.members[rank_event.rank]
        if isinstance(event, Exited):  # after the script's end, an unknown exit code does not count as a failure
            return event.code != 0 and (event.code is not None or member.script_ended_at is None)
        return not rank_event.ordered and isinstance(event, (Failed, Lost))

    @property
    def flight(self) -> str:
        """The line about the flight recorder's file, or ""."""
        return self._end.flight

    def signal(self, number: int) -> None:
        """Send a signal to the programs of all ranks."""
        broadcast(self.members, Signal(number=number))

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
        verdict = self.verdict
        here = processes.place()
        if verdict is None or verdict.orderly or not self._end.has_written:
            return False
        remote = (one for one in self.members.values() if one.joined.place != here and one.exited is None)
        return any(
            one.is_silent or (self.has_ended and one.lost_at is None and one.rank == verdict.rank) for one in remote
        )

    @property
    def has_ended(self) -> bool:
        """True once the job has been ended after a failure: every sentinel has the order to end its rank."""
        return self.verdict is not None and self._end.due is None

    @property
    def all_ended(self) -> bool:
        """True once all ranks have joined and ended."""
        return len(self.members) == self._size and not self._running

    @property
    def over(self) -> bool:
        """True once every rank that joined has ended, and no decision or step is pending."""
        is_undecided = (self._decision_due is not None or bool(self._lost_ranks)) and self.verdict is None
        return not self._running and self._end.due is None and not is_undecided and bool(self.members)
