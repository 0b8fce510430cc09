"""Average gradients over ranks: dense tensors, IndexedSlices and None."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.lone_training import lone_training
from hvdkit.cluster.progress import progress
from hvdkit.collectives.batch_share import gradient_factor, times_share, within_share
from hvdkit.collectives.call_checks import Call, agree_on_call
from hvdkit.collectives.conversion import as_tensor, graph_safe
from hvdkit.collectives.graphs import is_for_xla, not_constant
from hvdkit.collectives.ops import Average, ReduceOp, checked_op, op_label
from hvdkit.collectives.process_sets import RankGroup, describe_group, resolve
from hvdkit.collectives.tensors import grouped_allreduce
from hvdkit.errors import describe
from hvdkit.optimizer import compression as wires
from hvdkit.optimizer import sparse
from hvdkit.optimizer.coupled_layers import any_coupled
from hvdkit.optimizer.gradients import Gradient, Kind, PlacedGradients, map_values, place_gradients
from hvdkit.optimizer.model_numbers import model_number
from hvdkit.optimizer.reduction import Reduction
from hvdkit.sharding.shards import AnyVariable


@graph_safe
def average_gradients(
    grads: Sequence[Gradient | npt.ArrayLike],
    *,
    op: ReduceOp = Average,
    weight: npt.ArrayLike | tf.Tensor | None = None,
    compression: str | None = None,
    variables: Sequence[AnyVariable] | None = None,
    process_set: RankGroup = None,
) -> list[Gradient]:
    """Combine gradients over all ranks; the results are bitwise identical on all ranks.

    Each gradient is reduced to

        Average   sum_r g_r / N,  or with weights  sum_r w_r g_r / sum_r w_r
        Sum       sum_r g_r,      or with weights  sum_r w_r g_r

    with g_r the gradient and w_r the weight of rank r.

    If each rank's loss is the mean over its local batch, users pass the number of local examples as ``weight`` to get
    the gradient of the mean over the global batch, no matter how unevenly it is distributed. A rank without examples
    passes 0; its gradients may then be NaN. Ranks that share a batch (along mesh axes other than "data") count once.

    Args:
        grads: one gradient per variable, in the same order on every rank: a dense tensor, NumPy array, or list or tuple
            of numbers (same shape and dtype on every rank), IndexedSlices of any of these (rows may differ between
            ranks; repeated rows are summed), or None.
        op: ``hk.Average`` or ``hk.Sum``; ``hk.Min`` and ``hk.Max`` for dense gradients without weight.
        weight: this rank's weight, a number or scalar tensor >= 0; passed on every rank or on none. Inside a graph, a
            negative or NaN weight makes the result NaN on all ranks.
        compression: ``"fp16"`` or ``"bf16"`` to send 32- and 64-bit floats in 16 bits.
        variables: the variables of the gradients. Required if any of them is sharded or local. Gradients of sharded
            variables have already been summed over ranks when they were sent to the owner, and are only divided by N
            if ``op`` is Average. With these, or with synchronized BatchNormalization layers, pass ``weight`` to
            ``hk.DistributedGradientTape`` instead, which applies it before gradients are sent. Gradients of local
            variables (``hk.register_local_variables``) are only scaled. Variables that are overwritten with
            their gradient (``overwrite_with_gradient``) get the maximum over ranks, without weight.
        process_set: the N ranks that combine their gradients, each with its own batch: an ``hk.ProcessSet`` or an axis
            of the mesh. Default: all ranks. Not supported for sharded variables, whose rows come from all ranks.

    Returns:
        The combined gradients in the order and dtypes of ``grads``: tensors, IndexedSlices with distinct rows, or None.

    Raises:
        TypeError: an element of ``grads`` is not a gradient.
        ValueError: ``op``, ``weight`` or ``compression`` is invalid, the parts of an IndexedSlices are inconsistent,
            the lists differ in length, or ``process_set`` does not contain this rank.
        CollectiveMismatchError: in eager mode, another rank passed different gradients or an invalid argument; the
            message names the rank and the tensor.

    Examples:
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> w, table = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([10_000, 8]))
        >>> x = tf.ones([hk.rank() + 1])  # rank 0 has 1 example, rank 1 has 2, ...
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_mean(x) * tf.reduce_sum(w * w) + tf.reduce_sum(tf.gather(table, [7]))
        >>> dense, rows = hk.average_gradients(tape.gradient(loss, [w, table]), weight=len(x))
        >>> dense.numpy()
        array([2., 4.], dtype=float32)
        >>> type(rows).__name__, rows.indices.numpy().tolist(), rows.values.shape
        ('IndexedSlices', [7], TensorShape([1, 8]))
    """
    reduction = Reduction(op=op, weight=weight, compression=compression, group=resolve(process_set))
    return average(lambda: place_gradients(grads, variables), reduction)


def average(prepare: Callable[[], PlacedGradients], reduction: Reduction, call_site: str = "") -> list[Gradient]:
    """Combine the gradients that ``prepare`` returns over all ranks, as :func:`average_gradients` does.

    If ``call_site`` is given, the profiler counts the call as a step.
    """
    placed = agree_on(lambda: scale_to_batch(prepare(), reduction), reduction)
    placed = placed.map(lambda grad, kind: sparse.sum_duplicates(grad) if kind == "rows" else grad)
    return combine(placed, reduction, call_site).grads


def scale_to_batch(placed: PlacedGradients, reduction: Reduction) -> PlacedGradients:
    """In a step of ``hk.fit``, multiply gradients by this rank's share of the global batch; else return them unchanged.

    Gradients of sharded rows were already multiplied when sent to the owner (:mod:`hvdkit.collectives.batch_share`).

    Raises:
        ValueError: in such a step, ``weight`` is set or ``op`` is not the average.
    """
    if not within_share() or not reduction.combines:
        return placed
    if reduction.weight is not None:
        remedy = "leave it out: hk.fit weights each rank's gradients by its rows"
        raise ValueError(describe("weight", reduction.weight, "None inside hk.fit", remedy))
    if checked_op(reduction.op) != ReduceOp.Average:
        remedy = "use hk.Average: hk.fit handles losses that are sums"
        raise ValueError(describe("op", op_label(reduction.op), "Average inside hk.fit", remedy))
    if (factor := gradient_factor()) is None:
        return placed

    def scale(grad: Gradient, kind: Kind) -> Gradient:
        return grad if kind in ("rows", "overwritten") else map_values(grad, lambda x: times_share(x, factor))

    return placed.map(scale)


def agree_on(
    prepare: Callable[[], PlacedGradients], reduction: Reduction, *, exchanges: bool = False
) -> PlacedGradients:
    """Check the result of ``prepare`` and return it; in eager mode, also compare it between ranks.

    An error in ``prepare`` or the checks on one rank raises an error on every rank. Everything that can fail before
    gradients are exchanged belongs in ``prepare``, which may itself exchange objects, as in the first step of ``fit``.

    Gradients that are combined already are not compared. Pass ``exchanges=True`` if their update contains another
    exchange, so that a rank must not raise alone.

    Raises:
        Exception: this rank's gradients or arguments are invalid.
        CollectiveMismatchError: in eager mode, ranks differ, or ``prepare`` or a check failed on another rank.
    """
    if not (reduction.combines or exchanges):
        return prepare()
    lone_training().is_combined = True
    problem: Exception | None = None
    try:
        placed = prepare()
        if reduction.combines:
            _check(placed, reduction)
    except Exception as error:
        if not tf.executing_eagerly():
            raise
        problem = error
        placed = PlacedGradients()
    if tf.executing_eagerly():
        call = _call(placed, reduction, problem) if reduction.combines else Call("gradients", problem=problem)
        agree_on_call(call, reduction.group)  # raises the problem
    return placed


def combine(
    placed: PlacedGradients,
    reduction: Reduction,
    call_site: str = "",
    combine_replicated: Callable[[list[Gradient], Reduction], list[Gradient]] | None = None,
) -> PlacedGradients:
    """Combine gradients that all ranks have agreed on, unless they are combined already.

    Repeated rows of sharded tables stay repeated; the update sums duplicates where necessary. ``call_site`` is that of
    :func:`average`.

    With N ranks, C of which share each batch: rows of a table are already sums over all N ranks; the average divides
    them by N, the sum by C. A part of a layer along a mesh axis has the complete gradient of its batch and is combined
    over the ranks with other batches. A local gradient is the complete gradient of one of N/C batches.
    """
    if not reduction.combines:
        return placed
    if not tf.executing_eagerly():  # eager calls are compared, and may fail on all ranks
        reduction = replace(reduction, model=model_number(placed.variables, reduction.group))
    if reduction.weight is not None:
        factor = weight_factor(reduction)
        reduction = replace(reduction, op=ReduceOp.Sum, weight=None)
        placed = placed.map(lambda grad, kind: grad if kind == "overwritten" else _apply_weight(grad, factor))
    by_kind: defaultdict[Kind, list[Gradient]] = defaultdict(list)
    for grad, kind in zip(placed.grads, placed.kinds, strict=True):
        by_kind[kind].append(grad)
    op = checked_op(reduction.op)
    batch_group = reduction.batch_group
    is_average = op == ReduceOp.Average
    row_divisor = cluster.size() if is_average else reduction.ranks_per_batch
    local_divisor = batch_group.size if is_average else 1
    combined: dict[Kind, list[Gradient]] = {
        "replicated": (combine_replicated or _combine_replicated)(by_kind["replicated"], reduction),
        "rows": [_divide(grad, row_divisor) for grad in by_kind["rows"]],
        "part": _reduce(by_kind["part"], op, f"{reduction.name}.parts", batch_group),
        "local": [_divide(sparse.sum_duplicates(grad), local_divisor) for grad in by_kind["local"]],
        "overwritten": _reduce(by_kind["overwritten"], ReduceOp.Max, f"{reduction.name}.overwritten", reduction.group),
    }
    results = {kind: iter(grads) for kind, grads in combined.items()}
    grads = [next(results[kind]) for kind in placed.kinds]
    if call_site:
        _report_step(grads, call_site)
    return placed.with_grads(grads)


def _report_step(grads: Sequence[Gradient], call_site: str) -> None:
    """Report a step to the profiler, if active, of a program that doesn't count them; in a graph, on every execution.

    Args:
        grads: the combined gradients; a graph reports when the first of them is available.
        call_site: identifies the call site; the first call site that reports marks the end of each step.
    """
    recorder = progress().profile
    if recorder is None:
        return
    if not tf.inside_function():
        recorder.gradients_combined(call_site)
        return
    first = next((g for g in grads if g is not None), None)
    # XLA has no kernel for numpy_function.
    if first is None or is_for_xla():
        return
    values = first.values if isinstance(first, tf.IndexedSlices) else first

    def report(_: np.ndarray) -> np.int32:
        recorder.gradients_combined(call_site)
        return np.int32(0)

    tf.numpy_function(report, [tf.reshape(values, [-1])[:1]], tf.int32, name="hvdkit_profile")


def _reduce(grads: list[Gradient], op: ReduceOp, name: str, group: cluster.Group | None) -> list[Gradient]:
    reduced = iter(grouped_allreduce([g for g in grads if g is not None], op, name, group))
    return [None if g is None else next(reduced) for g in grads]


def _divide(grad: Gradient, divisor: int) -> Gradient:
    if divisor == 1 or grad is None:
        return grad
    return sparse.DividedRows(grad, divisor) if isinstance(grad, tf.IndexedSlices) else grad / divisor


def weight_factor(reduction: Reduction) -> tf.Tensor:
    """Return the factor of this rank's gradients in a plain sum: w_r, or w_r / sum_r w_r for the average.

    Weights are known before the gradients, so inside a graph their exchange overlaps with the step.
    """
    w = tf.cast(as_tensor(reduction.weight), tf.float64)
    if not tf.executing_eagerly():
        w = not_constant(w)  # TensorFlow removes whatever a constant 0 is multiplied with, collectives included
    # Inside a graph it is too late to raise on every rank, so an invalid weight makes the result NaN on every rank.
    w = tf.where(w >= 0, w, np.nan)
    if checked_op(reduction.op) == ReduceOp.Sum:
        return w
    return tf.math.divide_no_nan(w, grouped_allreduce([w], ReduceOp.Sum, "hvdkit.weight", reduction.batch_group)[0])


def _apply_weight(grad: Gradient, factor: tf.Tensor) -> Gradient:
    return map_values(zero_without_weight(grad, factor), lambda x: x * tf.cast(factor, x.dtype))


def zero_without_weight(grad: Gradient, factor: tf.Tensor) -> Gradient:
    """Return zeros if this rank's weight is 0: without examples, its gradient is 0/0 and would propagate NaN."""
    return map_values(grad, lambda x: tf.where(tf.equal(factor, 0), tf.zeros_like(x), x))


def _combine_replicated(grads: list[Gradient], reduction: Reduction) -> list[Gradient]:
    """Combine gradients of replicated variables; tiny tables are sent with the dense gradients."""
    op = checked_op(reduction.op)
    group = reduction.group
    if op in (ReduceOp.Min, ReduceOp.Max):
        return _reduce(grads, op, reduction.name, group)
    results = dict(enumerate(map(sparse.sum_duplicates, grads)))
    if (cluster.size() if group is None else group.size) == 1:
        return [*results.values()]
    tables = {i: g for i, g in results.items() if isinstance(g, tf.IndexedSlices)}
    tiny = {i: tf.convert_to_tensor(g) for i, g in tables.items() if sparse.is_tiny(g)}
    dense = {i: g for i, g in results.items() if g is not None and i not in tables} | tiny
    large = {i: g for i, g in tables.items() if i not in tiny}
    wire = wires.wire_dtype(reduction.compression)
    results |= zip(dense, wires.reduce_dense([*dense.values()], op, wire, reduction.name, group), strict=True)
    results |= zip(large, sparse.combine([*large.values()], op, wire, reduction.name, group), strict=True)
    for i in tiny:
        every_row = tf.range(tf.shape(results[i])[0], dtype=tables[i].indices.dtype)
        results[i] = tf.IndexedSlices(results[i], every_row, tables[i].dense_shape)
    ranks_per_batch = reduction.ranks_per_batch if op == ReduceOp.Sum else 1
    if ranks_per_batch == 1:
        return [*results.values()]
    return [map_values(g, lambda x: x / ranks_per_batch) for g in results.values()]


def _check(placed: PlacedGradients, reduction: Reduction) -> None:
    wires.wire_dtype(reduction.compression)
    op = checked_op(reduction.op)
    rows = any(isinstance(g, tf.IndexedSlices) for g in placed.grads)
    has_options = reduction.weight is not None or reduction.compression
    is_plain = not (rows or has_options) and set(placed.kinds) <= {"replicated", "part"}
    if op in (ReduceOp.Min, ReduceOp.Max) and not is_plain:
        expected = "Average or Sum with sparse gradients, sharded or local variables, weight or compression"
        raise ValueError(describe("op", op.name, expected, "use hk.Sum"))
    if reduction.group is not None and {"rows", "part"} & set(placed.kinds):
        got = f"ranks {list(reduction.group.ranks)}"
        expected = "all ranks with gradients of sharded variables"
        raise ValueError(describe("process_set", got, expected, "leave it out, or use variables that are not sharded"))
    if reduction.weight is None:
        return
    if placed.grads and any_coupled():
        remedy = "pass it to hk.DistributedGradientTape, which weights the loss"
        raise ValueError(describe("weight", reduction.weight, "None with synchronized batch normalization", remedy))
    if {"rows", "part"} & set(placed.kinds):
        remedy = "pass it to hk.DistributedGradientTape"
        raise ValueError(describe("weight", reduction.weight, "None with gradients of sharded variables", remedy))
    check_weight(reduction.weight)


def check_weight(weight: npt.ArrayLike | tf.Tensor) -> None:
    """Raise if the static value of ``weight`` is known and not a number >= 0."""
    known = tf.get_static_value(as_tensor(weight))
    if known is not None and (known.ndim != 0 or not 0 <= known < np.inf):
        raise ValueError(
            describe("weight", weight, "one finite number >= 0", "pass the number of this rank's examples")
        )


def _call(placed: PlacedGradients, reduction: Reduction, problem: Exception | None) -> Call:
    """Describe this rank's call, for comparison with other ranks."""
    signatures = [_signature(*pair) for pair in zip(placed.grads, placed.kinds, strict=True)]
    weight = "" if reduction.weight is None else "weight"
    options = [f"op={op_label(reduction.op)}", f"compression={reduction.compression}", weight]
    shown = ", ".join(filter(None, [*options, describe_group(reduction.group)]))
    dtypes = tuple(d[0] for d in signatures)
    shapes = tuple(d[1] for d in signatures)
    return Call(f"average_gradients({shown})", dtypes=dtypes, shapes=shapes, problem=problem)


def _signature(grad: Gradient, kind: Kind) -> tuple[str, tuple[int, ...]]:
    """Return what must be equal on all ranks: everything that determines how a gradient is sent."""
    if kind in ("rows", "local"):  # not exchanged here: may differ, or be missing on some ranks
        return kind, ()
    if grad is None:
        return "none", ()
    if kind == "part":  # shapes may differ along the other axes
        return f"part {grad.dtype.name}", ()
    if not isinstance(grad, tf.IndexedSlices):
        return grad.dtype.name, tuple(grad.shape)
    shape = sparse.dense_shape(grad)
    table = "a table of unknown shape" if shape is None else f"a table {list(shape)}"
    return f"sparse {grad.dtype.name} by {grad.indices.dtype.name} into {table}, rows ", tuple(grad.values.shape[1:])
