"""Global batches as a dataset: the one adapter to Keras, for ``fit`` with ``as_keras()`` and for ``hk.fit``."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import optree

from hvdkit.data import arguments, order
from hvdkit.data.aligned import Nest
from hvdkit.data.arrays import ArraySource
from hvdkit.data.batch_plan import BatchPlan
from hvdkit.data.position import DataPosition
from hvdkit.data.reader import RankBatch, read_on
from hvdkit.errors import describe

if TYPE_CHECKING:
    import tensorflow as tf

Weighted: TypeAlias = tuple[Nest, Nest, Nest]  # (x, y, sample_weight)
# Each call from TensorFlow into Python takes 0.2 ms. So several small batches, up to this many bytes, are fetched at
# once and split by TensorFlow.
_BYTES_AT_ONCE = 2**20
_MOST_AT_ONCE = 16
_PREFETCHED = 2  # batches, at least
_OPEN_READERS = 4  # limit on open passes; the oldest, abandoned ones are closed first
# Seconds without a read after which a pass is closed, once the dataset has been deleted.
_ABANDONED_SECONDS = 2.0
_UNTIL_END = -1  # batches remaining in a pass over an epoch of unknown length
_NOT_STARTED = np.array([-1, -1, -1])  # position of a pass that has not started


def weighted_batches(position: DataPosition) -> tf.data.Dataset:
    """Return the batches from a position on as ``(x, y, sample_weight)``; see ``GlobalBatches.as_keras``."""
    plan = position.plan
    size = plan.rank_rows.size
    parts = arguments.keras_parts(plan.source.structure)
    if parts == 1 and not plan.is_even:
        got = f"data without labels, in batches of {plan.batch_size} on {size} ranks, remainder={plan.remainder!r}"
        expected = "labels, whose weights correct for uneven shares and padding"
        remedy = "call hk.fit(model, batches); or pass remainder='drop' and a multiple of the number of ranks"
        raise ValueError(describe("arrays_or_source", got, expected, remedy))
    if plan.rank_rows.rank == 0 and plan.remainder == "pad":
        arguments.warn_about_filler(plan.source.examples, plan.batch_size)
    spec = plan.source.batch_spec(plan.rank_rows.max_rows)
    at_once = batches_at_once(plan)
    if parts == 1:
        return prefetched(_dataset(position, lambda batch: batch.rows, spec, at_once), plan)

    def add_weights(batch: RankBatch) -> Nest:
        weights = [order.sample_weights(order.real_rows(n, plan.local_rows), n, size) for n in batch.counts]
        return weighted(batch.rows, np.stack(weights) if at_once > 1 else weights[0])

    return prefetched(_dataset(position, add_weights, weighted_spec(spec), at_once), plan)


def shares_of_batches(position: DataPosition) -> tf.data.Dataset:
    """Return this rank's shares of the batches from a position on, for ``hk.fit``. The caller prefetches them.

    Its elements are ``(data, b, digest)``: rows ``[r*b//N, (r+1)*b//N)`` of the b real examples of a global batch, or
    one of its rows if that range is empty; int32 b; and the int64 digest of a stream's batch, otherwise 0. The plan of
    the position must be without filler.
    """
    import tensorflow as tf

    plan = position.plan
    at_once = batches_at_once(plan)
    first, last = plan.local_rows
    is_constant = plan.remainder == "drop" or plan.is_even
    spec = plan.source.batch_spec(last - first if is_constant else None)

    def add_count_and_digest(batch: RankBatch) -> Nest:
        if at_once == 1:
            return batch.rows, np.int32(batch.counts[0]), np.int64(batch.digest)
        return batch.rows, np.array(batch.counts, np.int32), np.zeros(len(batch.counts), np.int64)

    specs = (spec, tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int64))
    return _dataset(position, add_count_and_digest, specs, at_once)


def batches_at_once(plan: BatchPlan) -> int:
    """Return how many batches to pass to TensorFlow at once: several small ones of arrays, otherwise 1."""
    import tensorflow as tf

    if not isinstance(plan.source, ArraySource):
        return 1
    spec = plan.source.batch_spec(plan.rank_rows.max_rows)
    size: int = sum(s.shape.num_elements() * s.dtype.size for s in tf.nest.flatten(_lists_to_tuples(spec)))
    return max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // max(1, size)))


def prefetched(dataset: tf.data.Dataset, plan: BatchPlan) -> tf.data.Dataset:
    """Return a dataset whose batches are read while steps run: the next ones, while those fetched at once are used."""
    return dataset.prefetch(max(_PREFETCHED, batches_at_once(plan)))


def _dataset(position: DataPosition, convert: Callable[[RankBatch], Nest], spec: Nest, at_once: int) -> tf.data.Dataset:
    """Return a ``tf.data.Dataset`` of an epoch's batches; each pass over it continues after the previous one.

    Why not a ``keras.utils.PyDataset``: ``fit`` by default shuffles its batches with each process's random state, so
    ranks would train on rows of different global batches; and it calls ``on_epoch_end`` before the first epoch as well
    as after each. It does neither for a ``tf.data.Dataset``. The start of a pass is determined when its first batch is
    requested, because Keras creates iterators that it never reads.

    Why not ``Dataset.from_generator``: it permanently makes the process's C library return freed memory to the system
    immediately, so that every later step has to allocate it again (for a small network 1500 page faults and 2 ms per
    step); and Keras creates two iterators per epoch, each of which takes three times as long to create.

    Args:
        position: Where the first pass starts, and the first after the position was moved. A pass has the batches of an
            epoch, from the position on; of a stream of unknown length, the rest of the epoch.
        convert: Returns the batches that TensorFlow gets.
        spec: Of a converted batch.
        at_once: Maximum number of batches to fetch at once, with a leading batch axis; 1 for streams and files.
    """
    import tensorflow as tf

    steps = position.steps_per_epoch
    spec = _lists_to_tuples(spec)
    if at_once > 1:
        spec = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), spec)
    parts = tf.nest.flatten(spec, expand_composites=True)
    passes = _Passes(position, convert, parts, at_once)

    def read(at: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, Nest]:
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
        dataset = dataset.unbatch().take(steps)
    options = tf.data.Options()
    # Autotuning has nothing to tune here, and if fit stops within an epoch, deleting the iterator waits for the tuner's
    # thread: 10 s, sometimes two minutes.
    options.autotune.enabled = False
    if steps is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
    dataset = dataset.with_options(options)
    weakref.finalize(dataset, passes.close)  # TensorFlow keeps the function that reads, and with it the passes
    return dataset


class _Passes:
    """Passes over data. The state of a pass is its position: ``[epoch, step, batches remaining]``."""

    def __init__(
        self,
        position: DataPosition,
        convert: Callable[[RankBatch], Nest],
        parts: list[tf.TensorSpec],
        at_once: int,
    ) -> None:
        self._position = position
        self._convert = convert
        self._steps = position.steps_per_epoch
        self._source_identity = position.plan.source_identity
        self._parts = parts
        self._at_once = at_once
        self._empty_arrays = [_empty_array(part) for part in parts]
        self._origin = (position.moves, position.epoch, position.step)
        self._started = itertools.count()
        # Readers by position. A reader that was dropped is reopened.
        self._readers: dict[tuple[int, int, int], Generator[RankBatch, None, int | None]] = {}
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
            reader = read_on(self._position.plan, epoch, step, self._at_once, is_endless=self._steps is not None)
        try:
            batch = next(reader)
        except StopIteration as end:
            if remaining == _UNTIL_END:
                self._position.learn_length(end.value)
                if not is_first:
                    return [np.array([epoch, step, 0]), *self._empty_arrays]
            got = f"a pass that ends in epoch {epoch} at step {step}"
            remedy = "set GlobalBatches(epochs=) to at least fit's epochs, or to None"
            raise ValueError(describe("epochs", got, "more batches", remedy)) from None
        count = len(batch.counts)
        arrays = tf.nest.flatten(_lists_to_tuples(self._convert(batch)), expand_composites=True)
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
            position = self._position
            if position.plan.source_identity != self._source_identity:
                got = "other files than when it was made"
                remedy = "call as_keras() again, after restore() and add_new_files()"
                raise ValueError(describe("dataset", got, "the same files", remedy))
            if self._origin[0] != position.moves:
                self._origin = (position.moves, position.epoch, position.step)
                self._started = itertools.count()
            _, epoch, step = self._origin
            passed = next(self._started)
        if self._steps is None:
            return epoch + passed, 0 if passed else step, _UNTIL_END
        return *self._after(epoch + passed, step), self._steps

    def _after(self, epoch: int, step: int) -> tuple[int, int]:
        """Normalize a position to a step less than ``steps``, if that is known."""
        return (epoch, step) if self._steps is None else (epoch + step // self._steps, step % self._steps)


def _empty_array(spec: tf.TensorSpec) -> np.ndarray:
    """Return an array that matches a ``tf.TensorSpec``, empty if possible."""
    shape = [extent or 0 for extent in spec.shape]
    kind = spec.dtype.as_numpy_dtype
    return np.full(shape, b"", kind) if spec.dtype.name == "string" else np.zeros(shape, kind)


# ---- what Keras takes ------------------------------------------------------------------------------------------


def weighted(data: Nest, weight: np.ndarray) -> Weighted:
    """Return ``(x, y, sample_weight)`` for data ``(x, y)`` or ``(x, y, sample_weight)`` and a weight for each row.

    Keras multiplies losses ``[rows, ...]`` by weights of the same rank, so labels ``[rows, T]`` get ``[rows, 1]``. The
    data are arrays ``[..., rows, ...]``, the weights float32 ``[..., rows]``.
    """
    if len(data) == 3:
        x, y, weights = data
        return x, y, optree.tree_map(lambda w: np.asarray(w, _float(w.dtype)) * _like(weight, w), weights)
    x, y = data
    return x, y, _for_labels(y, weight.ndim, lambda label: _like(weight, label))


def weighted_spec(spec: Nest) -> Weighted:
    """Return the ``tf.TypeSpec`` structure of :func:`weighted`'s result, given that of the data."""
    import tensorflow as tf

    if len(spec) == 3:
        x, y, weights = spec
        return x, y, optree.tree_map(lambda w: tf.TensorSpec(w.shape, _float(w.dtype.as_numpy_dtype)), weights)
    x, y = spec
    return (
        x,
        y,
        _for_labels(y, 1, lambda label: tf.TensorSpec([label.shape[0], *[1] * _weight_axes(label, 1)], tf.float32)),
    )


def _for_labels(labels: Nest, axes: int, weight_of: Callable[[Nest], Nest]) -> Nest:
    """Return one weight if it fits all labels, otherwise a nest with one for each label."""
    leaves = optree.tree_leaves(labels)
    if len({_weight_axes(label, axes) for label in leaves}) == 1:
        return weight_of(leaves[0])
    return optree.tree_map(weight_of, labels)


def _float(dtype: npt.DTypeLike) -> np.dtype:
    return np.dtype(dtype) if np.issubdtype(dtype, np.floating) else np.dtype(np.float32)


def _weight_axes(label: np.ndarray | tf.Tensor | tf.TensorSpec, axes: int) -> int:
    """Return the number of size-1 axes to append to the weights' ``axes``; 0 for labels ``[rows, 1]``."""
    after = len(label.shape) - axes
    return 0 if after == 1 and label.shape[-1] == 1 else after


def _like(weight: np.ndarray, label: np.ndarray | tf.Tensor) -> np.ndarray:
    """Return weights with size-1 axes appended to match the label's rank."""
    return weight.reshape(*weight.shape, *[1] * _weight_axes(label, weight.ndim))


def _lists_to_tuples(structure: Nest) -> Nest:
    """Convert lists to tuples: tf.data interprets a list as one tensor."""
    if isinstance(structure, dict):
        return {key: _lists_to_tuples(value) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        return tuple(_lists_to_tuples(value) for value in structure)
    return structure
