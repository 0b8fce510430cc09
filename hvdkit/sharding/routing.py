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

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import tensors
from hvdkit.collectives.batch_share import with_scaled_gradient
from hvdkit.collectives.conversion import is_symbolic
from hvdkit.collectives.refusal import refusing_collectives
from hvdkit.errors import HvdkitError, describe
from hvdkit.sharding.id_checks import FAULT_CODE_LENGTH, Fault, raise_everywhere


class _Reading(threading.local):
    own_rows = False


_reading = _Reading()


@contextlib.contextmanager
def reading_own_rows() -> Iterator[None]:
    """Refuse collectives on this thread, and look up ids in this rank's part of a table, as if it were all of it.

    For tests of a step on one rank. Gradients are not scaled.
    """
    before = _reading.own_rows
    _reading.own_rows = True
    try:
        with refusing_collectives():
            yield
    finally:
        _reading.own_rows = before


def reads_own_rows() -> bool:
    """Return True inside :func:`reading_own_rows`."""
    return _reading.own_rows


@dataclass(frozen=True)
class LookupRows:
    """The rows of one variable for some keys.

    Attributes:
        rows: ``[u, width]``.
        positions: the index in ``rows`` of each key's row, ``[n]``.
    """

    rows: tf.Tensor
    positions: tf.Tensor

    def by_key(self) -> tf.Tensor:
        """Return the row of each key, ``[n, width]``."""
        return _expand(self.rows, self.positions)


class RowSource(Protocol):
    """Access to the rows of one variable, on this rank and on others."""

    def route(self, keys: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the owner of each key, int32, and the id by which the owner finds the row."""

    def read(self, ids: tf.Tensor) -> tf.Tensor:
        """Return this rank's rows with these ids."""


@dataclass(frozen=True)
class KeyedVariable:
    """A variable whose rows are identified by ``key = local * N + rank``.

    Attributes:
        variable: this rank's rows.
    """

    variable: tf.Variable

    def route(self, keys: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the owner of each key, and its local row."""
        return tf.cast(keys % size, tf.int32), keys // size

    def read(self, local_rows: tf.Tensor) -> tf.Tensor:
        """Return local rows."""
        return self.variable.sparse_read(local_rows)


class RoutedLookup(NamedTuple):
    """The state of a lookup before rows are read. It holds only tensors, so it can be passed to the next step.

    P parts are looked up: one for each table of each variable, ordered by variable.

    Attributes:
        ids: for each variable, the ids requested from this rank, ``[m]``.
        positions: for each part, the position of each key's row among the rows received, ``[n]``.
        requested: number of rows of each part that this rank requested from each rank, ``[N, P]`` int32.
        served: number of rows of each variable that each rank requested from this one, ``[N, variables]`` int32.
    """

    ids: tuple[tf.Tensor, ...]
    positions: tuple[tf.Tensor, ...]
    requested: tf.Tensor
    served: tf.Tensor


class RowsByRank(NamedTuple):
    """The rows of one variable that ranks read, in rank order.

    If several ranks read a row, it occurs up to N times in the gradient, but only once in each rank's part. An update
    that knows the parts can apply them one after another, without searching for duplicate rows.

    Attributes:
        ids: local rows, ``[m]``; distinct within each rank's part.
        counts: number of rows that each rank read, ``[N]``.
    """

    ids: tf.Tensor
    counts: tf.Tensor

    def split(self, values: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Return the ids that each rank read, with their ``values`` ``[m, ...]``."""
        ids, parts = (tf.split(x, self.counts, num=cluster.size()) for x in (self.ids, values))
        return list(zip(ids, parts, strict=True))


class KeptLookup:
    """A lookup that a layer keeps until its next one, for the update of the rows that ranks read.

    The rows cannot be attached to the gradient: TensorFlow computes the gradient of a read as IndexedSlices with copies
    of the ids, and a custom gradient of a read would read the whole table inside graphs. So the update checks that the
    gradient has the same ids.

    The tensors of a graph live as long as the graph, which the layer must not keep alive: they are referenced weakly.
    """

    def __init__(self, lookup: RoutedLookup):
        self._ids = [_reference(ids) for ids in lookup.ids]
        self._served = _reference(lookup.served)

    def rows(self, number: int) -> RowsByRank | None:
        """Return the rows of a variable, by its number; None in another graph, or if only one of both is eager."""
        ids = self._ids[number]()
        served = self._served()
        if ids is None or served is None or cluster.size() == 1:
            return None
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if (ids.graph if is_symbolic(ids) else None) is not graph:
            return None
        return RowsByRank(ids, served[:, number])


def _reference(tensor: tf.Tensor) -> Callable[[], tf.Tensor | None]:
    """Return a function that returns ``tensor``: of a graph, while the graph lives."""
    return weakref.ref(tensor) if is_symbolic(tensor) else lambda: tensor


class LookupKeeper(Protocol):
    """A layer, or part of one, that keeps its last lookup: None before the first one."""

    last_lookup: KeptLookup | None


def rows_of_last_lookup(keeper: LookupKeeper, number: int) -> Callable[[], RowsByRank | None]:
    """Return the function by which the update of a variable reads its rows in the last lookup of its keeper.

    The function belongs to the variable, so it does not keep the keeper alive.
    """
    reference = weakref.ref(keeper)

    def rows() -> RowsByRank | None:
        living = reference()
        return None if living is None or living.last_lookup is None else living.last_lookup.rows(number)

    return rows


def request_rows(sources: Sequence[RowSource], keys: Sequence[Sequence[tf.Tensor]], fault: Fault) -> RoutedLookup:
    """Request from every rank the rows that this rank needs.

    Every rank calls it with the same variables and parts; the keys and their number may differ.

    Args:
        sources: the source of each variable's rows.
        keys: for each variable, the keys of each of its parts, ``[n]`` each, all int32 or all int64, n >= 0. A key must
            not be in two parts of a variable: each part is deduplicated separately.
        fault: the first invalid id of this rank, if any.

    Raises:
        ValueError: in eager mode, on every rank, if a rank had a fault. Inside graphs
            ``tf.errors.InvalidArgumentError``.
    """
    size = cluster.size()
    if size == 1 or reads_own_rows():
        with tf.control_dependencies(raise_everywhere(fault.code[None], fault)):
            local = [[_local_rows(source, k, size) for k in parts] for source, parts in zip(sources, keys, strict=True)]
            uniques = [[tf.unique(rows) for rows in parts] for parts in local]
        ids = tuple(concat([unique_ids for unique_ids, _ in parts]) for parts in uniques)
        counts = tf.stack([tf.size(unique_ids) for parts in uniques for unique_ids, _ in parts])[None]
        return RoutedLookup(ids, tuple(positions for parts in uniques for _, positions in parts), counts, counts)
    requests = _SortedRequests.of(sources, keys, size)
    received, served = _exchange_ids(requests, fault)
    return RoutedLookup(tuple(received), requests.positions, requests.by_part, served)


def fetch_rows(
    sources: Sequence[RowSource], parts: Sequence[int], lookup: RoutedLookup, wire: tf.DType | None = None
) -> list[list[LookupRows]]:
    """Return the requested rows of each part of each variable. Every rank calls it.

    Args:
        sources: as for :func:`request_rows`.
        parts: number of parts of each variable.
        lookup: the result of :func:`request_rows`.
        wire: dtype in which rows are sent; None for their dtype.
    """
    rows = [s.read(i) for s, i in zip(sources, lookup.ids, strict=True)]
    if cluster.size() > 1 and not reads_own_rows():
        received = iter(_exchange_rows(rows, parts, lookup, wire))
    else:
        counts = tf.split(lookup.requested[0], list(parts))
        received = iter([part for r, c, n in zip(rows, counts, parts, strict=True) for part in split(r, c, n)])
    if not reads_own_rows():
        received = map(with_scaled_gradient, received)
    positions = iter(lookup.positions)
    return [[LookupRows(next(received), next(positions)) for _ in range(n)] for n in parts]


def _local_rows(source: RowSource, keys: tf.Tensor, size: int) -> tf.Tensor:
    """Return the rows that are read on this rank for keys: on one rank the keys themselves."""
    if size == 1:
        return tf.identity(keys)
    if not isinstance(source, KeyedVariable):
        remedy = "leave the step untested"
        raise HvdkitError(describe("table", "a table with eviction", "rows found by their ids", remedy))
    _, rows = source.route(keys, size)
    return tf.minimum(rows, tf.cast(tf.shape(source.variable)[0] - 1, rows.dtype))


def concat(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenate along the first axis."""
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def split(x: tf.Tensor, sizes: tf.Tensor, number: int) -> list[tf.Tensor]:
    """Split along the first axis into ``number`` tensors of these sizes."""
    return [x] if number == 1 else tf.split(x, sizes, num=number)


@dataclass(frozen=True)
class _SortedRequests:
    """This rank's requests to every rank: distinct ids, sorted by part, and by rank within each part.

    Attributes:
        blocks: for each variable and part, the ids to send to each rank.
        by_part: their number, ``[N, P]`` int32.
        by_variable: their number, ``[N, variables]`` int32.
        positions: for each part, the position of each key's row in ``concat(blocks of all ranks)``.
    """

    blocks: list[list[list[tf.Tensor]]]
    by_part: tf.Tensor
    by_variable: tf.Tensor
    positions: tuple[tf.Tensor, ...]

    @classmethod
    def of(cls, sources: Sequence[RowSource], keys: Sequence[Sequence[tf.Tensor]], size: int) -> _SortedRequests:
        numbers = [len(parts) for parts in keys]
        uniques = [tf.unique(k) for parts in keys for k in parts]
        sizes = tf.stack([tf.size(unique_ids) for unique_ids, _ in uniques])
        routes = []
        start = 0
        for source, number in zip(sources, numbers, strict=True):
            routes.append(source.route(concat([d for d, _ in uniques[start : start + number]]), size))
            start += number
        part = concat([tf.fill(tf.shape(unique_ids), p) for p, (unique_ids, _) in enumerate(uniques)])
        block = part * size + concat([rank for rank, _ in routes])
        blocks = tf.dynamic_partition(concat([ids for _, ids in routes]), block, len(uniques) * size)
        order = tf.concat(tf.dynamic_partition(tf.range(tf.size(block)), block, len(uniques) * size), 0)
        within = tf.math.invert_permutation(order) - tf.gather(tf.cumsum(sizes, exclusive=True), part)
        offsets = split(within, sizes, len(uniques))
        # Not the transpose of these counts: TensorFlow writes an error line about oneDNN for one of integers.
        counts = [tf.size(blocks[p * size + rank]) for rank in range(size) for p in range(len(uniques))]
        by_part = tf.reshape(tf.stack(counts), [size, len(uniques)])
        by_variable = tf.stack([tf.reduce_sum(some, 1) for some in tf.split(by_part, numbers, 1)], 1)
        variable = [v for v, number in enumerate(numbers) for _ in range(number)]
        of_parts = [list(blocks[p * size : (p + 1) * size]) for p in range(len(uniques))]
        return cls(
            [[of_parts[p] for p, of in enumerate(variable) if of == v] for v in range(len(numbers))],
            by_part,
            by_variable,
            tuple(tf.gather(offset, position) for offset, (_, position) in zip(offsets, uniques, strict=True)),
        )


def _exchange_ids(requests: _SortedRequests, fault: Fault) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Send every rank its requests; return those received, by variable, and their number per rank and variable.

    A message is a header (the fault's code, and the number of rows of each variable) followed by the ids.
    """
    size = cluster.size()
    variables = len(requests.blocks)
    dtype = requests.blocks[0][0][0].dtype
    header = tf.cast(tf.concat([tf.tile(fault.code[None], [size, 1]), requests.by_variable], 1), dtype)
    length = FAULT_CODE_LENGTH + variables
    message = []
    for rank in range(size):
        message += [header[rank], *(part[rank] for variable in requests.blocks for part in variable)]
    splits = tf.reduce_sum(requests.by_variable, axis=1) + length
    received, received_counts = tensors.alltoall(tf.concat(message, 0), splits, "hvdkit.lookup.ids")
    starts = tf.cumsum(received_counts, exclusive=True)
    headers = tf.cast(tf.gather(received, starts[:, None] + tf.range(length)), tf.int32)
    with tf.control_dependencies(raise_everywhere(headers[:, :FAULT_CODE_LENGTH], fault)):
        served = tf.identity(headers[:, FAULT_CODE_LENGTH:])
        served.set_shape([size, variables])
    lengths = tf.reshape(tf.concat([tf.fill([size, 1], length), served], 1), [-1])
    chunks = tf.split(received, lengths, num=size * (1 + variables))
    return [tf.concat(chunks[1 + v :: 1 + variables], 0) for v in range(variables)], served


def _exchange_rows(
    rows: list[tf.Tensor], parts: Sequence[int], lookup: RoutedLookup, wire: tf.DType | None
) -> list[tf.Tensor]:
    """Send each variable's rows to the ranks that requested them; return each part's rows. Differentiable."""
    variable = [v for v, number in enumerate(parts) for _ in range(number)]
    kinds = [(r.shape[1:], r.dtype) for r in rows]

    @tf.custom_gradient
    def exchange(*rows: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            outgoing = [(g, lookup.requested[:, p]) for p, g in enumerate(upstream)]
            incoming = [(*kind, lookup.served[:, v]) for v, kind in enumerate(kinds)]
            return _exchange_tensors(outgoing, incoming, wire, "hvdkit.lookup.gradients")

        outgoing = [(r, lookup.served[:, v]) for v, r in enumerate(rows)]
        incoming = [(*kinds[v], lookup.requested[:, p]) for p, v in enumerate(variable)]
        return _exchange_tensors(outgoing, incoming, wire, "hvdkit.lookup.rows"), gradient

    return list(exchange(*rows))


def _exchange_tensors(
    outgoing: list[tuple[tf.Tensor, tf.Tensor]],
    incoming: list[tuple[tf.TensorShape, tf.DType, tf.Tensor]],
    wire: tf.DType | None,
    name: str,
) -> list[tf.Tensor]:
    """Exchange rows, with one collective per dtype.

    Args:
        outgoing: rows of variables or parts, sorted by destination rank, and their number for each rank, ``[N]``.
        incoming: the row shape, dtype, and number of rows from each rank of each tensor to receive. Rows sent as one
            variable may be received as its parts, and vice versa: the order is the same.
        wire: dtype in which rows are sent; None for their dtype.
        name: prefix of the collectives' names.
    """

    def sent_as(dtype: tf.DType) -> tf.DType:
        return wire if wire is not None and wire.size < dtype.size else dtype

    results: list[tf.Tensor | None] = [None] * len(incoming)
    for dtype in dict.fromkeys(sent_as(rows.dtype) for rows, _ in outgoing):
        sent = [(tf.cast(rows, dtype), counts) for rows, counts in outgoing if sent_as(rows.dtype) == dtype]
        indices = [i for i, (_, result_dtype, _) in enumerate(incoming) if sent_as(result_dtype) == dtype]
        received = _exchange_dtype(sent, [incoming[i][0::2] for i in indices], f"{name}_{dtype.name}")
        for i, rows in zip(indices, received, strict=True):
            results[i] = tf.cast(rows, incoming[i][1])
    return results


def _exchange_dtype(
    outgoing: list[tuple[tf.Tensor, tf.Tensor]], incoming: list[tuple[tf.TensorShape, tf.Tensor]], name: str
) -> list[tf.Tensor]:
    """Exchange rows of one dtype; rows of different widths are sent as one flat tensor."""
    size = cluster.size()
    flat = len({tuple(shape) for shape, _ in incoming}) > 1
    units_received = [shape.num_elements() if flat else 1 for shape, _ in incoming]
    units_sent = [rows.shape[1:].num_elements() if flat else 1 for rows, _ in outgoing]
    pairs = zip(outgoing, units_sent, strict=True)
    sent = [(tf.reshape(rows, [-1]) if flat else rows, counts * unit) for (rows, counts), unit in pairs]
    message = sent[0][0]
    if len(sent) > 1:
        blocks = [tf.split(rows, counts, num=size) for rows, counts in sent]
        message = tf.concat([of_tensor[rank] for rank in range(size) for of_tensor in blocks], 0)
    splits = tf.add_n([counts for _, counts in sent])
    received = tensors.alltoall(message, splits, name)[0]
    results = [received]
    if len(incoming) > 1:
        lengths = tf.stack([counts * unit for (_, counts), unit in zip(incoming, units_received, strict=True)], axis=1)
        chunks = tf.split(received, tf.reshape(lengths, [-1]), num=size * len(incoming))
        results = [tf.concat(chunks[i :: len(incoming)], 0) for i in range(len(incoming))]
    shapes = [[-1, *shape] for shape, _ in incoming]
    return [tf.ensure_shape(tf.reshape(r, s), [None, *s[1:]]) for r, s in zip(results, shapes, strict=True)]


@tf.custom_gradient
def _expand(rows: tf.Tensor, positions: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, None]]]:
    """Gather with a dense gradient: the sum over the positions of each row."""

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, None]:
        wide = tf.cast(upstream, tf.float32) if upstream.dtype.size == 2 else upstream
        return tf.cast(tf.math.unsorted_segment_sum(wide, positions, tf.shape(rows)[0]), upstream.dtype), None

    return tf.gather(rows, positions), gradient
