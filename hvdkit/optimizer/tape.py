"""GradientTape that combines gradients over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvdkit.collectives.conversion import graph_safe
from hvdkit.collectives.ops import Average, ReduceOp, Sum
from hvdkit.collectives.process_sets import RankGroup, resolve
from hvdkit.errors import describe
from hvdkit.optimizer.average import agree_on, average, weight_factor, zero_without_weight
from hvdkit.optimizer.coupled_layers import check_coupled, was_coupled
from hvdkit.optimizer.gradients import PlacedGradients, kind_of, place_gradients
from hvdkit.optimizer.local_variables import is_layer, register_local_variables
from hvdkit.optimizer.reduction import Reduction
from hvdkit.sharding.shards import AnyVariable
from hvdkit.watchdog.reporter import reporter

if TYPE_CHECKING:
    import keras
    import numpy.typing as npt


class DistributedGradientTape:
    """Wrap a ``tf.GradientTape`` so that ``gradient`` returns gradients combined over all ranks.

    Supports TensorFlow and Keras variables. Use it as a context manager, or wrap a tape that has already recorded.
    Apply the gradients with a plain Keras optimizer. With sharded or local variables, users need
    ``hk.DistributedOptimizer(optimizer, op=None)``, which handles their slots; any other ``op`` would combine the
    gradients twice.

    Args:
        tape: the recording tape.
        op: as for ``hk.average_gradients``.
        weight: as for ``hk.average_gradients``.
        compression: as for ``hk.average_gradients``.
        process_set: as for ``hk.average_gradients``.

    Raises:
        TypeError: ``tape`` is not a tape.
        ValueError: ``process_set`` does not contain this rank.

    Examples:
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> w, scale = tf.Variable([1.0, 2.0]), tf.Variable(1.0)
        >>> with hk.DistributedGradientTape(tf.GradientTape()) as tape:
        ...     tape.register_local_source(scale)  # each rank has its own
        ...     loss = tf.reduce_sum(w * w) * scale
        >>> of_w, of_scale = tape.gradient(loss, [w, scale])
        >>> of_w.numpy()  # the average over ranks
        array([2., 4.], dtype=float32)
        >>> float(of_scale) == 5 / hk.size()
        True
    """

    _local_layers: tuple[keras.layers.Layer, ...] = ()

    def __init__(
        self,
        tape: tf.GradientTape,
        *,
        op: ReduceOp = Average,
        weight: npt.ArrayLike | tf.Tensor | None = None,
        compression: str | None = None,
        process_set: RankGroup = None,
    ) -> None:
        if not hasattr(tape, "gradient"):
            raise TypeError(describe("tape", type(tape).__name__, "a tf.GradientTape", "pass tf.GradientTape()"))
        self._tape = tape
        self._reduction = Reduction(op=op, weight=weight, compression=compression, group=resolve(process_set))

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            reporter().note_raised(error)
        self._tape.__exit__(kind, error, trace)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def register_local_source(self, source: AnyVariable) -> None:
        """Make a variable local, as ``hk.register_local_variables`` does.

        Args:
            source: a TensorFlow or Keras variable.
        """
        register_local_variables([source])

    @graph_safe
    def gradient(self, target: object, sources: object, *args: object, **kwargs: object) -> Any:
        """Return the gradients of ``target`` with respect to ``sources``, combined over all ranks.

        Args:
            target: as for ``tf.GradientTape.gradient``.
            sources: as for ``tf.GradientTape.gradient``.
            *args: as for ``tf.GradientTape.gradient``.
            **kwargs: as for ``tf.GradientTape.gradient``.

        Returns:
            As for ``hk.average_gradients``, in the structure of ``sources``.

        Raises:
            TypeError, ValueError, CollectiveMismatchError: as for ``hk.average_gradients``.
        """
        for layer in self._local_layers:
            if layer.built:
                register_local_variables(layer)
        variables = tf.nest.flatten(sources)
        check_coupled(variables)
        reduction = self._reduction
        factor = None
        gradient_of = self._tape.gradient
        if reduction.weight is not None and (was_coupled() or any(kind_of(v) in ("rows", "part") for v in variables)):
            # Weight the loss instead of its gradients: some are exchanged during the backward pass.
            agree_on(PlacedGradients, reduction)  # check the weight before it is exchanged
            factor = weight_factor(reduction)
            reduction = replace(reduction, op=Sum, weight=None)
            gradient_of = partial(self._weighted_gradient, factor)
        structure: list[object] = []

        def prepare() -> PlacedGradients:
            structure.append(gradient_of(target, sources, *args, **kwargs))
            placed = place_gradients(tf.nest.flatten(structure[0]), variables)
            if factor is None:
                return placed
            # Keep rows: they come from all ranks.
            return placed.map(lambda grad, kind: grad if kind == "rows" else zero_without_weight(grad, factor))

        combined = average(prepare, reduction, "tape")
        return tf.nest.pack_sequence_as(structure[0], combined)

    def _weighted_gradient(
        self, factor: tf.Tensor, target: object, sources: object, output_gradients: object = None, **kwargs: object
    ) -> object:
        """Return the local gradients of ``factor * target``."""
        upstream = tf.nest.map_structure(tf.ones_like, target) if output_gradients is None else output_gradients
        weighted = tf.nest.map_structure(lambda g: g * tf.cast(factor, g.dtype), upstream)
        return self._tape.gradient(target, sources, output_gradients=weighted, **kwargs)


def PartialDistributedGradientTape(
    tape: tf.GradientTape, *, local_layers: keras.layers.Layer | Sequence[keras.layers.Layer] = (), **options: Any
) -> DistributedGradientTape:
    """Return a ``hk.DistributedGradientTape`` that makes the weights of some layers local.

    Args:
        tape: the recording tape.
        local_layers: a Keras layer or several. Their weights become local
            (``hk.register_local_variables``) at the first gradient after they are built.
        **options: ``op``, ``weight``, ``compression`` and ``process_set``, as for ``hk.DistributedGradientTape``.

    Returns:
        The tape.

    Raises:
        TypeError: ``local_layers`` contains something else, or ``tape`` is not a tape.

    Examples:
        >>> import keras
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> body, head = keras.layers.Dense(16), keras.layers.Dense(4)  # a head per rank
        >>> with hk.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[head]) as tape:
        ...     loss = tf.reduce_mean(head(body(tf.ones([2, 8]))))
        >>> grads = tape.gradient(loss, body.trainable_variables + head.trainable_variables)
        >>> [tuple(grad.shape) for grad in grads]
        [(8, 16), (16,), (16, 4), (4,)]
    """
    layers = list(local_layers) if isinstance(local_layers, Iterable) else [local_layers]
    for layer in layers:
        if not is_layer(layer):
            remedy = "pass e.g. [model.layers[-1]]"
            raise TypeError(describe("local_layers", type(layer).__name__, "Keras layers", remedy))
    distributed = DistributedGradientTape(tape, **options)
    distributed._local_layers = tuple(layers)
    return distributed
