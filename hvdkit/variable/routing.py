"""Rows of sharded variables, from the ranks that hold them to the ranks that ask for them, and gradients back.

One lookup of any number of variables, with N ranks:

    1. each rank makes its ids distinct and sorts them by owner;
    2. one alltoall sends them, with how many there are of each variable, and whether an id was out of range;
    3. each owner reads its rows, and one alltoall (for each dtype) sends them back;
    4. the rows are spread over the places that asked for them.

Backwards, 4 sums gradients that belong to one row, and one alltoall takes them to the owners, who add the ranks' rows
up when they update. With one rank 1 to 3 are a plain gather. (The scheme of embedding layers since "Deep learning
recommendation model for personalization and recommendation systems", Naumov et al., arXiv:1906.00091, section 3.)

Rows are known by keys: ``key = local * N + rank``, see ``hvdkit.planning.layout``; those of tables that evict by ids,
see ``hvdkit.variable.vocabulary``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import tensors
from hvdkit.variable.faults import FAULT_WORDS, Fault, raise_everywhere


@dataclass(frozen=True)
class Found:
    """The rows that one variable gave for some keys.

    Attributes:
        rows: ``[u, width]``.
        place: for each key the row that is its own, ``[n]``.
    """

    rows: tf.Tensor
    place: tf.Tensor

    def spread(self) -> tf.Tensor:
        """Return the row of each key, ``[n, width]``."""
        return _spread(self.rows, self.place)


class Source(Protocol):
    """Rows of one variable, on this rank and on the others."""

    def route(self, keys: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the rank of each key, int32, and what to send it."""

    def read(self, sent: tf.Tensor) -> tf.Tensor:
        """Return this rank's rows for what was sent."""


@dataclass(frozen=True)
class Numbered:
    """A variable whose rows are known by ``key = local * N + rank``."""

    variable: tf.Variable

    def route(self, keys: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the rank of each key, and its local row."""
        return tf.cast(keys % size, tf.int32), keys // size

    def read(self, sent: tf.Tensor) -> tf.Tensor:
        """Return local rows."""
        return self.variable.sparse_read(sent)


class Asked(NamedTuple):
    """What a lookup knows before any row is read. All of it tensors, so that it can go from one step to the next.

    Attributes:
        ids: of each variable what this rank is asked for, ``[m]``; with one rank, what it asks itself.
        places: of each variable, for each key the place of its row among those that come, ``[n]``.
        mine: how many rows of each variable this rank asked of each rank, ``[N, variables]`` int32.
        theirs: how many each asked of this one, likewise.
    """

    ids: tuple[tf.Tensor, ...]
    places: tuple[tf.Tensor, ...]
    mine: tf.Tensor
    theirs: tf.Tensor


def look_up(
    sources: Sequence[Source],
    keys: Sequence[tf.Tensor],
    fault: Fault,
    *,
    name: str,
    wire: tf.DType | None = None,
) -> list[Found]:
    """Return the rows of each variable for its keys: :func:`ask`, then :func:`fetch`."""
    return fetch(sources, ask(sources, keys, fault, name=name), name=name, wire=wire)


def ask(sources: Sequence[Source], keys: Sequence[tf.Tensor], fault: Fault, *, name: str) -> Asked:
    """Tell every rank which of its rows this one needs.

    Every rank calls it with the same variables; keys, and how many there are, differ.

    Args:
        sources: where each variable's rows are.
        keys: for each variable the keys asked for, ``[n]`` int32 or int64, n >= 0.
        fault: the first id of this rank that was out of range, if there is one.
        name: makes the collectives' names.

    Raises:
        ValueError: in eager mode, on every rank, if a rank had a fault. Inside graphs
            ``tf.errors.InvalidArgumentError``.
    """
    size = cluster.size()
    if size == 1:
        with tf.control_dependencies(raise_everywhere(fault.words[None], fault)):
            distinct, places = zip(*(tf.unique(tf.identity(k)) for k in keys), strict=True)
        counts = tf.stack([tf.size(d) for d in distinct])[None]
        return Asked(distinct, places, counts, counts)
    asked = [_Sorted.of(s, k, size) for s, k in zip(sources, keys, strict=True)]
    mine = tf.stack([a.counts for a in asked], axis=1)
    ids, theirs = _swap_ids(asked, mine, fault, name)
    return Asked(tuple(ids), tuple(a.place for a in asked), mine, theirs)


def fetch(sources: Sequence[Source], asked: Asked, *, name: str, wire: tf.DType | None = None) -> list[Found]:
    """Return the rows that were asked for. Every rank calls it.

    Args:
        sources: as for :func:`ask`.
        asked: what it returned.
        name: makes the collectives' names.
        wire: dtype in which rows travel; None: their own.
    """
    rows = [s.read(i) for s, i in zip(sources, asked.ids, strict=True)]
    if cluster.size() > 1:
        rows = _swap_rows(rows, asked.theirs, asked.mine, wire, name)
    return [Found(r, place) for r, place in zip(rows, asked.places, strict=True)]


def read_distinct(source: Source, keys: tf.Tensor) -> Found:
    """Read rows of this rank's own, each once however often it is asked for: its gradient then is one row, too."""
    distinct, place = tf.unique(keys)
    return Found(source.read(distinct), place)


@dataclass(frozen=True)
class _Sorted:
    """What this rank asks of every rank: distinct rows, sorted by rank.

    Attributes:
        parts: for each rank what asks it for its rows.
        counts: how many, ``[N]`` int32.
        place: for each key the place of its row in ``concat(parts)``.
    """

    parts: list[tf.Tensor]
    counts: tf.Tensor
    place: tf.Tensor

    @classmethod
    def of(cls, source: Source, keys: tf.Tensor, size: int) -> _Sorted:
        distinct, place = tf.unique(keys)
        rank, sent = source.route(distinct, size)
        parts = tf.dynamic_partition(sent, rank, size)
        order = tf.concat(tf.dynamic_partition(tf.range(tf.size(distinct)), rank, size), 0)
        sorted_place = tf.gather(tf.math.invert_permutation(order), place)
        return cls(parts, tf.stack([tf.size(p) for p in parts]), sorted_place)


def _swap_ids(
    asked: Sequence[_Sorted], counts: tf.Tensor, fault: Fault, name: str
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Send every rank the rows asked of it; return those asked of this one, by variable, and how many by whom.

    A message is a header (the fault's words, how many rows of each variable) and the rows.
    """
    size, dtype = cluster.size(), asked[0].parts[0].dtype
    header = tf.cast(tf.concat([tf.tile(fault.words[None], [size, 1]), counts], 1), dtype)
    length = FAULT_WORDS + len(asked)
    message = [part for rank in range(size) for part in (header[rank], *(a.parts[rank] for a in asked))]
    splits = tf.reduce_sum(counts, axis=1) + length
    received, theirs = tensors.alltoall(tf.concat(message, 0), splits, f"{name}.ids")
    starts = tf.cumsum(theirs, exclusive=True)
    headers = tf.cast(tf.gather(received, starts[:, None] + tf.range(length)), tf.int32)
    with tf.control_dependencies(raise_everywhere(headers[:, :FAULT_WORDS], fault)):
        wanted = tf.identity(headers[:, FAULT_WORDS:])
        wanted.set_shape([size, len(asked)])
    lengths = tf.reshape(tf.concat([tf.fill([size, 1], length), wanted], 1), [-1])
    pieces = tf.split(received, lengths, num=size * (1 + len(asked)))
    return [tf.concat(pieces[1 + v :: 1 + len(asked)], 0) for v in range(len(asked))], wanted


def _swap_rows(
    rows: list[tf.Tensor], out: tf.Tensor, back: tf.Tensor, wire: tf.DType | None, name: str
) -> list[tf.Tensor]:
    """Send ``out[r, v]`` rows of variable v to each rank r, and receive ``back[r, v]``; gradients go the other way."""

    @tf.custom_gradient
    def swap(*rows: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> Any:
            return _exchange(list(upstream), back, out, wire, f"{name}.gradients")

        return _exchange(list(rows), out, back, wire, f"{name}.rows"), gradient

    return list(swap(*rows))


def _exchange(
    rows: list[tf.Tensor], out: tf.Tensor, back: tf.Tensor, wire: tf.DType | None, name: str
) -> list[tf.Tensor]:
    """Exchange rows of all variables, those of one dtype at once."""
    results: list[Any] = [None] * len(rows)
    travel = [wire if wire is not None and wire.size < r.dtype.size else r.dtype for r in rows]
    for dtype in dict.fromkeys(travel):
        places = [i for i, d in enumerate(travel) if d == dtype]
        sent = [tf.cast(rows[i], dtype) for i in places]
        received = _exchange_one(
            sent, tf.gather(out, places, axis=1), tf.gather(back, places, axis=1), f"{name}_{dtype.name}"
        )
        for i, r in zip(places, received, strict=True):
            results[i] = tf.cast(r, rows[i].dtype)
    return results


def _exchange_one(rows: list[tf.Tensor], out: tf.Tensor, back: tf.Tensor, name: str) -> list[tf.Tensor]:
    """Exchange rows of one dtype. Of several widths, they travel as one flat tensor."""
    if len(rows) == 1:
        received = tensors.alltoall(rows[0], out[:, 0], name)[0]
        received.set_shape([None, *rows[0].shape[1:]])
        return [received]
    size, widths = cluster.size(), [r.shape[1] for r in rows]
    parts = [tf.split(tf.reshape(r, [-1]), out[:, i] * widths[i], num=size) for i, r in enumerate(rows)]
    message = tf.concat([part[rank] for rank in range(size) for part in parts], 0)
    received = tensors.alltoall(message, tf.linalg.matvec(out, widths), name)[0]
    lengths = tf.reshape(back * tf.constant(widths), [-1])
    pieces = tf.split(received, lengths, num=size * len(rows))
    return [tf.reshape(tf.concat(pieces[i :: len(rows)], 0), [-1, width]) for i, width in enumerate(widths)]


@tf.custom_gradient
def _spread(rows: tf.Tensor, place: tf.Tensor) -> Any:
    """Gather whose gradient is dense: the sum over the places of each row."""

    def gradient(upstream: tf.Tensor) -> Any:
        return tf.math.unsorted_segment_sum(upstream, place, tf.shape(rows)[0]), None

    return tf.gather(rows, place), gradient
