"""What a rank's training knows and its sentinel cannot see: the loss, examples per step, saves, seconds in collectives.

The training process writes these facts to the memory of the flight recorder, a fraction of a microsecond each. Its
sentinel reads them if the job serves metrics.
"""

from __future__ import annotations

import math
import struct
import time
from mmap import mmap
from typing import NamedTuple

OFFSET = 1024
"""Where the notes begin in the recorder's memory."""
# Steps trained (-1: not counted), and when the last one ended, by the host's monotonic clock in seconds; examples per
# step (0: unknown); loss (-inf: unknown); step (-1: none), seconds since 1970 and duration of the last save; number,
# bytes and seconds of eager collectives.
_NOTES = struct.Struct("qdddqddQQd")
_STEP, _STEP_AT, _EXAMPLES, _LOSS, _SAVED_STEP, _SAVED_AT, _SAVE_SECONDS, _COUNT, _BYTES, _SECONDS = range(10)
_FIELD = 8


class NotedTraining(NamedTuple):
    """The notes of a rank.

    Attributes:
        step: steps trained, or None if they are not counted.
        step_at: when the last one ended, by the host's monotonic clock in seconds.
        examples: rows of a global batch, on average, or None.
        loss: the last known loss, or None.
        saved_step: the step of the last complete save, or None.
        saved_at: when it was complete, in seconds since 1970.
        save_seconds: how long it took.
        collectives: number of eager collectives that have ended.
        nbytes: bytes that this rank has sent in them.
        seconds: seconds that this rank has spent in them.
    """

    step: int | None
    step_at: float
    examples: float | None
    loss: float | None
    saved_step: int | None
    saved_at: float
    save_seconds: float
    collectives: int
    nbytes: int
    seconds: float


class TrainingNotes:
    """Writes the notes. Each field is written by a single instruction."""

    def __init__(self, memory: mmap) -> None:
        view = memoryview(memory)[OFFSET : OFFSET + _NOTES.size]
        self._counts = view.cast("Q")
        self._signed = view.cast("q")
        self._numbers = view.cast("d")
        _NOTES.pack_into(memory, OFFSET, -1, 0.0, 0.0, -math.inf, -1, 0.0, 0.0, 0, 0, 0.0)

    def at_step(self, step: int) -> None:
        """Note the number of steps trained."""
        self._numbers[_STEP_AT] = time.monotonic()
        self._signed[_STEP] = step

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
        self._counts[_COUNT] += 1
        self._counts[_BYTES] += nbytes
        self._numbers[_SECONDS] += seconds


def read_notes(memory: mmap) -> NotedTraining:
    """Return the notes in the recorder's memory."""
    step, step_at, examples, loss, saved_step, saved_at, save_seconds, count, nbytes, seconds = _NOTES.unpack_from(
        memory, OFFSET
    )
    return NotedTraining(
        step=None if step < 0 else step,
        step_at=step_at,
        examples=examples or None,
        loss=None if loss == -math.inf else loss,
        saved_step=None if saved_step < 0 else saved_step,
        saved_at=saved_at,
        save_seconds=save_seconds,
        collectives=count,
        nbytes=nbytes,
        seconds=seconds,
    )
