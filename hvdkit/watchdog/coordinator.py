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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from hvdkit.watchdog.admission import Peer, Server
from hvdkit.watchdog.channel import NO_ANSWER, Closed, Output
from hvdkit.watchdog.events import (
    End,
    Exited,
    Failed,
    Joined,
    Leaving,
    Measured,
    Message,
    Refused,
    Release,
    Signal,
    Status,
    Training,
    Unwound,
    Welcome,
    WriteLine,
)
from hvdkit.watchdog.hung_ranks import HungRanks
from hvdkit.watchdog.job_end import JobEnd
from hvdkit.watchdog.job_metrics import JobMetrics
from hvdkit.watchdog.leaving import LEAVE_SECONDS, LeavingRanks
from hvdkit.watchdog.left_behind import LeftBehind
from hvdkit.watchdog.lines import Lines
from hvdkit.watchdog.member import Member, broadcast
from hvdkit.watchdog.settings import WatchdogSettings
from hvdkit.watchdog.silent_ranks import SilentRanks, not_replaced, of_lost_hosts
from hvdkit.watchdog.verdict import PREEMPTED, Alive, Blame, Judged, Lost, RankEvent, Verdict, is_failure, verdict
from hvdkit.watchdog.waits import Waits

# Seconds to collect failures before a verdict: nearly simultaneous ones are compared to find the first.
_GATHER_SECONDS = 0.25
# Seconds for other ranks to report their own errors after one has raised an exception, or after a program that does not
# use hvdkit has failed: every rank may be about to raise the same.
_OTHERS_SECONDS = 1.0
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
        settings: the watchdog's.
        selector: waits for the sentinels' connections, which arrive at ``listeners`` and prove the ``token``.
        welcome: returns the answer to a sentinel that joins.
        output: called with a rank and its program's output.
        lines: for the user.
        hosts: display names of the ranks' hosts; by default the names that the hosts report.
        under_run: this is ``hvdkit run``, which writes the last line itself, and whose sentinels are not replaced.
        metrics: gets what sentinels report, if the job serves metrics.

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
        metrics: JobMetrics | None = None,
    ) -> None:
        self._size = size
        self.settings = settings
        self.server = Server(selector, listeners, token, size)
        self._welcome = welcome or (lambda joined: settings.welcome(size, measures=metrics is not None))
        self._output = output or (lambda rank, output: None)
        self._lines = lines
        self._under_run = under_run
        self._hosts = hosts or {}
        self._metrics = metrics
        if metrics is not None:
            metrics.begin(size)
        self.members: dict[int, Member] = {}
        # Running ranks with a sentinel, in the order of their last messages.
        self._running: OrderedDict[int, Member] = OrderedDict()
        self._lost: dict[int, Member] = {}  # ranks whose sentinels are gone, and may be replaced; not with hvdkit run
        self._leaving = LeavingRanks(self._running, self._record)
        self._silent = SilentRanks(self._running, settings)
        self._hung = HungRanks(self._running, settings.patience, lines)
        self._events: dict[int, list[RankEvent]] = defaultdict(list)
        self._decision_due: float | None = None
        self._waits = Waits(lambda rank: self.members[rank].last_heard)
        self._ticked_at = time.monotonic()
        self._left_behind = LeftBehind(self._running)
        self.stop_requested = self.notified = False
        self.verdict: Verdict | None = None
        self._end = JobEnd(size, settings, self.members, self.judge, self._lines, writes_last=not under_run)
        self.messages = 0
        self._stopped: set[int] = set()  # ranks that have been ended because the job is being stopped
        self._failed: set[int] = set()  # ranks that have reported their own error
        self._victims: set[int] = set()  # ranks that have reported an error caused by another rank
        self._give_up_at: float | None = None  # after the verdict: when the remaining ranks count as lost
        self._handlers: Mapping[type[Message], Callable[[Member, Any, float], None]] = {
            Status: self._handle_status,
            Measured: self._handle_measurements,
            Training: self._handle_training,
            Failed: self._handle_failure,
            Leaving: self._leaving.add,
            Exited: self._handle_exit,
            Unwound: self._handle_unwound,
        }

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
            member.continue_from(before)
        self.members[joined.rank] = self._running[joined.rank] = member
        self._lost.pop(joined.rank, None)
        if self._metrics is not None:
            self._metrics.join(joined)
        return member

    def handle(self, member: Member, message: Message, now: float) -> None:
        """Handle a message of a sentinel."""
        self.messages += 1
        member.last_heard = now
        if member.is_running:
            self._running.move_to_end(member.rank)
        handler = self._handlers.get(type(message), Member.keep)
        handler(member, message, now)

    def _handle_status(self, member: Member, status: Status, now: float) -> None:
        member.keep(status, now)
        if self._metrics is not None:
            self._metrics.add_status(member.rank, status)
        self._silent.note(member)
        self._waits.replace(member.rank, member.waits, now)
        self._left_behind.note(member, now)
        self._hung.note(member)

    def _handle_measurements(self, member: Member, measured: Measured, now: float) -> None:
        if self._metrics is not None:
            self._metrics.add(member.rank, measured, now)

    def _handle_training(self, member: Member, training: Training, now: float) -> None:
        if member.script_ended_at is not None:  # a second world of the same process
            self._leaving.trains_again(member)
            events = self._events[member.rank]
            events[:] = [one for one in events if not isinstance(one.event, Leaving)]
        member.begin_training(training.pid)
        self._record(member, training, now)

    def _handle_failure(self, member: Member, failed: Failed, now: float) -> None:
        self._record(member, failed, now)
        if self.stop_requested:
            self._stop(member, failed.code)
        (self._victims if failed.follows else self._failed).add(member.rank)
        wait = _GATHER_SECONDS
        if self._victims and not self._failed and not self._leaving.have_ended:
            wait = LEAVE_SECONDS  # the rank that has caused the error will report its own
        elif not self._victims and len(self._failed) < len(self._running):
            wait = _OTHERS_SECONDS  # the error may be about to happen on every rank
        self._decide_at(now + wait)

    def _stop(self, member: Member, code: int) -> None:
        """End a rank of a job that is being stopped, once."""
        if member.rank not in self._stopped:
            self._stopped.add(member.rank)
            member.send(End(code=code, unwind=self.settings.unwind))

    def _handle_unwound(self, member: Member, unwound: Unwound, now: float) -> None:
        member.unwound = True
        if member.rank in self._stopped:
            member.send(Release(code=128 + signal.SIGINT))

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

    def _connection_ended(self, member: Member, now: float, number: int | None) -> None:
        """Handle a lost sentinel. ``number`` is the connection's error, e.g. if the sentinel's host does not answer."""
        self._lose(member, now, is_silent=number in NO_ANSWER)
        if member.is_silent:
            why = f"has not answered for {now - member.last_heard:.0f} s: its host is down, or the network is cut"
            self._blame(Blame(member.rank, Judged(cause=why, dead=True), member.last_heard))
        elif self._under_run:
            self._blame_lost(member)
        else:
            self._lost[member.rank] = member

    def _blame_lost(self, member: Member) -> None:
        assert member.lost_at is not None
        self._lost.pop(member.rank, None)
        self._record(member, Lost(), member.lost_at)
        self._decide_at(time.monotonic() + _GATHER_SECONDS)

    def _forget_running(self, member: Member) -> None:
        self._running.pop(member.rank, None)
        self._leaving.has_stopped(member)
        self._left_behind.has_stopped(member)
        self._silent.has_ended(member)
        if self._metrics is not None:
            self._metrics.end(member.rank)

    def _lose(self, member: Member, now: float, *, is_silent: bool) -> None:
        """Handle the end of a sentinel, or give up one that does not answer."""
        member.lost_at = now
        member.is_silent = is_silent
        self._forget_running(member)
        if is_silent:
            member.disconnect()

    def _record(self, member: Member, event: Message, at: float, *, ordered: bool = False) -> None:
        ordered = ordered or self.stop_requested or self.verdict is not None
        self._events[member.rank].append(RankEvent(member.rank, at, event, ordered))

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
            self._silent.postpone(elapsed)
        self.server.close_unauthenticated(now)
        if self._give_up_at is not None and now >= self._give_up_at:
            self._give_up_at = None
            for member in list(self._running.values()):  # its sentinel is stopped or cut off
                self._lose(member, now, is_silent=True)
        self._end.tick(now)
        if self.verdict is not None:
            return
        self._leaving.release(now, all_joined=len(self.members) == self._size)
        if self.stop_requested:
            if self._stopped:  # end ranks that wait in a collective for one that has ended; others may be saving
                for member in [one for one in self._running.values() if one.waits]:
                    self._stop(member, 128 + signal.SIGINT)
            return
        for member in not_replaced(self._lost, now):
            self._blame_lost(member)
        for blame in self._silent.silent(now):
            self._lose(self.members[blame.rank], now, is_silent=True)  # the end of the job does not wait for it
            self._blame(blame)
        for blame in self._silent.stopped(now):
            self._blame(blame)
        has_all = len(self.members) == self._size and not self._lost
        if (hung := self._hung.check(now, has_all=has_all)) is not None:
            self._blame(hung)
        if self._decision_due is None and self.settings.patience:
            self._check_left_behind(now)
        if self._decision_due is None and (difference := self._waits.difference(self._running.keys(), now)) is not None:
            self._blame(Blame(difference.rank, Judged(cause=difference.cause), now))
        if self._decision_due is not None and now >= self._decision_due:
            self._decision_due = None
            self._decide(now)

    def _check_left_behind(self, now: float) -> None:
        """Blame a rank that has left the others by an exception; report waits that last long."""
        if (left := self._left_behind.by_exception(now)) is not None:
            self._lines.line(left.text)
            self._blame(Blame(left.member.rank, Judged(cause=left.cause), left.member.raised_at))
            return
        for rank, line in self._left_behind.report(now):
            self.members[rank].send(WriteLine(text=line))

    def _blame(self, blame: Blame) -> None:
        """Record that a rank cannot continue, unless that is recorded already."""
        member = self.members[blame.rank]
        if any(isinstance(one.event, Judged) for one in self._events[blame.rank]):
            return
        step = member.status.step
        if member.rank not in self._running:  # ranks step together
            step = max((one.status.step for one in self.members.values() if one.status.step is not None), default=None)
        self._record(member, replace(blame.judged, step=step), blame.since)
        self._decide_at(time.monotonic())

    # ---- the end ----------------------------------------------------------------------------------------------

    def judge(self) -> Verdict:
        """Return the verdict on the events so far."""
        now = time.monotonic()
        alive = [RankEvent(rank, now, Alive()) for rank in self._running]
        hosts = {rank: member.joined.host for rank, member in self.members.items()}
        found = verdict([*chain.from_iterable(self._events.values()), *alive], self._size, hosts)
        return replace(found, saved=self.saved)

    @property
    def saved(self) -> str:
        """What the job has saved and where the same command continues, or "" without a Supervisor."""
        reports = [member.saved for member in self.members.values() if member.saved is not None]
        newest = max(reports, key=lambda one: -1 if one.step is None else one.step, default=None)
        return "" if newest is None else newest.text

    def _decide(self, now: float) -> None:
        """End the job if a rank has failed."""
        for member in of_lost_hosts(self._lost, self._running):
            self._blame_lost(member)
        verdict = self.judge()
        have_left = {rank for rank, member in self.members.items() if member.script_ended_at is not None}
        events = chain.from_iterable(self._events.values())
        if verdict.code == 0 or (verdict.rank is None and not any(is_failure(each, have_left) for each in events)):
            return
        self.verdict = verdict
        if self._metrics is not None:
            self._metrics.fail(verdict)
        self._give_up_at = now + self.settings.unwind + _REPORT_END_SECONDS
        self._end.begin(verdict)

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
            member.disconnect()

    @property
    def launcher_waits(self) -> bool:
        """True if the last line is written, but the launcher waits for a rank on another host that does not exit."""
        return self.verdict is not None and self._end.launcher_waits(self.verdict)

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
        is_undecided = (self._decision_due is not None or bool(self._lost)) and self.verdict is None
        return not self._running and self._end.due is None and not is_undecided and bool(self.members)
