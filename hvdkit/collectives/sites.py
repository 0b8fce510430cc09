"""Sites: records of when each collective of a graph last began and ended, for the flight recorder.

TensorFlow runs these without Python, so the graph writes both times to a small variable per collective. The collective
waits until its start time is written; nothing waits for the write of its end time. A thread of the rank reads the
variables every two seconds, and when the job fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import tensorflow as tf

from hvdkit.cluster.progress import is_user_file
from hvdkit.internals import tf_stack
from hvdkit.watchdog.flight_recorder import FlightRecorder, collective_key, recorder

if TYPE_CHECKING:
    from traceback import FrameSummary

Result = TypeVar("Result")

MOST_SHAPES = 4
"""Maximum number of a collective's tensors to describe."""


_SITES: dict[str, Site] = {}  # the collectives of this rank's graphs


class Site:
    """One collective of a graph. A graph that is traced again has the same site.

    Args:
        key: identifies the collective across ranks.
        what: its name, dtypes and shapes.
        line: the user's source line that led to it.
        ranks: the ranks that take part; None for all.
        nbytes: bytes that this rank sends, as far as known when the graph is built.
    """

    def __init__(self, key: str, what: str, line: str, ranks: Sequence[int] | None, nbytes: int) -> None:
        self._key = key
        self._what = what
        self._line = line
        self._ranks = ranks
        self._nbytes = nbytes
        self._number = 0
        self._seen = (0.0, 0.0)
        self._has_run = False

    def handle(self) -> tf.Tensor:
        """Return the variable with its last start and end time, in seconds since 1970. End time 0: not ended yet.

        The variable is looked up by name, because a graph that captures a variable cannot be exported.
        """
        return tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=[2], shared_name=f"hvdkit.{self._key}")

    def record(self, native: Callable[[list[tf.Tensor]], Result], values: list[tf.Tensor]) -> Result:
        """Return ``native(values)``, and record when ``values`` and the results become available in the graph."""
        with tf.control_dependencies(values), tf.device("/CPU:0"):
            began = tf.timestamp()
            handle = self.handle()
            written = tf.raw_ops.AssignVariableOp(resource=handle, value=tf.stack([began, tf.zeros_like(began)]))
        with tf.control_dependencies([written]):
            ready = [tf.identity(x) for x in values]
        result = native(ready)
        with tf.control_dependencies(tf.nest.flatten(result)), tf.device("/CPU:0"):
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.stack([began, tf.timestamp()]))
        return result

    def sample(self, flight: FlightRecorder, offset: float) -> None:
        """Record what has happened since the last call.

        Args:
            flight: the recorder.
            offset: seconds to add to the time since 1970 to get the host's monotonic clock.
        """
        with tf.device("/CPU:0"):
            handle = self.handle()
            # Reading a variable that does not exist yet would log a warning.
            self._has_run = self._has_run or bool(tf.raw_ops.VarIsInitializedOp(resource=handle))
            if not self._has_run:
                return
            began, ended = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64).numpy().tolist()
        if (began, ended) == self._seen:
            return
        if began != self._seen[0]:
            if self._number and not self._seen[1]:  # its end time has been overwritten
                flight.end(self._number, eager=False, at=began + offset)
            self._number = flight.begin(
                self._key, self._what, self._line, self._ranks, self._nbytes, eager=False, at=began + offset
            )
        self._seen = began, ended
        if ended:
            flight.end(self._number, eager=False, at=ended + offset)


def add_site(op_name: str, label: str, shown: Sequence[tf.Tensor], ranks: Sequence[int] | None) -> Site:
    """Create the site of a collective. It replaces an earlier one with the same key.

    Args:
        op_name: the name that identifies it across ranks.
        label: its name for messages.
        shown: the tensors to describe in messages.
        ranks: the ranks that take part; None for all.
    """
    what = describe_tensors(label, [f"{x.dtype.name}{x.shape}" for x in shown[:MOST_SHAPES]], len(shown))
    sizes = [x.shape.num_elements() for x in shown]
    nbytes = sum((size or 0) * x.dtype.size for x, size in zip(shown, sizes, strict=True))
    key = collective_key(op_name, ranks)
    if not _SITES:
        recorder().sampler = _sample_sites
    site = _SITES[key] = Site(key, what, traced_line(), ranks, nbytes)
    return site


def _sample_sites() -> None:
    """Record what has happened since the last call."""
    offset = time.monotonic() - time.time()
    for site in list(_SITES.values()):
        site.sample(recorder(), offset)


def describe_tensors(name: str, first: Sequence[str], count: int) -> str:
    """Describe a collective of ``count`` tensors, given the dtypes and shapes of the ``first`` ones.

    Example:
        >>> describe_tensors("sum", ["float32[3]", "int32[]"], 6)
        'sum of float32[3], int32[] and 4 more'
    """
    more = f" and {count - len(first)} more" * (count > len(first))
    return f"{name} of {', '.join(first)}{more}"


def traced_line() -> str:
    """Return the innermost source line of the user. TensorFlow's stack maps AutoGraph's code to the original lines."""
    frames: list[FrameSummary] = list(tf_stack.extract_stack())
    frame = ([frame for frame in frames if is_user_file(frame.filename)] or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
