"""Count what a training step does, independent of the machine: exchanges, bytes, traces, Python calls.

Exchanges are counted when Horovod's ops are created: hvdkit, its gradients and Horovod's own Python API all
use these ops. Each op created in a graph gets a counter op, which counts its runs and its input elements, so
that branches not taken do not count.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import func_graph

from hvdkit.cluster.progress import progress

EXCHANGES = ("allreduce", "allgather", "alltoall", "broadcast", "reducescatter")
_MOST_OPS = 256


class Exchange(NamedTuple):
    """One of Horovod's ops and its number of runs.

    Attributes:
        kind: "allreduce", "alltoall", ...
        tensors: number of tensors in the exchange.
        runs: number of runs.
        bytes: bytes that this rank sent, in all runs.
    """

    kind: str
    tensors: int
    runs: int
    bytes: int


@dataclass
class _Op:
    kind: str
    tensors: int
    itemsize: int


class Counts:
    """The counts since the last reset.

    Attributes:
        traced: names of the functions that TensorFlow traced, branches and loop bodies included.
        operations: number of operations in the graph of each of these functions.
    """

    def __init__(self) -> None:
        self.traced: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self._ops: list[_Op] = []
        with tf.device("CPU:0"):  # runs and input elements of each op; traced functions may not create variables
            self._table = tf.Variable(tf.zeros([_MOST_OPS, 2], tf.int64), trainable=False)
        self._seen = self._table.numpy()
        self._eager = self._begun()

    def exchanges(self) -> list[Exchange]:
        """Return the exchanges that ran since the last call, in the order in which they were traced."""
        before, self._seen = self._seen, self._table.numpy()
        rows = zip(self._ops, (self._seen - before).tolist(), strict=False)
        return [Exchange(op.kind, op.tensors, runs, n * op.itemsize) for op, (runs, n) in rows if runs]

    def eager(self) -> int:
        """Return the number of eager collectives and object exchanges since the last call."""
        before, self._eager = self._eager, self._begun()
        return self._eager - before

    @staticmethod
    def _begun() -> int:
        return sum(progress()._counts.values())

    def look(self) -> None:
        """Reset all counts."""
        self.exchanges()
        self.eager()
        self.traced.clear()
        self.operations.clear()

    def made(self, kind: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Create one of Horovod's ops and its counter."""
        given = tf.nest.flatten(args[0])
        if (
            tf.inside_function() or options.get("name") != "hvdkit.objects"
        ):  # object exchanges are counted as eager, also those over MPI
            self._count(kind, [tf.convert_to_tensor(x) for x in given])
        return function(*args, **options)

    def _count(self, kind: str, given: list[tf.Tensor]) -> None:
        with tf.control_dependencies(given):  # sizes may be constants: count only if the data exist
            elements = tf.add_n([tf.size(x, out_type=tf.int64) for x in given])
            self._table.scatter_nd_add([[len(self._ops)]], tf.stack([tf.constant(1, tf.int64), elements])[None])
        self._ops.append(_Op(kind, len(given), given[0].dtype.size))


class _Library:
    """Horovod's op library with a counter for every exchange."""

    def __init__(self, library: Any, counts: Counts) -> None:
        self._library, self._counts = library, counts

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        kind = name.removeprefix("horovod_").removeprefix("grouped_")
        if kind not in EXCHANGES:
            return function
        return lambda *args, **options: self._counts.made(kind, function, *args, **options)


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Count what happens inside the context. Functions must be traced inside it, too.

    Example::

        with counting() as counts:
            step(batch)
            counts.look()
            step(batch)
            assert counts.exchanges() == [Exchange("allreduce", 4, 1, 848)]
            assert not counts.traced
    """
    from horovod.tensorflow import mpi_ops

    counts, library, trace = Counts(), mpi_ops.MPI_LIB, func_graph.func_graph_from_py_func

    def traced(name: str, *args: Any, **options: Any) -> Any:
        counts.traced[name] += 1
        graph = trace(name, *args, **options)
        counts.operations[name] += len(graph.get_operations())
        return graph

    mpi_ops.MPI_LIB, func_graph.func_graph_from_py_func = _Library(library, counts), traced
    try:
        yield counts
    finally:
        mpi_ops.MPI_LIB, func_graph.func_graph_from_py_func = library, trace


class PythonCalls:
    """Count the Python functions called by this thread between :meth:`start` and :meth:`stop`, by file."""

    def __init__(self) -> None:
        self.by_file: Counter[str] = Counter()

    def start(self) -> None:
        """Start counting, with the garbage collector disabled because it may call functions at any time."""
        gc.disable()
        sys.setprofile(self._note)

    def stop(self) -> None:
        """Stop counting."""
        sys.setprofile(None)
        gc.enable()

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self.by_file[frame.f_code.co_filename] += 1

    def total(self) -> int:
        """Return the number of function calls, without those of this class."""
        return sum(n for file, n in self.by_file.items() if file != __file__)
