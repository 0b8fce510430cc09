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
_TO_THE_END = -1  # batches left in a pass over an epoch of unknown length
_NOWHERE = np.array([-1, -1, -1])  # where a pass is that has read nothing


def batches_at_once(spec: Any) -> int:
    """Return how many batches to hand over to TensorFlow at once, of a ``tf.TypeSpec`` structure of dense tensors."""
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
    """Return a ``tf.data.Dataset`` of an epoch's batches, each pass over which goes on where the one before ended.

    Why not a ``keras.utils.PyDataset``: ``fit`` shuffles the order of its batches by default, with each process's own
    random state, so that ranks would train on rows of different global batches; and it calls ``on_epoch_end``
    before the first epoch as well as after each. It does neither to a ``tf.data.Dataset``. Where a pass starts
    is settled when it is asked for its first batch: Keras creates iterators that it never reads.

    Why not ``Dataset.from_generator``: it has the C library give memory back to the system at once, in the whole
    process and for good, so that every later step gets its memory anew (in a small network 1500 page faults and 2 ms
    a step); and Keras makes two iterators in an epoch, of which each takes three times as long to make.

    Args:
        open_at: Returns an iterator from a step of an epoch on over numbers of batches, at most ``at_once``, and the
            batches, with an axis for them in front if ``at_once`` is not 1. It goes on with the next epoch if ``steps``
            is known, and ends with the epoch if it is not.
        position: Returns how often the data have been restored, and the epoch and step they are at. The first pass, and
            the first after a restore, starts there.
        steps: Batches in a pass; None: as many as the epoch turns out to have.
        spec: The ``tf.TypeSpec`` structure of a batch.
        at_once: How many batches may come at once; 1 if ``steps`` is not known.
    """
    import tensorflow as tf

    from hvdkit.collectives.batch_share import mark_share

    spec = _lists_to_tuples(spec)
    if at_once > 1:
        spec = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), spec)
    parts = tf.nest.flatten(spec, expand_composites=True)
    passes = _Passes(open_at, position, steps, [_nothing(part) for part in parts])

    def read(at: Any, _: Any) -> tuple[Any, Any]:
        at, *batches = tf.numpy_function(passes.read, [at], [tf.int64, *(part.dtype for part in parts)])
        at.set_shape([3])
        for batch, part in zip(batches, parts, strict=True):
            batch.set_shape(part.shape)
        batch = tf.nest.pack_sequence_as(spec, batches, expand_composites=True)
        return at, (at, batch) if steps is None else batch

    # The state of a scan is its iterator's own: where the pass is.
    dataset = tf.data.Dataset.range(steps or np.iinfo(np.int64).max).scan(_NOWHERE, read)
    if steps is None:
        dataset = dataset.take_while(lambda at, _: at[2] != 0).map(lambda _, batch: batch)
    if at_once > 1:
        dataset = dataset.prefetch(1).unbatch().take(steps)
    options = tf.data.Options()
    # There is nothing to tune, and an iterator that is dropped half read, when fit stops within an epoch, waits for
    # the tuner's thread: 10 s, at times two minutes.
    options.autotune.enabled = False
    if steps is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
    dataset = dataset.prefetch(2).with_options(options)
    mark_share(dataset)
    return dataset


class _Passes:
    """Passes over data. Each of them keeps where it is: ``[epoch, step, batches left]``."""

    def __init__(
        self,
        open_at: Callable[[int, int], Iterator[tuple[int, Any]]],
        position: Callable[[], tuple[int, int, int]],
        steps: int | None,
        nothing: list[np.ndarray],
    ) -> None:
        self._open_at, self._position, self._steps, self._nothing = open_at, position, steps, nothing
        self._origin, self._started = position(), itertools.count()
        # By where they are. One that was dropped is opened anew.
        self._readers: dict[tuple[int, int, int], Iterator[tuple[int, Any]]] = {}
        self._lock = threading.Lock()

    def read(self, state: np.ndarray) -> list[np.ndarray]:
        """Return where a pass is after some more batches, and the arrays of these; no batches after its end."""
        import tensorflow as tf

        begins = state[0] < 0
        epoch, step, left = self._begin() if begins else map(int, state)
        if left == 0:  # asked ahead of time
            return [state, *self._nothing]
        with self._lock:
            reader = self._readers.pop((epoch, step, left), None)
        if reader is None:
            reader = self._open_at(epoch, step)
        number, batches = next(reader, (0, None))
        if number == 0 and left == _TO_THE_END and not begins:
            return [np.array([epoch, step, 0]), *self._nothing]
        if number == 0:
            raise ValueError(
                describe("epochs", f"a pass that ends in epoch {epoch} at step {step}", "more batches",
                         "let GlobalBatches(epochs=) be at least the epochs of fit, or None")
            )  # fmt: skip
        arrays = tf.nest.flatten(_lists_to_tuples(batches), expand_composites=True)
        if left != _TO_THE_END and number >= left:
            if number > left:
                arrays = [array[:left] for array in arrays]
            return [np.array([epoch, step, 0]), *arrays]
        epoch, step = self._after(epoch, step + number)
        at = epoch, step, left if left == _TO_THE_END else left - number
        with self._lock:
            self._readers[at] = reader
            while len(self._readers) > _OPEN_READERS:
                del self._readers[next(iter(self._readers))]
        return [np.array(at), *arrays]

    def _begin(self) -> tuple[int, int, int]:
        with self._lock:
            if self._origin[0] != self._position()[0]:
                self._origin, self._started = self._position(), itertools.count()
            _, epoch, step = self._origin
            passed = next(self._started)
        if self._steps is None:
            return epoch + passed, 0 if passed else step, _TO_THE_END
        return *self._after(epoch + passed, step), self._steps

    def _after(self, epoch: int, step: int) -> tuple[int, int]:
        """Return a position with a step less than ``steps``, if that is known."""
        return (epoch, step) if self._steps is None else (epoch + step // self._steps, step % self._steps)


def _nothing(spec: Any) -> np.ndarray:
    """Return an array that goes with a ``tf.TensorSpec``, of no elements if that is possible."""
    shape = [extent or 0 for extent in spec.shape]
    kind = spec.dtype.as_numpy_dtype
    return np.full(shape, b"", kind) if spec.dtype.name == "string" else np.zeros(shape, kind)


# ---- what Keras takes ------------------------------------------------------------------------------------------


def weighted(data: Any, weight: np.ndarray) -> tuple[Any, Any, Any]:
    """Return ``(x, y, sample_weight)`` for data ``(x, y)`` or ``(x, y, sample_weight)`` and a weight for each row.

    Keras multiplies losses ``[rows, ...]`` by weights of the same rank. So labels ``[rows, T]`` get ``[rows, 1]``.

    Args:
        data: arrays ``[..., rows, ...]``.
        weight: float32 ``[..., rows]``.
    """
    import optree

    if len(data) == 3:
        x, y, own = data
        return x, y, optree.tree_map(lambda w: np.asarray(w, _float(w.dtype)) * _like(weight, w), own)
    x, y = data
    leaves = optree.tree_leaves(y)
    if len({_weight_axes(label, weight.ndim) for label in leaves}) == 1:
        return x, y, _like(weight, leaves[0])
    return x, y, optree.tree_map(lambda label: _like(weight, label), y)


def weighted_spec(spec: Any) -> tuple[Any, Any, Any]:
    """Return the ``tf.TypeSpec`` structure of what :func:`weighted` returns, for that of the data."""
    import tensorflow as tf

    def of(label: Any) -> Any:
        return tf.TensorSpec([label.shape[0], *[1] * _weight_axes(label, 1)], tf.float32)

    if len(spec) == 3:
        x, y, own = spec
        return x, y, tf.nest.map_structure(lambda w: tf.TensorSpec(w.shape, _float(w.dtype.as_numpy_dtype)), own)
    x, y = spec
    leaves = tf.nest.flatten(_lists_to_tuples(y))
    if len({_weight_axes(label, 1) for label in leaves}) == 1:
        return x, y, of(leaves[0])
    return x, y, tf.nest.map_structure(of, y)


def _float(dtype: Any) -> np.dtype:
    return np.dtype(dtype) if np.issubdtype(dtype, np.floating) else np.dtype(np.float32)


def _weight_axes(label: Any, axes: int) -> int:
    """Return how many axes of extent 1 follow the weights' ``axes``; none for labels ``[rows, 1]``."""
    after = len(label.shape) - axes
    return 0 if after == 1 and label.shape[-1] == 1 else after


def _like(weight: np.ndarray, label: Any) -> np.ndarray:
    """Return weights with axes of extent 1 for those that the label has after its rows."""
    return weight.reshape(*weight.shape, *[1] * _weight_axes(label, weight.ndim))


def _lists_to_tuples(structure: Any) -> Any:
    """tf.data takes a list for one tensor."""
    if isinstance(structure, dict):
        return {key: _lists_to_tuples(value) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        return tuple(_lists_to_tuples(value) for value in structure)
    return structure
