"""Keras data adapter for this rank's rows of each global batch.

Rank r of N gets rows ``r * b // N`` to ``(r + 1) * b // N`` of a global batch of b rows. If b is less than N, some
shares are empty: these ranks process the first row of the batch with weight 0. If tensors of a batch differ in length,
N must divide each length (see :class:`BatchDivision`). The elements of a dataset become
``(data, info)``; ``info`` is a dict for the step, empty for a single rank:

    factor   float64, f_r = n_r N / b (see :mod:`hvdkit.collectives.batch_share`); omitted if all shares are equal
    digest   int64, digest of the first and last rows of the global batch, to compare the ranks' data; 0 after the
             first batch, if every epoch starts with that batch
    rows     int32, b; used to restore the order of the global batch in predictions
    may_end_anywhere  present if the length of the data is unknown (see :mod:`hvdkit.keras.data_end`)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from hvdkit import cluster
from hvdkit.collectives.digests import digest_of_batch
from hvdkit.data.division import ROWS, WHOLE, Parts
from hvdkit.errors import describe, see
from hvdkit.internals import DataAdapter, TFDatasetAdapter

if TYPE_CHECKING:
    from hvdkit.data.position import ArrayPosition, DataPosition
    from hvdkit.keras.data_types import Tensors

Element: TypeAlias = "tuple[Tensors, dict[str, tf.Tensor]]"
"""A batch, and ``info``."""
AnyTensor: TypeAlias = "tf.Tensor | tf.RaggedTensor | tf.SparseTensor"
Number = TypeVar("Number", int, np.ndarray, tf.Tensor)


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

    def bounds(self, rows: Number) -> tuple[Number, Number]:
        """Return the first and one past the last row of this rank in batches of ``rows``: ints, arrays or tensors."""
        return self.index * rows // self.size, (self.index + 1) * rows // self.size

    def bounds_and_info(self, rows: int | tf.Tensor) -> tuple[int | tf.Tensor, int | tf.Tensor, dict[str, tf.Tensor]]:
        """Return the bounds of the rows to process, and ``info``, for a batch of ``rows``: an int, or a scalar tensor.

        For an empty share, they are the bounds of the first row.
        """
        start, end = self.bounds(rows)
        info: dict[str, tf.Tensor] = {"rows": tf.cast(rows, tf.int32)}
        if isinstance(rows, int) and rows % self.size == 0:
            return start, end, info
        info["factor"] = tf.cast((end - start) * self.size, tf.float64) / tf.cast(rows, tf.float64)
        if isinstance(rows, int) and rows >= self.size:
            return start, end, info
        is_empty = tf.equal(start, end)
        return tf.where(is_empty, 0, start), tf.where(is_empty, 1, end), info


def slice_tensor(x: AnyTensor, start: int | tf.Tensor, end: int | tf.Tensor) -> AnyTensor:
    """Slice the rows of a tensor: dense, ragged or sparse."""
    if isinstance(x, tf.SparseTensor):
        size = tf.cast(end - start, tf.int64)[None]
        first = tf.cast(start, tf.int64)[None]
        rest = x.dense_shape[1:]
        part = tf.sparse.slice(x, tf.concat([first, tf.zeros_like(rest)], 0), tf.concat([size, rest], 0))
        part.set_shape([None, *x.shape[1:]])  # layers are built from the static shape
        return part
    return x[start:end]


def first_tensor(data: object) -> AnyTensor | tf.TypeSpec | None:
    """Return the first tensor of a batch, or of its spec, with at least one axis, or None."""
    leaves = [x for x in tree.flatten(data) if x is not None]
    return next((x for x in leaves if x.shape.rank is None or x.shape.rank > 0), None)


def number_of_rows(data: Tensors) -> int | tf.Tensor:
    """Return the number of rows of a batch: an int, or an int32 scalar tensor if it is not statically known."""
    return _length(first_tensor(data))


def _length(x: AnyTensor) -> int | tf.Tensor:
    """Return the number of rows of a tensor: an int, or an int32 scalar tensor if it is not statically known."""
    static = _static_length(x)
    if static is not None:
        return static
    if isinstance(x, tf.SparseTensor):
        return tf.cast(x.dense_shape[0], tf.int32)
    return tf.cast(x.nrows(), tf.int32) if isinstance(x, tf.RaggedTensor) else tf.shape(x)[0]


def _static_length(x: AnyTensor | tf.TypeSpec) -> int | None:
    """Return the static number of rows of a tensor or a spec, if known."""
    if isinstance(x, (tf.SparseTensor, tf.RaggedTensor)) or not x.shape.rank:
        return None
    length: int | None = x.shape[0]
    return length


class BatchDivision:
    """The division of a batch's tensors among ranks.

    If all tensors have b rows, rank r's loss has the weight n_r N / b. If their lengths differ, a loss with a mean over
    each of several tensors has no such weight, unless all shares of a tensor are equal: N must divide each length.

    Args:
        spec: the specification of the batches.
        parts: how each tensor is divided (``hk.data.divide``); None if all tensors have the same number of rows.
        data_rank: this rank's index among the ranks with different rows.

    Attributes:
        problem: the error of a batch that cannot be divided; it ends the dataset with an error of TensorFlow.

    Raises:
        ValueError: ``parts`` has another structure than the batches, or they cannot be divided.
    """

    def __init__(self, spec: object, parts: Parts, data_rank: DataRank) -> None:
        self._data_rank = data_rank
        self.problem: ValueError | None = None
        paths = tree.flatten_with_path(spec)
        rules = [_rule(parts, path) for path, _ in paths]
        self._rules = tree.pack_sequence_as(spec, rules)
        self._is_declared = parts is not None
        divided = [(path, x) for (path, x), rule in zip(paths, rules, strict=True) if rule == ROWS and _has_rows(x)]
        self._names = ["batch" + "".join(f"[{key!r}]" for key in path) for path, _ in divided]
        self.spec = [x for _, x in divided]
        if not divided:
            got = f"{parts!r}, with scalars in place of rows"
            expected = "a tensor with rows to divide"
            raise ValueError(describe("hk.data.divide: parts", got, expected, "call dataset.batch(batch_size)"))
        lengths = [_static_length(x) for _, x in divided]
        known = [length for length in lengths if length is not None]
        self._is_static = len(known) == len(divided) and all(x.shape.rank is not None for _, x in divided)
        is_divisible = self._is_declared and all(length % data_rank.size == 0 for length in known)
        if self._is_static and len(set(known)) > 1 and not is_divisible:
            raise self._error(lengths)

    def rows(self, data: Tensors) -> int | tf.Tensor:
        """Return the number of rows of a batch: those of the first tensor that is divided."""
        return _length(self._divided(data)[0])

    def take(self, data: Tensors) -> Element:
        """Return this rank's share of a batch, and ``info``."""
        lengths = [_length(x) for x in self._divided(data)]
        _, _, info = self._data_rank.bounds_and_info(lengths[0])
        if self._is_static or len(lengths) == 1:
            return tree.map_structure(self._take_tensor, data, self._rules), info
        stacked = tf.stack([tf.cast(length, tf.int32) for length in lengths])
        is_equal = tf.reduce_all(tf.equal(stacked, stacked[0]))
        is_divisible = is_equal
        if self._is_declared:
            is_divisible |= tf.reduce_all(tf.equal(stacked % self._data_rank.size, 0))
        refuse = lambda: tf.numpy_function(self._refuse, [stacked], tf.bool)  # noqa: E731
        check = tf.cond(is_divisible, lambda: True, refuse)
        with tf.control_dependencies([check]):
            if "factor" in info:
                info["factor"] = tf.where(is_equal, info["factor"], 1.0)
            return tree.map_structure(self._take_tensor, data, self._rules), info

    def _take_tensor(self, x: AnyTensor | None, rule: str | None) -> AnyTensor | None:
        if rule != ROWS or not _has_rows(x):
            return x
        start, end, _ = self._data_rank.bounds_and_info(_length(x))
        return slice_tensor(x, start, end)

    def _divided(self, data: Tensors) -> list[AnyTensor]:
        pairs = zip(tree.flatten(data), tree.flatten(self._rules), strict=True)
        return [x for x, rule in pairs if rule == ROWS and _has_rows(x)]

    def _refuse(self, lengths: np.ndarray) -> bool:
        self.problem = self._error(lengths.tolist())
        raise self.problem

    def _error(self, lengths: Sequence[int | None]) -> ValueError:
        shown = ", ".join(f"{length} in {name}" for name, length in zip(self._names, lengths, strict=True))
        if self._is_declared:
            number = self._data_rank.size
            expected = f"lengths that the number of ranks, {number}, divides, as they differ"
            remedy = "choose other batch sizes with drop_remainder=True"
            return ValueError(describe("x", f"a batch with different numbers of rows: {shown}", expected, remedy))
        expected = "the same number of rows, one for each example"
        remedy = (
            "if its elements are single rows, pass dataset.batch(batch_size); otherwise declare how each tensor is "
            "divided among ranks, e.g. hk.data.divide(dataset, ('rows', 'rows', 'whole')); "
            f"of a batch of graphs, pass one row for each graph, as RaggedTensors; {see('pitfalls#data')}"
        )
        return ValueError(describe("x", f"a batch with different numbers of rows: {shown}", expected, remedy))


def _rule(parts: Parts, path: tuple[object, ...]) -> str | None:
    """Return the part of ``parts`` for the tensor at ``path`` of a batch."""
    rule: Any = ROWS if parts is None else parts
    for key in path:
        if isinstance(rule, str) or rule is None:
            break
        try:
            rule = rule[key]
        except (KeyError, IndexError, TypeError):
            got = f"{parts!r}, without a part for batch{''.join(f'[{k!r}]' for k in path)}"
            remedy = "pass parts in the structure of a batch: dataset.element_spec"
            raise ValueError(describe("hk.data.divide: parts", got, "one for each tensor", remedy)) from None
    if not isinstance(rule, str | None):
        got = f"{rule!r} for batch{''.join(f'[{k!r}]' for k in path)}, which is a tensor"
        raise ValueError(describe("hk.data.divide: parts", got, f"{ROWS!r} or {WHOLE!r}", "leave out the inner ones"))
    return rule


def _has_rows(x: AnyTensor | tf.TypeSpec | None) -> bool:
    return x is not None and x.shape.rank != 0


def untuned_options() -> tf.data.Options:
    """Return options that disable tf.data's autotuner; parallelism then equals the number of cores.

    Destroying an iterator may wait for the autotuner's thread, whose sleep grows with the length of the epoch.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return options


class LateAdapter(DataAdapter):
    """Keras's adapter of a PyDataset or a generator, made when its batches are first needed.

    Keras reads the first two batches to learn their dtypes. It reads those of validation data after the first epoch of
    training: sources that draw random numbers, and those that share NumPy's generator with the training data, have
    other batches if they are read earlier. ``num_batches`` is None if the number of batches is unknown.
    """

    def __init__(self, make: Callable[[], DataAdapter], num_batches: int | None) -> None:
        self._make = make
        self._num_batches = num_batches
        self._adapter: DataAdapter | None = None

    @property
    def py_dataset(self) -> keras.utils.PyDataset | None:
        """The PyDataset of the adapter, once it is made."""
        return getattr(self._adapter, "py_dataset", None)

    @property
    def is_made(self) -> bool:
        """Return True if the adapter has been made."""
        return self._adapter is not None

    def get_tf_dataset(self) -> tf.data.Dataset:
        """Return the dataset of the global batches."""
        if self._adapter is None:
            self._adapter = self._make()
        return self._adapter.get_tf_dataset()

    @property
    def num_batches(self) -> int | None:
        """Batches per epoch; None if unknown."""
        return self._num_batches if self._adapter is None else self._adapter.num_batches

    def on_epoch_begin(self) -> None:
        """Notify the adapter."""
        if self._adapter is not None:
            self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Notify the adapter."""
        if self._adapter is not None:
            self._adapter.on_epoch_end()


class Shares(DataAdapter):
    """Keras data adapter for this rank's shares of the global batches of another adapter.

    Args:
        inner: Keras's adapter of the global batches.
        data_rank: this rank's index among the ranks with different rows.
        may_start_mid_data: whether an epoch may start in the middle of the data, as with ``steps_per_epoch``.
        parts: how each tensor of a batch is divided (``hk.data.divide``); None if all have the same number of rows.
    """

    def __init__(
        self, inner: DataAdapter, data_rank: DataRank, *, may_start_mid_data: bool = False, parts: Parts = None
    ) -> None:
        self.inner = inner
        self.data_rank = data_rank
        self._may_start_mid_data = may_start_mid_data
        self._parts = parts
        self._division: BatchDivision | None = None
        self._dataset: tf.data.Dataset | None = None

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raise the error of a batch that cannot be divided, in place of TensorFlow's."""
        try:
            yield
        except tf.errors.OpError:
            if self._division is None or self._division.problem is None:
                raise
            problem = self._division.problem
            self._division.problem = None
            raise problem from None

    @property
    def has_workers(self) -> bool:
        """Return True for a PyDataset whose batches several threads or processes make."""
        dataset = getattr(self.inner, "py_dataset", None)
        return dataset is not None and (dataset.workers > 1 or dataset.use_multiprocessing)

    @property
    def has_whole_tensors(self) -> bool:
        """Return True if every rank gets a tensor of the batch whole, which must not be gathered."""
        return self._parts is not None and WHOLE in tree.flatten(self._parts)

    @property
    def may_be_empty(self) -> bool:
        """Return False if no share can be empty."""
        if isinstance(self.inner, LateAdapter) and not self.inner.is_made:
            return self.data_rank.size > 1
        data, info = self.get_tf_dataset().element_spec
        first = first_tensor(data if self._division is None else self._division.spec)
        return "factor" in info and (first is None or not first.shape.rank or first.shape[0] is None)

    def get_tf_dataset(self) -> tf.data.Dataset:
        """Return the shares as a dataset of ``(data, info)``."""
        if self._dataset is None:
            self._dataset = self._global_dataset() if cluster.size() == 1 else self._share_dataset()
        return self._dataset

    def _global_dataset(self) -> tf.data.Dataset:
        """Return the complete global batches for a single rank; the map only repacks its input, at no cost."""
        dataset = self.inner.get_tf_dataset()
        is_tuple = type(dataset.element_spec) is tuple  # tf.data does not unpack a NamedTuple
        division = None if self._parts is None else BatchDivision(dataset.element_spec, self._parts, self.data_rank)

        def with_info(*element: Tensors) -> Element:
            data = element if is_tuple else element[0]
            return data, {} if division is None else {"rows": tf.cast(division.rows(data), tf.int32)}

        return dataset.map(with_info)

    def _share_dataset(self) -> tf.data.Dataset:
        dataset = self.inner.get_tf_dataset()
        self._division = division = BatchDivision(dataset.element_spec, self._parts, self.data_rank)
        may_end_anywhere = self.may_end_anywhere

        def take(number: tf.Tensor, data: Tensors) -> Element:
            share, info = division.take(data)
            is_compared = tf.equal(number, 0) | self._may_start_mid_data
            info["digest"] = tf.cond(is_compared, lambda: digest_of_batch(data), lambda: tf.zeros([], tf.int64))
            if may_end_anywhere:
                info["may_end_anywhere"] = tf.constant(True)
            return share, info

        dataset = dataset.enumerate().map(take, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        dataset = dataset.prefetch(tf.data.AUTOTUNE)
        # A dataset of the user may need the autotuner.
        return dataset if isinstance(self.inner, TFDatasetAdapter) else dataset.with_options(untuned_options())

    @property
    def may_end_anywhere(self) -> bool:
        """Return True for data of unknown length, which may end at different steps on different ranks."""
        if self.num_batches is not None:
            return False
        dataset = self.inner.get_tf_dataset()
        return bool(int(dataset.cardinality()) != tf.data.INFINITE_CARDINALITY)

    @property
    def num_batches(self) -> int | None:
        """Batches per epoch, the same on every rank; None if unknown."""
        number: int | None = self.inner.num_batches
        return number

    @property
    def mean_batch_size(self) -> float | None:
        """Rows per global batch, over an epoch; None if the data do not declare it."""
        first = None if self._parts is not None else first_tensor(self.inner.get_tf_dataset().element_spec)
        return None if first is None or not first.shape.rank or first.shape[0] is None else float(first.shape[0])

    @property
    def position(self) -> ArrayPosition | DataPosition | None:
        """The position of training, for a Supervisor; None if training cannot begin within an epoch."""
        return None

    def begin_training(self, epoch: int | None) -> None:
        """Prepare for training from ``epoch``, which a callback may have restored; None without such a callback."""

    def begin_epoch(self, epoch: int) -> None:
        """Prepare for a Keras epoch of training."""

    def on_epoch_begin(self) -> None:
        """Notify the adapter of the global batches."""
        self.inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Notify the adapter of the global batches."""
        self.inner.on_epoch_end()
