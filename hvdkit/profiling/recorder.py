"""Record some steps of this rank, and collect all ranks' records on the chief.

``hk.Supervisor`` and hvdkit's callbacks count the steps. If a program uses neither, the recorder counts how often the
graph combines gradients.

A failure here never fails the training; it is reported to the user in one line. After a failure a rank still
participates in the final exchange, so that other ranks do not wait for it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hvdkit.profiling import timeline, xplane
from hvdkit.profiling.record import RankProfile, Span, StepEnd, TimedCollective
from hvdkit.profiling.settings import ProfileSettings

Say = Callable[[str], None]
SUPERVISOR = "hk.Supervisor"


class Recorder:
    """Records this rank's steps ``first`` to ``last``. The training thread calls its methods.

    Args:
        settings: the steps to record, and the output folder.
        record: an empty record of this rank.
        exchange: exchanges objects among all ranks: ``allgather``, ``broadcast`` and ``allgather_bytes``.
        horovod: the initialized ``horovod.tensorflow``.
        say: prints a line for the user.
    """

    def __init__(self, settings: ProfileSettings, record: RankProfile, exchange: Any, horovod: Any, say: Say) -> None:
        self.over = False
        self._settings, self._record, self._exchange, self._horovod, self._say = (
            settings, record, exchange, horovod, say,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._recording = self._tracing = self._due = False
        self._source = ("", -1)  # the source of step counts, and its priority
        self._before: int | None = None  # steps before the first step counted in this run
        self._passed: dict[str, int] = {}
        self._begun: list[tuple[str, int]] = []
        self._clock = 0
        self._folder: Path | None = None
        self._main = threading.main_thread().ident

    # ---- events -------------------------------------------------------------------------------------------------

    def at_step(self, step: int, source: str = SUPERVISOR) -> None:
        """Record the end of ``step``, as counted by a Supervisor or a callback; repeated calls are ignored.

        Args:
            step: number of the step.
            source: the source of the count. A Supervisor takes precedence over callbacks, and the first callback over
                others.
        """
        with self._lock:
            if not self._due and self._believed(source, 2 if source == SUPERVISOR else 1, step):
                self._ended(step)
        if self._due:  # at the same step on all ranks
            self.finish()

    def passed(self, place: str) -> None:
        """Record that gradients were combined at ``place``, which counts as a step without another source."""
        with self._lock:
            self._passed[place] = self._passed.get(place, 0) + 1
            if not self._due and self._believed(place, 0, self._passed[place]):
                self._ended(self._passed[place])

    @contextlib.contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Record that the training thread waits for input, or saves, within the context."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            if self._recording and threading.get_ident() == self._main:
                self._record.spans.append(Span(kind, kind, "training", start, time.monotonic_ns()))

    def began(self, name: str) -> None:
        """Record the start of an eager collective or an exchange of objects on the training thread."""
        if self._recording and threading.get_ident() == self._main:
            self._begun.append((name, time.monotonic_ns()))

    def ended(self) -> None:
        """Record the end of the collective or exchange."""
        if self._begun and threading.get_ident() == self._main:
            name, start = self._begun.pop()
            if self._recording:
                self._record.collectives.append(TimedCollective(name, start, time.monotonic_ns(), True))

    def _believed(self, source: str, worth: int, step: int) -> bool:
        """Return whether ``source`` counts the steps; a source with higher priority restarts the count."""
        if worth > self._source[1]:
            self._source, self._before = (source, worth), None
            if self._recording:  # continue recording with the new count
                self._before = step - self._settings.first + 1
                self._record.marks = [StepEnd(step, time.monotonic_ns())]
        return self._source[0] == source

    # ---- begin and end ------------------------------------------------------------------------------------------

    def _ended(self, step: int) -> None:
        """Count a step. After a failure counting continues, so that all ranks finish at the same step."""
        if self._before is None:
            self._before = step - 1
        done, marks = step - self._before, self._record.marks
        # Start the profiler one step early: its startup takes time, which differs between ranks.
        if not self._recording and done >= self._settings.first - 2:
            self._recording = True
            self._start()
        if done >= self._settings.first - 1 and (not marks or step > marks[-1].step):
            marks.append(StepEnd(step, time.monotonic_ns()))
        if done >= self._settings.last:
            self._due = True
            self._stop()

    def _start(self) -> None:
        try:
            import tensorflow as tf

            self._folder = Path(tempfile.mkdtemp(prefix="hvdkit-profile-"))
            tf.profiler.experimental.start(str(self._folder))
            self._tracing = True
            self._clock = time.monotonic_ns()
            with tf.profiler.experimental.Trace(xplane.CLOCK):
                pass
            if self._timeline is not None:
                if os.environ.get("HOROVOD_TIMELINE") != "DYNAMIC":
                    raise ValueError("HOROVOD_TIMELINE is set, so that Horovod's timeline goes there; unset it")
                self._horovod.start_timeline(str(self._timeline), mark_cycles=False)
        except Exception as error:  # never fail the training
            self._problem("the profiler did not start", error)

    def _stop(self) -> None:
        self._recording = False
        if not self._tracing:
            return
        self._tracing = False
        try:
            import tensorflow as tf

            tf.profiler.experimental.stop()
            if self._timeline is not None:
                self._horovod.stop_timeline()
        except Exception as error:
            self._problem("the profiler did not stop", error)

    @property
    def _timeline(self) -> Path | None:
        """The path of Horovod's timeline on the rank that writes it, else None."""
        wanted = self._settings.timeline and self._record.rank == 0 and self._folder is not None
        return self._folder / "timeline.json" if wanted and self._folder is not None else None

    def finish(self) -> None:
        """Collect all ranks' records. Every rank calls it, at the same step or at the end of the run."""
        if self.over:
            return
        self.over = True
        self._due = True
        self._stop()
        from hvdkit.profiling import collect  # imported late: it loads rich, which is rarely needed

        try:
            raw = self._read()
            collect.together(self._settings.folder, self._record, raw, self._exchange, self._say)
        except Exception as error:
            self._say(f"profile: not made: {_words(error)}")
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> bytes:
        """Read TensorFlow's and Horovod's output into the record; return TensorFlow's file."""
        if self._folder is None:
            return b""
        raw = b""
        try:
            file = next(self._folder.glob("plugins/profile/*/*.xplane.pb"))
            raw = file.read_bytes()
            traced = xplane.read(file, self._clock)
            self._record.spans += traced.spans
            self._record.collectives += traced.collectives
            if self._timeline is not None:
                offset = time.time_ns() - time.monotonic_ns()
                self._record.phases += timeline.read(self._timeline, offset)
        except StopIteration:
            if not self._record.problems:
                self._record.problems.append("TensorFlow's profiler wrote nothing")
        except Exception as error:
            self._problem("the trace cannot be read", error)
        return raw

    def _problem(self, what: str, error: Exception) -> None:
        self._record.problems.append(f"{what}: {_words(error)}")


def _words(error: Exception) -> str:
    if os.environ.get("HVDKIT_DEBUG") == "1":
        traceback.print_exception(error, file=sys.stderr)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
