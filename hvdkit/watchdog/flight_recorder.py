"""The flight recorder: the last collectives of a rank, in memory that its sentinel can read after the rank has died.

Recording a collective takes a few microseconds. The same memory has what the training knows and the sentinel cannot
see, such as the loss: a fraction of a microsecond for each fact.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from types import CodeType
from typing import NamedTuple

SLOTS = 1000
_SLOT_BYTES = 768
_BEGIN = 4096
# The fields of RecorderState; the step is -1 if steps are not counted.
_STATE = struct.Struct("qqQQQddd")
_THREAD, _STEP, _LAST, _COUNT, _WAIT, _SINCE, _IN_GRAPH, _PYTHON = range(8)
# Number, steps trained, start and end (0: not yet) by the host's monotonic clock in seconds, bytes, length of the text.
_SLOT = struct.Struct("QqddQQ")
_END = 3
_BYTES = 4
# Steps trained (-1: not counted), and when the last one ended, by the host's monotonic clock in seconds; examples per
# step (0: unknown); loss (-inf: unknown); step (-1: none), seconds since 1970 and duration of the last save; number,
# bytes and seconds of eager collectives.
_NOTES_BEGIN = 1024
_NOTES = struct.Struct("qdddqddQQd")
_NOTED_STEP, _STEP_AT, _EXAMPLES, _LOSS, _SAVED_STEP, _SAVED_AT, _SAVE_SECONDS, _ENDED, _SENT, _SECONDS = range(10)
# Bytes per field. Fields that the sentinel may read concurrently are written through a memoryview, which takes a single
# instruction; ``struct.pack_into`` would write zeros first.
_FIELD = 8
_NUMBER = struct.Struct("Q")
# Maximum bytes of the key, the ranks and the source line; about 250 remain for the rest.
_KEY_TEXT = 200
_RANKS_TEXT = 120
_LINE_TEXT = 160


EAGER = "eager "
"""Prefix of the keys of eager collectives. The key of a graph's collective is the name of its op."""


class CollectiveRecord(NamedTuple):
    """One collective of a rank. In JSON it is a list of its fields.

    Attributes:
        number: 1 for the rank's first collective.
        key: identifies the collective across ranks.
        what: its name, dtypes and shapes.
        line: the user's source line that led to it.
        ranks: the participating ranks as short text, even for thousands; "": all.
        nbytes: bytes that this rank sends.
        step: steps trained before it, or None if they are not counted.
        start: start time by the host's monotonic clock, in seconds.
        end: end time by the same clock; None if the rank is still in it.
    """

    number: int
    key: str
    what: str
    line: str
    ranks: str
    nbytes: int
    step: int | None
    start: float
    end: float | None

    def __str__(self) -> str:
        return f"{self.what} ({self.line})"

    @property
    def is_eager(self) -> bool:
        """True if it was called from Python. Ranks match these by order, and their arguments are compared elsewhere."""
        return self.key.startswith(EAGER)

    @property
    def participants(self) -> tuple[int, ...] | None:
        """The ranks that take part. None: all; empty: unknown, because there were too many to record."""
        return _participants(self.ranks)

    @staticmethod
    def from_json(fields: object) -> CollectiveRecord:
        """Return the record with these fields, as decoded from JSON. Raises TypeError for other values."""
        if not isinstance(fields, list) or tuple(map(type, fields)) not in _RECORD_TYPES:
            raise TypeError("not a record")
        return CollectiveRecord._make(fields)


_RECORD_TYPES = set(product([int], [str], [str], [str], [str], [int], [int, type(None)], [float], [float, type(None)]))


@dataclass(frozen=True)
class RecorderState:
    """Progress of a rank.

    Attributes:
        thread: thread ID of the training thread.
        step: steps trained, or None if they are not counted.
        number: number of the last recorded collective, or 0. Collectives of graphs are recorded with a delay.
        count: eager collectives begun in this world.
        waiting: number of the eager collective that the rank is in, or 0.
        since: when that collective began, or the last one ended, by the host's monotonic clock in seconds.
        in_graph: when the training thread was last seen inside a graph, after the graph's collectives had been
            recorded, by the same clock; 0: not at the last look.
        python: when the process last ran Python in another thread, by the same clock. It no longer does once the
            interpreter has ended.
    """

    thread: int
    step: int | None
    number: int
    count: int
    waiting: int
    since: float
    in_graph: float = 0.0
    python: float = 0.0


class TrainingNotes:
    """Writes what the training knows, for metrics. Each field is written by a single instruction."""

    def __init__(self, memory: mmap.mmap) -> None:
        view = memoryview(memory)[_NOTES_BEGIN : _NOTES_BEGIN + _NOTES.size]
        self._counts = view.cast("Q")
        self._signed = view.cast("q")
        self._numbers = view.cast("d")
        _NOTES.pack_into(memory, _NOTES_BEGIN, -1, 0.0, 0.0, -math.inf, -1, 0.0, 0.0, 0, 0, 0.0)

    def at_step(self, step: int) -> None:
        """Note the number of steps trained."""
        self._numbers[_STEP_AT] = time.monotonic()
        self._signed[_NOTED_STEP] = step

    def expect_examples(self, per_step: float | None) -> None:
        """Note the mean number of rows of a global batch; None: unknown."""
        self._numbers[_EXAMPLES] = per_step or 0.0

    def at_loss(self, loss: float) -> None:
        """Note the loss."""
        self._numbers[_LOSS] = loss

    def saved(self, step: int, seconds: float) -> None:
        """Note that a save of ``step`` is complete, and how long it took."""
        self._signed[_SAVED_STEP] = step
        self._numbers[_SAVED_AT] = time.time()
        self._numbers[_SAVE_SECONDS] = seconds

    def ended_collective(self, nbytes: int, seconds: float) -> None:
        """Count an eager collective."""
        self._counts[_ENDED] += 1
        self._counts[_SENT] += nbytes
        self._numbers[_SECONDS] += seconds


class FlightRecorder:
    """Records collectives.

    Attributes:
        file: descriptor of the memory, for the sentinel.
        last: name of the last eager collective, or "".
        graphs: names of the functions of TensorFlow that have collectives.
        callers: the user's code that called them when they were traced, and the lines of these calls.
        sampler: records the collectives that this rank's graphs have noted since its last call.
        notes: what the training knows, for metrics.
    """

    def __init__(self) -> None:
        self.file = memory_file()
        os.ftruncate(self.file, _BEGIN + SLOTS * _SLOT_BYTES)
        self._memory = mmap.mmap(self.file, 0)
        self.notes = TrainingNotes(self._memory)
        self._numbers = itertools.count(1)
        # The training and sampling threads both record. Reentrant, because a signal handler may interrupt the former.
        self._writing = threading.RLock()
        self.step: int | None = None
        self.last = ""
        self.graphs: set[str] = set()
        self.callers: dict[CodeType, set[int]] = {}
        self.sampler: Callable[[], None] = lambda: None
        view = memoryview(self._memory)
        self._counts = view.cast("Q")
        self._signed = view.cast("q")
        self._times = view.cast("d")
        _STATE.pack_into(self._memory, 0, threading.get_native_id(), -1, 0, 0, 0, time.monotonic(), 0.0, 0.0)

    def begin_world(self) -> None:
        """Count eager collectives from 0 again: ``hk.init()`` was called again, on all ranks."""
        self._counts[_COUNT] = 0

    def at_step(self, step: int) -> None:
        """Record the number of steps trained."""
        self.step = step
        self._signed[_STEP] = step
        self.notes.at_step(step)

    def begin(
        self,
        key: str,
        what: str,
        line: str = "",
        ranks: Sequence[int] | None = None,
        nbytes: int = 0,
        *,
        eager: bool,
        at: float | None = None,
    ) -> int:
        """Record that the rank enters a collective, see :class:`CollectiveRecord`; return its number for :meth:`end`.

        Args:
            eager: the calling thread waits in it.
            at: start time by the host's monotonic clock; default: now.
        """
        now = time.monotonic() if at is None else at
        line = line.encode(errors="replace")[-_LINE_TEXT:].decode(errors="ignore")
        text = "\0".join((_short_key(key), ranks_text(tuple(ranks or ())), line, what))
        data = text.encode(errors="replace")[: _SLOT_BYTES - _SLOT.size]
        step = -1 if self.step is None else self.step
        with self._writing:
            number = next(self._numbers)
            start = _BEGIN + (number - 1) % SLOTS * _SLOT_BYTES
            # Write the number last: readers skip a slot without it.
            _SLOT.pack_into(self._memory, start, 0, step, now, 0.0, nbytes, len(data))
            self._memory[start + _SLOT.size : start + _SLOT.size + len(data)] = data
            self._counts[start // _FIELD] = self._counts[_LAST] = number
            self._counts[_COUNT] += eager
        if eager:
            self.last = what
            self._set_waiting(number, now)
        return number

    def _set_waiting(self, number: int, now: float) -> None:
        """Record which eager collective the rank is in. Write the time first, because readers read it last."""
        self._times[_SINCE] = now
        self._counts[_WAIT] = number

    def end(self, number: int, *, eager: bool, at: float | None = None) -> None:
        """Record that the rank has left collective ``number``."""
        now = time.monotonic() if at is None else at
        start = (_BEGIN + (number - 1) % SLOTS * _SLOT_BYTES) // _FIELD
        nbytes = 0
        if self._counts[start] == number:  # the slot has not been reused
            self._times[start + _END] = now
            nbytes = self._counts[start + _BYTES]
        if eager:
            self.notes.ended_collective(nbytes, now - self._times[_SINCE])
            self._set_waiting(0, now)

    @property
    def waiting(self) -> bool:
        """True while the rank is in an eager collective."""
        return self._counts[_WAIT] != 0

    def describe(self) -> str:
        """Describe the last eager collective."""
        if not self.last:
            return "no eager collective yet"
        seconds = f"{time.monotonic() - self._times[_SINCE]:.0f} s"
        return (
            f"has waited in {self.last} for {seconds}" if self.waiting else f"returned from {self.last} {seconds} ago"
        )

    def set_in_graph(self, is_inside: bool) -> None:
        """Record whether the training thread is inside a graph whose collectives have just been recorded."""
        self._times[_IN_GRAPH] = time.monotonic() if is_inside else 0.0

    def note_python(self) -> None:
        """Record that this process runs Python."""
        self._times[_PYTHON] = time.monotonic()

    def in_thread(self) -> None:
        """Record the calling thread as the training thread."""
        self._signed[_THREAD] = threading.get_native_id()


def memory_file() -> int:
    """Return the descriptor of an anonymous file in memory."""
    try:
        return os.memfd_create("hvdkit-flight")
    except (AttributeError, OSError):  # Python was built against an old C library
        import tempfile  # not imported by sentinels

        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def collective_key(name: str, ranks: Sequence[int] | None) -> str:
    """Return the key of collective ``name`` among ``ranks``; None: all ranks.

    Example:
        >>> collective_key("sum", [0, 2, 4])
        'sum of 0:5:2'
    """
    return f"{name} of {ranks_text(tuple(ranks))}" if ranks else name


@lru_cache(256)
def _short_key(key: str) -> str:
    """Return the key; replace the end of a long one with a checksum."""
    data = key.encode(errors="replace")
    if len(data) <= _KEY_TEXT:
        return key
    checksum = f"...{zlib.crc32(data):08x}"
    return data[: _KEY_TEXT - len(checksum)].decode(errors="ignore") + checksum


@lru_cache(256)
def ranks_text(ranks: tuple[int, ...]) -> str:
    """Return ranks as text: a slice if evenly spaced, otherwise a list. Truncate a long list and append a checksum."""
    if len(ranks) > 1 and ranks[1] > ranks[0]:
        step = ranks[1] - ranks[0]
        if ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
            return f"{ranks[0]}:{ranks[-1] + 1}:{step}"
    text = ",".join(map(str, ranks))
    if len(text) <= _RANKS_TEXT:
        return text
    return f"{text[:_RANKS_TEXT].rpartition(',')[0]},...{zlib.crc32(text.encode()):08x}"


@lru_cache(256)
def _participants(text: str) -> tuple[int, ...] | None:
    """Parse the result of :func:`ranks_text`. None: all ranks; an empty tuple: unknown."""
    if not text:
        return None
    try:
        if ":" not in text:
            return tuple(map(int, text.split(",")))
        first, end, step = map(int, text.split(":"))
        return tuple(range(first, end, step))
    except ValueError:  # truncated, with a checksum
        return ()


@cache
def recorder() -> FlightRecorder:
    """Return the recorder of this process."""
    return FlightRecorder()


class FlightReader:
    """Reads the records of a :class:`FlightRecorder` from its memory, whose descriptor is ``file``."""

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)

    def state(self) -> RecorderState:
        """Return the rank's progress."""
        state = RecorderState(*_STATE.unpack_from(self._memory))
        return replace(state, step=None) if state.step == -1 else state

    def notes(self) -> tuple[int, float, float, float, int, float, float, int, int, float]:
        """Return what the rank's training has noted, see ``_NOTES``."""
        return _NOTES.unpack_from(self._memory, _NOTES_BEGIN)

    def record(self, number: int) -> CollectiveRecord | None:
        """Return collective ``number``, or None if its slot has been reused or is being written."""
        start = _BEGIN + (number - 1) % SLOTS * _SLOT_BYTES
        slot = self._memory[start : start + _SLOT_BYTES]
        stored, step, begin, end, nbytes, length = _SLOT.unpack_from(slot)
        if stored != number or _NUMBER.unpack_from(self._memory, start)[0] != number:
            return None
        text = slot[_SLOT.size : _SLOT.size + length].decode(errors="replace")
        key, ranks, line, what = (text.split("\0", 3) + [""] * 3)[:4]
        return CollectiveRecord(number, key, what, line, ranks, nbytes, None if step < 0 else step, begin, end or None)

    def records(self, after: int = 0) -> list[CollectiveRecord]:
        """Return the collectives after number ``after`` that are still available, in order."""
        last = self.state().number
        numbers = range(max(0, after, last - SLOTS) + 1, last + 1)
        return [record for number in numbers if (record := self.record(number)) is not None]
