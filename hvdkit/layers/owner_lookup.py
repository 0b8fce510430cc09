"""The lookup of ids that the tables' owners already have: only vectors are exchanged.

Each table is on one rank, or sharded by columns. A rank has the ids of the entire global batch for the tables of which
it holds a part. With N ranks, B examples, and W_o numbers per example in the vectors that rank o computes:

    1. the ranks exchange whether an id is invalid, and B;
    2. each owner looks up its features, ``[B, W_o]``;
    3. one alltoall (per dtype) sends rank r the rows of its examples, ``[r*B//N, (r+1)*B//N)``, which are those of
       ``hk.data.GlobalBatches``.

Gradients take one alltoall in the opposite direction. Same as ``dp_input=False`` of NVIDIA's distributed-embeddings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import tensors
from hvdkit.errors import describe
from hvdkit.layers.features import Bag, Lookup, combine_rows, make_ids_valid
from hvdkit.layers.lookup import fault_of
from hvdkit.layers.table_store import TableStore
from hvdkit.sharding.id_checks import FAULT_CODE_LENGTH, Fault, raise_everywhere, refusal
from hvdkit.sharding.layout import Layout, TableSlice
from hvdkit.sharding.routing import KeyedVariable, read_distinct

_NAME = "hvdkit.owners"
_AS_MANY = "the same number of examples for all features"
_REMEDY = "pass the ids of the whole global batch on every rank"


class OwnedLookup(NamedTuple):
    """Some columns of an output, looked up by the rank that holds them.

    Attributes:
        output: name of the output.
        group: number of the table group whose variable holds the columns.
        slice: the columns of the output's table.
    """

    output: str
    group: int
    slice: TableSlice


def lookups_of_rank(layout: Layout, lookups: Mapping[str, Lookup], rank: int) -> list[OwnedLookup]:
    """Return the lookups of ``rank``, in an order that all ranks share.

    Args:
        layout: the layout of the tables.
        lookups: the feature and the table of each output.
        rank: any rank.
    """
    return [
        OwnedLookup(output, group, table_slice)
        for output, (_, table) in lookups.items()
        for group, table_slice in layout.slices[table.name]
        if table_slice.rank == rank
    ]


def read_owned(store: TableStore, bags: Mapping[str, Bag]) -> dict[str, Any]:
    """Return each output of this rank's examples, ``[local, output_dim]``. Every rank calls it.

    Args:
        store: the tables.
        bags: for each output of which this rank holds columns, the ids of all examples of the global batch.

    Raises:
        ValueError: in eager mode, on every rank, if an id of any rank is out of range, or the numbers of examples
            differ; ``tf.errors.InvalidArgumentError`` in graphs.
    """
    checked, batch = _agree_on_batch(fault_of(store, bags), _examples(bags), bags)
    safe = {name: make_ids_valid(bag, store.lookups[name].table, store.out_of_range) for name, bag in checked.items()}
    rank = cluster.rank()
    size = cluster.size()
    edges = tf.range(size + 1) * batch // size
    counts = edges[1:] - edges[:-1]
    columns: dict[str, dict[int, tf.Tensor]] = {name: {} for name in store.lookups}
    lookups = [lookups_of_rank(store.layout, store.lookups, owner) for owner in range(size)]
    for dtype in dict.fromkeys(table.dtype for table in store.tables.values()):
        by_owner = [[lookup for lookup in owned if lookup.slice.table.dtype == dtype] for owned in lookups]
        widths = [sum(len(lookup.slice.columns) for lookup in owned) for owned in by_owner]
        vectors = [_vectors(store, safe[lookup.output], lookup) for lookup in by_owner[rank]]
        groups_read = {lookup.group for lookup in by_owner[rank]}
        vectors += [
            _no_vectors(variable, batch)
            for number, (group, variable) in enumerate(zip(store.layout.groups, store.variables, strict=True))
            if group.dtype == dtype and number not in groups_read
        ]
        received = _scatter_examples(tf.concat(vectors, 1), widths, counts, batch, store.wire)
        for owned, of_owner in zip(by_owner, received, strict=True):
            parts = tf.split(of_owner, [len(lookup.slice.columns) for lookup in owned], axis=1) if owned else []
            for lookup, part in zip(owned, parts, strict=True):
                columns[lookup.output][lookup.slice.columns.start] = part
    return {name: tf.concat([parts[start] for start in sorted(parts)], 1) for name, parts in columns.items()}


def abandon_owned_lookup(store: TableStore) -> None:
    """Participate in a lookup after this rank rejected its inputs, so that the other ranks raise as well."""
    with contextlib.suppress(ValueError):
        _agree_on_batch(refusal(), tf.constant(-1), {})


def one_vector_each(bag: Bag, name: str) -> Bag:
    """Return ``bag`` unchanged. Raises ValueError unless every example has exactly one vector."""
    if bag.like is None and bag.shape.shape[0] == 1:
        return bag
    expected = "one vector for each example with dp_input=False"
    remedy = "give the table a combiner, or pass [batch]"
    raise ValueError(describe(f"ids of {name!r}", "several ids for each example", expected, remedy))


def _examples(bags: Mapping[str, Bag]) -> tf.Tensor:
    """Return the number of examples of this rank's bags; -1 without a bag, -2 if they differ."""
    if not bags:
        return tf.constant(-1)
    every = tf.stack([tf.cast(bag.examples, tf.int32) for bag in bags.values()])
    known = sorted({int(n) for bag in bags.values() if (n := tf.get_static_value(bag.examples)) is not None})
    if len(known) > 1 and not tf.executing_eagerly():  # a tracing error ends the job
        raise ValueError(describe("inputs", f"{known} examples", _AS_MANY, _REMEDY))
    return tf.where(tf.reduce_all(every == every[0]), every[0], -2)


def _agree_on_batch(fault: Fault, examples: tf.Tensor, bags: Mapping[str, Bag]) -> tuple[dict[str, Bag], tf.Tensor]:
    """Return the bags and the global number of examples, after checking all ranks' faults and numbers of examples."""
    codes = tf.concat([fault.code, examples[None]], 0)[None]
    if cluster.size() > 1:
        codes = tensors.allgather(codes, f"{_NAME}.faults")
    batches = codes[:, FAULT_CODE_LENGTH]
    batch = tf.maximum(tf.reduce_max(batches), 0)
    wrong = tf.logical_and(batches != batch, batches != -1)
    with tf.control_dependencies(raise_everywhere(codes[:, :FAULT_CODE_LENGTH], fault)):
        wrong = tf.identity(wrong)
    with tf.control_dependencies(_raise_if_unequal(batches, wrong)):
        return {name: bag._replace(ids=tf.identity(bag.ids)) for name, bag in bags.items()}, tf.identity(batch)


def _raise_if_unequal(batches: tf.Tensor, wrong: tf.Tensor) -> list[tf.Operation]:
    if tf.executing_eagerly():
        if tf.reduce_any(wrong):
            shown = ", ".join(
                "none" if n == -1 else "different numbers" if n == -2 else str(n) for n in batches.numpy()
            )
            raise ValueError(
                describe("inputs", f"{shown} examples on ranks 0 to {len(batches) - 1}", _AS_MANY, _REMEDY)
            )
        return []
    message = tf.strings.join(
        [
            "inputs: got ",
            tf.strings.reduce_join(tf.strings.as_string(batches), separator=", "),
            f" examples on the ranks (-1: none, -2: different numbers), expected {_AS_MANY}; {_REMEDY}",
        ]
    )
    return [tf.debugging.Assert(tf.logical_not(tf.reduce_any(wrong)), [message])]


def _vectors(store: TableStore, bag: Bag, lookup: OwnedLookup) -> tf.Tensor:
    """Return the columns of one output that this rank owns, for all examples: ``[B, columns]``."""
    source = KeyedVariable(store.variables[lookup.group]._value)
    columns = len(lookup.slice.columns)
    rows = read_distinct(source, tf.cast(bag.ids, tf.int64) + lookup.slice.base)
    vectors = combine_rows(rows, bag, lookup.slice.table.combiner)
    return tf.ensure_shape(vectors[:, :columns], [None, columns])


def _no_vectors(variable: Any, batch: tf.Tensor) -> tf.Tensor:
    """Return ``[B, 0]`` for a variable without lookups on this rank: the exchange of gradients needs it."""
    return tf.reshape(variable._value.sparse_read(tf.zeros([0], tf.int32)), [batch, 0])


def _scatter_examples(
    whole: tf.Tensor, widths: Sequence[int], counts: tf.Tensor, batch: tf.Tensor, wire: tf.DType | None
) -> list[tf.Tensor]:
    """Send each rank its examples' rows of ``whole``; return the rows received from each rank, ``[local, widths[o]]``.

    Args:
        whole: this rank's vectors of all examples, ``[B, widths[rank]]``.
        widths: width of each rank's vectors.
        counts: number of examples of each rank, ``[N]`` int32.
        batch: B.
        wire: dtype in which vectors are sent; None for their dtype.
    """
    rank = cluster.rank()
    size = cluster.size()
    if size == 1 or not any(widths):
        return [whole[: counts[rank]] if o == rank else tf.zeros([counts[rank], 0], whole.dtype) for o in range(size)]
    sent = wire if wire is not None and wire.size < whole.dtype.size else whole.dtype
    dtype = whole.dtype
    name = f"{_NAME}.vectors_{sent.name}"
    sent_counts = counts * widths[rank]
    received_counts = counts[rank] * tf.constant(list(widths))

    @tf.custom_gradient
    def exchange(whole: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            back = tensors.alltoall(tf.cast(upstream, sent), received_counts, f"{name}.gradients")[0]
            return tf.cast(tf.reshape(back, [batch, widths[rank]]), dtype)

        flat = tf.reshape(tf.cast(whole, sent), [-1])
        return tf.cast(tensors.alltoall(flat, sent_counts, name)[0], dtype), gradient

    parts = tf.split(exchange(whole), received_counts, num=size)
    return [tf.reshape(part, [counts[rank], width]) for part, width in zip(parts, widths, strict=True)]
