"""How ``hk.fit`` divides the tensors of a batch among ranks: by rows, or not at all."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

from hvdkit.collectives.weak_registry import WeakRegistry
from hvdkit.errors import describe

Parts: TypeAlias = "str | tuple[Parts, ...] | list[Parts] | dict[str, Parts] | None"
"""``"rows"``, ``"whole"``, or a nest of these."""

Data = TypeVar("Data")
ROWS = "rows"
WHOLE = "whole"
_DIVISIONS: WeakRegistry[Parts] = WeakRegistry()


def divide(data: Data, parts: Parts) -> Data:
    """Declare how each tensor of a batch is divided among ranks, for ``hk.fit``, ``hk.evaluate`` and ``hk.predict``.

    Without a declaration, all tensors of a batch must have the same number of rows. Tensors declared as

        "rows"    are divided by their own number of rows: rank r of N gets rows ``r * b // N`` to ``(r + 1) * b // N``
                  of b. If the numbers differ between the tensors of a batch, N must divide each of them, because then
                  the mean over a tensor's rows is the mean of the ranks' means
        "whole"   are passed whole to every rank, such as a table or a graph

    Do not declare parts of a graph (nodes, edges) as "rows": their numbers refer to each other. Store one row for each
    graph instead, in a ``tf.RaggedTensor``.

    Call it last, on the object that is passed to ``hk.fit``: a dataset that is derived from it has no declaration.

    Args:
        data: a batched ``tf.data.Dataset``, a ``keras.utils.PyDataset`` or a generator.
        parts: ``"rows"`` or ``"whole"`` for each tensor, in the structure of a batch. One of them in place of a tuple
            or dict holds for all of its tensors. At least one tensor is divided.

    Returns:
        ``data`` itself.

    Raises:
        TypeError: ``data`` is of another type.
        ValueError: ``parts`` contains something else.

    Examples:
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> labelled = tf.data.Dataset.from_tensor_slices((tf.ones([8, 3]), tf.ones([8]))).batch(4)
        >>> unlabelled = tf.data.Dataset.from_tensor_slices(tf.ones([24, 3])).batch(12)
        >>> table = tf.data.Dataset.from_tensors(tf.ones([6, 2])).repeat()
        >>> batches = tf.data.Dataset.zip(labelled, unlabelled, table)
        >>> batches = hk.data.divide(batches, ("rows", "rows", "whole"))  # for a model with its own train_step
    """
    leaves = _leaves(parts)
    if not set(leaves) <= {ROWS, WHOLE} or ROWS not in leaves:
        expected = f"{ROWS!r} or {WHOLE!r} for each tensor, and {ROWS!r} at least once"
        raise ValueError(describe("parts", repr(parts), expected, "pass e.g. ('rows', 'rows', 'whole')"))
    import keras
    import tensorflow as tf

    if not isinstance(data, (tf.data.Dataset, keras.utils.PyDataset, Generator)):
        expected = "a tf.data.Dataset, a PyDataset or a generator"
        remedy = "make a dataset of the arrays, and zip those of different lengths"
        raise TypeError(describe("data", type(data).__name__, expected, remedy))
    _DIVISIONS.set(data, parts)
    return data


def division_of(data: object) -> Parts:
    """Return the declaration of :func:`divide` for ``data``, or None."""
    return _DIVISIONS.get(data)


def _leaves(parts: Parts) -> list[str | None]:
    if isinstance(parts, dict):
        parts = list(parts.values())
    if isinstance(parts, (tuple, list)):
        return [leaf for part in parts for leaf in _leaves(part)]
    return [parts]
