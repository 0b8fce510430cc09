"""Types of what users pass to ``hk.fit``, and of what its steps compute with."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    import keras
    import numpy.typing as npt
    import tensorflow as tf

    from hvdkit.data import GlobalBatches

Tensors: TypeAlias = "tf.Tensor | tf.RaggedTensor | tf.SparseTensor | Sequence[Tensors] | Mapping[str, Tensors] | None"
"""Tensors of a batch or of outputs, in nested tuples, lists and dicts."""
Arrays: TypeAlias = "npt.ArrayLike | Tensors | Sequence[Arrays] | Mapping[str, Arrays]"
"""Arrays, tensors or data frames with equal numbers of rows, in nested tuples, lists and dicts."""
InputData: TypeAlias = (
    "Arrays | tf.data.Dataset | keras.utils.PyDataset | Generator[Arrays, None, None] | GlobalBatches"
)
"""Rows of data, or their batches."""
