"""A GradientTape whose gradients are combined over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdkit.collectives.ops import Average, ReduceOp
from hvdkit.collectives.values import graph_safe
from hvdkit.gradients.average import average_gradients


class DistributedGradientTape:
    """Wrap a ``tf.GradientTape`` so that :meth:`gradient` returns gradients combined over all ranks.

    TensorFlow and Keras variables serve alike. Works as a context manager, or around a tape that has recorded.
    Do not use it together with ``DistributedOptimizer``: gradients would be combined twice.

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
        local = self._tape.gradient(target, sources, *args, **kwargs)
        return tf.nest.pack_sequence_as(local, average_gradients(tf.nest.flatten(local), **self._how))
