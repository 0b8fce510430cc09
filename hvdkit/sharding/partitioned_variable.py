"""A variable sharded across ranks by rows: the successor of TensorFlow 1's ``PartitionedVariable``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import alltoall, tensors
from hvdkit.collectives.call_checks import exchange_payloads
from hvdkit.collectives.conversion import graph_safe
from hvdkit.errors import HvdkitError, describe, integer
from hvdkit.sharding.id_checks import Fault, as_ids, find_fault, is_out_of_range, range_check, refusal
from hvdkit.sharding.initial import common_seed, draws_numbers, initial_blocks
from hvdkit.sharding.keys import key_dtype, keys_of
from hvdkit.sharding.partition import Partition, rows_of
from hvdkit.sharding.routing import KeptLookup, KeyedVariable, fetch_rows, request_rows, rows_of_last_lookup
from hvdkit.sharding.shards import AnyVariable, Piece, Shard, set_holding, write_box
from hvdkit.sharding.table import Initializer


class PartitionedVariable:
    """A variable whose rows are sharded across ranks.

    Rank r of N holds contiguous rows ("div") or every N-th row ("mod").
    Initial values depend only on ``seed`` and the global row, not on N.

    Every rank creates it, with the same arguments, and calls ``lookup``, ``gather`` and ``assign_rows``. The methods
    ``assign``, ``assign_local`` and ``apply`` do not exchange values.

    Args:
        shape: global shape ``[rows, ...]``; may have zero rows, or fewer rows than ranks.
        dtype: a floating-point or integer dtype.
        initializer: a Keras initializer or its name, a number, or the unsharded array.
        partition: "div" or "mod".
        seed: seed of random initializers; None draws one, the same for all ranks.
        name: name in checkpoints and messages to the user.
        trainable: whether a ``tf.GradientTape`` watches it.

    Attributes:
        shape: global shape, a tuple.
        dtype: a ``tf.DType``.
        partition: "div" or "mod".
        name: as given.
        local: this rank's rows, a ``tf.Variable`` ``[local rows, ...]``, for ``tape.gradient`` and optimizers.
        local_rows: their global indices, a ``range``.
        local_index: the same, and the complete ranges along the other axes.

    Raises:
        ValueError, TypeError: an argument is invalid.
        CollectiveMismatchError: ranks passed different arguments.

    Examples:
        >>> import keras
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> table = hk.PartitionedVariable((1000, 8), initializer="ones", partition="mod", seed=1)
        >>> table.local.shape == (len(range(hk.rank(), 1000, hk.size())), 8)
        True
        >>> optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(0.5))
        >>> with tf.GradientTape() as tape:
        ...     vectors = table.lookup([[7, 12, 999]])  # this rank's ids
        ...     loss = tf.reduce_sum(vectors)
        >>> vectors.shape
        TensorShape([1, 3, 8])
        >>> optimizer.apply([tape.gradient(loss, table.local)], [table.local])
        >>> table.gather()[[6, 7], 0]  # row 7 was updated on the rank that holds it
        array([1. , 0.5], dtype=float32)
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: tf.DType | str = "float32",
        initializer: Initializer = "zeros",
        *,
        partition: Partition = "div",
        seed: int | None = None,
        name: str | None = None,
        trainable: bool = True,
    ):
        self.name = name or "partitioned"
        call = f"PartitionedVariable(shape={shape}, dtype={dtype}, partition={partition!r}, name={self.name!r})"

        def check() -> int:
            self.shape = tuple(integer("shape", n, minimum=0) for n in shape)
            if not self.shape:
                raise ValueError(describe("shape", shape, "at least one axis", "a scalar cannot be sharded"))
            self.dtype = tf.as_dtype(dtype)
            if not (self.dtype.is_floating or self.dtype.is_integer):
                raise TypeError(describe("dtype", self.dtype.name, "numbers", "pass e.g. 'float32'"))
            if partition not in get_args(Partition):
                raise ValueError(describe("partition", partition, "'div' or 'mod'", "pass one of them"))
            return common_seed(seed if draws_numbers(initializer) else seed or 0, initializer)

        chief_seed = exchange_payloads(call, check)[0]
        self.partition = partition
        self.local_rows = rows_of(partition, self.shape[0], cluster.rank(), cluster.size())
        self.local_index = (self.local_rows, *map(range, self.shape[1:]))
        self._key_dtype = key_dtype(-(-self.shape[0] // cluster.size()) * cluster.size())
        with tf.init_scope():
            zeros = tf.zeros([len(axis) for axis in self.local_index], self.dtype)
            self.local = tf.Variable(zeros, trainable=trainable, name=self.name)
            blocks = initial_blocks(initializer, self.shape, self.dtype.name, chief_seed, self.local_index)
            for start, block in blocks:
                write_box(self.local, (slice(start, start + len(block)),), block)
        piece = Piece("", self.shape, self.local_index, 0, partition)
        self.last_lookup: KeptLookup | None = None
        set_holding(self.local, Shard(self.name, (piece,), rows_by_rank=rows_of_last_lookup(self, 0)))

    def __repr__(self) -> str:
        local = f"{len(self.local_rows)} of {self.shape[0]} rows on rank {cluster.rank()} of {cluster.size()}"
        return (
            f"<hvdkit.PartitionedVariable {self.name!r} {self.dtype.name}{list(self.shape)} {self.partition}: {local}>"
        )

    @graph_safe
    def lookup(self, ids: npt.ArrayLike | tf.Tensor) -> tf.Tensor:
        """Return rows by their global index, from any rank. Differentiable, in eager mode and in graphs.

        Every rank calls it, each with its own ids. The gradient arrives at ``local`` of the ranks that hold the rows,
        as IndexedSlices summed over all ranks' losses; ``hk.DistributedOptimizer`` converts it to a mean.

        Args:
            ids: this rank's ids, integers of any shape; may be empty.

        Returns:
            ``[*ids.shape, *shape[1:]]``.

        Raises:
            TypeError: ids are not integers.
            ValueError: on every rank, if an id of any rank is out of range (in a graph,
                ``tf.errors.InvalidArgumentError``).
        """
        try:
            ids = as_ids(ids, self.name)
        except (TypeError, ValueError):
            with contextlib.suppress(ValueError):
                if tf.executing_eagerly():  # in a graph, a tracing error ends the job; here others would wait
                    self._look_up(tf.zeros([0], tf.int32), refusal())
            raise
        flat = tf.reshape(ids, [-1])
        vectors = self._look_up(flat, find_fault([range_check(flat, self.shape[0], f"lookup of {self.name!r}")]))
        return tf.reshape(vectors, tf.concat([tf.shape(ids), self.shape[1:]], 0))

    def _look_up(self, flat: tf.Tensor, fault: Fault) -> tf.Tensor:
        rows = self.shape[0]
        safe = tf.cast(tf.where(is_out_of_range(flat, rows), tf.zeros_like(flat), flat), self._key_dtype)
        keys = keys_of(safe, self.partition, rows, cluster.size())
        sources = [KeyedVariable(self.local)]
        lookup = request_rows(sources, [[keys]], fault)
        self.last_lookup = KeptLookup(lookup)
        return fetch_rows(sources, [1], lookup)[0][0].by_key()

    def gather(self, root: int | None = None) -> np.ndarray | None:
        """Return the unsharded array on every rank, or only on ``root``. Every rank calls it.

        Args:
            root: the rank that gets the array; None for all.

        Returns:
            An array of the global shape; None on ranks other than ``root``.

        Raises:
            ValueError: ``root`` is not a rank.
            HvdkitError: called inside a ``tf.function``.
        """

        def check() -> None:
            if root is not None and not 0 <= integer("root", root, minimum=0) < cluster.size():
                raise ValueError(describe("root", root, f"a rank, 0 to {cluster.size() - 1}", "pass one"))

        exchange_payloads(f"PartitionedVariable({self.name!r}).gather(root={root})", check)
        size = cluster.size()
        others = tuple(map(range, self.shape[1:]))
        indices = [(rows_of(self.partition, self.shape[0], rank, size), *others) for rank in range(size)]
        return gather_parts(self.local, indices, self.shape, root, "hvdkit.gather")

    def assign(self, full_array: npt.ArrayLike) -> None:
        """Set the entire variable; each rank takes its rows of ``full_array``.

        Args:
            full_array: the new values, of the global shape, the same on every rank.

        Raises:
            ValueError: the array has the wrong shape.

        Examples:
            >>> import numpy as np
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> variable = hk.PartitionedVariable((10, 4))
            >>> variable.assign(np.ones((10, 4)))
            >>> variable.gather().sum().item()
            40.0
        """
        array = np.asarray(full_array)
        if array.shape != self.shape:
            raise ValueError(describe("full_array", list(array.shape), f"{list(self.shape)}", "pass the whole array"))
        rows = self.local_rows
        self.local.assign(tf.cast(array[rows.start : rows.stop : rows.step], self.dtype))

    def assign_local(self, values: npt.ArrayLike | tf.Tensor) -> None:
        """Set this rank's rows.

        Args:
            values: the new values, with the shape of ``local``.

        Examples:
            >>> import numpy as np
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> variable = hk.PartitionedVariable((10,), "int64")
            >>> variable.assign_local(np.array(variable.local_rows) ** 2)
            >>> variable.gather()
            array([ 0,  1,  4,  9, 16, 25, 36, 49, 64, 81])
        """
        self.local.assign(tf.cast(values, self.dtype))

    def assign_rows(self, ids: npt.ArrayLike | tf.Tensor, rows: npt.ArrayLike | tf.Tensor) -> None:
        """Set individual rows on any rank. Every rank calls it, each with its own, possibly empty ids.

        If a row is given more than once, the highest rank's value is used, and of one rank the last.

        Args:
            ids: global rows, ``[k]``.
            rows: their values, ``[k, *shape[1:]]``.

        Raises:
            ValueError, TypeError: an id of this rank is out of range, or its values have the wrong shape.
            CollectiveMismatchError: another rank's ids or values are invalid.

        Examples:
            >>> import numpy as np
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> variable = hk.PartitionedVariable((10, 4))
            >>> variable.assign_rows([2, 9], np.ones((2, 4)))
            >>> variable.gather()[:, 0].tolist()
            [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
        """
        checked: list[np.ndarray] = []

        def check() -> None:
            checked[:] = self._checked_rows(ids, rows)

        exchange_payloads(f"PartitionedVariable({self.name!r}).assign_rows()", check)
        self._scatter(checked[0].astype(np.int64), checked[1])

    def _checked_rows(
        self, ids: npt.ArrayLike | tf.Tensor, rows: npt.ArrayLike | tf.Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ids ``[k]`` and rows ``[k, *shape[1:]]`` as arrays, or raise."""
        ids = np.asarray(ids)
        rows = np.asarray(rows, self.dtype.as_numpy_dtype)
        if not ids.size and not rows.size:
            return np.zeros(0, np.int64), np.zeros((0, *self.shape[1:]), rows.dtype)
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            raise TypeError(describe("ids", f"{ids.dtype}{list(ids.shape)}", "integers [k]", "flatten or cast them"))
        if rows.shape != (len(ids), *self.shape[1:]):
            expected = f"{[len(ids), *self.shape[1:]]}, one row for each id"
            raise ValueError(describe("rows", list(rows.shape), expected, "pass as many rows as ids"))
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.shape[0]:
            raise ValueError(describe("ids", f"{ids.min()} to {ids.max()}", f"0 to {self.shape[0] - 1}", "check them"))
        return ids, rows

    def _scatter(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Send rows to their owners, who write them."""
        size = cluster.size()
        keys = keys_of(tf.constant(ids), self.partition, self.shape[0], size).numpy()
        owners = keys % size
        order = np.argsort(owners, kind="stable")
        splits = np.bincount(owners, minlength=size).astype(np.int32)
        values = rows[order].astype(self.dtype.as_numpy_dtype)
        rows_received = alltoall(keys[order] // size, splits)[0]
        received = alltoall(values, splits)[0]
        _, last = np.unique(rows_received[::-1], return_index=True)  # the last of duplicates
        kept = len(rows_received) - 1 - last
        self.local.scatter_update(tf.IndexedSlices(tf.constant(received[kept], self.dtype), rows_received[kept]))

    def apply(self, fn: Callable[[tf.Tensor], tf.Tensor]) -> None:
        """Set this rank's rows to ``fn(local)``, without communication.

        Args:
            fn: a function from a tensor ``[local rows, ...]`` to one of the same shape.

        Raises:
            ValueError: the result has a different shape.

        Examples:
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> variable = hk.PartitionedVariable((10, 4), initializer="ones")
            >>> variable.apply(lambda rows: rows * 2 + 1)
            >>> variable.lookup([9]).numpy()
            array([[3., 3., 3., 3.]], dtype=float32)
        """
        result = tf.cast(fn(self.local.read_value()), self.dtype)
        if result.shape != self.local.shape:
            expected = f"{list(self.local.shape)}, the shape of its argument"
            raise ValueError(describe("fn", f"a result of shape {list(result.shape)}", expected, "keep the shape"))
        self.local.assign(result)


def gather_parts(
    local: np.ndarray | tf.Tensor | AnyVariable,
    indices: Sequence[tuple[range, ...]],
    shape: tuple[int, ...],
    root: int | None,
    name: str,
) -> np.ndarray | None:
    """Assemble the ranks' parts on all ranks (``root`` None), or only on ``root`` and return None elsewhere.

    Args:
        local: this rank's part.
        indices: for each rank, the global indices that it holds along each axis.
        shape: global shape.
    """
    if tf.inside_function():
        raise HvdkitError("gather: called inside tf.function; call it outside, it returns an array")
    size = cluster.size()
    flat = tf.reshape(tf.convert_to_tensor(local), [-1])
    if size > 1 and root is None:
        flat = tensors.allgather(flat, name)
    elif size > 1:
        splits = [int(flat.shape[0]) * (rank == root) for rank in range(size)]
        flat = tensors.alltoall(flat, tf.constant(splits, tf.int32), name)[0]
        if cluster.rank() != root:
            return None
    received = flat.numpy()
    result = np.empty(shape, flat.dtype.as_numpy_dtype)
    start = 0
    for index in indices:
        extents = [len(axis) for axis in index]
        end = start + int(np.prod(extents))
        result[tuple(slice(i.start, i.stop, i.step) for i in index)] = received[start:end].reshape(extents)
        start = end
    return result
