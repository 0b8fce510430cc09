"""The rank's side: starts the sentinel, reports this rank's state to it, and carries out its orders."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache

from hvdkit.errors import ClusterError
from hvdkit.machine.launcher import LaunchedRank
from hvdkit.watchdog.channel import receive_now, send_now
from hvdkit.watchdog.ending import end_process, ending, flush_files, is_victim, report_exit_status
from hvdkit.watchdog.events import (
    Busy,
    Connect,
    End,
    Exiting,
    Failed,
    GiveFlight,
    GiveStacks,
    Leaving,
    Left,
    Message,
    Release,
    Sampled,
    Saved,
    Training,
    Unwound,
    Watching,
)
from hvdkit.watchdog.flight_recorder import FlightRecorder, recorder
from hvdkit.watchdog.lines import flush_streams
from hvdkit.watchdog.metrics_server import METRICS, address_from_environment, url_of
from hvdkit.watchdog.sentinel_start import inherited_socket, listen_for_ranks, resume_if_stopped, start_sentinel
from hvdkit.watchdog.settings import EXIT, WatchdogSettings, seconds
from hvdkit.watchdog.tracebacks import ended_a_step, left_a_loop, raised, with_cause_first
from hvdkit.watchdog.training_thread import TrainingThread

_LOGGER = logging.getLogger("hvdkit")
# Seconds to wait for the coordinator's answer before this rank reports its failure itself.
_ANSWER_SECONDS = 5.0
_SEND_SECONDS = 2.0
# How many times a killed sentinel is replaced.
_RESTARTS = 10
_REPORTED = "_hvdkit_reported"  # attribute of an exception that this rank has reported


class Reporter:
    """This process's connection to its sentinel.

    Attributes:
        pid: PID of this process, to distinguish forked children, which are not ranks.
        doing: what this rank does while others wait for it, for reports; "" if unknown.
        saved: what the run has saved; None without a Supervisor.
        problem: why rank 0 cannot serve metrics, to be raised on all ranks, or None.
    """

    def __init__(self, recorder: FlightRecorder) -> None:
        self.recorder = recorder
        self.pid = os.getpid()
        self.doing = ""
        self.saved: Saved | None = None
        self.problem: ValueError | None = None
        self._metrics_listener: socket.socket | None = None
        self._socket: socket.socket | None = None
        self._sending = threading.RLock()  # reentrant: a signal handler may use hk.busy
        self._listeners: Sequence[socket.socket] = ()
        self._offer = ""
        self._child: subprocess.Popen[bytes] | None = None
        self._sentinel = 0
        self._connect: Connect | None = None
        self._training: Training | None = None
        self._busy_reasons: list[str] = []
        self._answered = threading.Event()
        self._released = threading.Event()
        self._closed = False
        self._leaving: Leaving | None = None
        self._is_exiting = False
        self._under_run = False
        self._all_leave = False
        self._finalize: Callable[[], None] = lambda: None
        self._must_finalize = False
        self._thread = TrainingThread(threading.main_thread().ident or 0)
        self._rank = self._restarts = 0
        self._settings = WatchdogSettings()
        self._exit_seconds = 0.0
        self._status_reader = report_exit_status()
        os.register_at_fork(after_in_child=self._close_in_child)

    # ---- the sentinel -----------------------------------------------------------------------------------------

    @property
    def is_watched(self) -> bool:
        """True if this rank has a sentinel."""
        return self._socket is not None

    def begin(self, launched: LaunchedRank) -> str:
        """Connect to a sentinel, or start one. Called before MPI starts. Raises ValueError if a setting is invalid.

        In rank 0, return the offer with which other ranks reach the coordinator, see :meth:`join`; otherwise "".
        """
        self._rank = launched.rank
        self._closed = self._is_exiting = self._all_leave = False
        self._leaving = None
        self._answered.clear()
        self._released.clear()
        self._settings = WatchdogSettings.from_environment()
        self._exit_seconds = seconds(EXIT)
        self._under_run = self._under_run or self._adopt_sentinel()
        if self._under_run:
            return ""
        address = address_from_environment()
        if launched.size == 1 or not self._settings.heartbeat:
            if address is not None:
                _LOGGER.warning("%s has no effect in a rank without watchdog: start it with hvdkit run", METRICS)
            return ""
        if self.is_watched:  # hk.init() failed, and was called again
            return self._offer
        if launched.rank != 0:
            self._start_sentinel()
            return ""
        self._listeners, offer = listen_for_ranks(on_several_hosts=launched.on_several_hosts)
        if not offer:
            return ""
        self.problem = None
        try:
            self._metrics_listener = None if address is None else address.listen()
        except ValueError as error:
            self.problem = error
        self._start_sentinel()
        self._offer = offer
        return self._offer

    def join(
        self,
        rank: int,
        hosts: Sequence[str],
        places: Sequence[str],
        offer: str,
        waiters: Collection[int],
        finalize: Callable[[], None],
    ) -> None:
        """Join the world. Called by the training thread.

        Args:
            rank: this rank.
            hosts: the host of each rank.
            places: the place of each rank, see :class:`Joined`.
            offer: the result of :meth:`begin` in rank 0.
            waiters: IDs of threads whose CPU time is no progress: those of Horovod and MPI, which poll.
            finalize: finalizes MPI.
        """
        self._thread = TrainingThread(threading.get_ident())
        self._finalize = finalize
        if not self._under_run and offer:
            self._connect = Connect.of(rank, hosts, places, offer)
            if self._metrics_listener is not None:
                _LOGGER.info("metrics: %s", url_of(self._metrics_listener))
        self._training = Training(pid=self.pid, waiters=sorted(waiters), step=self.recorder.step)
        self._send_state()

    def start_helper(self, name: str, target: Callable[..., None], *args: object) -> threading.Thread:
        """Start a daemon thread that does none of the program's work, so that its CPU time is no progress."""
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        thread.start()
        self.add_waiters([] if thread.native_id is None else [thread.native_id])
        return thread

    def add_waiters(self, waiters: Collection[int]) -> None:
        """Add threads whose CPU time is no progress. Called by the training thread."""
        if self._training is not None:
            self._training = replace(self._training, waiters=sorted({*self._training.waiters, *waiters}))
            self.send(self._training)

    def _send_state(self) -> None:
        """Send this rank's state to a new sentinel."""
        busy = None if self.reason is None else Busy(reason=self.reason)
        for message in (self._connect, self._training, busy, self.saved, self._leaving):
            if message is not None:
                self.send(message)

    def _adopt_sentinel(self) -> bool:
        """Connect to the sentinel that started this program; return False if there is none."""
        try:
            if (connected := inherited_socket()) is None:
                return False
            self._serve_from(connected)
        except OSError:
            return False
        return True

    def _start_sentinel(self) -> None:
        """Start a sentinel, in rank 0 with the listening sockets of the coordinator."""
        try:
            self._child, connected = start_sentinel(self.pid, self._listeners, self._metrics_listener)
            self._serve_from(connected)
        except (OSError, RuntimeError) as error:  # Python 3.12+ cannot start threads while it exits
            _LOGGER.warning("watchdog: no sentinel can be started (%s): failures may not be noticed", error)

    def _serve_from(self, connected: socket.socket) -> None:
        connected.settimeout(_SEND_SECONDS)
        socket.send_fds(connected, [b"f"], [self.recorder.file, self._status_reader])
        self._socket = connected
        threading.Thread(target=self._serve, args=[connected], name="hvdkit-watchdog", daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        """Carry out the sentinel's orders, in a separate thread."""
        if self._child is not None:
            self._child.wait()  # the child forks the sentinel and exits
        ready = select.poll()  # select.select does not accept descriptors above 1,023
        ready.register(connected, select.POLLIN)
        while True:
            self.recorder.note_python()
            try:
                if not ready.poll(self._settings.check_interval * 1000):
                    resume_if_stopped(self._sentinel)
                    self._sample()
                    continue
                order = receive_now(connected)
            except (OSError, ValueError):
                break
            try:
                self._obey(order)
            except Exception as error:  # must not end the rank
                _LOGGER.warning("watchdog: rank %d cannot carry out %s: %s", self._rank, type(order).__name__, error)
        connected.close()
        is_over = self._closed or ending().begun or self._connect is None or self._socket is not connected
        if not is_over:
            self._replace_sentinel()
        if is_over or not self.is_watched:  # no sentinel will answer
            self._answered.set()
            self._released.set()

    def _replace_sentinel(self) -> None:
        """Start a new sentinel in place of one that was killed, a limited number of times."""
        self._socket = None
        self._restarts += 1
        if self._restarts > _RESTARTS:
            _LOGGER.warning("watchdog: the sentinels of rank %d keep dying: failures may not be noticed", self._rank)
            return
        _LOGGER.warning("watchdog: the sentinel of rank %d was killed; starting a new one", self._rank)
        self._start_sentinel()
        self._send_state()

    def _sample(self) -> None:
        """Record the collectives noted by this rank's graphs, unless the interpreter is about to exit."""
        if self._is_exiting or self._closed or ending().begun:
            return
        try:
            self.recorder.sampler()
            self.recorder.set_in_graph(self._thread.is_in_graph)
            caught = self._thread.exception
            if caught is not None and not hasattr(caught, _REPORTED):
                # The program handles it, and has ended a step or a loop of steps.
                has_ended = ended_a_step(caught, self.recorder.graphs) or left_a_loop(caught, self.recorder.callers)
                if has_ended:
                    self.note_raised(caught)
        except Exception as error:  # must not end the rank
            _LOGGER.warning("flight recorder: rank %d stops recording collectives in graphs: %s", self._rank, error)
            self.recorder.sampler = lambda: None

    def explained(self, error: Exception) -> Exception:
        """Return an error to raise instead of ``error``, with a message that begins with what went wrong, and where.

        If another rank has caused ``error``, that is a :class:`ClusterError` with the verdict.
        """
        if is_victim(error):
            self._answered.wait(_ANSWER_SECONDS)
            return ClusterError(ending().line).with_traceback(None) if ending().line else error
        self.note_raised(error)
        return with_cause_first(error, self._rank)

    def note_raised(self, error: BaseException) -> None:
        """Report an exception that has ended a step in which other ranks may still be, unless they have caused it."""
        if hasattr(error, _REPORTED) or not self.is_watched or ending().begun or is_victim(error):
            return
        setattr(error, _REPORTED, True)
        self.send(raised(error))

    def _obey(self, order: Message) -> None:
        if isinstance(order, Watching):
            self._sentinel = order.pid
        elif isinstance(order, GiveStacks):
            self.send(self._thread.stacks(self.recorder, self.reason, self.doing))
        elif isinstance(order, GiveFlight):
            self._sample()
            self.send(Sampled())
        elif isinstance(order, Release):
            if order.code is not None and ending().begun:
                ending().code = order.code
            self._all_leave = order.all_leave
            self._released.set()
            self._answered.set()
        elif isinstance(order, End):
            if self._is_exiting:  # it ends soon, and with its own exit code
                self._released.set()
                return
            if not order.unwind:
                end_process(order.code)
            self._must_finalize = order.finalize
            ending().line = order.line
            ending().begin(order.code, order.unwind)
            self._answered.set()

    def send(self, message: Message) -> None:
        """Send a message to the sentinel; drop the connection if that takes longer than two seconds."""
        connected = self._socket
        if connected is None:
            return
        with self._sending:
            try:
                send_now(connected, message)
            except OSError:  # the message may be partly sent, so later ones could not be parsed
                with contextlib.suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)

    def note_saved(self, logdir: str, step: int | None) -> None:
        """Report what the run has saved: the newest checkpoint in ``logdir`` is that of ``step``; None: there is none.

        The last line of a job that fails says so. Called on every rank; on the chief also by the thread that saves.
        """
        self.saved = Saved(logdir=logdir, step=step)
        self.send(self.saved)

    @contextlib.contextmanager
    def busy(self, reason: str) -> Iterator[None]:
        """Suspend hang detection inside the context: its work is not visible from outside."""
        self._busy_reasons.append(reason)
        self.send(Busy(reason=reason))
        try:
            yield
        finally:
            self._busy_reasons.remove(reason)
            self.send(Busy(reason=self.reason))

    @property
    def reason(self) -> str | None:
        """The reason of the most recent open :meth:`busy`, or None."""
        return self._busy_reasons[-1] if self._busy_reasons else None

    def _close_in_child(self) -> None:
        """Close the parent's connections in a forked child: otherwise they would stay open after the parent's end."""
        if self._socket is not None:
            os.close(self._socket.detach())
            self._socket = None
        self._close_listeners()

    def _close_listeners(self) -> None:
        for one in self._listeners:
            one.close()
        self._listeners = ()
        if self._metrics_listener is not None:
            self._metrics_listener.close()
            self._metrics_listener = None

    # ---- the end ----------------------------------------------------------------------------------------------

    def fail(self, failed: Failed) -> bool:
        """Report a failure, and wait a limited time for the coordinator's answer; return False without a sentinel."""
        if not self.is_watched or not (self._under_run or self._connect is not None):
            return False
        self.send(failed)
        self._answered.wait(_ANSWER_SECONDS)
        return True

    def remove(self) -> None:
        """Do not replace the sentinel any more."""
        self._closed = True

    def leave(self, *, keeps_horovod: bool) -> None:
        """Report that this rank's script has ended.

        With ``keeps_horovod``, Horovod may still be needed: wait until the other ranks have ended as well, or are
        waiting. Ctrl-C ends the wait.
        """
        self._answered.clear()
        self._is_exiting = True
        resume_if_stopped(self._sentinel)
        with contextlib.suppress(KeyboardInterrupt):
            self._report_leaving(keeps_horovod)

    def _report_leaving(self, keeps_horovod: bool) -> None:
        self._leaving = Leaving(step=self.recorder.step, keeps_horovod=keeps_horovod)
        self.send(self._leaving)
        if keeps_horovod and self.is_watched:
            flush_streams()
            self._released.wait()

    def note_exit(self, doing: str, *, is_bounded: bool) -> None:
        """Report what this rank does after :meth:`leave`, see :class:`Exiting`."""
        limit = self._exit_seconds
        patience = self._settings.patience
        self.send(Exiting(rank=self._rank, doing=doing, seconds=limit, is_bounded=is_bounded, patience=patience))

    def await_others(self) -> bool:
        """After :meth:`leave`: wait a limited time for the other ranks; return True if all scripts have ended.

        A rank that has kept Horovod running has waited before, and returns immediately.
        """
        if self.is_watched:
            self._answered.wait(_ANSWER_SECONDS)
        return self._all_leave or not self.is_watched

    def leave_world(self, *, keeps_horovod: bool) -> None:
        """Leave the world; the process continues. See :meth:`leave`."""
        self._report_leaving(keeps_horovod)
        self.remove()
        connected = self._socket
        if connected is not None and not self._under_run:
            self.send(Left())
            self._socket = None
            with contextlib.suppress(OSError):  # the sentinel was faster
                connected.shutdown(socket.SHUT_RDWR)
        self._close_listeners()
        self._connect = None
        self._training = None

    def finish(self) -> None:
        """After a failure: wait until all ranks have unwound, then let this interpreter shut down."""
        if not ending().begun or os.getpid() != self.pid:
            return
        flush_files()  # the interpreter would, but only seconds later, on a busy host
        ending().has_unwound()
        self.send(Unwound())
        if self._must_finalize and ending().is_released():
            self._finalize()
        if self.is_watched:
            self._released.wait()
        ending().finish()


@cache
def reporter() -> Reporter:
    """Return the :class:`Reporter` of this process."""
    return Reporter(recorder())
