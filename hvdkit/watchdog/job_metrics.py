"""The metrics of a job, as Prometheus text."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hvdkit._version import __version__
from hvdkit.watchdog.events import Joined, Measured, Status
from hvdkit.watchdog.verdict import Verdict

# A rank is the straggler if another one waits for it for more than this part of a step.
_STRAGGLING = 0.05
# A step that takes this many seconds longer than the one before counts with the time that it has taken so far.
_LATE_SECONDS = 10.0

METRICS: Mapping[str, tuple[str, str]] = {
    "hvdkit_build_info": ("gauge", "Version of hvdkit"),
    "hvdkit_ranks": ("gauge", "Ranks of the job"),
    "hvdkit_ranks_running": ("gauge", "Ranks that run"),
    "hvdkit_attempt_start_timestamp_seconds": ("gauge", "When the job, or its last restart, began"),
    "hvdkit_restarts_total": ("counter", "Restarts by this hvdkit run"),
    "hvdkit_failures_total": ("counter", "Failures of the job"),
    "hvdkit_last_failure_info": (
        "gauge",
        "The last failure: the first rank that failed, its host, exit code and cause",
    ),
    "hvdkit_step": ("gauge", "Steps trained, in all runs of this logdir"),
    "hvdkit_steps_trained_total": ("counter", "Steps trained in this job, those repeated after a restart included"),
    "hvdkit_examples_trained_total": ("counter", "Examples in these steps, of all ranks"),
    "hvdkit_step_duration_seconds": ("gauge", "Mean duration of the last steps"),
    "hvdkit_examples_per_second": ("gauge", "Examples per second in the last steps, of all ranks"),
    "hvdkit_loss": ("gauge", "Loss, mean over the ranks"),
    "hvdkit_straggler_rank": ("gauge", "The rank that others wait for more than 5 % of a step; -1: none"),
    "hvdkit_last_save_step": ("gauge", "Step of the last complete save"),
    "hvdkit_last_save_timestamp_seconds": ("gauge", "When the last save was complete"),
    "hvdkit_last_save_duration_seconds": ("gauge", "Duration of the last save"),
    "hvdkit_rank_wait_seconds": ("gauge", "Seconds per step that the rank waits for others in collectives"),
    "hvdkit_rank_exchange_seconds": ("gauge", "Seconds per step in which collectives run, waits included"),
    "hvdkit_rank_exchange_bytes": ("gauge", "Bytes per step that the rank sends in collectives of its graph"),
    "hvdkit_rank_exchange_bytes_total": ("counter", "Bytes that the rank has sent in collectives of its graph"),
    "hvdkit_rank_exchange_seconds_total": ("counter", "Seconds in which collectives of its graph have run"),
    "hvdkit_rank_collectives_total": ("counter", "Collectives called from Python"),
    "hvdkit_rank_collective_bytes_total": ("counter", "Bytes that the rank has sent in these"),
    "hvdkit_rank_collective_seconds_total": ("counter", "Seconds that the rank has spent in these"),
    "hvdkit_rank_idle_seconds": ("gauge", "Seconds since the rank last made progress"),
    "hvdkit_rank_stopped_seconds": ("gauge", "Seconds since the rank's process was stopped; 0: it is not"),
}
"""Type and help text of each metric."""

_Value = tuple[str, dict[str, str], float]  # of a metric: its name, its labels and its value


@dataclass
class _RankMetrics:
    """What is known of a rank of the current attempt."""

    joined: Joined
    measured: Measured = field(default_factory=Measured)
    status: Status = field(default_factory=Status)
    is_running: bool = True
    eager_seconds: float = 0.0  # per step, in collectives called from Python
    graph_bytes: int = 0  # of all steps, in collectives of the graph
    graph_seconds: float = 0.0

    @property
    def exchange(self) -> float | None:
        """Seconds per step in collectives, or None if they are unknown."""
        in_graph = self.measured.step_seconds
        if in_graph is None and not self.eager_seconds:
            return None
        return (in_graph or 0.0) + self.eager_seconds

    def add(self, measured: Measured) -> None:
        """Add a measurement. Steps since the last one count as the last step whose collectives were seen."""
        before = self.measured
        steps = (measured.step or 0) - (before.step or 0)
        if before.step is not None and steps > 0:
            self.eager_seconds = (measured.seconds - before.seconds) / steps
            self.graph_bytes += steps * measured.step_bytes
            self.graph_seconds += steps * (measured.step_seconds or 0.0)
        self.measured = measured


class JobMetrics:
    """Collects the metrics of a job, of all its attempts. Another thread may read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[int, _RankMetrics] = {}
        self._size = 0
        self._attempts = 0
        self._began_at = 0.0
        self._failures = 0
        self._failure: Verdict | None = None
        self._has_failed = False  # in this attempt
        self._steps = 0
        self._examples = 0.0
        self._step_seconds: float | None = None
        self._stepped_at = 0.0  # when a step was last reported
        self._saved: Measured | None = None

    # ---- events -----------------------------------------------------------------------------------------------

    def begin(self, size: int) -> None:
        """Begin an attempt with ``size`` ranks."""
        with self._lock:
            self._ranks.clear()
            self._size = size
            self._attempts += 1
            self._began_at = time.time()
            self._has_failed = False
            self._step_seconds = None

    def join(self, joined: Joined) -> None:
        """Add a rank, or its new sentinel."""
        with self._lock:
            self._ranks.setdefault(joined.rank, _RankMetrics(joined)).is_running = True

    def end(self, rank: int) -> None:
        """Note that a rank has ended."""
        with self._lock:
            self._ranks[rank].is_running = False

    def add_status(self, rank: int, status: Status) -> None:
        """Add the state of a rank."""
        with self._lock:
            self._ranks[rank].status = status

    def add(self, rank: int, measured: Measured, now: float) -> None:
        """Add measurements of a rank that arrive at ``now`` by the monotonic clock."""
        with self._lock:
            if rank == 0:
                self._count_steps(self._ranks[rank].measured, measured, now)
                self._saved = self._saved if measured.saved_step is None else measured
            self._ranks[rank].add(measured)

    def _count_steps(self, before: Measured, after: Measured, now: float) -> None:
        """Count the steps between two measurements of rank 0."""
        if after.step is None:
            return
        if before.step is None:
            self._stepped_at = now
            return
        steps = after.step - before.step
        if steps > 0:
            self._stepped_at = now
            self._steps += steps
            self._examples += steps * (after.examples or 0.0)
            self._step_seconds = (after.step_at - before.step_at) / steps

    def fail(self, verdict: Verdict) -> None:
        """Note how this attempt has failed; a later verdict may know more."""
        with self._lock:
            self._failures += not self._has_failed
            self._has_failed = True
            self._failure = verdict

    # ---- text -------------------------------------------------------------------------------------------------

    def values(self) -> list[_Value]:
        """Return the name, the labels and the value of each metric that is known."""
        now = time.monotonic()
        with self._lock:
            return [*self._of_job(), *self._of_steps(now), *self._of_ranks()]

    def text(self) -> str:
        """Return the metrics in Prometheus's text format, version 0.0.4."""
        lines: dict[str, list[str]] = {}
        for name, named, value in self.values():
            lines.setdefault(name, []).append(f"{name}{labels(**named)} {_number(value)}\n")
        parts = []
        for name, (kind, meaning) in METRICS.items():
            if name in lines:
                parts += [f"# HELP {name} {meaning}\n# TYPE {name} {kind}\n", *lines[name]]
        return "".join(parts)

    def _of_job(self) -> Iterable[_Value]:
        yield "hvdkit_build_info", {"version": __version__}, 1
        yield "hvdkit_ranks", {}, self._size
        yield "hvdkit_ranks_running", {}, sum(one.is_running for one in self._ranks.values())
        yield "hvdkit_attempt_start_timestamp_seconds", {}, self._began_at
        yield "hvdkit_restarts_total", {}, max(0, self._attempts - 1)
        yield "hvdkit_failures_total", {}, self._failures
        if (failure := self._failure) is not None:
            rank = "" if failure.rank is None else str(failure.rank)
            named = {"rank": rank, "host": failure.host, "code": str(failure.code), "cause": failure.summary}
            yield "hvdkit_last_failure_info", named, 1
        if (saved := self._saved) is not None and saved.saved_step is not None:
            yield "hvdkit_last_save_step", {}, saved.saved_step
            yield "hvdkit_last_save_timestamp_seconds", {}, saved.saved_at
            yield "hvdkit_last_save_duration_seconds", {}, saved.save_seconds

    def _of_steps(self, now: float) -> Iterable[_Value]:
        chief = self._ranks[0].measured if 0 in self._ranks else Measured()
        if chief.step is not None:
            yield "hvdkit_step", {}, chief.step
        yield "hvdkit_steps_trained_total", {}, self._steps
        if chief.examples is not None or self._examples:
            yield "hvdkit_examples_trained_total", {}, self._examples
        if chief.loss is not None:
            yield "hvdkit_loss", {}, chief.loss
        if self._step_seconds is not None:
            waited = now - self._stepped_at
            seconds = waited if waited > self._step_seconds + _LATE_SECONDS else self._step_seconds
            yield "hvdkit_step_duration_seconds", {}, seconds
            if chief.examples is not None and seconds:
                yield "hvdkit_examples_per_second", {}, chief.examples / seconds

    def _of_ranks(self) -> Iterable[_Value]:
        waits = self._waits()
        if waits:
            straggler = min(waits, key=lambda rank: waits[rank])
            is_waited_for = max(waits.values()) > _STRAGGLING * (self._step_seconds or 0.0) > 0
            yield "hvdkit_straggler_rank", {}, straggler if is_waited_for else -1
        for rank, one in sorted(self._ranks.items()):
            named = {"rank": str(rank), "host": one.joined.host}
            measured = one.measured
            if rank in waits:
                yield "hvdkit_rank_wait_seconds", named, waits[rank]
                yield "hvdkit_rank_exchange_seconds", named, one.exchange or 0.0
            if measured.step_seconds is not None:
                yield "hvdkit_rank_exchange_bytes", named, measured.step_bytes
                yield "hvdkit_rank_exchange_bytes_total", named, one.graph_bytes
                yield "hvdkit_rank_exchange_seconds_total", named, one.graph_seconds
            yield "hvdkit_rank_collectives_total", named, measured.collectives
            yield "hvdkit_rank_collective_bytes_total", named, measured.nbytes
            yield "hvdkit_rank_collective_seconds_total", named, measured.seconds
            yield "hvdkit_rank_idle_seconds", named, one.status.idle
            yield "hvdkit_rank_stopped_seconds", named, one.status.stopped or 0.0

    def _waits(self) -> dict[int, float]:
        """Return the seconds per step that each rank waits, if they are known for all ranks.

        A collective ends on all ranks at about the same time, so the rank that comes last spends the least time in it:
        the transfer alone. What the others spend more is their wait.
        """
        seconds = {rank: one.exchange for rank, one in self._ranks.items() if one.is_running}
        known = {rank: value for rank, value in seconds.items() if value is not None}
        if len(known) != self._size or self._size < 2:
            return {}
        transfer = min(known.values())
        return {rank: value - transfer for rank, value in known.items()}


def labels(**values: str) -> str:
    r"""Return labels in the text format; "" for none.

    Example:
        >>> print(labels(rank="0", cause='the "x"\n'))
        {rank="0",cause="the \"x\"\n"}
    """
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items())
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return repr(value) if isinstance(value, int) else repr(float(value)).replace("nan", "NaN").replace("inf", "Inf")
