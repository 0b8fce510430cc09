"""Keys of rows inside a graph: ``key = local * N + rank``, see ``hvdkit.sharding.layout``."""

from __future__ import annotations

import tensorflow as tf


def keys_of(ids: tf.Tensor, rule: str, rows: int, size: int, *, base: int = 0, rank: int = 0) -> tf.Tensor:
    """Return the key of each global row.

    The rows of each rank are those of ``hvdkit.sharding.partition.rows_of``. For "div", with e = rows div N and
    l = rows mod N, the owner is max(id div (e + 1), (id - l) div e), since the first l ranks have e + 1 rows each.

    Args:
        ids: global rows, all in range; their dtype must hold every key.
        rule: "mod", "div", or "whole": all rows on ``rank``.
        rows: global number of rows.
        size: number of ranks.
        base: the variable's first row that belongs to the table.
        rank: the owner, for rule "whole".
    """
    if rule == "mod":
        return ids + base * size if base else ids  # local * N + rank is the id itself
    if rule == "whole":
        return (ids + base) * size + rank
    base_count, remainder = divmod(rows, size)
    owner = tf.maximum(ids // (base_count + 1), (ids - remainder) // max(base_count, 1))
    local = ids - (owner * base_count + tf.minimum(owner, tf.constant(remainder, ids.dtype)))
    return (local + base) * size + owner


def key_dtype(keys: int) -> tf.DType:
    """Return the dtype for keys below ``keys``: int32 if possible, to halve the bytes sent."""
    return tf.int32 if keys < 2**31 else tf.int64
