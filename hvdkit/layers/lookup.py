"""The lookup of any number of features in a set of tables, in two phases: request rows, and read them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvdkit.collectives import tensors
from hvdkit.layers.features import Bag, combined, in_range
from hvdkit.layers.table_store import TableStore
from hvdkit.sharding import routing
from hvdkit.sharding.id_checks import (
    Fault,
    check_range,
    check_weights,
    check_whole_numbers,
    find_fault,
    raise_everywhere,
    refusal,
)
from hvdkit.sharding.keys import key_dtype, keys_of
from hvdkit.sharding.routing import KeyedVariable, LookupRows, read_distinct

_NAME = "hvdkit.lookup"


class PendingLookup(NamedTuple):
    """A pending lookup: returned by a layer's ``ask``, and accepted by its call instead of ids.

    Attributes:
        bags: the ids of each output, with the nesting of the layer's inputs.
        rows: the request to other ranks; None without sharded tables.
    """

    bags: dict[str, Any]
    rows: routing.RoutedLookup | None


def ask(store: TableStore, bags: Mapping[str, Bag], fault: Fault | None = None) -> PendingLookup:
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
    safe = {name: in_range(bag, store.lookups[name].table, store.out_of_range) for name, bag in bags.items()}
    if store.deferred:
        return PendingLookup(safe, None)
    wanted = _wanted(store, safe)
    if not wanted:
        return PendingLookup(_after_check(store, safe, fault), None)
    keys = [
        [_keys(store, safe, features, number) for (_, number), features in parts.items()] for parts in wanted.values()
    ]
    return PendingLookup(safe, routing.request_rows(store.sources(list(wanted), None), keys, fault, name=_NAME))


def read(store: TableStore, asked: PendingLookup, training: bool | None) -> dict[str, Any]:
    """Return each output ``[*shape, output_dim]``, in its table's dtype. Every rank calls it.

    Args:
        store: the tables.
        asked: the result of :func:`ask`.
        training: whether to assign rows to new ids in tables with eviction; see
            :class:`hvdkit.sharding.vocabulary.Vocabulary`.
    """
    slices = {} if asked.rows is None else _slices(store, asked.bags, asked.rows, training)
    outputs = {}
    for name, bag in asked.bags.items():
        table = store.lookups[name].table
        if table.name in store.replicated and not store.deferred:
            parts = [read_distinct(KeyedVariable(store.replicated[table.name]._value), bag.ids)]
        elif name in slices:
            parts = slices[name]
        else:  # Keras infers shapes
            parts = [LookupRows(tf.zeros([1, table.output_dim], table.dtype), tf.zeros_like(bag.ids))]
        made = [combined(found, bag, table.combiner) for found in parts]
        outputs[name] = made[0] if len(made) == 1 else _beside(made, table.output_dim)
    return outputs


def abandon(store: TableStore) -> None:
    """Participate in a lookup after this rank rejected its inputs, so that the other ranks raise as well."""
    nothing = Bag(tf.zeros([0], tf.int32), None, tf.constant(0))
    with contextlib.suppress(ValueError):
        ask(store, dict.fromkeys(store.lookups, nothing), refusal())


def fault_of(store: TableStore, bags: Mapping[str, Bag]) -> Fault:
    """Return the first invalid id or weight of this rank.

    Every rank runs the same checks in the same order, even without a bag or weights, because faults are sent by number.
    """
    checks = []
    for name, (feature, table) in store.lookups.items():
        bag, where = bags.get(name), f"feature {feature!r} of table {table.name!r}"
        ids = None if bag is None else bag.ids
        if store.out_of_range == "error" and not table.evict:
            checks.append(check_range(ids, table.input_dim, where))
        if table.combiner is not None:
            checks.append(check_weights(*((None, None) if bag is None else (bag.weights, bag.matches)), where))
        if store.floats:
            checks.append(check_whole_numbers(ids, None if bag is None else bag.whole, where))
    return find_fault(checks)


def _after_check(store: TableStore, bags: dict[str, Bag], fault: Fault) -> dict[str, Bag]:
    """Return the bags after exchanging faults: with only replicated tables, this is the only communication."""
    words = fault.words[None]
    if store.layout.size > 1 and (fault.texts or tf.executing_eagerly()):
        words = tensors.allgather(words, f"{_NAME}.faults")
    with tf.control_dependencies(raise_everywhere(words, fault)):
        return {name: bag._replace(ids=tf.identity(bag.ids)) for name, bag in bags.items()}


def _wanted(store: TableStore, bags: Mapping[str, Bag]) -> dict[int, dict[tuple[str, int], list[str]]]:
    """Return, by group, the outputs that need each (table, column slice)."""
    wanted: dict[int, dict[tuple[str, int], list[str]]] = {}
    for name in bags:
        table = store.lookups[name].table.name
        for number, (group, _) in enumerate(store.layout.slices.get(table, ())):
            wanted.setdefault(group, {}).setdefault((table, number), []).append(name)
    return dict(sorted(wanted.items()))


def _keys(store: TableStore, bags: Mapping[str, Bag], names: Sequence[str], number: int) -> tf.Tensor:
    """Return the concatenated keys that outputs request from one column slice."""
    table, size = store.lookups[names[0]].table, store.layout.size
    dtype = key_dtype(store.layout.keys)  # one dtype for all tables, which share a message
    ids = routing.concat([tf.cast(bags[name].ids, dtype) for name in names])
    _, part = store.layout.slices[table.name][number]
    return ids if table.evict else keys_of(ids, part.rule, table.input_dim, size, base=part.base, rank=part.rank)


def _slices(
    store: TableStore, bags: Mapping[str, Bag], asked: routing.RoutedLookup, training: bool | None
) -> dict[str, list[LookupRows]]:
    """Return each output's rows, one part per column slice."""
    wanted = _wanted(store, bags)
    sources, parts = store.sources(list(wanted), training), [len(parts) for parts in wanted.values()]
    found = routing.fetch_rows(sources, parts, asked, name=_NAME, wire=store.wire)
    results: dict[str, dict[int, LookupRows]] = {}
    for runs, rows_of_runs in zip(wanted.values(), found, strict=True):
        for ((_, number), features), rows in zip(runs.items(), rows_of_runs, strict=True):
            sizes = [tf.size(bags[name].ids) for name in features]
            places = [rows.positions] if len(sizes) == 1 else tf.split(rows.positions, tf.stack(sizes), num=len(sizes))
            for name, place in zip(features, places, strict=True):
                results.setdefault(name, {})[number] = LookupRows(rows.rows, place)
    return {name: [parts[i] for i in sorted(parts)] for name, parts in results.items()}


def _beside(parts: Sequence[Any], width: int) -> Any:
    """Concatenate column slices; the last one may be padded."""
    if isinstance(parts[0], tf.RaggedTensor):
        flat = tf.concat([p.flat_values for p in parts], -1)[..., :width]
        return parts[0].with_flat_values(flat)
    return tf.concat(parts, -1)[..., :width]
