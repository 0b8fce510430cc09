"""Collectives that reduce values, and broadcast, whose gradient does: for numbers, NumPy arrays and tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import dtypes, numpy_collectives, tensors
from hvdkit.collectives.call_checks import attempt, check_root
from hvdkit.collectives.calls import Collective, Tensors, run
from hvdkit.collectives.conversion import SameKind, TensorLike, graph_safe
from hvdkit.collectives.gathers import allgather, gather_as
from hvdkit.collectives.ops import Average, ReduceOp, Sum, checked_op, op_label
from hvdkit.collectives.process_sets import RankGroup, describe_group, resolve
from hvdkit.errors import describe


@graph_safe
def allreduce(
    x: TensorLike,
    op: ReduceOp = Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankGroup = None,
    group: RankGroup = None,
    name: str | None = None,
) -> SameKind:
    """Reduce ``x`` over all ranks; every rank gets the result.

    With N ranks, prescale factor a and postscale factor b:

        Sum, Average   b * sum_r a x_r,   b * sum_r a x_r / N
        Min, Max       b * min_r a x_r
        Product        b * prod_r a x_r
        Adasum         b * the adaptive sum of a x_r (Maleki et al. 2020, arXiv:2006.02924)

    The gradient of this rank's ``x`` is that of the sum of all ranks' losses; see docs/collectives.md for the formulas.

    Args:
        x: number, array or tensor; shape and dtype must be equal on every rank. All numeric dtypes except complex and
            uint64; bfloat16 is sent as float32, small integers as int32. Or ``tf.IndexedSlices`` on every rank, whose
            rows and their number may differ, with ``hk.Average`` or ``hk.Sum``.
        op: ``hk.Average``, ``hk.Sum``, ``hk.Min``, ``hk.Max``, ``hk.Product``, or for floats ``hk.Adasum``, which
            requires MPI and a power of two as the number of ranks. The average of integers is rounded toward zero.
        prescale_factor: multiplies ``x`` before the reduction; the product is rounded toward zero for integers.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part, an ``hk.ProcessSet`` or an axis of the mesh; default: all.
        group: alias of ``process_set``.
        name: shown in messages and profiles; must be equal on every rank.

    Returns:
        The result, of the same kind, shape and dtype as ``x``; of IndexedSlices, the distinct rows of all ranks.

    Raises:
        TypeError: ``op`` cannot reduce the dtype of ``x``.
        ValueError: ``op`` is not one of these, a factor is not a finite number, or ``process_set`` does not contain
            this rank.
        CollectiveMismatchError: ranks called different collectives, or passed incompatible tensors.

    Examples:
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> hk.allreduce(np.float32([1, 2]))  # the average, on every rank
        array([1., 2.], dtype=float32)
        >>> hk.allreduce(hk.rank(), hk.Max) == hk.size() - 1
        True
        >>> hk.allreduce(True, hk.Sum)
        Traceback (most recent call last):
            ...
        TypeError: x: got dtype bool with op Sum, expected a real number that Horovod can reduce ...
    """
    return grouped_allreduce(
        [x],
        op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        group=group,
        name=name,
    )[0]


@graph_safe
def grouped_allreduce(
    xs: Sequence[TensorLike],
    op: ReduceOp = Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankGroup = None,
    group: RankGroup = None,
    name: str | None = None,
) -> list[SameKind]:
    """Reduce several values over all ranks, in a single exchange per dtype.

    Args:
        xs: numbers, arrays, tensors or IndexedSlices. Their number, kinds, shapes and dtypes must be equal on every
            rank.
        op: as for ``hk.allreduce``.
        prescale_factor: as for ``hk.allreduce``.
        postscale_factor: as for ``hk.allreduce``.
        process_set: as for ``hk.allreduce``.
        group: as for ``hk.allreduce``.
        name: as for ``hk.allreduce``.

    Returns:
        The results, in the order of ``xs``.

    Raises:
        TypeError, ValueError, CollectiveMismatchError: as for ``hk.allreduce``.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> loss, accuracy = hk.grouped_allreduce([0.25, 0.5])  # this rank's values
        >>> loss, accuracy
        (0.25, 0.5)
    """
    members = resolve(process_set, group)
    size = cluster.size() if members is None else members.size
    factors = prescale_factor, postscale_factor
    if any(isinstance(x, tf.IndexedSlices) for x in xs):
        return _reduce_mixed(xs, op, *factors, members, name)

    def check(inputs: Tensors) -> None:
        reduction = checked_op(op, tuple(ReduceOp))
        _check_factors(*factors)
        for x in inputs:
            dtypes.wire_dtype(x.dtype, reduction)
        if reduction == ReduceOp.Adasum and size > 1:
            _check_adasum(size, members)

    def combine(values: list[list[np.ndarray]]) -> list[np.ndarray]:
        return [numpy_collectives.reduce(each, ReduceOp(op), *factors, size) for each in zip(*values, strict=True)]

    is_adasum = op == ReduceOp.Adasum
    collective = Collective(
        kind=_kind("allreduce", op, factors, members),
        group=members,
        check=check,
        combine=None if is_adasum else combine,
        exchange=lambda inputs: tensors.grouped_allreduce(
            inputs, ReduceOp(op), tensors.PUBLIC, members, *factors, compares=True
        ),
        gradient=None
        if is_adasum
        else lambda xs, ys, dys: _reduced_gradients(xs, dys, ReduceOp(op), members, *factors),
        name=name,
        joinable=op in (ReduceOp.Sum, ReduceOp.Average) and members is None,
    )
    return run(collective, list(xs))


def _reduce_mixed(
    xs: Sequence[TensorLike],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    members: cluster.Group | None,
    name: str | None,
) -> list[SameKind]:
    """Reduce dense values and IndexedSlices: the former in an allreduce, the rows of the latter in an allgather."""

    def check() -> None:
        checked_op(op, (ReduceOp.Average, ReduceOp.Sum))
        _check_factors(prescale, postscale)

    size = cluster.size() if members is None else members.size
    sparse = {i: x for i, x in enumerate(xs) if isinstance(x, tf.IndexedSlices)}
    values: list[TensorLike] = [x.values for x in sparse.values()]
    is_marked = op == ReduceOp.Average and not tf.executing_eagerly()
    if is_marked:  # graphs compare shapes only
        values = [tf.expand_dims(x, -1) for x in values]
    kind = f"{_kind('allreduce', op, (prescale, postscale), members)} of IndexedSlices"
    gathered = gather_as(kind, [*values, *(x.indices for x in sparse.values())], members, name, check)
    results: dict[int, SameKind] = {}
    for number, (i, x) in enumerate(sparse.items()):
        rows, positions = tf.unique(gathered[len(sparse) + number])
        scaled = dtypes.scaled(tf.convert_to_tensor(gathered[number]), prescale)
        total = tf.math.unsorted_segment_sum(tf.squeeze(scaled, -1) if is_marked else scaled, positions, tf.size(rows))
        if op == ReduceOp.Average:
            total = dtypes.divided(total, size)
        results[i] = tf.IndexedSlices(dtypes.scaled(total, postscale), rows, x.dense_shape)
    if dense := [i for i in range(len(xs)) if i not in sparse]:
        reduce = partial(grouped_allreduce, prescale_factor=prescale, postscale_factor=postscale, process_set=members)
        results |= zip(dense, reduce([xs[i] for i in dense], op, name=name), strict=True)
    return [results[i] for i in range(len(xs))]


def _kind(name: str, op: object, factors: tuple[float, float], members: cluster.Group | None) -> str:
    """Return the collective with all arguments that must agree between ranks."""
    is_valid = attempt(lambda: _check_factors(*factors)) is None  # otherwise all ranks raise together
    scale = f"factors={tuple(map(float, factors))}" if is_valid and factors != (1.0, 1.0) else ""
    return f"{name}({', '.join(filter(None, [f'op={op_label(op)}', scale, describe_group(members)]))})"


def _check_factors(prescale: float, postscale: float) -> None:
    for argument, factor in (("prescale_factor", prescale), ("postscale_factor", postscale)):
        if not isinstance(factor, (int, float, np.number)) or not math.isfinite(factor):
            raise ValueError(describe(argument, repr(factor), "a finite number", "pass a Python float"))


def _check_adasum(size: int, members: cluster.Group | None) -> None:
    if not cluster.exchange().over_mpi or size & (size - 1) or members is not None:
        got = f"hk.Adasum with {size} ranks{'' if members is None else ' of a process set'}"
        expected = "MPI, all ranks, and a number of ranks that is a power of two, as Horovod's Adasum requires"
        raise ValueError(describe("op", got, expected, "use hk.Average"))


def _reduced_gradients(
    xs: Tensors, dys: Tensors, op: ReduceOp, members: cluster.Group | None, prescale: float, postscale: float
) -> Tensors:
    """Return the gradients of a grouped allreduce."""
    if op in (ReduceOp.Sum, ReduceOp.Average):
        return grouped_allreduce(dys, op, prescale_factor=prescale, postscale_factor=postscale, process_set=members)
    totals = grouped_allreduce(dys, Sum, postscale_factor=prescale * postscale, process_set=members)
    scaled = [x * tf.cast(prescale, x.dtype) for x in xs]
    is_product = op == ReduceOp.Product
    slopes = _product_of_others(scaled, members) if is_product else _tie_weights(scaled, op, members)
    return [total * slope for total, slope in zip(totals, slopes, strict=True)]


def _tie_weights(xs: Tensors, op: ReduceOp, members: cluster.Group | None) -> Tensors:
    """Return 1/k for each element in which this rank is one of k ranks with the minimum or maximum, else 0."""
    ys = grouped_allreduce(xs, op, process_set=members)
    masks = [tf.cast(tf.equal(x, y), x.dtype) for x, y in zip(xs, ys, strict=True)]
    counts = grouped_allreduce(masks, Sum, process_set=members)
    return [tf.math.divide_no_nan(mask, count) for mask, count in zip(masks, counts, strict=True)]


def _product_of_others(xs: Tensors, members: cluster.Group | None) -> Tensors:
    """Return the product over all other ranks: the nonzero product over this rank's value; 0 if another has a 0."""
    zeros = [tf.cast(tf.equal(x, 0), x.dtype) for x in xs]
    counts = grouped_allreduce(zeros, Sum, process_set=members)
    nonzeros = [tf.where(tf.equal(x, 0), tf.ones_like(x), x) for x in xs]
    products = grouped_allreduce(nonzeros, ReduceOp.Product, process_set=members)
    return [
        tf.where(tf.equal(count, zero), product / factor, tf.zeros_like(factor))
        for count, zero, product, factor in zip(counts, zeros, products, nonzeros, strict=True)
    ]


@graph_safe
def reducescatter(
    x: TensorLike,
    op: ReduceOp = Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankGroup = None,
    group: RankGroup = None,
    name: str | None = None,
) -> SameKind:
    """Reduce ``x`` over all ranks, and scatter the rows of the result over the ranks.

    The gradient of ``x`` is the concatenation of the gradients of all ranks' rows, times both factors; with
    ``hk.Average`` divided by the number of ranks.

    Args:
        x: array or tensor ``[rows, ...]``; shape and dtype must be equal on every rank.
        op: ``hk.Average`` or ``hk.Sum``.
        prescale_factor: as for ``hk.allreduce``.
        postscale_factor: as for ``hk.allreduce``.
        process_set: as for ``hk.allreduce``.
        group: as for ``hk.allreduce``.
        name: as for ``hk.allreduce``.

    Returns:
        Rows ``r*k`` to ``(r+1)*k`` of the reduced array on the r-th rank, with ``k = rows / size``; if there is a
            remainder, the first ``rows % size`` ranks get one more row. The same kind and dtype as ``x``.

    Raises:
        ValueError: ``op`` is not supported, or ``x`` is a scalar.
        TypeError, CollectiveMismatchError: as for ``hk.allreduce``.

    Examples:
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> x = np.arange(4 * hk.size())
        >>> rows = hk.reducescatter(x, op=hk.Sum)  # with 2 ranks [0, 2, 4, 6] on rank 0, [8, 10, 12, 14] on rank 1
        >>> rows.tolist() == [hk.size() * (4 * hk.rank() + i) for i in range(4)]
        True
    """
    return grouped_reducescatter(
        [x],
        op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        group=group,
        name=name,
    )[0]


@graph_safe
def grouped_reducescatter(
    xs: Sequence[TensorLike],
    op: ReduceOp = Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankGroup = None,
    group: RankGroup = None,
    name: str | None = None,
) -> list[SameKind]:
    """Reduce and scatter several values like ``hk.reducescatter``, with a single comparison of the ranks' calls.

    Args:
        xs: arrays or tensors. Their number, shapes and dtypes must be equal on every rank.
        op: as for ``hk.reducescatter``.
        prescale_factor: as for ``hk.reducescatter``.
        postscale_factor: as for ``hk.reducescatter``.
        process_set: as for ``hk.reducescatter``.
        group: as for ``hk.reducescatter``.
        name: as for ``hk.reducescatter``.

    Returns:
        The results, in the order of ``xs``.

    Raises:
        ValueError, TypeError, CollectiveMismatchError: as for ``hk.reducescatter``.

    Examples:
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> a, b = np.ones(2 * hk.size()), np.ones((3 * hk.size(), 8))
        >>> rows_of_a, rows_of_b = hk.grouped_reducescatter([a, b])
        >>> rows_of_a.shape, rows_of_b.shape
        ((2,), (3, 8))
    """
    members = resolve(process_set, group)
    size = cluster.size() if members is None else members.size
    index = cluster.rank() if members is None else members.index
    factors = prescale_factor, postscale_factor

    def check(inputs: Tensors) -> None:
        reduction = checked_op(op, (ReduceOp.Average, ReduceOp.Sum))
        _check_factors(*factors)
        for x in inputs:
            if x.shape.rank == 0:
                raise ValueError(describe("x", "a single number", "at least one axis", "use hk.allreduce"))
            if (x.shape.num_elements() or 0) > tensors.LARGEST:
                got = f"{x.shape.num_elements():,} elements"
                expected = f"at most {tensors.LARGEST:,}"
                raise ValueError(describe("x", got, expected, "reduce it in several parts"))
            dtypes.wire_dtype(x.dtype, reduction)

    def combine(values: list[list[np.ndarray]]) -> list[np.ndarray]:
        reduced = [numpy_collectives.reduce(each, ReduceOp(op), *factors) for each in zip(*values, strict=True)]
        return [np.array_split(y, size)[index] for y in reduced]

    def gradient(dy: tf.Tensor) -> tf.Tensor:
        factor = prescale_factor * postscale_factor / (size if op == ReduceOp.Average else 1)
        return allgather(dy, process_set=members) * tf.cast(factor, dy.dtype)

    collective = Collective(
        kind=_kind("reducescatter", op, factors, members),
        group=members,
        check=check,
        combine=combine,
        exchange=lambda inputs: tensors.compared_reducescatter(inputs, ReduceOp(op), tensors.PUBLIC, members, *factors),
        gradient=lambda xs, ys, dys: [gradient(dy) for dy in dys],
        name=name,
    )
    return run(collective, list(xs))


@graph_safe
def broadcast(
    x: TensorLike, root: int = 0, *, process_set: RankGroup = None, group: RankGroup = None, name: str | None = None
) -> SameKind:
    """Return rank ``root``'s ``x`` on every rank.

    The gradient of ``x`` is the sum of all ranks' gradients on ``root``, and 0 on other ranks.

    Args:
        x: number, array or tensor; shape and dtype must be equal on every rank.
        root: the rank whose value is sent, by its number in the world; must be in ``process_set``, if given.
        process_set: as for ``hk.allreduce``.
        group: as for ``hk.allreduce``.
        name: as for ``hk.allreduce``.

    Returns:
        The value of ``root``, of the same kind, shape and dtype as ``x``.

    Raises:
        ValueError: ``root`` is not a rank, or not in ``process_set``.
        TypeError, CollectiveMismatchError: as for ``hk.allreduce``.

    Examples:
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> seed = hk.broadcast(np.random.randint(2**31))  # the same on every rank
        >>> hk.broadcast(np.array([hk.rank(), 7]), root=hk.size() - 1).tolist() == [hk.size() - 1, 7]
        True
    """
    members = resolve(process_set, group)

    def check(inputs: Tensors) -> None:
        check_root(root, members)
        dtypes.check_movable(inputs[0].dtype)

    def gradient(dy: tf.Tensor) -> tf.Tensor:
        total = allreduce(dy, Sum, process_set=members)
        return total if cluster.rank() == root else tf.zeros_like(total)

    collective = Collective(
        kind=f"broadcast({', '.join(filter(None, [f'root={root}', describe_group(members)]))})",
        group=members,
        check=check,
        combine=lambda values: values[root if members is None else members.ranks.index(root)],
        exchange=lambda inputs: [tensors.broadcast(inputs[0], int(root), tensors.PUBLIC, members)],
        gradient=lambda xs, ys, dys: [gradient(dy) for dy in dys],
        name=name,
        combines=False,
    )
    return run(collective, [x])[0]
