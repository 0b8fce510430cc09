"""Look up any number of features in a set of tables, in two phases: request rows, then read them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from hvdkit.collectives import tensors
from hvdkit.layers.features import Bag, Nested, Vectors, combine_rows, make_ids_valid
from hvdkit.layers.table_store import TableStore
from hvdkit.sharding import routing
from hvdkit.sharding.id_checks import Check, Fault, find_fault, raise_everywhere, range_check, refusal
from hvdkit.sharding.keys import key_dtype, keys_of
from hvdkit.sharding.layout import TableSlice
from hvdkit.sharding.routing import KeptLookup, LookupRows


class PendingLookup(NamedTuple):
    """A lookup whose ids have been sent: returned by a layer's ``ask``, and accepted by its call instead of ids.

    Attributes:
        bags: the ids of each output, with the nesting of the layer's inputs.
        rows: the requests to all ranks; None without sharded tables.
    """

    bags: Nested[Bag]
    rows: routing.RoutedLookup | None


def send_requests(store: TableStore, bags: Mapping[str, Bag], fault: Fault | None = None) -> PendingLookup:
    """Send every rank the ids of the rows that this rank needs. Every rank calls it, with the same outputs.

    Raises:
        ValueError: in eager mode, on every rank, if an id of any rank is out of range and that is an error;
            ``tf.errors.InvalidArgumentError`` in graphs.
    """
    fault = _find_fault(store, bags) if fault is None else fault
    safe = {name: make_ids_valid(bag, store.lookups[name].table, store.out_of_range) for name, bag in bags.items()}
    if store.deferred:
        return PendingLookup(safe, None)
    if not store.variables:
        return PendingLookup(_after_check(store, safe, fault), None)
    keys = [[_keys(store, safe, part) for part in group.slices] for group in store.layout.groups]
    return PendingLookup(safe, routing.request_rows(store.sources(None), keys, fault))


def read_outputs(
    store: TableStore, bags: Mapping[str, Bag], rows: routing.RoutedLookup | None, training: bool | None
) -> dict[str, Vectors]:
    """Return each output ``[*shape, output_dim]``, in its table's dtype. Every rank calls it.

    ``bags`` and ``rows`` are those that :func:`send_requests` has returned. ``training``: whether to assign rows to new
    ids in tables with eviction; see :class:`hvdkit.sharding.vocabulary.Vocabulary`.
    """
    slices = {} if rows is None else _slices(store, bags, rows, training)
    outputs = {}
    for name, (_, table) in store.lookups.items():
        bag = bags[name]
        if table.name in store.replicated and not store.deferred:
            ids, positions = tf.unique(bag.ids)  # so that the gradient of a repeated row is one row as well
            parts = [LookupRows(store.replicated[table.name]._value.sparse_read(ids), positions)]
        elif name in slices:
            parts = slices[name]
        else:  # Keras infers shapes
            parts = [LookupRows(tf.zeros([1, table.output_dim], table.dtype), tf.zeros_like(bag.ids))]
        columns = [combine_rows(part, bag, table.combiner) for part in parts]
        outputs[name] = columns[0] if len(columns) == 1 else _concat_columns(columns, table.output_dim)
    return outputs


def abandon_lookup(store: TableStore) -> None:
    """Participate in a lookup after this rank rejected its inputs, so that the other ranks raise as well."""
    nothing = Bag(tf.zeros([0], tf.int32), None, tf.constant(0))
    with contextlib.suppress(ValueError):
        send_requests(store, dict.fromkeys(store.lookups, nothing), refusal())


def _find_fault(store: TableStore, bags: Mapping[str, Bag]) -> Fault:
    """Return the first invalid id or weight of this rank.

    Every rank runs the same checks in the same order, even without weights, because faults are sent by number.
    """
    checks = []
    for name, (feature, table) in store.lookups.items():
        bag = bags[name]
        where = f"feature {feature!r} of table {table.name!r} of layer {store.layer_name!r}"
        if store.out_of_range == "error" and not table.evict:
            remedy = "check the data, or pass out_of_range='wrap' or 'drop'"
            checks.append(range_check(bag.ids, table.input_dim, where, remedy))
        if table.combiner is not None:
            count = None if bag.weights is None else tf.size(bag.weights)[None]
            mismatch = None if bag.matches is None else tf.logical_not(bag.matches)[None]
            expected = "one for each id, at the same positions"
            checks.append(Check(count, mismatch, "weights", where, expected, "give both the same shape"))
        if store.floats:
            fraction = None if bag.whole is None else tf.logical_not(bag.whole)
            checks.append(
                Check(bag.ids, fraction, "ids, without their fraction", where, "whole numbers", "pass integers")
            )
    return find_fault(checks)


def _after_check(store: TableStore, bags: dict[str, Bag], fault: Fault) -> dict[str, Bag]:
    """Return the bags after exchanging faults: with only replicated tables, this is the only communication."""
    codes = fault.code[None]
    if store.layout.size > 1 and not routing.reads_own_rows() and (fault.texts or tf.executing_eagerly()):
        codes = tensors.allgather(codes, "hvdkit.lookup.faults")
    with tf.control_dependencies(raise_everywhere(codes, fault)):
        return {name: bag._replace(ids=tf.identity(bag.ids)) for name, bag in bags.items()}


def _keys(store: TableStore, bags: Mapping[str, Bag], part: TableSlice) -> tf.Tensor:
    """Return the concatenated keys that the outputs of a table request from one of its slices."""
    table = part.table
    size = store.layout.size
    dtype = key_dtype(store.layout.keys)  # one dtype for all tables, which share a message
    ids = routing.concat([tf.cast(bags[name].ids, dtype) for name in store.outputs[table.name]])
    return ids if table.evict else keys_of(ids, part.rule, table.input_dim, size, base=part.base, rank=part.rank)


def _slices(
    store: TableStore, bags: Mapping[str, Bag], lookup: routing.RoutedLookup, training: bool | None
) -> dict[str, list[LookupRows]]:
    """Return each output's rows, one part per column slice."""
    groups = store.layout.groups
    parts = [len(group.slices) for group in groups]
    store.last_lookup = KeptLookup(lookup)
    looked_up = routing.fetch_rows(store.sources(training), parts, lookup, store.wire)
    results: dict[str, list[LookupRows]] = {}
    for group, rows_of_group in zip(groups, looked_up, strict=True):
        for part, rows in zip(group.slices, rows_of_group, strict=True):
            outputs = store.outputs[part.table.name]
            sizes = [tf.size(bags[name].ids) for name in outputs]
            positions = routing.split(rows.positions, tf.stack(sizes), len(sizes))
            for name, of_output in zip(outputs, positions, strict=True):
                results.setdefault(name, []).append(LookupRows(rows.rows, of_output))
    return results


def _concat_columns(parts: Sequence[Vectors], width: int) -> Vectors:
    """Concatenate column slices; the last one may be padded."""
    if isinstance(parts[0], tf.RaggedTensor):
        flat = tf.concat([p.flat_values for p in parts], -1)[..., :width]
        return parts[0].with_flat_values(flat)
    return tf.concat(parts, -1)[..., :width]
