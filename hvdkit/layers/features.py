"""What a feature looks up, in whatever form it comes, and how the rows found become the layer's output."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import tensorflow as tf

from hvdkit.errors import describe
from hvdkit.variable.faults import is_out_of_range
from hvdkit.variable.partitioned import as_ids
from hvdkit.variable.routing import Found

OutOfRange = Literal["error", "wrap", "drop"]


class Bag(NamedTuple):
    """The ids of one feature, laid out flat.

    Attributes:
        ids: ``[n]`` int32 or int64.
        segments: of each id the example that it belongs to, ascending, ``[n]`` int32; None without a combiner.
        examples: how many examples (or places) the output has, before it gets its shape.
        weights: ``[n]``, or None.
        shape: of the output without its last axis; None for a ragged one.
        like: the ragged ids that a ragged output takes its rows' lengths from, or None.
        kept: with ids left out and no combiner, the places of those that are kept, ``[n]``; else None.
        matches: whether weights stand where ids do, a bool scalar; None without weights.
    """

    ids: tf.Tensor
    segments: tf.Tensor | None
    examples: tf.Tensor
    weights: tf.Tensor | None = None
    shape: Any = None
    like: Any = None
    kept: tf.Tensor | None = None
    matches: tf.Tensor | None = None


def bag_of(value: Any, combiner: str | None, name: str) -> Bag:
    """Lay out a feature's input.

    Args:
        value: ids as a dense tensor (with a combiner, its last axis is combined), a RaggedTensor, or a SparseTensor;
            or a pair of ids and weights of the same form.
        combiner: "sum", "mean", "sqrtn" or None.
        name: the feature's, for messages.

    Raises:
        TypeError: ids are no integers.
        ValueError: weights without a combiner, or of another shape; a SparseTensor without a combiner.
    """
    ids, weights = value if _is_pair(value) else (value, None)
    if weights is not None and combiner is None:
        remedy = "give the table a combiner"
        raise ValueError(describe(f"weights of {name!r}", "weights", "none without a combiner", remedy))
    _check_form(ids, weights, name)
    if isinstance(ids, tf.RaggedTensor):
        return _ragged(ids, weights, combiner, name)
    if isinstance(ids, tf.SparseTensor):
        return _sparse(ids, weights, combiner, name)
    return _dense(as_ids(ids, name), weights, combiner, name)


def _check_form(ids: Any, weights: Any, name: str) -> None:
    if weights is None:
        return
    forms = (tf.RaggedTensor, tf.SparseTensor)
    if [isinstance(ids, form) for form in forms] != [isinstance(weights, form) for form in forms]:
        raise ValueError(describe(f"weights of {name!r}", type(weights).__name__, type(ids).__name__, "use one form"))
    dtype = weights.dtype if hasattr(weights, "dtype") else np.asarray(weights).dtype
    if not (tf.as_dtype(dtype).is_floating or tf.as_dtype(dtype).is_integer):
        raise TypeError(describe(f"weights of {name!r}", f"dtype {dtype}", "real numbers", "cast them to float32"))


def _is_pair(value: Any) -> bool:
    """Tell ids with weights from a plain list of two ids."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    return any(tf.is_tensor(v) or isinstance(v, tf.RaggedTensor | tf.SparseTensor) or np.ndim(v) for v in value)


def _dense(ids: tf.Tensor, weights: Any, combiner: str | None, name: str) -> Bag:
    if combiner is None:
        return Bag(tf.reshape(ids, [-1]), None, tf.size(ids), shape=tf.shape(ids))
    if ids.shape.rank == 1:
        ids = ids[:, None]
        weights = None if weights is None else tf.convert_to_tensor(weights)[:, None]
    shape = tf.shape(ids)[:-1]
    examples = tf.reduce_prod(shape)
    if weights is not None:
        weights = tf.convert_to_tensor(weights)
        if not weights.shape.is_compatible_with(ids.shape):
            expected = f"the ids' shape {ids.shape}"
            raise ValueError(describe(f"weights of {name!r}", f"shape {weights.shape}", expected, "one for each id"))
    segments = tf.range(tf.size(ids)) // tf.maximum(tf.shape(ids)[-1], 1)
    found = Bag(tf.reshape(ids, [-1]), segments, examples, shape=shape)
    if weights is None:
        return found
    return found._replace(weights=tf.reshape(weights, [-1]), matches=_same(tf.shape(weights), tf.shape(ids)))


def _ragged(ids: tf.RaggedTensor, weights: Any, combiner: str | None, name: str) -> Bag:
    flat = as_ids(ids.flat_values, name)
    if combiner is None:
        return Bag(flat, None, tf.size(flat), like=ids)
    if ids.ragged_rank != 1 or ids.flat_values.shape.rank != 1:
        remedy = "merge the others, or use no combiner"
        raise ValueError(
            describe(f"ids of {name!r}", f"{ids.shape.rank} axes", "[batch, None] with a combiner", remedy)
        )
    examples = tf.cast(ids.nrows(), tf.int32)
    segments = _row_of_each(tf.cast(ids.row_splits, tf.int32), tf.size(flat))
    found = Bag(flat, segments, examples, shape=examples[None])
    if weights is None:
        return found
    matches = tf.logical_and(
        tf.equal(weights.flat_values.shape.rank, 1),
        _same(weights.row_splits, tf.cast(ids.row_splits, weights.row_splits.dtype)),
    )
    return found._replace(weights=weights.flat_values, matches=matches)


def _row_of_each(splits: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Return the row of each of ``count`` values: how many rows have begun. Faster than TensorFlow's value_rowids."""
    begins = splits[1:-1]
    return tf.cumsum(tf.math.unsorted_segment_sum(tf.ones_like(begins), begins, count + 1))[:-1]


def _sparse(ids: tf.SparseTensor, weights: Any, combiner: str | None, name: str) -> Bag:
    if combiner is None or ids.shape.rank not in (2, None):
        remedy = "give the table a combiner, or pass dense or ragged ids"
        raise ValueError(describe(f"ids of {name!r}", "a SparseTensor", "[batch, k] with a combiner", remedy))
    ids = tf.sparse.reorder(ids)  # segments have to ascend
    weights = None if weights is None else tf.sparse.reorder(weights)
    examples = tf.cast(ids.dense_shape[0], tf.int32)
    segments = tf.cast(ids.indices[:, 0], tf.int32)
    found = Bag(as_ids(ids.values, name), segments, examples, shape=examples[None])
    if weights is None:
        return found
    return found._replace(weights=weights.values, matches=_same(ids.indices, weights.indices))


def _same(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Return whether two tensors of one rank are equal, which may differ in shape."""
    return tf.cond(tf.reduce_all(tf.shape(a) == tf.shape(b)), lambda: tf.reduce_all(a == b), lambda: tf.constant(False))


def in_range(bag: Bag, rows: int, how: OutOfRange) -> Bag:
    """Return a bag whose ids are rows: wrapped round, without those that are none, or (for "error") 0 in their place.

    With "error" they have been noted before, and every rank raises before a row is used.
    """
    if how == "wrap":
        return bag._replace(ids=tf.math.floormod(bag.ids, tf.cast(rows, bag.ids.dtype)))
    bad = is_out_of_range(bag.ids, rows)
    if how == "error":
        return bag._replace(ids=tf.where(bad, tf.zeros_like(bag.ids), bag.ids))
    kept = tf.where(tf.logical_not(bad))[:, 0]
    ids = tf.gather(bag.ids, kept)
    if bag.segments is None:
        return bag._replace(ids=ids, kept=kept)
    weights = None if bag.weights is None else tf.gather(bag.weights, kept)
    return bag._replace(ids=ids, segments=tf.gather(bag.segments, kept), weights=weights)


def combined(found: Found, bag: Bag, combiner: str | None) -> Any:
    """Turn the rows found for a bag into the feature's output ``[*shape, width]``.

    With w_k the weights (1 where there are none) and e_k the rows of one example:

        sum    sum_k w_k e_k
        mean   sum_k w_k e_k / sum_k w_k
        sqrtn  sum_k w_k e_k / sqrt(sum_k w_k^2)

    An example without ids gives zeros. Rows of 16 bits are summed in 32. (As ``tf.nn.embedding_lookup_sparse``.)
    """
    dtype = found.rows.dtype
    if dtype.size == 2:  # sums of many rows, and of their gradients, need more than 16 bits
        return tf.cast(combined(Found(tf.cast(found.rows, tf.float32), found.place), bag, combiner), dtype)
    if combiner is None:
        rows = found.spread()
        if bag.kept is not None:
            rows = tf.scatter_nd(bag.kept[:, None], rows, tf.cast([bag.examples, rows.shape[1]], tf.int64))
        if bag.like is not None:
            return bag.like.with_flat_values(rows)
        return tf.reshape(rows, tf.concat([bag.shape, [rows.shape[1]]], 0))
    total = _sums(found, bag)
    if combiner != "sum":
        one = tf.ones_like(bag.segments, total.dtype) if bag.weights is None else tf.cast(bag.weights, total.dtype)
        size = tf.math.unsorted_segment_sum(one if combiner == "mean" else one * one, bag.segments, bag.examples)
        total = tf.math.divide_no_nan(total, (size if combiner == "mean" else tf.sqrt(size))[:, None])
    return tf.reshape(total, tf.concat([bag.shape, [total.shape[1]]], 0))


def _sums(found: Found, bag: Bag) -> tf.Tensor:
    """Return the weighted sum of each example's rows, ``[examples, width]``."""
    if bag.weights is None:
        total = tf.raw_ops.SparseSegmentSumWithNumSegments(
            data=found.rows, indices=found.place, segment_ids=bag.segments, num_segments=bag.examples
        )
    else:
        rows = found.spread()
        rows *= tf.cast(bag.weights, rows.dtype)[:, None]
        total = tf.math.unsorted_segment_sum(rows, bag.segments, bag.examples)
    return tf.ensure_shape(total, [None, found.rows.shape[1]])
