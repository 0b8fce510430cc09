"""Global batches as a dataset for Keras ``fit``."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hvdkit.errors import describe

# TensorFlow takes 0.2 ms to get something from Python. So small batches come several at once, of about so many bytes,
# and are cut apart by TensorFlow, without Python.
_BYTES_AT_ONCE, _MOST_AT_ONCE = 2**20, 16
_OPEN_READERS = 4  # of passes under way; those of passes that were given up go first
_NOWHERE = np.array([-1, -1])  # where a pass is that has read nothing


def batches_at_once(spec: Any) -> int:
    """Return how many batches to hand over to TensorFlow at once, of a ``tf.TypeSpec`` structure of dense tensors."""
    import tensorflow as tf

    size = sum(s.shape.num_elements() * s.dtype.size for s in tf.nest.flatten(_lists_to_tuples(spec)))
    return max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // max(1, size)))


def keras_dataset(
    open_at: Callable[[int], Iterator[tuple[int, Any]]],
    position: Callable[[], tuple[int, int]],
    steps: int,
    spec: Any,
    *,
    at_once: int,
) -> Any:
    """Return a ``tf.data.Dataset`` of ``steps`` elements, each pass over which goes on where the one before ended.

    Why not a ``keras.utils.PyDataset``: ``fit`` shuffles the order of its batches by default, with each process's own
    random state, so that ranks would train on rows of different global batches; and it calls ``on_epoch_end``
    before the first epoch as well as after each. It does neither to a ``tf.data.Dataset``. Where a pass starts
    is settled when it is asked for its first batch: Keras creates iterators that it never reads.

    Why not ``Dataset.from_generator``: it has the C library give memory back to the system at once, in the whole
    process and for good, so that every later step gets its memory anew (in a small network 1500 page faults and 2 ms
    a step); and Keras makes two iterators in an epoch, of which each takes three times as long to make.

    Args:
        open_at: Returns an iterator from a global step on over numbers of batches, at most ``at_once``, and the batches
            ``(x, y, sample_weight)``, with an axis for them in front where ``at_once`` is not 1.
        position: Returns how often the data have been restored, and the global step they are at. The first pass, and
            the first after a restore, starts there.
        steps: Batches in a pass.
        spec: The ``tf.TypeSpec`` structure of a batch ``(x, y)``.
        at_once: How many batches may come at once.
    """
    import tensorflow as tf

    from hvdkit.collectives.batch_share import mark_share

    spec = _lists_to_tuples(spec)
    rows = tf.nest.flatten(spec)[0].shape[0]
    spec = (*spec, tf.TensorSpec([rows], tf.float32))
    nothing = []
    if at_once > 1:
        nothing = [np.empty([0, *part.shape], part.dtype.as_numpy_dtype) for part in tf.nest.flatten(spec)]
        spec = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), spec)
    parts = tf.nest.flatten(spec)
    passes = _Passes(open_at, position, steps, nothing)

    def read(at: Any, _: Any) -> tuple[Any, Any]:
        at, *batches = tf.numpy_function(passes.read, [at], [tf.int64, *(part.dtype for part in parts)])
        at.set_shape([2])
        for batch, part in zip(batches, parts, strict=True):
            batch.set_shape(part.shape)
        return at, tf.nest.pack_sequence_as(spec, batches)

    # The state of a scan is its iterator's own: where the pass is.
    dataset = tf.data.Dataset.range(steps).scan(_NOWHERE, read)
    if at_once > 1:
        dataset = dataset.prefetch(1).unbatch().take(steps)
    options = tf.data.Options()
    # There is nothing to tune, and an iterator that is dropped half read, when fit stops within an epoch, waits for
    # the tuner's thread: 10 s, at times two minutes.
    options.autotune.enabled = False
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps)).prefetch(2).with_options(options)
    mark_share(dataset)
    return dataset


class _Passes:
    """Passes of ``steps`` batches over data. Each of them keeps where it is, ``[at, end]`` in steps of the training."""

    def __init__(
        self,
        open_at: Callable[[int], Iterator[tuple[int, Any]]],
        position: Callable[[], tuple[int, int]],
        steps: int,
        nothing: list[np.ndarray],
    ) -> None:
        self._open_at, self._position, self._steps, self._nothing = open_at, position, steps, nothing
        self._origin, self._started = position(), itertools.count()
        # By where they are. One that was dropped is opened anew.
        self._readers: dict[tuple[int, int], Iterator[tuple[int, Any]]] = {}
        self._lock = threading.Lock()

    def read(self, state: np.ndarray) -> list[np.ndarray]:
        """Return where a pass is after some more batches, and the arrays of these; no batches after its end."""
        import tensorflow as tf

        at, end = self._begin() if state[0] < 0 else map(int, state)
        if at == end:  # asked ahead of time
            return [state, *self._nothing]
        with self._lock:
            reader = self._readers.pop((at, end), None)
        if reader is None:
            reader = self._open_at(at)
        number, batches = next(reader, (0, None))
        if number == 0:
            raise ValueError(
                describe("epochs", f"a pass that ends after step {at}", f"{end - at} more steps",
                         "let GlobalBatches(epochs=) be at least the epochs of fit, or None")
            )  # fmt: skip
        arrays = tf.nest.flatten(_lists_to_tuples(batches))
        if at + number >= end:
            return [np.array([end, end]), *(array[: end - at] if number > end - at else array for array in arrays)]
        with self._lock:
            self._readers[at + number, end] = reader
            while len(self._readers) > _OPEN_READERS:
                del self._readers[next(iter(self._readers))]
        return [np.array([at + number, end]), *arrays]

    def _begin(self) -> tuple[int, int]:
        with self._lock:
            if self._origin[0] != self._position()[0]:
                self._origin, self._started = self._position(), itertools.count()
            at = self._origin[1] + next(self._started) * self._steps
        return at, at + self._steps


def _lists_to_tuples(structure: Any) -> Any:
    """tf.data takes a list for one tensor."""
    if isinstance(structure, dict):
        return {key: _lists_to_tuples(value) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        return tuple(_lists_to_tuples(value) for value in structure)
    return structure
