"""Look up any number of features in a set of tables, in two phases: request rows, then read them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvdkit.collectives import tensors
from hvdkit.layers.features import Bag, combine_rows, make_ids_valid
from hvdkit.layers.table_store import TableStore
from hvdkit.sharding import routing
from hvdkit.sharding.id_checks import (
    Fault,
    find_fault,
    raise_everywhere,
    range_check,
    refusal,
    weights_check,
    whole_numbers_check,
)
from hvdkit.sharding.keys import key_dtype, keys_of
from hvdkit.sharding.routing import KeyedVariable, LookupRows, read_distinct

_NAME = "hvdkit.lookup"


class PendingLookup(NamedTuple):
    """A lookup whose ids have been sent: returned by a layer's ``ask``, and accepted by its call instead of ids.

    Attributes:
        bags: the ids of each output, with the nesting of the layer's inputs.
        rows: the requests to all ranks; None without sharded tables.
    """

    bags: dict[str, Any]
    rows: routing.RoutedLookup | None


def send_requests(store: TableStore, bags: Mapping[str, Bag], fault: Fault | None = None) -> PendingLookup:
    """Send every rank the ids of the rows that this rank needs. Every rank calls it, with the same outputs.

    Args:
        store: the tables.
        bags: the ids of each output.
        fault: a fault that is already known on this rank.

    Raises:
        ValueError: in eager mode, on every rank, if an id of any rank is out of range and that is an error;
            ``tf.errors.InvalidArgumentError`` in graphs.
    """
    fault = fault_of(store, bags) if fault is None else fault
    safe = {name: make_ids_valid(bag, store.lookups[name].table, store.out_of_range) for name, bag in bags.items()}
    if store.deferred:
        return PendingLookup(safe, None)
    requests = _outputs_by_slice(store, safe)
    if not requests:
        return PendingLookup(_after_check(store, safe, fault), None)
    keys = [
        [_keys(store, safe, outputs, number) for (_, number), outputs in slices.items()] for slices in requests.values()
    ]
    return PendingLookup(safe, routing.request_rows(store.sources(list(requests), None), keys, fault, name=_NAME))


def read_outputs(store: TableStore, pending: PendingLookup, training: bool | None) -> dict[str, Any]:
    """Return each output ``[*shape, output_dim]``, in its table's dtype. Every rank calls it.

    Args:
        store: the tables.
        pending: the result of :func:`send_requests`.
        training: whether to assign rows to new ids in tables with eviction; see
            :class:`hvdkit.sharding.vocabulary.Vocabulary`.
    """
    slices = {} if pending.rows is None else _slices(store, pending.bags, pending.rows, training)
    outputs = {}
    for name, bag in pending.bags.items():
        table = store.lookups[name].table
        if table.name in store.replicated and not store.deferred:
            parts = [read_distinct(KeyedVariable(store.replicated[table.name]._value), bag.ids)]
        elif name in slices:
            parts = slices[name]
        else:  # Keras infers shapes
            parts = [LookupRows(tf.zeros([1, table.output_dim], table.dtype), tf.zeros_like(bag.ids))]
        columns = [combine_rows(rows, bag, table.combiner) for rows in parts]
        outputs[name] = columns[0] if len(columns) == 1 else _concat_columns(columns, table.output_dim)
    return outputs


def abandon_lookup(store: TableStore) -> None:
    """Participate in a lookup after this rank rejected its inputs, so that the other ranks raise as well."""
    nothing = Bag(tf.zeros([0], tf.int32), None, tf.constant(0))
    with contextlib.suppress(ValueError):
        send_requests(store, dict.fromkeys(store.lookups, nothing), refusal())


def fault_of(store: TableStore, bags: Mapping[str, Bag]) -> Fault:
    """Return the first invalid id or weight of this rank.

    Every rank runs the same checks in the same order, even without a bag or weights, because faults are sent by number.
    """
    checks = []
    for name, (feature, table) in store.lookups.items():
        bag, where = bags.get(name), f"feature {feature!r} of table {table.name!r}"
        ids = None if bag is None else bag.ids
        if store.out_of_range == "error" and not table.evict:
            checks.append(range_check(ids, table.input_dim, where))
        if table.combiner is not None:
            checks.append(weights_check(*((None, None) if bag is None else (bag.weights, bag.matches)), where))
        if store.floats:
            checks.append(whole_numbers_check(ids, None if bag is None else bag.whole, where))
    return find_fault(checks)


def _after_check(store: TableStore, bags: dict[str, Bag], fault: Fault) -> dict[str, Bag]:
    """Return the bags after exchanging faults: with only replicated tables, this is the only communication."""
    codes = fault.code[None]
    if store.layout.size > 1 and (fault.texts or tf.executing_eagerly()):
        codes = tensors.allgather(codes, f"{_NAME}.faults")
    with tf.control_dependencies(raise_everywhere(codes, fault)):
        return {name: bag._replace(ids=tf.identity(bag.ids)) for name, bag in bags.items()}


def _outputs_by_slice(store: TableStore, bags: Mapping[str, Bag]) -> dict[int, dict[tuple[str, int], list[str]]]:
    """Return, for each table group, the outputs that need each (table, number of the column slice)."""
    requests: dict[int, dict[tuple[str, int], list[str]]] = {}
    for name in bags:
        table = store.lookups[name].table.name
        for number, (group, _) in enumerate(store.layout.slices.get(table, ())):
            requests.setdefault(group, {}).setdefault((table, number), []).append(name)
    return dict(sorted(requests.items()))


def _keys(store: TableStore, bags: Mapping[str, Bag], names: Sequence[str], number: int) -> tf.Tensor:
    """Return the concatenated keys that outputs request from one column slice."""
    table, size = store.lookups[names[0]].table, store.layout.size
    dtype = key_dtype(store.layout.keys)  # one dtype for all tables, which share a message
    ids = routing.concat([tf.cast(bags[name].ids, dtype) for name in names])
    _, part = store.layout.slices[table.name][number]
    return ids if table.evict else keys_of(ids, part.rule, table.input_dim, size, base=part.base, rank=part.rank)


def _slices(
    store: TableStore, bags: Mapping[str, Bag], lookup: routing.RoutedLookup, training: bool | None
) -> dict[str, list[LookupRows]]:
    """Return each output's rows, one part per column slice."""
    requests = _outputs_by_slice(store, bags)
    sources, parts = store.sources(list(requests), training), [len(parts) for parts in requests.values()]
    looked_up = routing.fetch_rows(sources, parts, lookup, name=_NAME, wire=store.wire)
    results: dict[str, dict[int, LookupRows]] = {}
    for of_variable, rows_of_variable in zip(requests.values(), looked_up, strict=True):
        for ((_, number), features), rows in zip(of_variable.items(), rows_of_variable, strict=True):
            sizes = [tf.size(bags[name].ids) for name in features]
            positions = routing.split(rows.positions, tf.stack(sizes), len(sizes))
            for name, of_output in zip(features, positions, strict=True):
                results.setdefault(name, {})[number] = LookupRows(rows.rows, of_output)
    return {name: [parts[i] for i in sorted(parts)] for name, parts in results.items()}


def _concat_columns(parts: Sequence[Any], width: int) -> Any:
    """Concatenate column slices; the last one may be padded."""
    if isinstance(parts[0], tf.RaggedTensor):
        flat = tf.concat([p.flat_values for p in parts], -1)[..., :width]
        return parts[0].with_flat_values(flat)
    return tf.concat(parts, -1)[..., :width]
