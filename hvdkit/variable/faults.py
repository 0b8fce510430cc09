"""Ids that are no rows: found on one rank, raised on all, before anything is updated.

Inside a graph a rank that raised alone would leave the others waiting. So what is wrong travels with the ids, as a few
words in front of them, and every rank raises the same error in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from hvdkit.errors import describe

# Number of the feature, 1 for the first, 0 for no fault; and the id in two halves, as ids may travel in 32 bits.
FAULT_WORDS = 3


@dataclass(frozen=True)
class Fault:
    """The first id of this rank that is no row.

    Attributes:
        words: ``[3]`` int32: feature (1 for the first, 0: no fault), low and high half of the id.
        labels: what to call each feature, e.g. ``"feature 'user' of table 'users'"``.
        rows: how many rows each feature's table has.
    """

    words: tf.Tensor
    labels: tuple[str, ...]
    rows: tuple[int, ...]


def find_fault(ids: Sequence[tf.Tensor], labels: Sequence[str], rows: Sequence[int]) -> Fault:
    """Look through this rank's ids of each feature, ``[n]`` each, for the first that is out of range."""
    wrong = tf.concat([is_out_of_range(i, r) for i, r in zip(ids, rows, strict=True)], 0)

    def words() -> tf.Tensor:
        ends = tf.cumsum(tf.stack([tf.size(i) for i in ids]))
        first = tf.argmax(wrong, output_type=tf.int32)
        number = tf.searchsorted(ends, first[None], side="right") + 1
        value = tf.concat([tf.cast(i, tf.int64) for i in ids], 0)[first]
        return tf.concat([number, tf.bitcast(value, tf.int32)], 0)

    found = tf.cond(tf.reduce_any(wrong), words, lambda: tf.zeros([FAULT_WORDS], tf.int32))
    return Fault(tf.ensure_shape(found, [FAULT_WORDS]), tuple(labels), tuple(rows))


def is_out_of_range(ids: tf.Tensor, rows: int) -> tf.Tensor:
    """Return True for each id that is no row of a table of so many."""
    if rows > ids.dtype.max:  # every id that is not negative is a row
        return ids < 0
    return tf.logical_or(ids < 0, ids >= tf.constant(rows, ids.dtype))


def raise_everywhere(words: tf.Tensor, fault: Fault) -> list[tf.Operation]:
    """Raise if any rank has a fault; inside a graph, return the op that does.

    Args:
        words: of all ranks, ``[N, 3]``.
        fault: this rank's own, for the names.
    """
    if tf.executing_eagerly():
        for rank, (number, *halves) in enumerate(words.numpy()):
            if number:
                raise ValueError(_message(fault, number - 1, str(_joined(halves)), rank))
        return []

    def stop() -> tf.Tensor:
        with tf.control_dependencies([tf.raw_ops.Assert(condition=False, data=[_graph_message(words, fault)])]):
            return tf.constant(False)

    return [tf.cond(tf.reduce_any(words[:, 0] > 0), stop, lambda: tf.constant(True)).op]


def _joined(halves: Sequence[int]) -> int:
    low, high = (int(h) for h in halves)
    return (high << 32) | (low & 0xFFFFFFFF)


def _message(fault: Fault, number: int, value: str, rank: int) -> str:
    where = f"{value} in {fault.labels[number]} on rank {rank}"
    return describe("ids", where, f"0 to {fault.rows[number] - 1}", _REMEDY)


_REMEDY = "check the data, or pass out_of_range='wrap' or 'drop'"


def _graph_message(words: tf.Tensor, fault: Fault) -> tf.Tensor:
    rank = tf.argmax(words[:, 0] > 0, output_type=tf.int32)
    number, value = words[rank, 0] - 1, tf.bitcast(words[rank, 1:], tf.int64)
    label = tf.gather([_unquoted(label) for label in fault.labels], number)
    last = tf.gather(tf.constant([r - 1 for r in fault.rows], tf.int64), number)
    numbers = [tf.strings.as_string(n) for n in (value, rank, last)]
    rest = f"; {_unquoted(_REMEDY)}"
    return tf.strings.join(
        ["ids: got ", numbers[0], " in ", label, " on rank ", numbers[1], ", expected 0 to ", numbers[2], rest]
    )


def _unquoted(text: str) -> str:
    """Return a text without quotes, which TensorFlow would print with backslashes."""
    return text.replace("'", "")
