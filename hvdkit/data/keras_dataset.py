"""Global batches as a dataset for Keras ``fit``."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hvdkit.errors import describe

# Each call from TensorFlow into Python takes 0.2 ms. So several small batches, up to this many bytes, are fetched at
# once and split by TensorFlow.
_BYTES_AT_ONCE = 2**20
_MOST_AT_ONCE = 16
_OPEN_READERS = 4  # limit on open passes; the oldest, abandoned ones are closed first
# Seconds without a read after which a pass is closed, once the dataset has been deleted.
_ABANDONED_SECONDS = 2.0
_UNTIL_END = -1  # batches remaining in a pass over an epoch of unknown length
_NOT_STARTED = np.array([-1, -1, -1])  # position of a pass that has not started


def batches_at_once(spec: Any) -> int:
    """Return how many batches to pass to TensorFlow at once, for a ``tf.TypeSpec`` structure of dense tensors."""
    import tensorflow as tf

    size = sum(s.shape.num_elements() * s.dtype.size for s in tf.nest.flatten(_lists_to_tuples(spec)))
    return max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // max(1, size)))


def keras_dataset(
    open_at: Callable[[int, int], Iterator[tuple[int, Any]]],
    position: Callable[[], tuple[int, int, int]],
    steps: int | None,
    spec: Any,
    *,
    at_once: int,
) -> Any:
    """Return a ``tf.data.Dataset`` of an epoch's batches; each pass over it continues after the previous one.

    Why not a ``keras.utils.PyDataset``: ``fit`` by default shuffles its batches with each process's random state, so
    ranks would train on rows of different global batches; and it calls ``on_epoch_end`` before the first epoch as well
    as after each. It does neither for a ``tf.data.Dataset``. The start of a pass is determined when its first batch is
    requested, because Keras creates iterators that it never reads.

    Why not ``Dataset.from_generator``: it permanently makes the process's C library return freed memory to the system
    immediately, so that every later step has to allocate it again (for a small network 1500 page faults and 2 ms per
    step); and Keras creates two iterators per epoch, each of which takes three times as long to create.

    Args:
        open_at: Returns an iterator, from a step of an epoch on, over (number of batches, at most ``at_once``;
            batches, with a leading batch axis if ``at_once`` is not 1). It continues with the next epoch if ``steps``
            is known, and ends with the epoch if not.
        position: Returns the number of restores so far, and the current epoch and step. The first pass, and the first
            after a restore, starts there.
        steps: Batches in a pass; None for the length of the epoch, which is not known in advance.
        spec: The ``tf.TypeSpec`` structure of a batch.
        at_once: Maximum number of batches to fetch at once; 1 if ``steps`` is not known.
    """
    import tensorflow as tf

    from hvdkit.collectives.batch_share import mark_share

    spec = _lists_to_tuples(spec)
    if at_once > 1:
        spec = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), spec)
    parts = tf.nest.flatten(spec, expand_composites=True)
    passes = _Passes(open_at, position, steps, parts)

    def read(at: Any, _: Any) -> tuple[Any, Any]:
        at, *batches = tf.numpy_function(passes.read, [at], [tf.int64, *(part.dtype for part in parts)])
        at.set_shape([3])
        for batch, part in zip(batches, parts, strict=True):
            batch.set_shape(part.shape)
        batch = tf.nest.pack_sequence_as(spec, batches, expand_composites=True)
        return at, (at, batch) if steps is None else batch

    # The state of a scan belongs to its iterator: the position of the pass.
    dataset = tf.data.Dataset.range(steps or np.iinfo(np.int64).max).scan(_NOT_STARTED, read)
    if steps is None:
        dataset = dataset.take_while(lambda at, _: at[2] != 0).map(lambda _, batch: batch)
    if at_once > 1:
        dataset = dataset.prefetch(1).unbatch().take(steps)
    options = tf.data.Options()
    # Autotuning has nothing to tune here, and if fit stops within an epoch, deleting the iterator waits for the tuner's
    # thread: 10 s, sometimes two minutes.
    options.autotune.enabled = False
    if steps is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
    dataset = dataset.prefetch(2).with_options(options)
    mark_share(dataset)
    weakref.finalize(dataset, passes.close)  # TensorFlow keeps the function that reads, and with it the passes
    return dataset


class _Passes:
    """Passes over data. The state of a pass is its position: ``[epoch, step, batches remaining]``."""

    def __init__(
        self,
        open_at: Callable[[int, int], Iterator[tuple[int, Any]]],
        position: Callable[[], tuple[int, int, int]],
        steps: int | None,
        parts: list[Any],
    ) -> None:
        self._open_at = open_at
        self._position = position
        self._steps = steps
        self._parts = parts
        self._empty_arrays = [_empty_array(part) for part in parts]
        self._origin = position()
        self._started = itertools.count()
        # Readers by position. A reader that was dropped is reopened.
        self._readers: dict[tuple[int, int, int], Iterator[tuple[int, Any]]] = {}
        self._lock = threading.Lock()
        self._is_closed = self._is_watched = False

    def read(self, state: np.ndarray) -> list[np.ndarray]:
        """Return a pass's position after some more batches, and the arrays of these; empty arrays after its end."""
        import tensorflow as tf

        is_first = state[0] < 0
        epoch, step, remaining = self._begin() if is_first else map(int, state)
        if remaining == 0:  # prefetching past the end
            return [state, *self._empty_arrays]
        with self._lock:
            reader = self._readers.pop((epoch, step, remaining), None)
        if reader is None:
            reader = self._open_at(epoch, step)
        count, batches = next(reader, (0, None))
        if count == 0 and remaining == _UNTIL_END and not is_first:
            return [np.array([epoch, step, 0]), *self._empty_arrays]
        if count == 0:
            got = f"a pass that ends in epoch {epoch} at step {step}"
            remedy = "set GlobalBatches(epochs=) to at least fit's epochs, or to None"
            raise ValueError(describe("epochs", got, "more batches", remedy))
        arrays = tf.nest.flatten(_lists_to_tuples(batches), expand_composites=True)
        for array, part in zip(arrays, self._parts, strict=True):
            if not part.shape.is_compatible_with(array.shape):
                expected = f"{part.shape.as_list()}, as that of the first example"
                remedy = "map every batch to the same shape, e.g. with .to_tensor(shape=[None, 8])"
                raise ValueError(describe("arrays_or_source", f"a batch of shape {[*array.shape]}", expected, remedy))
        if remaining != _UNTIL_END and count >= remaining:
            if count > remaining:
                arrays = [array[:remaining] for array in arrays]
            return [np.array([epoch, step, 0]), *arrays]
        epoch, step = self._after(epoch, step + count)
        at = epoch, step, remaining if remaining == _UNTIL_END else remaining - count
        with self._lock:
            self._readers[at] = reader
            while len(self._readers) > _OPEN_READERS:
                del self._readers[next(iter(self._readers))]
            if self._is_closed:
                self._watch()
        return [np.array(at), *arrays]

    def close(self) -> None:
        """Close all readers: the dataset has been deleted. An iterator that is still read opens its own again."""
        with self._lock:
            self._is_closed = True
            self._readers.clear()

    def _watch(self) -> None:
        """Close the readers after a while, unless they are read: TensorFlow may prefetch while they are closed."""
        if not self._is_watched:
            self._is_watched = True
            timer = threading.Timer(_ABANDONED_SECONDS, self._close_unread, [set(self._readers)])
            timer.daemon = True
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                timer.start()

    def _close_unread(self, positions: set[tuple[int, int, int]]) -> None:
        with self._lock:
            self._is_watched = False
            for unread in positions & self._readers.keys():
                del self._readers[unread]
            if self._readers:
                self._watch()

    def _begin(self) -> tuple[int, int, int]:
        with self._lock:
            if self._origin[0] != self._position()[0]:
                self._origin = self._position()
                self._started = itertools.count()
            _, epoch, step = self._origin
            passed = next(self._started)
        if self._steps is None:
            return epoch + passed, 0 if passed else step, _UNTIL_END
        return *self._after(epoch + passed, step), self._steps

    def _after(self, epoch: int, step: int) -> tuple[int, int]:
        """Normalize a position to a step less than ``steps``, if that is known."""
        return (epoch, step) if self._steps is None else (epoch + step // self._steps, step % self._steps)


def _empty_array(spec: Any) -> np.ndarray:
    """Return an array that matches a ``tf.TensorSpec``, empty if possible."""
    shape = [extent or 0 for extent in spec.shape]
    kind = spec.dtype.as_numpy_dtype
    return np.full(shape, b"", kind) if spec.dtype.name == "string" else np.zeros(shape, kind)


# ---- what Keras takes ------------------------------------------------------------------------------------------


def weighted(data: Any, weight: np.ndarray) -> tuple[Any, Any, Any]:
    """Return ``(x, y, sample_weight)`` for data ``(x, y)`` or ``(x, y, sample_weight)`` and a weight for each row.

    Keras multiplies losses ``[rows, ...]`` by weights of the same rank, so labels ``[rows, T]`` get ``[rows, 1]``.

    Args:
        data: arrays ``[..., rows, ...]``.
        weight: float32 ``[..., rows]``.
    """
    import optree

    if len(data) == 3:
        x, y, weights = data
        return x, y, optree.tree_map(lambda w: np.asarray(w, _float(w.dtype)) * _like(weight, w), weights)
    x, y = data
    leaves = optree.tree_leaves(y)
    if len({_weight_axes(label, weight.ndim) for label in leaves}) == 1:
        return x, y, _like(weight, leaves[0])
    return x, y, optree.tree_map(lambda label: _like(weight, label), y)


def weighted_spec(spec: Any) -> tuple[Any, Any, Any]:
    """Return the ``tf.TypeSpec`` structure of :func:`weighted`'s result, given that of the data."""
    import tensorflow as tf

    def of(label: Any) -> Any:
        return tf.TensorSpec([label.shape[0], *[1] * _weight_axes(label, 1)], tf.float32)

    if len(spec) == 3:
        x, y, weights = spec
        return x, y, tf.nest.map_structure(lambda w: tf.TensorSpec(w.shape, _float(w.dtype.as_numpy_dtype)), weights)
    x, y = spec
    leaves = tf.nest.flatten(_lists_to_tuples(y))
    if len({_weight_axes(label, 1) for label in leaves}) == 1:
        return x, y, of(leaves[0])
    return x, y, tf.nest.map_structure(of, y)


def _float(dtype: Any) -> np.dtype:
    return np.dtype(dtype) if np.issubdtype(dtype, np.floating) else np.dtype(np.float32)


def _weight_axes(label: Any, axes: int) -> int:
    """Return the number of size-1 axes to append to the weights' ``axes``; 0 for labels ``[rows, 1]``."""
    after = len(label.shape) - axes
    return 0 if after == 1 and label.shape[-1] == 1 else after


def _like(weight: np.ndarray, label: Any) -> np.ndarray:
    """Return weights with size-1 axes appended to match the label's rank."""
    return weight.reshape(*weight.shape, *[1] * _weight_axes(label, weight.ndim))


def _lists_to_tuples(structure: Any) -> Any:
    """Convert lists to tuples: tf.data interprets a list as one tensor."""
    if isinstance(structure, dict):
        return {key: _lists_to_tuples(value) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        return tuple(_lists_to_tuples(value) for value in structure)
    return structure
