"""The lookup of any number of features in a set of tables, in two halves: ask for rows, and get them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvdkit.collectives import tensors
from hvdkit.layers.features import Bag, combined, in_range
from hvdkit.layers.store import TableStore
from hvdkit.variable import routing
from hvdkit.variable.faults import (
    Fault,
    find_fault,
    raise_everywhere,
    refused,
    rows_only,
    weights_match,
    whole_numbers,
)
from hvdkit.variable.keys import key_dtype, keys_of
from hvdkit.variable.routing import Found, Numbered, read_distinct

_NAME = "hvdkit.lookup"


class Asked(NamedTuple):
    """What a layer's ``ask`` returns, and its call takes in place of ids.

    Attributes:
        bags: of each output the ids that are looked up for it; nested as the layer's inputs are.
        rows: what was asked of the ranks; None where nothing is cut across them.
    """

    bags: dict[str, Any]
    rows: routing.Asked | None


def ask(store: TableStore, bags: Mapping[str, Bag], fault: Fault | None = None) -> Asked:
    """Tell every rank which rows this one needs. Every rank calls it, with the same outputs.

    Args:
        store: the tables.
        bags: of each output the ids that are looked up for it.
        fault: what is wrong on this rank, if that is known.

    Raises:
        ValueError: in eager mode, on every rank, where an id of any rank is out of range and that is an error;
            ``tf.errors.InvalidArgumentError`` in graphs.
    """
    fault = fault_of(store, bags) if fault is None else fault
    safe = {name: in_range(bag, store.lookups[name].table, store.out_of_range) for name, bag in bags.items()}
    if store.deferred:
        return Asked(safe, None)
    wanted = _wanted(store, safe)
    if not wanted:
        return Asked(_after_check(store, safe, fault), None)
    keys = [
        [_keys(store, safe, features, number) for (_, number), features in parts.items()] for parts in wanted.values()
    ]
    return Asked(safe, routing.ask(store.sources(list(wanted), None), keys, fault, name=_NAME))


def read(store: TableStore, asked: Asked, training: bool | None) -> dict[str, Any]:
    """Return each output ``[*shape, output_dim]``, in its table's dtype. Every rank calls it.

    Args:
        store: the tables.
        asked: what :func:`ask` returned.
        training: whether new ids of tables that evict get rows; see :class:`hvdkit.variable.vocabulary.Vocabulary`.
    """
    slices = {} if asked.rows is None else _slices(store, asked.bags, asked.rows, training)
    outputs = {}
    for name, bag in asked.bags.items():
        table = store.lookups[name].table
        if table.name in store.replicated and not store.deferred:
            parts = [read_distinct(Numbered(store.replicated[table.name]._value), bag.ids)]
        elif name in slices:
            parts = slices[name]
        else:  # Keras infers shapes
            parts = [Found(tf.zeros([1, table.output_dim], table.dtype), tf.zeros_like(bag.ids))]
        made = [combined(found, bag, table.combiner) for found in parts]
        outputs[name] = made[0] if len(made) == 1 else _beside(made, table.output_dim)
    return outputs


def abandon(store: TableStore) -> None:
    """Take part in a lookup whose inputs this rank could not make sense of: the others raise, too."""
    nothing = Bag(tf.zeros([0], tf.int32), None, tf.constant(0))
    with contextlib.suppress(ValueError):
        ask(store, dict.fromkeys(store.lookups, nothing), refused())


def fault_of(store: TableStore, bags: Mapping[str, Bag]) -> Fault:
    """Return the first id or weight of this rank that is wrong.

    Every rank makes the same checks in the same order, with or without a bag and weights: faults travel by number.
    """
    checks = []
    for name, (feature, table) in store.lookups.items():
        bag, where = bags.get(name), f"feature {feature!r} of table {table.name!r}"
        ids = None if bag is None else bag.ids
        if store.out_of_range == "error" and not table.evict:
            checks.append(rows_only(ids, table.input_dim, where))
        if table.combiner is not None:
            checks.append(weights_match(*((None, None) if bag is None else (bag.weights, bag.matches)), where))
        if store.floats:
            checks.append(whole_numbers(ids, None if bag is None else bag.whole, where))
    return find_fault(checks)


def _after_check(store: TableStore, bags: dict[str, Bag], fault: Fault) -> dict[str, Bag]:
    """Return the bags once no rank has a fault: with replicated tables alone nothing else would carry it."""
    words = fault.words[None]
    if store.layout.size > 1 and (fault.texts or tf.executing_eagerly()):
        words = tensors.allgather(words, f"{_NAME}.faults")
    with tf.control_dependencies(raise_everywhere(words, fault)):
        return {name: bag._replace(ids=tf.identity(bag.ids)) for name, bag in bags.items()}


def _wanted(store: TableStore, bags: Mapping[str, Bag]) -> dict[int, dict[tuple[str, int], list[str]]]:
    """Return, by group, which runs of columns of which tables are needed for which outputs."""
    wanted: dict[int, dict[tuple[str, int], list[str]]] = {}
    for name in bags:
        table = store.lookups[name].table.name
        for number, (group, _) in enumerate(store.layout.slices.get(table, ())):
            wanted.setdefault(group, {}).setdefault((table, number), []).append(name)
    return dict(sorted(wanted.items()))


def _keys(store: TableStore, bags: Mapping[str, Bag], names: Sequence[str], number: int) -> tf.Tensor:
    """Return the keys that outputs ask one run of columns for, one after another."""
    table, size = store.lookups[names[0]].table, store.layout.size
    dtype = key_dtype(store.layout.keys)  # one for all tables, which travel in one message
    ids = routing.joined([tf.cast(bags[name].ids, dtype) for name in names])
    _, part = store.layout.slices[table.name][number]
    return ids if table.evict else keys_of(ids, part.rule, table.input_dim, size, base=part.base, rank=part.rank)


def _slices(
    store: TableStore, bags: Mapping[str, Bag], asked: routing.Asked, training: bool | None
) -> dict[str, list[Found]]:
    """Return each output's rows, one part for each run of columns."""
    wanted = _wanted(store, bags)
    sources, parts = store.sources(list(wanted), training), [len(parts) for parts in wanted.values()]
    found = routing.fetch(sources, parts, asked, name=_NAME, wire=store.wire)
    results: dict[str, dict[int, Found]] = {}
    for runs, rows_of_runs in zip(wanted.values(), found, strict=True):
        for ((_, number), features), rows in zip(runs.items(), rows_of_runs, strict=True):
            sizes = [tf.size(bags[name].ids) for name in features]
            places = [rows.place] if len(sizes) == 1 else tf.split(rows.place, tf.stack(sizes), num=len(sizes))
            for name, place in zip(features, places, strict=True):
                results.setdefault(name, {})[number] = Found(rows.rows, place)
    return {name: [parts[i] for i in sorted(parts)] for name, parts in results.items()}


def _beside(parts: Sequence[Any], width: int) -> Any:
    """Put runs of columns beside each other; the last may have been filled up."""
    if isinstance(parts[0], tf.RaggedTensor):
        flat = tf.concat([p.flat_values for p in parts], -1)[..., :width]
        return parts[0].with_flat_values(flat)
    return tf.concat(parts, -1)[..., :width]
