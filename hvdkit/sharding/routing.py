"""Send rows of sharded variables from the owners to the ranks that request them, and gradients back.

One lookup of any number of variables, with N ranks:

    1. each rank deduplicates its ids and sorts them by owner;
    2. one alltoall sends them, with their number per variable, and whether an id was out of range;
    3. each owner reads its rows, and one alltoall (per dtype) sends them back;
    4. each requested position gathers its row.

In the backward pass, step 4 sums the gradients of each row, and one alltoall sends them to the owners, which sum the
ranks' gradients in the update. With one rank steps 1 to 3 are a local gather. This is the scheme of embedding layers
since "Deep learning recommendation model for personalization and recommendation systems", Naumov et al.,
arXiv:1906.00091, section 3.

Rows are identified by keys: ``key = local * N + rank``, see ``hvdkit.sharding.layout``; rows of tables with eviction by
ids, see ``hvdkit.sharding.vocabulary``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import tensors
from hvdkit.collectives.batch_share import with_shared_gradient
from hvdkit.sharding.id_checks import FAULT_WORDS, Fault, raise_everywhere
from hvdkit.sharding.runs import LastLookup, Runs


@dataclass(frozen=True)
class LookupRows:
    """The rows of one variable for some keys.

    Attributes:
        rows: ``[u, width]``.
        place: the index in ``rows`` of each key's row, ``[n]``.
    """

    rows: tf.Tensor
    place: tf.Tensor

    def spread(self) -> tf.Tensor:
        """Return the row of each key, ``[n, width]``."""
        return _spread(self.rows, self.place)


class Source(Protocol):
    """Access to the rows of one variable, on this rank and on others."""

    def route(self, keys: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the owner of each key, int32, and the values to send to it."""

    def read(self, sent: tf.Tensor) -> tf.Tensor:
        """Return this rank's rows for the values sent."""


@dataclass(frozen=True)
class KeyedVariable:
    """A variable whose rows are identified by ``key = local * N + rank``.

    Attributes:
        variable: this rank's rows.
        lookup: records which rows ranks read; None if the update does not need it.
    """

    variable: tf.Variable
    lookup: LastLookup | None = None

    def route(self, keys: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the owner of each key, and its local row."""
        return tf.cast(keys % size, tf.int32), keys // size

    def read(self, sent: tf.Tensor) -> tf.Tensor:
        """Return local rows."""
        return self.variable.sparse_read(sent)


class RoutedLookup(NamedTuple):
    """The state of a lookup before rows are read. It holds only tensors, so it can be passed to the next step.

    P parts are looked up: one for each table of each variable, ordered by variable.

    Attributes:
        ids: for each variable, the ids requested from this rank, ``[m]``.
        places: for each part, the position of each key's row among the rows received, ``[n]``.
        mine: number of rows of each part that this rank requested from each rank, ``[N, P]`` int32.
        theirs: number of rows of each variable that each rank requested from this one, ``[N, variables]`` int32.
    """

    ids: tuple[tf.Tensor, ...]
    places: tuple[tf.Tensor, ...]
    mine: tf.Tensor
    theirs: tf.Tensor


def look_up(
    sources: Sequence[Source], keys: Sequence[Sequence[tf.Tensor]], fault: Fault, *, name: str
) -> list[list[LookupRows]]:
    """Return the rows of each part of each variable for its keys: :func:`ask`, then :func:`fetch`."""
    return fetch(sources, [len(k) for k in keys], ask(sources, keys, fault, name=name), name=name)


def ask(sources: Sequence[Source], keys: Sequence[Sequence[tf.Tensor]], fault: Fault, *, name: str) -> RoutedLookup:
    """Request from every rank the rows that this rank needs.

    Every rank calls it with the same variables and parts; the keys and their number may differ.

    Args:
        sources: the source of each variable's rows.
        keys: for each variable, the keys of each of its parts, ``[n]`` each, all int32 or all int64, n >= 0. A key must
            not be in two parts of a variable: each part is deduplicated separately.
        fault: the first invalid id of this rank, if any.
        name: prefix of the collectives' names.

    Raises:
        ValueError: in eager mode, on every rank, if a rank had a fault. Inside graphs
            ``tf.errors.InvalidArgumentError``.
    """
    size = cluster.size()
    if size == 1:
        with tf.control_dependencies(raise_everywhere(fault.words[None], fault)):
            found = [[tf.unique(tf.identity(k)) for k in parts] for parts in keys]
        ids = tuple(joined([distinct for distinct, _ in parts]) for parts in found)
        counts = tf.stack([tf.size(distinct) for parts in found for distinct, _ in parts])[None]
        return RoutedLookup(ids, tuple(place for parts in found for _, place in parts), counts, counts)
    asked = _Sorted.of(sources, keys, size)
    wanted, theirs = _swap_ids(asked, fault, name)
    return RoutedLookup(tuple(wanted), asked.places, asked.by_part, theirs)


def fetch(
    sources: Sequence[Source], parts: Sequence[int], asked: RoutedLookup, *, name: str, wire: tf.DType | None = None
) -> list[list[LookupRows]]:
    """Return the requested rows of each part of each variable. Every rank calls it.

    Args:
        sources: as for :func:`ask`.
        parts: number of parts of each variable.
        asked: the result of :func:`ask`.
        name: prefix of the collectives' names.
        wire: dtype in which rows are sent; None for their dtype.
    """
    rows = [s.read(i) for s, i in zip(sources, asked.ids, strict=True)]
    if cluster.size() > 1:
        for v, source in enumerate(sources):
            if isinstance(source, KeyedVariable) and source.lookup is not None:
                source.lookup.note(Runs(asked.ids[v], asked.theirs[:, v]))
        received = iter(_swap_rows(rows, parts, asked, wire, name))
    else:
        counts = tf.split(asked.mine[0], list(parts))
        received = iter([part for r, c, n in zip(rows, counts, parts, strict=True) for part in _split(r, c, n)])
    places = iter(asked.places)
    return [[LookupRows(with_shared_gradient(next(received)), next(places)) for _ in range(n)] for n in parts]


def joined(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenate along the first axis."""
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def _split(x: tf.Tensor, sizes: tf.Tensor, number: int) -> list[tf.Tensor]:
    return [x] if number == 1 else tf.split(x, sizes, num=number)


def read_distinct(source: Source, keys: tf.Tensor) -> LookupRows:
    """Read local rows, each once even if requested repeatedly, so that its gradient is one row as well."""
    distinct, place = tf.unique(keys)
    return LookupRows(source.read(distinct), place)


@dataclass(frozen=True)
class _Sorted:
    """This rank's requests to every rank: distinct ids, sorted by part, and by rank within each part.

    Attributes:
        blocks: for each variable and part, the ids to send to each rank.
        by_part: their number, ``[N, P]`` int32.
        by_variable: their number, ``[N, variables]`` int32.
        places: for each part, the position of each key's row in ``concat(blocks of all ranks)``.
    """

    blocks: list[list[list[tf.Tensor]]]
    by_part: tf.Tensor
    by_variable: tf.Tensor
    places: tuple[tf.Tensor, ...]

    @classmethod
    def of(cls, sources: Sequence[Source], keys: Sequence[Sequence[tf.Tensor]], size: int) -> _Sorted:
        numbers = [len(parts) for parts in keys]
        found = [tf.unique(k) for parts in keys for k in parts]
        sizes = tf.stack([tf.size(distinct) for distinct, _ in found])
        routes, start = [], 0
        for source, number in zip(sources, numbers, strict=True):
            routes.append(source.route(joined([d for d, _ in found[start : start + number]]), size))
            start += number
        part = joined([tf.fill(tf.shape(distinct), p) for p, (distinct, _) in enumerate(found)])
        block = part * size + joined([rank for rank, _ in routes])
        blocks = tf.dynamic_partition(joined([sent for _, sent in routes]), block, len(found) * size)
        order = tf.concat(tf.dynamic_partition(tf.range(tf.size(block)), block, len(found) * size), 0)
        within = tf.math.invert_permutation(order) - tf.gather(tf.cumsum(sizes, exclusive=True), part)
        own = _split(within, sizes, len(found))
        counts = tf.reshape(tf.stack([tf.size(b) for b in blocks]), [len(found), size])
        variable = [v for v, number in enumerate(numbers) for _ in range(number)]
        of_parts = [list(blocks[p * size : (p + 1) * size]) for p in range(len(found))]
        return cls(
            [[of_parts[p] for p, own in enumerate(variable) if own == v] for v in range(len(numbers))],
            tf.transpose(counts),
            tf.transpose(tf.math.segment_sum(counts, variable)),
            tuple(tf.gather(o, place) for o, (_, place) in zip(own, found, strict=True)),
        )


def _swap_ids(asked: _Sorted, fault: Fault, name: str) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Send every rank its requests; return those received, by variable, and their number per rank and variable.

    A message is a header (the fault's words, and the number of rows of each variable) followed by the ids.
    """
    size, variables, dtype = cluster.size(), len(asked.blocks), asked.blocks[0][0][0].dtype
    header = tf.cast(tf.concat([tf.tile(fault.words[None], [size, 1]), asked.by_variable], 1), dtype)
    length = FAULT_WORDS + variables
    message = []
    for rank in range(size):
        message += [header[rank], *(part[rank] for variable in asked.blocks for part in variable)]
    splits = tf.reduce_sum(asked.by_variable, axis=1) + length
    received, theirs = tensors.alltoall(tf.concat(message, 0), splits, f"{name}.ids")
    starts = tf.cumsum(theirs, exclusive=True)
    headers = tf.cast(tf.gather(received, starts[:, None] + tf.range(length)), tf.int32)
    with tf.control_dependencies(raise_everywhere(headers[:, :FAULT_WORDS], fault)):
        wanted = tf.identity(headers[:, FAULT_WORDS:])
        wanted.set_shape([size, variables])
    lengths = tf.reshape(tf.concat([tf.fill([size, 1], length), wanted], 1), [-1])
    pieces = tf.split(received, lengths, num=size * (1 + variables))
    return [tf.concat(pieces[1 + v :: 1 + variables], 0) for v in range(variables)], wanted


def _swap_rows(
    rows: list[tf.Tensor], parts: Sequence[int], asked: RoutedLookup, wire: tf.DType | None, name: str
) -> list[tf.Tensor]:
    """Send each variable's rows to the ranks that requested them; return each part's rows. Differentiable."""
    variable = [v for v, number in enumerate(parts) for _ in range(number)]
    shapes = [(rows[v].shape[1:], rows[v].dtype) for v in variable]
    back = [(r.shape[1:], r.dtype) for r in rows]

    @tf.custom_gradient
    def swap(*rows: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> Any:
            sent = [(g, asked.mine[:, p]) for p, g in enumerate(upstream)]
            came = [(*back[v], asked.theirs[:, v]) for v in range(len(back))]
            return _exchange(sent, came, wire, f"{name}.gradients")

        sent = [(r, asked.theirs[:, v]) for v, r in enumerate(rows)]
        came = [(*shapes[p], asked.mine[:, p]) for p in range(len(shapes))]
        return _exchange(sent, came, wire, f"{name}.rows"), gradient

    return list(swap(*rows))


def _exchange(
    sent: list[tuple[tf.Tensor, tf.Tensor]],
    came: list[tuple[tf.TensorShape, tf.DType, tf.Tensor]],
    wire: tf.DType | None,
    name: str,
) -> list[tf.Tensor]:
    """Exchange rows, with one collective per dtype.

    Args:
        sent: rows of variables or parts, sorted by destination rank, and their number for each rank, ``[N]``.
        came: the row shape, dtype, and number of rows from each rank of each tensor to receive. Rows sent as one
            variable may be received as its parts, and vice versa: the order is the same.
        wire: dtype in which rows are sent; None for their dtype.
        name: prefix of the collectives' names.
    """

    def on_the_way(dtype: tf.DType) -> tf.DType:
        return wire if wire is not None and wire.size < dtype.size else dtype

    results: list[Any] = [None] * len(came)
    for dtype in dict.fromkeys(on_the_way(rows.dtype) for rows, _ in sent):
        out = [(tf.cast(rows, dtype), counts) for rows, counts in sent if on_the_way(rows.dtype) == dtype]
        places = [i for i, (_, own, _) in enumerate(came) if on_the_way(own) == dtype]
        received = _exchange_one(out, [came[i][0::2] for i in places], f"{name}_{dtype.name}")
        for i, rows in zip(places, received, strict=True):
            results[i] = tf.cast(rows, came[i][1])
    return results


def _exchange_one(
    sent: list[tuple[tf.Tensor, tf.Tensor]], came: list[tuple[tf.TensorShape, tf.Tensor]], name: str
) -> list[tf.Tensor]:
    """Exchange rows of one dtype; rows of different widths are sent as one flat tensor."""
    size, flat = cluster.size(), len({tuple(shape) for shape, _ in came}) > 1
    units = [shape.num_elements() if flat else 1 for shape, _ in came]
    own = [rows.shape[1:].num_elements() if flat else 1 for rows, _ in sent]
    out = [(tf.reshape(r, [-1]) if flat else r, n * unit) for (r, n), unit in zip(sent, own, strict=True)]
    message = out[0][0]
    if len(out) > 1:
        blocks = [tf.split(rows, counts, num=size) for rows, counts in out]
        message = tf.concat([of_one[rank] for rank in range(size) for of_one in blocks], 0)
    splits = tf.add_n([counts for _, counts in out])
    received = tensors.alltoall(message, splits, name)[0]
    results = [received]
    if len(came) > 1:
        lengths = tf.stack([counts * unit for (_, counts), unit in zip(came, units, strict=True)], axis=1)
        pieces = tf.split(received, tf.reshape(lengths, [-1]), num=size * len(came))
        results = [tf.concat(pieces[i :: len(came)], 0) for i in range(len(came))]
    shapes = [[-1, *shape] for shape, _ in came]
    return [tf.ensure_shape(tf.reshape(r, s), [None, *s[1:]]) for r, s in zip(results, shapes, strict=True)]


@tf.custom_gradient
def _spread(rows: tf.Tensor, place: tf.Tensor) -> Any:
    """Gather with a dense gradient: the sum over the positions of each row."""

    def gradient(upstream: tf.Tensor) -> Any:
        wide = tf.cast(upstream, tf.float32) if upstream.dtype.size == 2 else upstream
        return tf.cast(tf.math.unsorted_segment_sum(wide, place, tf.shape(rows)[0]), upstream.dtype), None

    return tf.gather(rows, place), gradient
