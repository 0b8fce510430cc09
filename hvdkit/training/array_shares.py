"""Shares of global batches of arrays: each rank reads only its own rows, in Keras's shuffled order.

Keras shuffles arrays through a dataset of index batches seeded by TensorFlow's global seed, so applying Keras's adapter
to the indices gives the same order. If ranks don't share a global seed, the chief draws a seed for the order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import xxhash
from keras.src import tree
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from hvdkit.training.shares import DataRank, Element, Shares, untuned


class ArrayShares(Shares):
    """This rank's shares of global batches of arrays.

    Args:
        inner: Keras's adapter of the arrays, which has validated them.
        place: the place of this rank.
        seed: the chief's seed for shuffling; None for Keras's own order, if it is the same on all ranks.

    Attributes:
        digest: digest of sampled rows.
    """

    inner: ArrayDataAdapter

    def __init__(self, inner: ArrayDataAdapter, place: DataRank, seed: int | None = None) -> None:
        super().__init__(inner, place)
        self.seed = seed
        self.digest = _digest(inner._inputs, inner._num_samples)

    @property
    def may_be_empty(self) -> bool:
        """Return False if no share can be empty."""
        short = self.inner.partial_batch_size
        return min(self.inner._num_samples, self.inner.batch_size, short or self.inner.batch_size) < self.place.size

    def _is_even(self) -> bool:
        """Return True if all global batches are evenly divisible."""
        inner, size = self.inner, self.place.size
        whole = inner._num_samples >= inner.batch_size
        return (not whole or inner.batch_size % size == 0) and (inner.partial_batch_size or 0) % size == 0

    def _make(self) -> tf.data.Dataset:
        inputs = array_slicing.convert_to_sliceable(self.inner._inputs, target_backend="tensorflow")
        inputs = tree.lists_to_tuples(inputs)
        is_even = self._is_even()

        def read(indices: tf.Tensor, arrays: Any) -> Element:
            rows = tf.shape(indices)[0] if indices.shape[0] is None else indices.shape[0]
            start, end, share = self.place.to_read(rows)
            if is_even:
                start, end = self.place.bounds(rows)
                share.pop("factor", None)
            return _gathered(arrays, indices[start:end]), share

        both = tf.data.Dataset.zip((self._indices(), tf.data.Dataset.from_tensors(inputs).repeat()))
        options = untuned()
        options.experimental_optimization.apply_default_optimizations = False  # as in Keras: they would copy the arrays
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        made = both.map(read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return made.with_options(options).prefetch(tf.data.AUTOTUNE)

    def _indices(self) -> tf.data.Dataset:
        """Return the row numbers of the global batches, int64 ``[b]``; each pass reshuffles if Keras's does."""
        examples, batch_size, shuffle = self.inner._num_samples, self.inner.batch_size, self.inner._shuffle
        if self.seed is None or not shuffle:
            return ArrayDataAdapter(np.arange(examples), batch_size=batch_size, shuffle=shuffle).get_tf_dataset()
        rng = np.random.default_rng(self.seed)

        def permutation(_: Any) -> tf.Tensor:
            found = tf.numpy_function(lambda: rng.permutation(examples), [], tf.int64)
            return tf.ensure_shape(found, [examples])

        def batches(order: tf.Tensor) -> tf.data.Dataset:
            starts = tf.data.Dataset.range(0, examples, batch_size)
            cut = starts.map(lambda start: order[start : start + batch_size])
            whole = examples % batch_size == 0
            return cut.map(lambda part: tf.ensure_shape(part, [batch_size])) if whole else cut

        if shuffle == "batch":
            ordered = tf.data.Dataset.range(1).map(lambda _: tf.range(examples, dtype=tf.int64)).flat_map(batches)
            return ordered.map(lambda part: tf.reshape(tf.numpy_function(rng.permutation, [part], tf.int64), [-1]))
        return tf.data.Dataset.range(1).map(permutation).prefetch(1).flat_map(batches)


def _gathered(arrays: Any, indices: tf.Tensor) -> Any:
    """Return the rows of each array, read as Keras does."""

    def one(x: Any) -> Any:
        if isinstance(x, array_slicing.TensorflowSparseWrapper):
            return array_slicing.slice_tensorflow_sparse_wrapper(x, indices)
        if isinstance(x, (list, tuple, dict)):
            return None
        return tf.gather(x, indices, axis=0) if tf.is_tensor(x) else x

    return tree.traverse(one, arrays)


def _digest(inputs: Any, examples: int) -> tuple[Any, ...]:
    """Return what must be equal on all ranks: shapes, dtypes, and a hash of up to 8 rows spread over the arrays."""
    sampled = np.unique(np.linspace(0, examples - 1, 8).astype(np.int64)) if examples else np.zeros(0, np.int64)
    found: list[Any] = [examples]
    for array in tree.flatten(array_slicing.convert_to_sliceable(inputs, target_backend="numpy")):
        if array is None:
            continue
        rows = np.ascontiguousarray(array.convert_to_numpy(array[sampled]))
        data = repr(rows.tolist()).encode() if rows.dtype.hasobject else rows.tobytes()
        found.append((rows.dtype.name, tuple(map(int, rows.shape[1:])), xxhash.xxh3_64_intdigest(data)))
    return tuple(found)
