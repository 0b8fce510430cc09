"""Convert a feature's input to flat ids, and the rows looked up to the layer's output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit.errors import describe
from hvdkit.sharding.id_checks import as_ids, is_out_of_range
from hvdkit.sharding.routing import LookupRows
from hvdkit.sharding.table import Table

OutOfRange = Literal["error", "wrap", "drop"]
Ids: TypeAlias = "npt.ArrayLike | tf.Tensor | tf.RaggedTensor | tf.SparseTensor"
"""Ids of one feature, or their weights."""
FeatureInput: TypeAlias = "Ids | tuple[Ids, Ids]"
"""Ids of one feature, or ids and weights."""
Vectors: TypeAlias = "tf.Tensor | tf.RaggedTensor"
"""The vectors of one output."""
T = TypeVar("T")
Nested: TypeAlias = "Mapping[str, T | Nested[T]]"
"""Values by feature, in nested dicts."""
Features: TypeAlias = "Nested[FeatureInput]"
"""The input of each feature."""
# Largest number up to which a floating-point dtype represents all integers exactly; beyond it, ids may collide.
_EXACT = {tf.float16: 2**11, tf.bfloat16: 2**8, tf.float32: 2**24, tf.float64: 2**53}


class Lookup(NamedTuple):
    """One output of a set of tables: a feature, looked up in one table."""

    feature: str
    table: Table


def lookups_of(tables: Iterable[Table]) -> dict[str, Lookup]:
    """Return all lookups by output name.

    The output name is the feature's name, or ``feature@table`` for each table of a feature in several tables.

    Raises:
        ValueError: two outputs have the same name.

    Example:
        >>> list(lookups_of([Table("a", 9, 2, features=("x", "y")), Table("b", 9, 2, features=("y",))]))
        ['x', 'y@a', 'y@b']
    """
    lookups: dict[str, Lookup] = {}
    pairs = [Lookup(feature, table) for table in tables for feature in table.features]
    features = [feature for feature, _ in pairs]
    for pair in pairs:
        name = pair.feature if features.count(pair.feature) == 1 else f"{pair.feature}@{pair.table.name}"
        if name in lookups:
            remedy = f"{name!r} is the name of another feature's output; rename the feature"
            raise ValueError(describe("features", repr(name), "names that do not collide with other outputs", remedy))
        lookups[name] = pair
    return lookups


def flatten_features(inputs: Nested[T], prefix: str = "") -> dict[str, T]:
    """Return the values of nested dicts by their paths.

    Example:
        >>> flatten_features({"user": {"clicks": 1, "buys": 2}, "item": 3})
        {'user/clicks': 1, 'user/buys': 2, 'item': 3}
    """
    flat: dict[str, T] = {}
    for key, value in inputs.items():
        flat |= flatten_features(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def nest_outputs(
    inputs: Nested[object], outputs: Mapping[str, T], lookups: Mapping[str, Lookup]
) -> dict[str, T | Nested[T]]:
    """Return ``outputs`` with the nesting of ``inputs``; the outputs of a feature in several tables are siblings."""
    names: dict[str, list[str]] = {}
    for name, lookup in lookups.items():
        names.setdefault(lookup.feature, []).append(name)

    def nest(values: Nested[object], prefix: str) -> dict[str, T | Nested[T]]:
        nested_outputs: dict[str, T | Nested[T]] = {}
        for key, value in values.items():
            path = f"{prefix}{key}"
            if isinstance(value, Mapping):
                nested_outputs[key] = nest(value, f"{path}/")
            else:
                nested_outputs |= {f"{key}{name.removeprefix(path)}": outputs[name] for name in names[path]}
        return nested_outputs

    return nest(inputs, "")


def unflatten_features(
    structure: Nested[object], values: Mapping[str, T], prefix: str = ""
) -> dict[str, T | Nested[T]]:
    """Return ``values``, keyed by path, with the nesting of ``structure``: the inverse of :func:`flatten_features`."""
    return {
        key: unflatten_features(item, values, f"{prefix}{key}/") if isinstance(item, Mapping) else values[prefix + key]
        for key, item in structure.items()
    }


class Bag(NamedTuple):
    """The flattened ids of one feature.

    Attributes:
        ids: ``[n]`` int32, int64 or uint64.
        segments: the example of each id, ascending, ``[n]`` int32; None without a combiner.
        examples: number of examples (or positions) in the output, before it is reshaped.
        weights: ``[n]``, or None.
        shape: shape of the output without its last axis; None for a ragged output.
        like: a RaggedTensor whose axes are the output's without the last one; None for a dense output.
        kept: if ids were dropped, without a combiner, the positions of the remaining ids, ``[n]``; else None.
        matches: whether weights and ids have the same structure, a bool scalar; None without weights.
        whole: for ids passed as floats, whether they are whole numbers, ``[n]`` bool; else None.
        mask: with ``mask_zero`` and without a combiner, False for ids equal to 0, in the form of the ids; else None.
    """

    ids: tf.Tensor
    segments: tf.Tensor | None
    examples: tf.Tensor
    weights: tf.Tensor | None = None
    shape: tf.Tensor | None = None
    like: tf.RaggedTensor | tf.Tensor | None = None
    kept: tf.Tensor | None = None
    matches: tf.Tensor | None = None
    whole: tf.Tensor | None = None
    mask: tf.Tensor | tf.RaggedTensor | None = None


def bag_of(value: FeatureInput, table: Table, name: str, *, floats: bool = False, how: OutOfRange = "error") -> Bag:
    """Flatten a feature's input.

    Args:
        value: ids as a dense tensor (with a combiner, its last axis is combined), a RaggedTensor, or a SparseTensor;
            or a pair of ids and weights of the same form.
        table: the table in which they are looked up.
        name: the feature's name, for messages.
        floats: whether ids may be floats, as Keras passes them to a layer without an ``Input``.
        how: how to handle ids out of range.

    Raises:
        TypeError: ids are not integers, or floats whose dtype cannot represent every row of the table exactly.
        ValueError: weights without a combiner, or of a different shape; a SparseTensor without a combiner; ids of
            unknown rank with a combiner.
    """
    combiner = table.combiner
    ids, weights = value if _has_weights(value) else (value, None)
    if weights is not None and combiner is None:
        remedy = "give the table a combiner"
        raise ValueError(describe(f"weights of {name!r}", "weights", "none without a combiner", remedy))
    _check_form(ids, weights, name)
    whole = None
    if floats and (dtype := _floating(ids)) is not None:
        check_exact(dtype, table, how, name)
        ids, whole = _rounded(ids)
    if isinstance(ids, tf.RaggedTensor):
        bag = _ragged(ids.with_flat_values(as_ids(ids.flat_values, name)), weights, combiner, name)
    elif isinstance(ids, tf.SparseTensor):
        bag = _sparse(ids, weights, combiner, name)
    else:
        bag = _dense(as_ids(ids, name), weights, combiner, name)
    if whole is not None:
        bag = bag._replace(whole=whole)
    return bag._replace(mask=tf.not_equal(ids, 0)) if table.mask_zero and combiner is None else bag


def _floating(ids: Ids) -> tf.DType | None:
    """Return the dtype of floating-point ids, else None; also None for an empty list, which NumPy treats as floats."""
    dtype = tf.as_dtype(ids.dtype) if hasattr(ids, "dtype") else tf.as_dtype(np.asarray(ids).dtype)
    return dtype if dtype.is_floating and (hasattr(ids, "dtype") or np.size(ids)) else None


def check_exact(dtype: tf.DType, table: Table, how: OutOfRange, name: str) -> None:
    """Raise TypeError if two ids of ``table`` may have the same value in a floating-point ``dtype``."""
    most = _EXACT.get(dtype, 0)
    if table.evict is None and how != "wrap" and table.input_dim <= most:
        return
    rows = "any 64-bit ids" if table.evict else "ids beyond its rows" if how == "wrap" else f"{table.input_dim:,} rows"
    got = f"{dtype.name} (exact up to {most:,}) for a table of {rows}"
    remedy = "put keras.Input(shape, dtype='int64') before the layer, or cast them to int64"
    raise TypeError(describe(f"ids of {name!r}", got, "integers", remedy))


def _rounded(ids: Ids) -> tuple[Ids, tf.Tensor]:
    """Return floating-point ids as integers, and a flat bool tensor: whether each was a whole number."""
    if isinstance(ids, tf.RaggedTensor):
        flat, whole = _rounded(ids.flat_values)
        return ids.with_flat_values(flat), whole
    if isinstance(ids, tf.SparseTensor):
        ids = tf.sparse.reorder(ids)
        flat, whole = _rounded(ids.values)
        return tf.SparseTensor(ids.indices, flat, ids.dense_shape), whole
    ids = tf.convert_to_tensor(ids)
    whole = tf.equal(ids - tf.floor(ids), 0)  # False for NaN and infinity
    return tf.cast(ids, tf.int64), tf.reshape(whole, [-1])


def _check_form(ids: Ids, weights: Ids | None, name: str) -> None:
    if weights is None:
        return
    forms = (tf.RaggedTensor, tf.SparseTensor)
    if [isinstance(ids, form) for form in forms] != [isinstance(weights, form) for form in forms]:
        raise ValueError(describe(f"weights of {name!r}", type(weights).__name__, type(ids).__name__, "use one form"))
    dtype = weights.dtype if hasattr(weights, "dtype") else np.asarray(weights).dtype
    if not (tf.as_dtype(dtype).is_floating or tf.as_dtype(dtype).is_integer):
        raise TypeError(describe(f"weights of {name!r}", f"dtype {dtype}", "real numbers", "cast them to float32"))


def _has_weights(value: FeatureInput) -> TypeGuard[tuple[Ids, Ids]]:
    """Return whether ``value`` is a pair (ids, weights), not a plain list of two ids."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    return any(tf.is_tensor(v) or isinstance(v, tf.RaggedTensor | tf.SparseTensor) or np.ndim(v) for v in value)


def _known_axes(ids: tf.Tensor, name: str) -> int:
    if ids.shape.rank is None:
        expected = "a known number of axes with a combiner, which is over the last one"
        remedy = "give tf.function an input_signature, or the tensor a shape with tf.ensure_shape"
        raise ValueError(describe(f"ids of {name!r}", "unknown shape", expected, remedy))
    return int(ids.shape.rank)


def _dense(ids: tf.Tensor, weights: Ids | None, combiner: str | None, name: str) -> Bag:
    if combiner is None:
        return Bag(tf.reshape(ids, [-1]), None, tf.size(ids), shape=tf.shape(ids))
    factors = None if weights is None else tf.convert_to_tensor(weights)
    if factors is not None and not factors.shape.is_compatible_with(ids.shape):
        expected = f"the ids' shape {ids.shape}"
        raise ValueError(describe(f"weights of {name!r}", f"shape {factors.shape}", expected, "one for each id"))
    if _known_axes(ids, name) < 2:  # each id is a separate example
        ids = ids[..., None]
        factors = None if factors is None else factors[..., None]
    return _over_last_axis(ids, factors)


def _over_last_axis(ids: tf.Tensor, weights: tf.Tensor | None) -> Bag:
    """Return the bag of dense ids whose last axis is combined."""
    shape = tf.shape(ids)[:-1]
    segments = tf.range(tf.size(ids)) // tf.maximum(tf.shape(ids)[-1], 1)
    bag = Bag(tf.reshape(ids, [-1]), segments, tf.reduce_prod(shape), shape=shape)
    if weights is None:
        return bag
    return bag._replace(weights=tf.reshape(weights, [-1]), matches=_equal(tf.shape(weights), tf.shape(ids)))


def _ragged(ids: tf.RaggedTensor, weights: tf.RaggedTensor | None, combiner: str | None, name: str) -> Bag:
    """Return the bag of ragged ids: their last axis is combined, whether it is ragged or uniform."""
    flat = ids.flat_values
    if combiner is None:
        return Bag(tf.reshape(flat, [-1]), None, tf.size(flat), like=ids)
    if _known_axes(flat, name) > 1:
        bag = _over_last_axis(flat, None)._replace(like=ids.with_flat_values(tf.reduce_sum(flat[..., :0], -1)))
    else:
        splits = tf.cast(ids.nested_row_splits[-1], tf.int32)
        examples = tf.size(splits) - 1
        like = None if ids.ragged_rank == 1 else _without_last_axis(ids)
        bag = Bag(flat, _row_of_each(splits, tf.size(flat)), examples, shape=examples[None], like=like)
    if weights is None:
        return bag
    matches = tf.constant(False)
    if weights.ragged_rank == ids.ragged_rank and weights.flat_values.shape.rank == flat.shape.rank:
        pairs = zip(weights.nested_row_splits, ids.nested_row_splits, strict=True)
        same = [_equal(weight_splits, tf.cast(id_splits, weight_splits.dtype)) for weight_splits, id_splits in pairs]
        matches = tf.reduce_all([*same, _equal(tf.shape(weights.flat_values), tf.shape(flat))])
    return bag._replace(weights=tf.reshape(weights.flat_values, [-1]), matches=matches)


def _without_last_axis(ragged: tf.RaggedTensor) -> tf.RaggedTensor | tf.Tensor:
    """Return zeros in the form of ``ragged`` without its last axis, which is ragged."""
    if ragged.ragged_rank == 1:
        return tf.zeros(tf.cast(ragged.nrows(), tf.int32)[None], tf.int32)
    return ragged.with_values(_without_last_axis(ragged.values))


def _row_of_each(splits: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Return the row of each of ``count`` values. Faster than TensorFlow's value_rowids."""
    begins = splits[1:-1]
    return tf.cumsum(tf.math.unsorted_segment_sum(tf.ones_like(begins), begins, count + 1))[:-1]


def _sparse(ids: tf.SparseTensor, weights: tf.SparseTensor | None, combiner: str | None, name: str) -> Bag:
    if combiner is None or ids.shape.rank not in (2, None):
        remedy = "give the table a combiner, or pass dense or ragged ids"
        raise ValueError(describe(f"ids of {name!r}", "a SparseTensor", "[batch, k] with a combiner", remedy))
    ids = tf.sparse.reorder(ids)  # segments must be ascending
    weights = None if weights is None else tf.sparse.reorder(weights)
    examples = tf.cast(ids.dense_shape[0], tf.int32)
    segments = tf.cast(ids.indices[:, 0], tf.int32)
    bag = Bag(as_ids(ids.values, name), segments, examples, shape=examples[None])
    if weights is None:
        return bag
    return bag._replace(weights=weights.values, matches=_equal(ids.indices, weights.indices))


def _equal(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Return whether two tensors of the same rank have equal shapes and values."""
    return tf.cond(tf.reduce_all(tf.shape(a) == tf.shape(b)), lambda: tf.reduce_all(a == b), lambda: tf.constant(False))


def make_ids_valid(bag: Bag, table: Table, how: OutOfRange) -> Bag:
    """Return a bag with valid row ids: wrap or drop ids out of range, or replace them by 0 for "error".

    With "error" they are already recorded as faults, and every rank raises before a row is used. Padding is dropped as
    well.
    """
    ids = bag.ids
    kept = None
    if table.mask_zero and table.combiner is not None:
        kept = tf.not_equal(ids, 0)
    if table.evict is None and how == "wrap":
        ids = tf.math.floormod(ids, tf.cast(table.input_dim, ids.dtype))
    elif table.evict is None:
        invalid = is_out_of_range(ids, table.input_dim)
        if how == "error":
            ids = tf.where(invalid, tf.zeros_like(ids), ids)
        else:
            valid = tf.logical_not(invalid)
            kept = valid if kept is None else tf.logical_and(kept, valid)
    bag = bag._replace(ids=tf.bitcast(ids, tf.int64) if ids.dtype == tf.uint64 else ids)
    return bag if kept is None else _keep_positions(bag, tf.where(kept)[:, 0])


def _keep_positions(bag: Bag, kept: tf.Tensor) -> Bag:
    """Return a bag with only the ids at the positions ``kept``."""
    ids = tf.gather(bag.ids, kept)
    if bag.segments is None:
        return bag._replace(ids=ids, kept=kept)
    weights = None if bag.weights is None else tf.gather(bag.weights, kept)
    return bag._replace(ids=ids, segments=tf.gather(bag.segments, kept), weights=weights)


def combine_rows(looked_up: LookupRows, bag: Bag, combiner: str | None) -> Vectors:
    """Combine the rows looked up for a bag into the feature's output ``[*shape, width]``.

    With w_k the weights (1 by default) and e_k the rows of one example:

        sum    sum_k w_k e_k
        mean   sum_k w_k e_k / sum_k w_k
        sqrtn  sum_k w_k e_k / sqrt(sum_k w_k^2)

    An example without ids gives zeros. 16-bit rows are summed in 32 bits. Same as ``tf.nn.embedding_lookup_sparse``.
    """
    dtype = looked_up.rows.dtype
    if dtype.size == 2:  # sums of many rows, and of their gradients, need more than 16 bits
        wide = LookupRows(tf.cast(looked_up.rows, tf.float32), looked_up.positions)
        return tf.cast(combine_rows(wide, bag, combiner), dtype)
    if combiner is None:
        rows = looked_up.by_key()
        if bag.kept is not None:
            rows = tf.scatter_nd(bag.kept[:, None], rows, tf.cast([bag.examples, rows.shape[1]], tf.int64))
        return _shaped(rows, bag)
    total = _sums(looked_up, bag)
    if combiner != "sum":
        weights = tf.ones_like(bag.segments, total.dtype) if bag.weights is None else tf.cast(bag.weights, total.dtype)
        is_mean = combiner == "mean"
        divisor = tf.math.unsorted_segment_sum(weights if is_mean else weights**2, bag.segments, bag.examples)
        total = tf.math.divide_no_nan(total, (divisor if is_mean else tf.sqrt(divisor))[:, None])
    return _shaped(total, bag)


def _shaped(rows: tf.Tensor, bag: Bag) -> Vectors:
    """Reshape the vectors of all examples ``[n, width]`` to the output."""
    width = rows.shape[1]
    if bag.like is None:
        return tf.reshape(rows, tf.concat([bag.shape, [width]], 0))
    flat = bag.like.flat_values
    if flat.shape.rank != 1:  # uniform axes within the ragged ones
        rows = tf.reshape(rows, tf.concat([tf.shape(flat), [width]], 0))
    return bag.like.with_flat_values(rows)


def _sums(looked_up: LookupRows, bag: Bag) -> tf.Tensor:
    """Return the weighted sum of each example's rows, ``[examples, width]``."""
    if bag.weights is None:
        total = tf.raw_ops.SparseSegmentSumWithNumSegments(
            data=looked_up.rows, indices=looked_up.positions, segment_ids=bag.segments, num_segments=bag.examples
        )
    else:
        rows = looked_up.by_key()
        rows *= tf.cast(bag.weights, rows.dtype)[:, None]
        total = tf.math.unsorted_segment_sum(rows, bag.segments, bag.examples)
    return tf.ensure_shape(total, [None, looked_up.rows.shape[1]])
