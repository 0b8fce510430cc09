"""Record some steps of this rank; then collect all ranks' profiles on the chief, and report them.

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
from types import ModuleType

from hvdkit.profiling import collect, timeline, xplane
from hvdkit.profiling.profile_report import write_report
from hvdkit.profiling.rank_profile import RankProfile, Span, StepEnd, TimedCollective
from hvdkit.profiling.settings import ProfileSettings

SUPERVISOR = "hk.Supervisor"


class Recorder:
    """Records this rank's steps in an empty profile. The training thread calls its methods; ``log`` is for the user."""

    def __init__(
        self,
        settings: ProfileSettings,
        profile: RankProfile,
        exchange: collect.Exchange,
        horovod: ModuleType,
        log: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._profile = profile
        self._exchange = exchange
        self._horovod = horovod
        self._log = log
        self._lock = threading.Lock()
        self._recording = self._tracing = self._due = self._finished = False
        self._source = ("", -1)  # the source of step counts, and its priority
        self._steps_before: int | None = None  # steps before the first step counted in this run
        self._combined: dict[str, int] = {}  # how often each call site has combined gradients
        self._open_collectives: list[tuple[str, int]] = []
        self._trace_start = 0
        self._folder: Path | None = None  # of the output of TensorFlow and Horovod
        self._training_thread = threading.main_thread().ident

    # ---- events -------------------------------------------------------------------------------------------------

    def at_step(self, step: int, source: str = SUPERVISOR) -> None:
        """Record the end of ``step``, as counted by a Supervisor or a callback; repeated calls are ignored.

        Args:
            step: number of the step.
            source: the source of the count. A Supervisor takes precedence over callbacks, and the first callback over
                others.
        """
        with self._lock:
            if not self._due and self._is_source(source, 2 if source == SUPERVISOR else 1, step):
                self._count(step)
        if self._due:  # at the same step on all ranks
            self.finish()

    def gradients_combined(self, call_site: str) -> None:
        """Record that ``call_site`` has combined gradients, which counts as a step without another source."""
        with self._lock:
            step = self._combined[call_site] = self._combined.get(call_site, 0) + 1
            if not self._due and self._is_source(call_site, 0, step):
                self._count(step)

    @contextlib.contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Record that the training thread waits for input, or saves, within the context."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            if self._recording and self._on_training_thread():
                self._profile.spans.append(Span(kind, kind, "training", start, time.monotonic_ns()))

    def begin_collective(self, name: str) -> None:
        """Record the start of an eager collective or an exchange of objects on the training thread."""
        if self._recording and self._on_training_thread():
            self._open_collectives.append((name, time.monotonic_ns()))

    def end_collective(self) -> None:
        """Record the end of the collective or exchange."""
        if self._open_collectives and self._on_training_thread():
            name, start = self._open_collectives.pop()
            if self._recording:
                self._profile.collectives.append(TimedCollective(name, start, time.monotonic_ns(), True))

    def _on_training_thread(self) -> bool:
        return threading.get_ident() == self._training_thread

    def _is_source(self, source: str, priority: int, step: int) -> bool:
        """Return whether ``source`` counts the steps; a source with higher priority restarts the count."""
        if priority > self._source[1]:
            self._source = (source, priority)
            self._steps_before = None
            if self._recording:  # continue recording with the new count
                self._steps_before = step - self._settings.first + 1
                self._profile.marks = [StepEnd(step, time.monotonic_ns())]
        return self._source[0] == source

    # ---- begin and end ------------------------------------------------------------------------------------------

    def _count(self, step: int) -> None:
        """Count a step. After a failure counting continues, so that all ranks finish at the same step."""
        if self._steps_before is None:
            self._steps_before = step - 1
        done = step - self._steps_before
        marks = self._profile.marks
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
            self._trace_start = time.monotonic_ns()
            with tf.profiler.experimental.Trace(xplane.CLOCK):
                pass
            if self._timeline_path is not None:
                if os.environ.get("HOROVOD_TIMELINE") != "DYNAMIC":
                    raise ValueError("HOROVOD_TIMELINE is set, so that Horovod's timeline goes there; unset it")
                self._horovod.start_timeline(str(self._timeline_path), mark_cycles=False)
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
            if self._timeline_path is not None:
                self._horovod.stop_timeline()
        except Exception as error:
            self._problem("the profiler did not stop", error)

    @property
    def _timeline_path(self) -> Path | None:
        """The path of Horovod's timeline on the rank that writes it, else None."""
        if not self._settings.timeline or self._profile.rank or self._folder is None:
            return None
        return self._folder / "timeline.json"

    def finish(self) -> None:
        """Collect and report all ranks' profiles. Every rank calls it, at the same step or at the end of the run."""
        if self._finished:
            return
        self._finished = self._due = True
        self._stop()
        folder = self._settings.folder
        try:
            profiles = collect.collect_profiles(folder, self._profile, self._read(), self._exchange, self._log)
            if profiles:
                write_report(folder, profiles, self._log)
        except Exception as error:
            self._log(f"profile: not written: {_describe(error)}")
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def is_finished(self) -> bool:
        """True once the profiles of all ranks have been collected."""
        return self._finished

    def give_up(self) -> None:
        """Report that the profile cannot be collected, because this rank ends before others."""
        if not self._finished:
            self._stop()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._log("profile: not written, because ranks ended at different times; end the program with hk.barrier()")

    def _read(self) -> bytes:
        """Add TensorFlow's and Horovod's output to the profile; return the content of TensorFlow's file."""
        if self._folder is None:
            return b""
        content = b""
        try:
            file = next(self._folder.glob("plugins/profile/*/*.xplane.pb"))
            content = file.read_bytes()
            traced = xplane.read(file, self._trace_start)
            self._profile.spans += traced.spans
            self._profile.collectives += traced.collectives
            if self._timeline_path is not None:
                offset = time.time_ns() - time.monotonic_ns()
                self._profile.phases += timeline.read(self._timeline_path, offset)
        except StopIteration:
            if not self._profile.problems:
                self._profile.problems.append("TensorFlow's profiler wrote nothing")
        except Exception as error:
            self._problem("the trace cannot be read", error)
        return content

    def _problem(self, what: str, error: Exception) -> None:
        self._profile.problems.append(f"{what}: {_describe(error)}")


def _describe(error: Exception) -> str:
    if os.environ.get("HVDKIT_DEBUG") == "1":
        traceback.print_exception(error, file=sys.stderr)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
