"""Detect from outside whether a process makes progress, with real child processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
import sys
import time

import pytest
from helpers.speed import wait_until
from helpers.tiers import after_core

from hvdkit.machine import processes
from hvdkit.watchdog.activity import Activity
from hvdkit.watchdog.base import Sentinel
from hvdkit.watchdog.events import Exiting, Leaving, Training
from hvdkit.watchdog.flight_recorder import FlightReader, FlightRecorder, RecorderState
from hvdkit.watchdog.rank_process import RankProcess

_PTRACE_ATTACH, _PTRACE_DETACH = 16, 17
# Each prints the kernel's ids of its threads except the first, which sleeps.
THREAD = """
import hashlib, threading, time
def compute():
    while True: hashlib.sha256(b"x" * 2**20)
def look():
    while True: time.sleep(0.2)
thread = threading.Thread(target=%s, daemon=True)
thread.start()
print(thread.native_id, flush=True)
time.sleep(1000)
"""
CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True)\\n" + sys.argv[1]])
time.sleep(1000)
"""
CHILDREN = {
    "computes": "while True: pass",
    "copies": "import time\nwhile True: open('/dev/zero', 'rb', 0).read(10**6); time.sleep(0.05)",
    "its child computes": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])",
    "sleeps": "import time; time.sleep(1000)",
    "looks now and then": "import time\nwhile True: time.sleep(0.2)",
    "reads in bursts": "import time\nwhile True: open('/dev/zero', 'rb', 0).read(9000); time.sleep(3)",
    "computes in bursts": """
import time
while True:
    until = time.process_time() + 0.04
    while time.process_time() < until: pass
    time.sleep(3)
""",
}


def state_of(pid: int, since: float, waiting: int = 0) -> RecorderState:
    return RecorderState(thread=pid, step=None, number=waiting, count=waiting, waiting=waiting, since=since)


class WatchedAlone(Sentinel):
    """A sentinel without a coordinator."""

    def handle_disconnect(self, *, is_cut_off):
        pass

    def write_line(self, text):
        pass


@pytest.fixture
def start():
    """Return a function that starts a script, and returns its process and the numbers that it prints."""
    started = []

    def run(script: str, *arguments: str) -> tuple[subprocess.Popen, list[int]]:
        command = [sys.executable, "-c", script, *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        return started[-1], [int(word) for word in started[-1].stdout.readline().split()]

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


class Look:
    """Observes a process as its sentinel does. On a busy machine it only takes longer."""

    def __init__(self, pid: int, waiters: list[int], waiting: int = 0) -> None:
        self.began = time.monotonic()
        self._activity = Activity(pid, waiters, self.began)
        self._state = state_of(pid, self.began, waiting)

    def idle(self) -> float:
        """Return the seconds since the last activity."""
        time.sleep(0.1)
        return self._activity.idle(self._state, time.monotonic())

    def moves(self) -> bool:
        """Wait until there is activity twice, at least half a second apart."""
        last = self.began
        for _ in range(2):
            wait_until(lambda: time.monotonic() - self.idle() > last + 0.5)  # noqa: B023
            last = time.monotonic()
        return True

    def rests(self, seconds: float = 1.5) -> bool:
        """Wait until there has been no activity for a while."""
        wait_until(lambda: self.idle() > seconds)
        return True


@pytest.mark.parametrize("works", after_core([True, False], but=[True]))
def test_a_rank_whose_other_threads_compute_does_not_hang(start, works):
    """If the graph contains the loop over all steps, the thread that called it sleeps."""
    child, threads = start(THREAD % ("compute" if works else "look"))
    assert Look(child.pid, []).moves() if works else Look(child.pid, []).rests()
    if works:  # like Horovod's own thread, which is always active
        assert Look(child.pid, threads).rests()


def test_a_rank_that_sleeps_in_a_collective_is_idle_since_it_began(start):
    child, threads = start(THREAD % "compute")
    assert Look(child.pid, threads, waiting=3).rests()


@pytest.mark.parametrize("what", after_core(CHILDREN, but=["computes"]))
def test_a_rank_whose_child_process_works_does_not_hang(start, what):
    """The chief waits for `tar` or an upload, with all its threads asleep."""
    parent, _ = start(CHILD, CHILDREN[what])
    wait_until(lambda: len(processes.descendants(parent.pid)) == (2 if what == "its child computes" else 1))
    look = Look(parent.pid, [])
    if what.endswith("in bursts"):  # as a tracker that looks at the machine
        assert look.rests(seconds=5)
    else:
        assert look.rests() if what in ("sleeps", "looks now and then") else look.moves()


def test_a_rank_that_has_ended_is_not_idle():
    child = subprocess.Popen(["true"])
    child.wait()
    assert Activity(child.pid, [], 10.0).idle(state_of(child.pid, 10.0), 500.0) == 0.0


def test_busy_counts_as_work_until_it_ends():
    activity = Activity(os.getpid(), [], 10.0)
    activity.note_progress(90.0)
    assert activity.idle(state_of(os.getpid(), 20.0, waiting=1), 100.0) == 10.0


def test_what_is_seen_of_a_process(start):
    """The start time is read from the kernel, to distinguish processes that reuse a pid."""
    child, _ = start("print(1, flush=True); import time; time.sleep(4000)")
    started = processes.stat(child.pid).started
    wait_until(lambda: processes.stat(child.pid).state == "S")
    assert not processes.is_over(child.pid, started) and processes.is_over(child.pid, started + 1)
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(child.pid))
    assert not processes.is_over(child.pid, started)
    child.kill()
    wait_until(lambda: processes.is_over(child.pid, started))  # although its parent has not collected the exit code yet
    assert child.wait() == -signal.SIGKILL and processes.stat(child.pid) is None
    assert processes.threads(child.pid) == set() and processes.descendants(child.pid) == []


# ---- a rank as seen by its sentinel ------------------------------------------------------------------------------


@pytest.fixture
def watched(start):
    """Return a process that sleeps in an eager collective, its RankProcess, its recorder, and the time it was seen."""
    child, _ = start("print(1, flush=True); import time; time.sleep(1000)")
    recorder, now = FlightRecorder(), time.monotonic()
    struct.pack_into("<q", recorder._memory, 0, child.pid)
    recorder.begin("eager 1", "barrier()", eager=True)
    rank = RankProcess(child.pid)
    rank._reader = FlightReader(recorder.file)
    rank.begin_training(Training(pid=child.pid, waiters=[]), now)
    rank.check_stopped(now)
    return child, rank, recorder, now


def is_stopped(pid: int) -> bool:
    return processes.stat(pid).state == "T"


def test_a_rank_that_was_stopped_has_not_been_idle(watched):
    """A job suspended for longer than the hang limit continues later."""
    child, rank, _, now = watched
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(child.pid))
    assert rank.check_stopped(now + 1.0)
    status = rank.status(now + 700.0)
    assert status.stopped == pytest.approx(699.0) and status.idle == 0.0
    child.send_signal(signal.SIGCONT)
    wait_until(lambda: not is_stopped(child.pid))
    assert rank.check_stopped(now + 701.0)
    status = rank.status(now + 703.0)
    assert status.stopped is None and status.idle == pytest.approx(2.0)


SHRINKS = """
import sys
memory = bytearray(2**26)
print(1, flush=True)
sys.stdin.read(1)
del memory
print(2, flush=True)
sys.stdin.read()
"""


def exits(rank: RankProcess, now: float, seconds: float = 120.0) -> None:
    doing = "handlers of atexit have been ending"
    rank.leaving = Leaving()
    rank.exiting = Exiting(rank=0, doing=doing, seconds=seconds, patience=600.0, is_bounded=False)
    rank.exiting_since = now


def test_when_the_end_of_a_rank_is_late(watched, monkeypatch):
    """Python's end is seen from outside: what runs afterwards has a shorter limit than handlers of the user."""
    _, rank, recorder, now = watched
    exits(rank, now)
    seen = [rank.status(now + seconds) for seconds in (0.0, 119.0, 121.0, 300.0)]
    assert [status.is_late for status in seen] == [False, False, True, True]
    assert [status.idle for status in seen] == pytest.approx([0.0, 0.0, 121.0, 300.0], abs=0.1)

    # Python runs: a handler is idle, and has a thread that waits in a collective
    struct.pack_into("<d", recorder._memory, 56, now + 599.0)
    assert not rank.status(now + 599.0).is_late
    struct.pack_into("<d", recorder._memory, 56, now + 601.0)
    assert rank.status(now + 601.0).is_late
    rank.busy = "uploading"
    status = rank.status(now + 2000.0)
    assert not status.is_late and status.idle == 0.0
    rank.busy = None
    exits(rank, now + 1.0)
    waits = iter([5.0, 104.0, 106.0, 106.0])  # for a core
    monkeypatch.setattr(processes, "waited_seconds", lambda pid: next(waits))
    struct.pack_into("<d", recorder._memory, 56, now)
    seen = [rank.status(now + seconds) for seconds in (1.0, 218.0, 221.5, 223.0)]
    assert [status.is_late for status in seen] == [False, False, False, True]
    exits(rank, now, seconds=0.0)  # not limited
    assert not rank.status(now + 2000.0).is_late


def test_a_rank_that_frees_its_memory_ends_in_time():
    child = subprocess.Popen([sys.executable, "-c", SHRINKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        child.stdout.readline()
        recorder, now = FlightRecorder(), time.monotonic()
        struct.pack_into("<q", recorder._memory, 0, child.pid)
        rank = RankProcess(child.pid)
        rank._reader = FlightReader(recorder.file)
        rank.begin_training(Training(pid=child.pid, waiters=[]), now)
        exits(rank, now)
        assert not rank.status(now).is_late and rank.status(now + 121.0).is_late
        child.stdin.write(b"x")
        child.stdin.flush()
        child.stdout.readline()
        assert not rank.status(now + 122.0).is_late and rank.status(now + 243.0).is_late
        child.kill()


def test_a_rank_was_not_idle_while_its_sentinel_was_stopped_too(watched):
    _, rank, recorder, now = watched
    sentinel = WatchedAlone(rank)
    struct.pack_into("<d", recorder._memory, 40, now - 1000.0)  # start of the wait
    rank.begin_training(rank.training, now - 1000.0)
    assert rank.status(now).idle == pytest.approx(1000.0)
    sentinel._turned_at = now - 1000.0
    sentinel.turn(0.0)
    assert rank.status(time.monotonic()).idle < 900.0
    sentinel.selector.close()


@pytest.mark.full
@pytest.mark.parametrize("missing", ["schedstat", "children"])
def test_kernels_without_all_files_show_as_much(start, monkeypatch, missing):
    child, _ = start(CHILD, CHILDREN["its child computes"])
    wait_until(lambda: len(processes.descendants(child.pid)) == 2)
    below = sorted(processes.descendants(child.pid))
    worker, _ = start("print(1, flush=True)\nwhile True: pass")
    wait_until(lambda: processes.cpu_nanoseconds(worker.pid, worker.pid) > 5e8)
    before = processes.cpu_nanoseconds(worker.pid, worker.pid)
    monkeypatch.setattr(processes, "_has_thread_file", lambda name: name != missing)
    after = processes.cpu_nanoseconds(worker.pid, worker.pid)
    assert sorted(processes.descendants(child.pid)) == below
    assert after > before - 5e7, (before, after)  # ticks of 10 ms
    wait_until(lambda: processes.cpu_nanoseconds(worker.pid, worker.pid) > after + 5e7)
    assert processes.cpu_nanoseconds(2**22 + 1, 1) is None and processes.descendants(2**22 + 1) == []


def test_a_process_that_a_debugger_holds_does_not_hang(start):
    child, _ = start("print(1, flush=True)\nwhile True: pass")
    rank = RankProcess(child.pid)
    rank.begin_training(Training(pid=child.pid, waiters=[]), time.monotonic())
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(_PTRACE_ATTACH, child.pid, None, None) == 0
    os.waitpid(child.pid, 0)
    try:
        later = time.monotonic() + 1000.0
        rank.check_stopped(later)
        assert rank._activity.idle(state_of(child.pid, 0.0), later) < 1.0
    finally:
        libc.ptrace(_PTRACE_DETACH, child.pid, None, None)


def test_only_processes_below_the_sentinel_are_taken_for_the_rank(start):
    """A program in a container reports its PID there, which on this host may belong to any process."""
    child, _ = start("print(1, flush=True)\nimport time; time.sleep(1000)")
    rank = RankProcess(child.pid)
    rank.begin_training(Training(pid=os.getppid(), waiters=[]), time.monotonic())
    assert rank.pid == child.pid
    rank = RankProcess(os.getpid())
    rank.begin_training(Training(pid=child.pid, waiters=[]), time.monotonic())
    assert rank.pid == child.pid
