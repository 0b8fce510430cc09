"""The part of :mod:`hvdkit.compat.horovod` that trains: optimizers, tapes, and saved models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hvdkit as hk
from hvdkit.collectives import Average
from hvdkit.errors import describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import keras
    import tensorflow as tf

    from hvdkit.collectives.ops import ReduceOp
    from hvdkit.collectives.process_sets import RankGroup


class Compression:
    """Compression of gradients while they are exchanged.

    Attributes:
        none: no compression.
        fp16: send 32- and 64-bit floats as float16.
        bf16: send 32- and 64-bit floats as bfloat16.

    Examples:
        >>> import keras
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.Compression.fp16)
    """

    none = None
    fp16 = "fp16"
    bf16 = "bf16"


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: str | None = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: object = None,
    process_set: RankGroup = None,
) -> keras.optimizers.Optimizer:
    """Wrap a Keras optimizer with ``hk.DistributedOptimizer``.

    Args:
        optimizer: as for ``hk.DistributedOptimizer``.
        name: ignored.
        device_dense: ignored.
        device_sparse: ignored.
        compression: as for ``hk.DistributedOptimizer``.
        sparse_as_dense: ignored.
        gradient_predivide_factor: ignored.
        op: as for ``hk.DistributedOptimizer``.
        backward_passes_per_step: ``accumulate_steps`` of ``hk.DistributedOptimizer``.
        average_aggregated_gradients: must be True if ``backward_passes_per_step`` is not 1.
        num_groups: ignored.
        groups: ignored.
        process_set: as for ``hk.DistributedOptimizer``.

    Returns:
        A copy of ``optimizer`` that combines gradients over ranks.

    Raises:
        ValueError: gradients would be summed over steps; or as for ``hk.DistributedOptimizer``.

    Examples:
        >>> import keras
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> optimizer = keras.optimizers.SGD(0.1 * hvd.size())
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(optimizer), "mse", jit_compile=False)
    """
    if backward_passes_per_step != 1 and not average_aggregated_gradients:
        expected = f"True with backward_passes_per_step={backward_passes_per_step}: hvdkit has no sum over steps"
        remedy = "pass True and multiply the learning rate"
        raise ValueError(describe("average_aggregated_gradients", average_aggregated_gradients, expected, remedy))
    return hk.DistributedOptimizer(
        optimizer, op=op, compression=compression, accumulate_steps=backward_passes_per_step, process_set=process_set
    )


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: str | None = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    process_set: RankGroup = None,
) -> hk.DistributedGradientTape:
    """Wrap a ``tf.GradientTape`` with ``hk.DistributedGradientTape``.

    Args:
        gradtape: the recording tape.
        device_dense: ignored.
        device_sparse: ignored.
        compression: as for ``hk.DistributedGradientTape``.
        sparse_as_dense: ignored.
        op: as for ``hk.DistributedGradientTape``.
        gradient_predivide_factor: ignored.
        num_groups: ignored.
        groups: ignored.
        process_set: as for ``hk.DistributedGradientTape``.

    Returns:
        A tape whose ``gradient`` returns gradients combined over ranks.

    Examples:
        >>> import tensorflow as tf
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> w = tf.Variable([1.0, 2.0])
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(w * w)
        >>> hvd.DistributedGradientTape(tape).gradient(loss, [w])[0].numpy()
        array([2., 4.], dtype=float32)
    """
    return hk.DistributedGradientTape(gradtape, op=op, compression=compression, process_set=process_set)


def load_model(
    filepath: str | Path,
    custom_optimizers: Iterable[type[keras.optimizers.Optimizer]] | None = None,
    custom_objects: Mapping[str, object] | None = None,
    compression: str | None = None,
) -> keras.Model:
    """Load a model with ``hk.load_model``.

    Args:
        filepath: ``path`` of ``hk.load_model``.
        custom_optimizers: optimizer classes that the file may contain.
        custom_objects: as for ``hk.load_model``.
        compression: as for ``hk.DistributedOptimizer``.

    Returns:
        The model, with a distributed optimizer.

    Examples:
        >>> import tempfile
        >>> import keras
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> model.optimizer.build(model.trainable_variables)  # or train the model
        >>> file = hvd.broadcast_object(tempfile.mkdtemp()) + "/model.keras"  # one file for all ranks
        >>> if hvd.rank() == 0:
        ...     model.save(file)
        >>> saved = hvd.broadcast_object(True)  # wait for rank 0
        >>> model = hvd.load_model(file)  # on every rank
        >>> type(model.optimizer).__name__
        'Adam'
    """
    optimizers = {cls.__name__: cls for cls in custom_optimizers or ()}
    options: dict[str, Any] = {} if compression is None else {"compression": compression}
    return hk.load_model(filepath, {**optimizers, **(custom_objects or {})}, **options)
