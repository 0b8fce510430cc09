"""Dense layers sharded by columns or rows along a mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.agreement import gather
from hvdkit.collectives.conversion import graph_safe
from hvdkit.errors import describe, integer
from hvdkit.layers.axis_collectives import copy_to_group, gather_columns, reduce_from_group
from hvdkit.layers.sharded_layer import ShardedLayer
from hvdkit.sharding.initial import common_seed, seeded
from hvdkit.sharding.partition import rows_of
from hvdkit.sharding.shards import Piece, Shard, set_holding


class _ParallelDense(ShardedLayer):
    """Base class: common arguments, and weights that are parts of the unsharded layer's weights."""

    def __init__(
        self,
        units: int,
        *,
        activation: Callable[[tf.Tensor], tf.Tensor] | str | None = None,
        use_bias: bool = True,
        kernel_initializer: keras.initializers.Initializer | str = "glorot_uniform",
        bias_initializer: keras.initializers.Initializer | str = "zeros",
        seed: int | None = None,
        axis: str = "model",
        **kwargs: object,
    ):
        super().__init__(**kwargs)
        self.units = integer("units", units, minimum=1)
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.seed = seed
        self.axis = axis
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        if axis == cluster.DATA:
            remedy = "name the axis whose ranks work on one batch, e.g. 'model'"
            raise ValueError(describe("axis", axis, "an axis along which batches do not differ", remedy))
        self._group = cluster.group(axis)

    def get_config(self) -> dict[str, object]:
        """Return the layer's config for ``from_config``."""
        own = {
            "units": self.units,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "seed": self.seed,
            "axis": self.axis,
        }
        return {**super().get_config(), **own}

    def _add_part(
        self, name: str, shape: tuple[int, ...], initializer: keras.initializers.Initializer, sharded: int | None
    ) -> keras.Variable:
        """Add this rank's part of a weight that is sharded along axis ``sharded``; None: replicated."""
        call = f"{type(self).__name__}(units={self.units}, axis={self.axis!r}).{name}"
        seed = gather(cluster.exchange(), call, lambda: common_seed(self.seed, initializer))[0]
        with_seed = seeded(initializer, seed)
        if sharded is None:
            return self.add_weight(name=name, shape=shape, initializer=with_seed)
        group = self._group
        rows = rows_of("div", shape[sharded], group.index, group.size)
        index = tuple(rows if i == sharded else range(n) for i, n in enumerate(shape))

        def initial_values(_: Sequence[int], dtype: str) -> tf.Tensor:
            return with_seed(shape, dtype=dtype)[tuple(slice(i.start, i.stop) for i in index)]

        local = tuple(len(i) for i in index)
        weight = self.add_weight(name=name, shape=local, initializer=initial_values)
        path = weight.path.rpartition("/")[0]
        set_holding(weight, Shard(path, (Piece(name, shape, index, 0, "div"),), axis=self.axis))
        return weight


@keras.saving.register_keras_serializable("hvdkit")
class ColumnParallelDense(_ParallelDense):
    """A dense layer whose kernel is sharded by columns: each rank of a mesh axis computes some of the outputs.

    Rank r of the M along ``axis`` holds the r-th of M contiguous ranges of columns. The inputs must be the same on all
    of them. Followed by a ``hk.layers.RowParallelDense``, the two need one allreduce forward and one backward.

    Args:
        units: outputs over all ranks of the axis.
        gather_output: concatenate all ranks' outputs; with False each rank returns only its own.
        **kwargs: the options below, and the arguments of ``keras.layers.Layer``.

    Keyword Args:
        activation (Callable | str | None): as for ``keras.layers.Dense``.
        use_bias (bool): as for ``keras.layers.Dense``.
        kernel_initializer (Initializer | str): as for ``keras.layers.Dense``.
        bias_initializer (Initializer | str): as for ``keras.layers.Dense``.
        seed (int | None): seed of the initializers; None uses theirs, or draws one for all ranks. With the same seed,
            weights equal those of ``keras.layers.Dense``.
        axis (str): an axis of the mesh passed to ``hk.init``; without such an axis the layer is not sharded.

    Raises:
        ValueError, TypeError: an argument is invalid.
        CollectiveMismatchError: ranks created different layers.

    Examples:
        On 4 ranks, ``hk.init(mesh={"data": 2, "model": 2})`` divides both matrices of this block by 2:

        >>> import keras
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> columns = hk.layers.ColumnParallelDense(4096, activation="gelu")
        >>> block = keras.Sequential([columns, hk.layers.RowParallelDense(64)])
        >>> block(tf.ones([8, 64])).shape
        TensorShape([8, 64])
        >>> columns.kernel.shape == (64, 4096 // cluster.mesh.get("model", 1))
        True
    """

    def __init__(self, units: int, *, gather_output: bool = False, **kwargs: Any):
        super().__init__(units, **kwargs)
        self.gather_output = gather_output

    def get_config(self) -> dict[str, object]:
        """Return the layer's config for ``from_config``."""
        return {**super().get_config(), "gather_output": self.gather_output}

    def build(self, input_shape: Sequence[int]) -> None:
        """Create this rank's columns."""
        self.kernel = self._add_part("kernel", (input_shape[-1], self.units), self.kernel_initializer, 1)
        self.bias = self._add_part("bias", (self.units,), self.bias_initializer, 0) if self.use_bias else None
        self.built = True

    @graph_safe
    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return ``[..., units]``, or this rank's ``[..., local units]``."""
        outputs = tf.matmul(copy_to_group(inputs, self._group), tf.convert_to_tensor(self.kernel))
        if self.bias is not None:
            outputs += tf.convert_to_tensor(self.bias)
        outputs = self.activation(outputs)
        return gather_columns(outputs, self.units, self._group) if self.gather_output else outputs

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the output's shape on this rank."""
        local = len(rows_of("div", self.units, self._group.index, self._group.size))
        return (*input_shape[:-1], self.units if self.gather_output else local)


@keras.saving.register_keras_serializable("hvdkit")
class RowParallelDense(_ParallelDense):
    """A dense layer whose kernel is sharded by rows: each rank of a mesh axis multiplies some columns of the inputs.

    Partial products are summed over the ranks; the bias, replicated on every rank, is added afterwards.

    Args:
        units: outputs.
        input_dim: inputs over all ranks of the axis; needed if the previous layer partitions them unevenly, or if
            ``input_is_parallel`` is True and their number is not M times this rank's.
        input_is_parallel: inputs are this rank's ``[..., local]``, the output of ``hk.layers.ColumnParallelDense``;
            with False, take this rank's columns of the full inputs.
        **kwargs: the other arguments of ``hk.layers.ColumnParallelDense``, except ``gather_output``.

    Raises:
        ValueError: the number of inputs differs from the number of this rank's rows.

    Examples:
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()  # mesh={"data": 2, "model": 2} on 4 ranks
        >>> rows = hk.layers.RowParallelDense(64, input_is_parallel=False)
        >>> rows(tf.ones([8, 4096])).shape  # on every rank of the axis
        TensorShape([8, 64])
        >>> rows.kernel.shape == (4096 // cluster.mesh.get("model", 1), 64)
        True
    """

    def __init__(self, units: int, *, input_dim: int | None = None, input_is_parallel: bool = True, **kwargs: Any):
        super().__init__(units, **kwargs)
        self.input_dim = input_dim
        self.input_is_parallel = input_is_parallel

    def get_config(self) -> dict[str, object]:
        """Return the layer's config for ``from_config``."""
        own = {"input_dim": self.input_dim, "input_is_parallel": self.input_is_parallel}
        return {**super().get_config(), **own}

    def build(self, input_shape: Sequence[int]) -> None:
        """Create this rank's rows."""
        group = self._group
        columns = int(input_shape[-1])
        input_dim = columns if not self.input_is_parallel else self.input_dim or self._all_inputs(columns)
        rows = rows_of("div", input_dim, group.index, group.size)
        if self.input_is_parallel and len(rows) != columns:
            expected = f"{len(rows)} of {input_dim}, this rank's share"
            raise ValueError(describe("inputs", f"{columns} columns", expected, "split them like ColumnParallelDense"))
        self.kernel = self._add_part("kernel", (input_dim, self.units), self.kernel_initializer, 0)
        self.bias = self._add_part("bias", (self.units,), self.bias_initializer, None) if self.use_bias else None
        self._rows = rows
        self.built = True

    def _all_inputs(self, columns: int) -> int:
        call = f"the inputs of RowParallelDense(units={self.units}, axis={self.axis!r})"
        everywhere = gather(cluster.exchange(), call, lambda: (self._group.ranks, columns))
        return sum(count for ranks, count in everywhere if ranks == self._group.ranks)

    @graph_safe
    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return ``[..., units]``, the same on all ranks of the axis."""
        if not self.input_is_parallel:
            inputs = copy_to_group(inputs, self._group)[..., self._rows.start : self._rows.stop]
        outputs = reduce_from_group(tf.matmul(inputs, tf.convert_to_tensor(self.kernel)), self._group)
        if self.bias is not None:
            outputs += tf.convert_to_tensor(self.bias)
        return self.activation(outputs)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the output's shape."""
        return (*input_shape[:-1], self.units)
