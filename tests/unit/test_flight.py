"""The flight recorder: a rank writes it into shared memory, and its sentinel reads it there."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import tensorflow as tf
from helpers.cases import case

from hvdkit.collectives.graph_recorder import Site
from hvdkit.watchdog.events import Flight, decode
from hvdkit.watchdog.flight_recorder import SLOTS, FlightReader, FlightRecorder, collective_key


@pytest.fixture
def pair():
    recorder = FlightRecorder()
    return recorder, FlightReader(recorder.file)


def texts(record):
    return record.key, record.what, record.line, record.participants


def test_records_are_read_as_they_were_written(pair):
    recorder, reader = pair
    assert reader.records() == [] and reader.state().number == 0 and reader.state().step is None
    began = time.monotonic()
    one = recorder.begin("sum", "allreduce of float32[3]", "train.py:7", [0, 2, 3], 12, eager=False)
    recorder.at_step(5)
    two = recorder.begin("eager 1", "barrier()", "träin.py:8", eager=True)
    first, second = reader.records()
    assert texts(first) == ("sum", "allreduce of float32[3]", "train.py:7", (0, 2, 3))
    assert texts(second) == ("eager 1", "barrier()", "träin.py:8", None)
    assert (first.number, first.nbytes, first.step, second.number, second.nbytes, second.step) == (1, 12, None, 2, 0, 5)
    assert began <= first.start <= second.start <= time.monotonic() and first.end is None and second.end is None
    state = reader.state()
    assert (state.thread, state.step, state.number, state.waiting) == (threading.get_native_id(), 5, 2, 2)
    assert state.since == second.start and recorder.waiting and "has waited in barrier() for 0 s" in recorder.describe()
    recorder.end(one, eager=False)
    recorder.end(two, eager=True)
    first, second = reader.records()
    assert first.start <= first.end <= second.end <= time.monotonic()
    assert reader.state().waiting == 0 and reader.state().since == second.end and not recorder.waiting
    assert "returned from barrier() 0 s ago" in recorder.describe()


def test_a_collective_of_a_graph_has_ended_when_it_begins_again(pair):
    """Its end is overwritten if the graph has run several times since the last sample."""
    recorder, reader = pair
    site = Site("sum", "sum of float32[3]", "train.py:7", None, 12)
    for began, ended in ((1.0, 0.0), (3.0, 4.0), (5.0, 0.0)):
        tf.raw_ops.AssignVariableOp(resource=site.handle(), value=tf.constant([began, ended], tf.float64))
        site.sample(recorder, offset=10.0)
    assert [(record.start, record.end) for record in reader.records()] == [(11.0, 13.0), (13.0, 14.0), (15.0, None)]


def test_any_process_set_is_read_as_it_was_written(pair):
    recorder, reader = pair
    sets = (None, [0], [3], [5, 2], [0, 1], [1, 2, 3, 7, 9, 10], list(range(4096)), [*range(0, 4096, 64)])
    for ranks in sets:
        recorder.begin("key", "what" * 1000, "a.py:1", ranks, eager=False)
    assert [one.participants for one in reader.records()] == [None if one is None else tuple(one) for one in sets]


def test_a_large_process_set_is_sent_as_short_text(pair):
    """The coordinator must read the records of all ranks within half a second."""
    recorder, reader = pair
    for _ in range(SLOTS):
        recorder.begin("key", "what", "a.py:1", range(0, 4096, 2), eager=False)
    message = Flight(records=reader.records())
    assert len(message.encode()) < 100 * SLOTS and decode(message.encode()) == message


def test_the_last_thousand_are_kept_in_order_with_those_that_have_not_ended(pair):
    recorder, reader = pair
    numbers = [recorder.begin(f"key {n}", f"what {n}", eager=False) for n in range(1, 2 * SLOTS + 251)]
    for number in numbers:
        if number % 3:
            recorder.end(number, eager=False)
    found = reader.records()
    assert [record.number for record in found] == list(range(SLOTS + 251, 2 * SLOTS + 251))
    assert all(record.key == f"key {record.number}" for record in found)
    assert [record.number for record in found if record.end is None] == [n for n in range(1251, 2251) if n % 3 == 0]
    assert [record.number for record in reader.records(2248)] == [2249, 2250]
    assert reader.record(1) is None and reader.record(1250) is None


def test_the_end_of_a_collective_whose_slot_is_in_use_again_changes_nothing(pair):
    recorder, reader = pair
    first = recorder.begin("key", "what", eager=False)
    for _ in range(SLOTS):
        recorder.begin("key", "what", eager=False)
    recorder.end(first, eager=False)
    assert all(record.end is None for record in reader.records())


def test_of_a_long_text_the_key_the_line_and_the_ranks_are_kept(pair):
    """If the ranks that take part were lost, a rank would seem to wait for all ranks."""
    recorder, reader = pair
    recorder.begin("key", "grouped_allreduce of " + "float32[3], " * 1000, "train.py:7", [0, 2], eager=False)
    recorder.begin("next", "é" * 1000, "train.py:8", [1], eager=False)
    long, accents = reader.records()
    assert (long.key, long.line, long.participants) == ("key", "train.py:7", (0, 2))
    assert long.what.startswith("grouped_allreduce of float32[3], float32[3]")
    assert (accents.key, accents.line, accents.participants) == ("next", "train.py:8", (1,))
    assert accents.what.startswith("ééé") and set(accents.what) <= {"é", "\ufffd"}


def test_a_long_key_is_shortened_and_leaves_room(pair):
    """Ranks match collectives by key: the end of a long key must still count, and the other fields must fit, too."""
    recorder, reader = pair
    ranks, line = [*range(0, 4096, 2), 4095], "é" * 200
    for key in ("scope/" * 100 + "allreduce", "é" * 300, "x" * 455, "x" * 464, "x" * 1000):
        for one in (key, key + "2", "eager 1 of " + key, key):
            recorder.begin(one, "sum of float32[3]", line, ranks, eager=False)
        with case(key=key):
            first, second, eager, again = reader.records()[-4:]
            assert len(first.key.encode()) <= 200 and first.key[:50] == key[:50] and eager.is_eager
            assert len({first.key, second.key, eager.key}) == 3 and again.key == first.key
            assert {one.what for one in reader.records()} == {"sum of float32[3]"} and set(first.line) == {"é"}
            assert first.participants == ()


def test_ranks_that_cannot_be_read_are_unknown(pair):
    recorder, reader = pair
    recorder.begin("key", "what", eager=False)
    for text in ("0:40", "0:", "0:4096:", "1,2,", "1,x", ":", "0:3:0", "1...00000000", "²"):
        assert reader.records()[0]._replace(ranks=text).participants == (), text


def test_one_collective_has_one_key():
    assert collective_key("sum", None) == collective_key("sum", ()) == "sum"
    assert collective_key("sum", [0, 2, 4]) == "sum of 0:5:2"


def test_ranks_are_compared_by_their_eager_collectives(pair):
    """Collectives of graphs are recorded every two seconds, so ranks with equal work may record different numbers."""
    recorder, reader = pair
    for eager in (True, False, False, True, False):
        recorder.end(recorder.begin("key", "what", eager=eager), eager=eager)
    assert (reader.state().count, reader.state().number) == (2, 5)
    assert [record.number for record in reader.records(3)] == [4, 5]


def test_a_second_world_counts_from_zero(pair):
    """Ranks may have failed at different collectives of the first world."""
    recorder, reader = pair
    recorder.begin("eager 1", "barrier()", eager=True)
    recorder.begin_world()
    assert (reader.state().count, reader.state().number) == (0, 1)
    recorder.begin("eager 1", "barrier()", eager=True)
    assert (reader.state().count, reader.state().number) == (1, 2)


def test_the_training_thread_may_be_another_one(pair):
    recorder, reader = pair
    threads = []
    thread = threading.Thread(target=lambda: (recorder.in_thread(), threads.append(threading.get_native_id())))
    thread.start()
    thread.join()
    assert [reader.state().thread] == threads


def test_two_threads_may_record_at_once(pair):
    """The training thread and the one that records the collectives of graphs; the latter is interrupted."""
    recorder, reader = pair
    counts, threads = [], []

    class Memory(mmap.mmap):
        def __setitem__(self, where, data):
            super().__setitem__(where, data)
            if not threads:  # while the first record is half written
                threads.append(threading.Thread(target=recorder.begin, args=["b", "what"], kwargs={"eager": True}))
                threads[0].start()
                threads[0].join(0.2)
                counts.append(reader.state().number)

    recorder._memory = Memory(recorder.file, 0)
    recorder.begin("a", "what", eager=False)
    threads[0].join()
    assert reader.state().number == 2 and [record.key for record in reader.records()] == ["a", "b"]
    assert counts == [0], "a reader that has seen a number asks for no earlier one again"


# ---- read during a write -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False])
def test_a_slot_that_is_used_again_while_it_is_read_is_not_taken_for_a_record(pair, before):
    """The rank may overwrite all slots before or after the reader copies one."""
    recorder, reader = pair

    def write_all():
        for _ in range(SLOTS):
            recorder.begin("another key", "another one", nbytes=9, eager=False)

    class Memory(mmap.mmap):
        def __getitem__(self, where):
            if before:
                write_all()
            found = super().__getitem__(where)
            write_all()
            return found

    for number in range(1, SLOTS + 1):
        recorder.begin("key", "what", nbytes=number, eager=False)
    reader._memory = Memory(recorder.file, 0)
    for number in (1, 2, 900):
        record = reader.record(number)
        assert record is None or (record.key, record.what, record.nbytes) == ("key", "what", number)


def test_a_record_that_is_half_written_is_not_read(pair):
    """The rank may be killed during a write."""
    recorder, reader = pair

    class Memory(mmap.mmap):
        def __setitem__(self, where, data):
            raise KeyboardInterrupt  # before the text

    for _ in range(SLOTS):
        recorder.begin("key", "what", nbytes=1, eager=False)
    recorder._memory = Memory(recorder.file, 0)
    with pytest.raises(KeyboardInterrupt):
        recorder.begin("other", "texts", nbytes=2, eager=False)
    found = reader.records()
    assert all((one.key, one.what, one.nbytes) == ("key", "what", 1) for one in found)
    assert [one.number for one in found] == list(range(2, SLOTS + 1))
    assert reader.record(SLOTS + 1) is None


WRITER = """
import os, signal, socket, sys, time
from hvdkit.watchdog.flight_recorder import FlightRecorder
recorder = FlightRecorder()
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"f"], [recorder.file])
if sys.argv[2] == "dies":
    recorder.at_step(7)
    for n in range(1, 1501):
        number = recorder.begin(f"key {n}", f"what {n}", "train.py:7", [0, 1], n, eager=n == 1500)
        if n != 1500:
            recorder.end(number, eager=False)
    os.kill(os.getpid(), signal.SIGKILL)
n = 0
while True:
    n += 1
    number = recorder.begin(f"key {n}", f"what {n} " * (n % 50), f"line {n}", [n], n, eager=True)
    recorder.end(number, eager=True)
"""


@pytest.fixture
def start():
    """Start a rank that writes; return its process and a reader of its memory."""
    started = []

    def run(what: str) -> tuple[subprocess.Popen, FlightReader]:
        mine, theirs = socket.socketpair()
        with mine, theirs:
            command = [sys.executable, "-c", WRITER, str(theirs.fileno()), what]
            started.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
            _, files, _, _ = socket.recv_fds(mine, 1, 1)
        reader = FlightReader(files[0])
        os.close(files[0])
        return started[-1], reader

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.full
def test_what_is_read_while_another_process_writes_is_whole(start):
    process, reader = start("writes")
    until, found, last = time.monotonic() + 3.0, 0, 0
    while time.monotonic() < until or not found:
        state = reader.state()
        assert state.number >= last and (state.waiting == 0 or abs(state.waiting - state.number) <= 1)
        last = state.number
        # The records that the rank will overwrite next are read last.
        for number in range(max(1, last - SLOTS + 1), last + 1)[::-1]:
            one = reader.record(number)
            if one is None:
                continue
            found += 1
            assert (one.number, one.key, one.line) == (number, f"key {number}", f"line {number}")
            assert one.participants == (number,)
            assert (one.nbytes == number and f"what {number} " * (number % 50) == one.what) or len(one.what) > 350
            assert one.end is None or one.start <= one.end < one.start + 1000
    assert process.poll() is None


def test_records_are_there_after_the_rank_was_killed(start):
    process, reader = start("dies")
    assert process.wait() == -signal.SIGKILL
    found = reader.records()
    assert [record.number for record in found] == list(range(501, 1501))
    assert all(texts(one) == (f"key {one.number}", f"what {one.number}", "train.py:7", (0, 1)) for one in found)
    assert [one.number for one in found if one.end is None] == [1500]
    state = reader.state()
    assert (state.step, state.number, state.count, state.waiting) == (7, 1500, 1, 1500)
