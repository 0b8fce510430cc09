"""Keras data adapter for this rank's rows of each global batch.

Rank r of N gets rows ``r * b // N`` to ``(r + 1) * b // N`` of a global batch of b rows. If b is less than N, some
shares are empty: these ranks process the first row of the batch with weight 0. The elements of a dataset become
``(data, info)``; ``info`` is a dict for the step, empty for a single rank:

    factor   float32, f_r = n_r N / b (see :mod:`hvdkit.collectives.batch_share`); omitted if all shares are equal
    digest   int64, digest of the first and last rows of the global batch, to compare the ranks' data; 0 after the
             first batch, if every epoch starts with that batch
    rows     int32, b; used to restore the order of the global batch in predictions
    may_end_anywhere  present if the length of the data is unknown (see :mod:`hvdkit.training.data_end`)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from keras.src import tree
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from hvdkit import cluster
from hvdkit.cluster import Group
from hvdkit.collectives.digests import digest_of_batch

Element = tuple[Any, dict[str, tf.Tensor]]


@dataclass(frozen=True)
class DataRank:
    """Rank ``index`` of ``size`` ranks with different rows."""

    index: int
    size: int

    @classmethod
    def local(cls) -> DataRank:
        """Return this process's index along the mesh axis "data"."""
        group = cluster.group(cluster.DATA)
        return cls(group.index, group.size)

    def bounds(self, rows: Any) -> tuple[Any, Any]:
        """Return the first and one past the last row of this rank in batches of ``rows``: ints, arrays or tensors."""
        return self.index * rows // self.size, (self.index + 1) * rows // self.size

    def bounds_and_info(self, rows: Any) -> tuple[Any, Any, dict[str, tf.Tensor]]:
        """Return the bounds of the rows to process, and ``info``; for an empty share, the bounds of the first row.

        Args:
            rows: number of rows of the global batch; an int or an int scalar tensor.
        """
        start, end = self.bounds(rows)
        info: dict[str, tf.Tensor] = {"rows": tf.cast(rows, tf.int32)}
        if isinstance(rows, int) and rows % self.size == 0:
            return start, end, info
        info["factor"] = tf.cast((end - start) * self.size, tf.float32) / tf.cast(rows, tf.float32)
        if isinstance(rows, int) and rows >= self.size:
            return start, end, info
        is_empty = tf.equal(start, end)
        return tf.where(is_empty, 0, start), tf.where(is_empty, 1, end), info


def data_group() -> Group | None:
    """Return the ranks with different rows of a batch, as a process set; None if these are all ranks."""
    group = cluster.group(cluster.DATA)
    return None if group.size == cluster.size() else group


def slice_rows(data: Any, start: Any, end: Any) -> Any:
    """Slice the rows of every tensor in a batch (dense, ragged or sparse); scalars and None are unchanged."""

    def slice_tensor(x: Any) -> Any:
        if x is None or (isinstance(x, tf.Tensor) and x.shape.rank == 0):
            return x
        if isinstance(x, tf.SparseTensor):
            size = tf.cast(end - start, tf.int64)[None]
            first = tf.cast(start, tf.int64)[None]
            rest = x.dense_shape[1:]
            return tf.sparse.slice(x, tf.concat([first, tf.zeros_like(rest)], 0), tf.concat([size, rest], 0))
        return x[start:end]

    return tree.map_structure(slice_tensor, data)


def first_tensor(data: Any) -> Any:
    """Return the first tensor of a batch with at least one axis, or None."""
    leaves = [x for x in tree.flatten(data) if x is not None]
    return next((x for x in leaves if x.shape.rank is None or x.shape.rank > 0), None)


def number_of_rows(data: Any) -> Any:
    """Return the number of rows of a batch: an int, or an int32 scalar tensor if it is not statically known."""
    first = first_tensor(data)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    static_rows = first.shape[0] if first.shape.rank is not None else None
    return tf.shape(first)[0] if static_rows is None else static_rows


def untuned_options() -> tf.data.Options:
    """Return options that disable tf.data's autotuner; parallelism then equals the number of cores.

    Destroying an iterator may wait for the autotuner's thread, whose sleep grows with the length of the epoch.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return options


class Shares(DataAdapter):
    """Keras data adapter for this rank's shares of the global batches of another adapter.

    Args:
        inner: Keras's adapter of the global batches.
        data_rank: this rank's index among the ranks with different rows.
        may_start_mid_data: whether an epoch may start in the middle of the data, as with ``steps_per_epoch``.
    """

    def __init__(self, inner: DataAdapter, data_rank: DataRank, *, may_start_mid_data: bool = False) -> None:
        self.inner, self.data_rank, self._may_start_mid_data = inner, data_rank, may_start_mid_data
        self._dataset: tf.data.Dataset | None = None

    @property
    def may_be_empty(self) -> bool:
        """Return False if no share can be empty."""
        data, info = self.get_tf_dataset().element_spec
        first = first_tensor(data)
        return "factor" in info and (first is None or not first.shape.rank or first.shape[0] is None)

    def get_tf_dataset(self) -> tf.data.Dataset:
        """Return the shares as a dataset of ``(data, info)``."""
        if self._dataset is None:
            self._dataset = self._global_dataset() if cluster.size() == 1 else self._share_dataset()
        return self._dataset

    def _global_dataset(self) -> tf.data.Dataset:
        """Return the complete global batches for a single rank; the map only repacks its input, at no cost."""
        dataset = self.inner.get_tf_dataset()
        is_tuple = isinstance(dataset.element_spec, tuple)
        return dataset.map(lambda *element: (element if is_tuple else element[0], {}))

    def _share_dataset(self) -> tf.data.Dataset:
        def take(number: tf.Tensor, data: Any) -> Element:
            start, end, info = self.data_rank.bounds_and_info(number_of_rows(data))
            is_compared = tf.equal(number, 0) | self._may_start_mid_data
            info["digest"] = tf.cond(is_compared, lambda: digest_of_batch(data), lambda: tf.zeros([], tf.int64))
            if may_end_anywhere:
                info["may_end_anywhere"] = tf.constant(True)
            return slice_rows(data, start, end), info

        dataset, may_end_anywhere = self.inner.get_tf_dataset().enumerate(), self.may_end_anywhere
        dataset = dataset.map(take, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)
        # A dataset of the user may need the autotuner.
        return dataset if isinstance(self.inner, TFDatasetAdapter) else dataset.with_options(untuned_options())

    @property
    def may_end_anywhere(self) -> bool:
        """Return True for data of unknown length, which may end at different steps on different ranks."""
        if self.num_batches is not None:
            return False
        dataset = self.inner.get_tf_dataset()
        return int(dataset.cardinality()) != tf.data.INFINITE_CARDINALITY

    @property
    def num_batches(self) -> int | None:
        """Batches per epoch, the same on every rank; None if unknown."""
        return self.inner.num_batches

    def begin_training(self, epoch: int | None) -> None:
        """Prepare for training from ``epoch``, which a callback may have restored; None without such a callback."""

    def on_epoch_begin(self) -> None:
        """Notify the adapter of the global batches."""
        self.inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Notify the adapter of the global batches."""
        self.inner.on_epoch_end()
