"""Shares of global batches of arrays: each rank reads only its own rows, in Keras's shuffled order.

Keras shuffles arrays through a dataset of index batches, by TensorFlow's global seed, which gives each epoch the same
order; the same operation in a dataset of row numbers gives this order, too. If ranks don't share a global seed, the
chief draws a seed, and each epoch has another order. Both can be continued within an epoch.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from hvdkit.data.arrays import digest_of_rows
from hvdkit.data.position import ArrayPosition
from hvdkit.internals import ArrayDataAdapter, array_slicing, context
from hvdkit.keras.shares import DataRank, Element, Shares, untuned_options

if TYPE_CHECKING:
    from hvdkit.keras.data_types import Tensors


class ArrayShares(Shares):
    """This rank's shares of global batches of arrays.

    Args:
        inner: Keras's adapter of the arrays, which has validated them.
        trains: whether ``fit`` reads the arrays; otherwise evaluation or prediction.
        steps: steps per Keras epoch; None for those of the data.

    Attributes:
        digest: dtypes and shapes of the arrays, and a digest of sampled rows.
    """

    inner: ArrayDataAdapter

    def __init__(
        self, inner: ArrayDataAdapter, data_rank: DataRank, *, trains: bool = False, steps: int | None = None
    ) -> None:
        super().__init__(inner, data_rank)
        self._trains = trains
        self._position = ArrayPosition(inner.num_batches)
        self._has_whole_epochs = steps in (None, inner.num_batches)
        arrays = tree.flatten(array_slicing.convert_to_sliceable(inner._inputs, target_backend="numpy"))
        columns = [functools.partial(_numpy_rows, array) for array in arrays if array is not None]
        self.digest = digest_of_rows(columns, inner._num_samples)

    @property
    def position(self) -> ArrayPosition | None:
        """The position of training, for a Supervisor; None if Keras's epochs differ from those of the data."""
        return self._position if self._trains and self._has_whole_epochs else None

    def shuffle_by(self, seed: int) -> None:
        """Shuffle by the chief's seed, in place of Keras's own order."""
        self._position.seed = seed

    def begin_epoch(self, epoch: int) -> None:
        """Read ``epoch`` in the next pass."""
        self._position.begin_epoch(epoch)

    @property
    def may_be_empty(self) -> bool:
        short = self.inner.partial_batch_size
        smallest: int = min(self.inner._num_samples, self.inner.batch_size, short or self.inner.batch_size)
        return smallest < self.data_rank.size

    @property
    def mean_batch_size(self) -> float:
        return float(self.inner._num_samples / self.inner.num_batches)

    def first_inputs(self, number: int) -> Tensors:
        """Return the inputs of the first ``number`` rows; None if an array is ragged or sparse."""
        arrays = array_slicing.convert_to_sliceable(self.inner._inputs, target_backend="numpy")
        if not all(isinstance(x.array, (np.ndarray, tf.Tensor)) for x in tree.flatten(arrays) if x is not None):
            return None
        indices = np.arange(min(number, self.inner._num_samples))
        rows = tree.map_structure(lambda x: None if x is None else tf.constant(_numpy_rows(x, indices)), arrays)
        return keras.utils.unpack_x_y_sample_weight(tree.lists_to_tuples(rows))[0]

    def _is_even(self) -> bool:
        """Return True if all global batches are evenly divisible."""
        inner = self.inner
        size = self.data_rank.size
        has_full_batch = inner._num_samples >= inner.batch_size
        return (not has_full_batch or inner.batch_size % size == 0) and (inner.partial_batch_size or 0) % size == 0

    def _share_dataset(self) -> tf.data.Dataset:
        arrays = array_slicing.convert_to_sliceable(self.inner._inputs, target_backend="tensorflow")
        inputs = tree.lists_to_tuples(arrays)
        is_even = self._is_even()

        @tf.autograph.experimental.do_not_convert
        def read(indices: tf.Tensor, arrays: Tensors) -> Element:
            rows = tf.shape(indices)[0] if indices.shape[0] is None else indices.shape[0]
            start, end, info = self.data_rank.bounds_and_info(rows)
            if is_even:
                start, end = self.data_rank.bounds(rows)
                info.pop("factor", None)
            return _take_rows(arrays, indices[start:end]), info

        dataset = tf.data.Dataset.zip((self._indices(), tf.data.Dataset.from_tensors(inputs).repeat()))
        options = untuned_options()
        options.experimental_optimization.apply_default_optimizations = False  # as in Keras: they would copy the arrays
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        dataset = dataset.map(read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)

    def _global_dataset(self) -> tf.data.Dataset:
        if not self._trains:
            return super()._global_dataset()
        return self._share_dataset().map(lambda data, info: (data, {}))

    def _indices(self) -> tf.data.Dataset:
        """Return the row numbers of the global batches, int64 ``[b]``, from the position on."""
        examples = self.inner._num_samples
        shuffle = self.inner._shuffle
        position = self._position  # TensorFlow may never free a numpy_function, and what it refers to

        @tf.autograph.experimental.do_not_convert
        def read(_: tf.Tensor) -> tf.data.Dataset:
            rows = tf.range(examples, dtype=tf.int64)
            batches = self._batches(self._permuted(rows) if shuffle and shuffle != "batch" else rows)
            if shuffle == "batch":
                batches = batches.map(self._permuted)
            return batches.skip(tf.numpy_function(lambda: np.int64(position.step), [], tf.int64))

        return tf.data.Dataset.range(1).flat_map(read)

    def _permuted(self, rows: tf.Tensor) -> tf.Tensor:
        """Return the row numbers in the order of this epoch."""
        position = self._position

        def by_seed() -> tf.Tensor:
            return tf.numpy_function(position.permutation, [rows], tf.int64)

        if context.global_seed() is None:  # with deterministic operations, Keras's order would raise
            return tf.ensure_shape(by_seed(), rows.shape)
        has_seed = tf.numpy_function(lambda: np.bool_(position.seed is not None), [], tf.bool)
        # Shuffled as in Keras, in a function of the dataset: the operation seed is 0.
        order = tf.cond(has_seed, by_seed, lambda: tf.random.shuffle(rows))
        return tf.ensure_shape(order, rows.shape)

    def _batches(self, order: tf.Tensor) -> tf.data.Dataset:
        """Return the global batches of the row numbers ``order``, int64 ``[examples]``."""
        batch_size = self.inner.batch_size
        stop = order.shape[0] // batch_size * batch_size
        batches = tf.data.Dataset.from_tensor_slices(tf.reshape(order[:stop], [-1, batch_size]))
        if stop < order.shape[0]:
            batches = batches.concatenate(tf.data.Dataset.from_tensors(order[stop:]))
        return batches


def _take_rows(arrays: Tensors, indices: tf.Tensor) -> Tensors:
    """Return the rows of each array, read as Keras does."""

    def take(x: Tensors) -> Tensors:
        if isinstance(x, array_slicing.TensorflowSparseWrapper):
            return array_slicing.slice_tensorflow_sparse_wrapper(x, indices)
        if isinstance(x, (list, tuple, dict)):
            return None
        return tf.gather(x, indices, axis=0) if tf.is_tensor(x) else x

    return tree.traverse(take, arrays)


def _numpy_rows(array: array_slicing.Sliceable, indices: np.ndarray) -> np.ndarray:
    return np.asarray(array.convert_to_numpy(array[indices]))
