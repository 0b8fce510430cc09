"""A GradientTape whose gradients are combined over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdkit.collectives.ops import Average, ReduceOp, Sum, checked_op
from hvdkit.collectives.shards import shard_of
from hvdkit.collectives.values import graph_safe
from hvdkit.gradients.average import average_gradients, share, zero_without_weight
from hvdkit.gradients.steps import tell_profile


class DistributedGradientTape:
    """Wrap a ``tf.GradientTape`` so that :meth:`gradient` returns gradients combined over all ranks.

    TensorFlow and Keras variables serve alike. Works as a context manager, or around a tape that has recorded.
    Apply the gradients with a plain Keras optimizer, or, where there are sharded variables, whose slots it has to know,
    with ``hk.DistributedOptimizer(optimizer, op=None)``: any other would combine them twice.

    Args:
        tape: the recording tape.
        op, weight, compression: as for :func:`hvdkit.average_gradients`.

    Example::

        with hk.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(model(images), labels)
        grads = tape.gradient(loss, model.trainable_variables)
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        *,
        op: ReduceOp = Average,
        weight: Any = None,
        compression: str | None = None,
    ) -> None:
        if not hasattr(tape, "gradient"):
            raise TypeError(f"tape: got {type(tape).__name__}, expected a tf.GradientTape; pass tf.GradientTape()")
        self._tape = tape
        self._how = {"op": op, "weight": weight, "compression": compression}

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    @graph_safe
    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the gradients of ``target`` with respect to ``sources``, combined over all ranks.

        Args, Returns and Raises as for ``tf.GradientTape.gradient`` and :func:`hvdkit.average_gradients`; the
        result has the structure of ``sources``.
        """
        variables = tf.nest.flatten(sources)
        if self._how["weight"] is not None and any(shard_of(v) is not None for v in variables):
            return self._weighted(target, sources, *args, **kwargs)
        local = self._tape.gradient(target, sources, *args, **kwargs)
        return self._packed(local, average_gradients(tf.nest.flatten(local), variables=variables, **self._how))

    def _weighted(self, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any) -> Any:
        """Weigh the loss and not its gradients: those of sharded variables travel while the tape goes back."""
        factor = share(self._how["weight"], checked_op(self._how["op"]))
        if output_gradients is None:
            output_gradients = tf.nest.map_structure(tf.ones_like, target)
        weighed = tf.nest.map_structure(lambda g: g * tf.cast(factor, g.dtype), output_gradients)
        local = self._tape.gradient(target, sources, output_gradients=weighed, **kwargs)
        variables = tf.nest.flatten(sources)
        pairs = zip(tf.nest.flatten(local), variables, strict=True)
        grads = [g if shard_of(v) is not None else zero_without_weight(g, factor) for g, v in pairs]
        how = {**self._how, "op": Sum, "weight": None}
        return self._packed(local, average_gradients(grads, variables=variables, **how))

    @staticmethod
    def _packed(local: Any, combined: list[Any]) -> Any:
        tell_profile(combined, "tape")
        return tf.nest.pack_sequence_as(local, combined)
