"""Stop signals, sent to real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from helpers.speed import WAIT

from hvdkit.supervisor.signals import ECHO_SECONDS, PREEMPTED, StopSignals

HEAD = """
import os, select, signal, sys, time
from hvdkit.supervisor import signals
from hvdkit.supervisor.signals import PREEMPTED, StopSignals
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's is ignored
def say(*words):  # handlers call it, too, in the middle of itself: print() refuses that
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
class SaidSignals(StopSignals):
    def _handle(self, number, frame):
        super()._handle(number, frame)
        say('got', signal.Signals(number).name)
"""
LOOP = """
with StopSignals() as stop:
    say('ready')
    for step in range(1500):
        time.sleep(0.01)
        if stop.received:
            say('noted', stop.received.name)
            break
"""
# Reports received signals, and ignores them until it reads a line.
STUBBORN = """
with SaidSignals() as stop:
    say('ready')
    # A signal just before the process begins to read would wait for the end of the read.
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        pass
say('went on')
"""
# One call into native code, during which Python runs no handler: pthread_join of a thread that sleeps. (time.sleep
# and reads return for signals.)
NATIVE = """
import ctypes
signals.GRACE_SECONDS = 0.2
libc = ctypes.CDLL(None)
with StopSignals() as stop:
    say('ready')
    thread = ctypes.c_ulong()
    sleep = ctypes.cast(libc.sleep, ctypes.c_void_p)
    libc.pthread_create(ctypes.byref(thread), None, sleep, ctypes.c_void_p(4000))
    libc.pthread_join(thread, None)
"""


class Process:
    """A script in another process that has printed ``ready``."""

    def __init__(self, code):
        self.process = subprocess.Popen(
            [sys.executable, "-c", HEAD + code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.line() == "ready"

    def line(self):
        return self.process.stdout.readline().strip()

    def send(self, number):
        self.process.send_signal(number)

    def send_and_hear(self, number):
        """Send a signal that does not end the process, and wait until its handler has reported it."""
        self.send(number)
        assert self.line() == f"got {number.name}"

    def end(self, line=""):
        out, err = self.process.communicate(line, timeout=WAIT)
        return self.process.returncode, out.strip(), err


def test_a_signal_is_noted_and_the_loop_ends_by_itself():
    assert PREEMPTED == os.EX_TEMPFAIL
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        process = Process(LOOP + "sys.exit(PREEMPTED)")
        process.send(number)
        assert process.end() == (PREEMPTED, f"noted {number.name}", ""), number


def test_the_first_signal_is_kept():
    process = Process(STUBBORN + "say(stop.received.name)")
    process.send_and_hear(signal.SIGUSR1)
    process.send_and_hear(signal.SIGTERM)
    code, out, _ = process.end()
    assert (code, out.split("\n")) == (0, ["went on", "SIGUSR1"])


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it(second):
    process = Process(STUBBORN)
    process.send_and_hear(signal.SIGTERM)
    time.sleep(ECHO_SECONDS[second])
    process.send(second)
    code, out, err = process.end()
    assert out == ""  # without the line after its loop
    assert code == -second
    assert ("KeyboardInterrupt" in err) == (second == signal.SIGINT)


@pytest.mark.full
def test_a_second_signal_ends_a_main_thread_that_waits_in_native_code():
    process = Process(NATIVE)
    process.send(signal.SIGTERM)
    time.sleep(ECHO_SECONDS[signal.SIGTERM] + 0.3)
    assert process.process.poll() is None
    process.send(signal.SIGTERM)
    code, _, err = process.end()
    assert code == -signal.SIGTERM
    assert err == "hvdkit: ended by a second SIGTERM; unsaved progress is lost\n"


def test_an_echo_of_the_first_is_no_second():
    slow = "signals.ECHO_SECONDS.update(dict.fromkeys(signals.ECHO_SECONDS, 1e6))\n"  # as on a busy machine
    process = Process(slow + STUBBORN)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        process.send_and_hear(number)
    assert process.end()[:2] == (0, "went on")


def test_usr1_may_come_often():
    process = Process(STUBBORN)
    for _ in range(3):
        process.send_and_hear(signal.SIGUSR1)
    assert process.end()[:2] == (0, "went on")


@pytest.mark.parametrize(
    ("number", "handler", "printed"),
    [(signal.SIGINT, "signal.SIG_IGN", ""), (signal.SIGUSR1, "lambda *_: say('mine')", "mine\n")],
)
def test_signals_that_the_program_ignores_or_handles_are_left_to_it(number, handler, printed):
    loop = LOOP.replace("1500", "100") + "say('received', stop.received)"
    process = Process(f"signal.signal({int(number)}, {handler})\n{loop}")
    process.send(number)
    assert process.end()[:2] == (0, f"{printed}received None")


def test_handlers_come_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    for _ in range(2):
        with StopSignals() as stop:
            assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
            signal.raise_signal(signal.SIGTERM)
            assert stop.received == signal.SIGTERM
        assert {number: signal.getsignal(number) for number in before} == before
        assert signal.set_wakeup_fd(-1) == -1


def test_a_handler_set_meanwhile_stays():
    before = signal.getsignal(signal.SIGTERM)

    def mine(number, frame):
        pass

    try:
        with StopSignals():
            signal.signal(signal.SIGTERM, mine)
        assert signal.getsignal(signal.SIGTERM) == mine
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.full
def test_a_previous_handler_gets_the_second_signal():
    process = Process("signal.signal(signal.SIGTERM, lambda *_: (say('mine'), sys.exit(9)))" + STUBBORN)
    process.send_and_hear(signal.SIGTERM)
    time.sleep(ECHO_SECONDS[signal.SIGTERM])
    process.send(signal.SIGTERM)
    assert process.end()[:2] == (9, "mine")


def test_another_thread_changes_nothing():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def inside():
        with StopSignals() as stop:
            seen.extend([signal.getsignal(signal.SIGTERM), stop.received])

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [before, None] and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.full
def test_a_forked_child_ends_as_ever_and_its_parent_does_not_notice():
    process = Process(
        """
signals.GRACE_SECONDS = 0.2
with StopSignals() as stop:
    for _ in range(2):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, b'!')
            time.sleep(4000)
            os._exit(0)
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    say('ready')
    time.sleep(0.6)  # more than the watching thread's grace
    say('received', stop.received)
"""
    )
    assert process.end()[:2] == (0, "received None")


def test_an_event_loop_keeps_its_wakeup_descriptor():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop.received == signal.SIGTERM
        assert os.read(reader, 10) == bytes([signal.SIGTERM])
    finally:
        assert signal.set_wakeup_fd(-1) == writer
        os.close(reader)
        os.close(writer)
