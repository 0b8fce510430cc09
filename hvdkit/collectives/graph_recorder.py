"""Records when each collective of a graph last began and ended, for the flight recorder.

TensorFlow runs these without Python, so the graph writes both times to a small variable per collective, its *site*. The
collective waits until its start time is written; nothing waits for the write of its end time. A thread of the rank
reads the variables every two seconds, and when the job fails.

Sites read TensorFlow's clock, which it refuses if op determinism is enabled. Then the graph calls Python in every run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import tensorflow as tf

from hvdkit.cluster.progress import is_user_file
from hvdkit.internals import is_op_determinism_enabled, tf_stack
from hvdkit.watchdog.flight_recorder import FlightRecorder, collective_key, recorder
from hvdkit.watchdog.reporter import reporter

if TYPE_CHECKING:
    from traceback import FrameSummary

Result = TypeVar("Result")
_MOST_SHAPES = 4  # of a collective's tensors to describe


def run(
    native: Callable[[list[tf.Tensor]], Result],
    tensors: list[tf.Tensor],
    *,
    op_name: str,
    label: str,
    shown: Sequence[tf.Tensor],
    uneven: bool,
    ranks: Sequence[int] | None,
) -> Result:
    """Run Horovod's op ``native`` on ``tensors`` in a graph, record the collective, and return its result.

    ``op_name`` identifies the collective across ``ranks`` (None: all). Messages have its ``label``, and the dtypes and
    shapes of the tensors ``shown``, of which ranks may differ in the first axis if ``uneven``.
    """
    if not reporter().is_watched:  # no sentinel would read the records
        return native(tensors)
    line = _traced_line()
    key = collective_key(op_name, ranks)
    if not is_op_determinism_enabled():
        what = _describe_tensors(label, [f"{x.dtype.name}{x.shape}" for x in shown[:_MOST_SHAPES]], len(shown))
        nbytes = sum((x.shape.num_elements() or 0) * x.dtype.size for x in shown)
        if not _SITES:
            recorder().sampler = _sample_sites
        _SITES[key] = Site(key, what, line, ranks, nbytes)
        return _SITES[key].record(native, tensors)
    numbers: list[int] = []

    def begin(*shapes: np.ndarray) -> None:
        first = [_shape(x.dtype, shape.tolist(), uneven) for x, shape in zip(shown, shapes, strict=False)]
        numbers.append(recorder().begin(key, _describe_tensors(label, first, len(shown)), line, ranks, eager=False))

    def end() -> None:
        recorder().end(numbers.pop(0), eager=False)

    ready = _call_after(tensors, begin, [tf.shape(x) for x in shown[:_MOST_SHAPES]])
    return _call_after(native(ready), end)


@dataclass
class Site:
    """One collective of a graph. A graph that is traced again has the same site.

    Attributes:
        key: identifies the collective across ranks.
        what: its name, dtypes and shapes.
        line: the user's source line that led to it.
        ranks: the ranks that take part; None for all.
        nbytes: bytes that this rank sends, as far as known when the graph is built.
    """

    key: str
    what: str
    line: str
    ranks: Sequence[int] | None
    nbytes: int
    _number: int = 0
    _seen: tuple[float, float] = (0.0, 0.0)
    _has_run: bool = False

    def handle(self) -> tf.Tensor:
        """Return the variable with its last start and end time, in seconds since 1970. End time 0: not ended yet.

        The variable is looked up by name, because a graph that captures a variable cannot be exported.
        """
        return tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=[2], shared_name=f"hvdkit.{self.key}")

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
                self.key, self.what, self.line, self.ranks, self.nbytes, eager=False, at=began + offset
            )
        self._seen = began, ended
        if ended:
            flight.end(self._number, eager=False, at=ended + offset)


_SITES: dict[str, Site] = {}  # the collectives of this rank's graphs; a later one replaces one with the same key


def _sample_sites() -> None:
    """Record what has happened since the last call."""
    offset = time.monotonic() - time.time()
    for site in list(_SITES.values()):
        site.sample(recorder(), offset)


def _call_after(values: Result, function: Callable[..., None], arguments: Sequence[tf.Tensor] = ()) -> Result:
    """Return ``values``, one or several tensors, and have the graph call ``function`` once they are available."""

    def call(_: np.ndarray, *known: np.ndarray) -> np.ndarray:
        function(*known)
        return np.zeros((), np.int32)

    every = tf.nest.flatten(values)
    with tf.control_dependencies(every):
        # A stateful function would block every other collective of the graph until this one has finished. A stateless
        # one runs at every step only if its argument, here any element, is not constant and its result is used.
        element = tf.reshape(every[0], [-1])[:1]
        called = tf.numpy_function(call, [element, *arguments], tf.int32, stateful=False)
    called = tf.ensure_shape(called, [])
    passed_on: Result = tf.nest.map_structure(lambda x: depending_on(called >= 0, x), values)
    return passed_on


def depending_on(condition: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Return ``x`` in a form that depends on the scalar ``condition``."""
    # As a vector, because tf.where supports at most 8 axes.
    flat = tf.reshape(x, [-1])
    return tf.ensure_shape(tf.reshape(tf.where(condition, flat, flat), tf.shape(x)), x.shape)


def _shape(dtype: tf.DType, axes: list[int], uneven: bool) -> str:
    return f"{dtype.name}[{', '.join(map(str, ['*', *axes[1:]] if uneven and axes else axes))}]"


def _describe_tensors(name: str, first: Sequence[str], count: int) -> str:
    """Describe a collective of ``count`` tensors, given the dtypes and shapes of the ``first`` ones.

    Example:
        >>> _describe_tensors("sum", ["float32[3]", "int32[]"], 6)
        'sum of float32[3], int32[] and 4 more'
    """
    more = f" and {count - len(first)} more" * (count > len(first))
    return f"{name} of {', '.join(first)}{more}"


def _traced_line() -> str:
    """Return the innermost source line of the user. TensorFlow's stack maps AutoGraph's code to the original lines."""
    frames: list[FrameSummary] = list(tf_stack.extract_stack())
    frame = ([frame for frame in frames if is_user_file(frame.filename)] or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
