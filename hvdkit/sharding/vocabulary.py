"""The mapping from ids to rows in a table with eviction.

A rank's rows are grouped in buckets of W. An id hashes to one bucket and may occupy any row of it: a lookup compares
the id with W others, and a new id takes a free row of its bucket, or evicts the id that was requested least recently
(lru) or in the fewest steps (lfu). This is a set-associative cache, like GPU hash tables for embeddings (NVIDIA's
HierarchicalKV). It works without a hash table op, runs on GPUs, and a bucket's owner is computed arithmetically, so
checkpoints can be restored at any number of ranks.

The mapping depends only on ids and steps: with equal global batches an id has the same row at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.logs import warn_once
from hvdkit.errors import describe, see
from hvdkit.sharding.hashing import bucket_of
from hvdkit.sharding.keys import keys_of
from hvdkit.sharding.shards import AnyVariable, RowUsage, shard_of
from hvdkit.sharding.table import BUCKET, Table

# A reserved id that marks free rows.
NO_ID = -(2**63)
# `used` packs (number of steps that requested the row, for lfu) * _STEPS + the last of these steps.
_STEPS = 2**40
_MAX_STEPS = 2**22
# Rows looked up since the last update wait for gradients and are not evicted, but for at most this many lookups:
# otherwise a program that never updates would fill the table.
_MAX_PENDING_LOOKUPS = 16
# Share of full buckets from which a table counts as too small: 2 % with 0.7 ids per row, 7 % with 0.75.
_FULL_SHARE = 0.02
_FREE_SHARE = 0.05  # of rows, from which a table does not count as full; 7 % with one id per row
_MOST_BUCKETS_CHECKED = 4096


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The rows of one table on this rank, by id: a row source of ``hvdkit.sharding.routing``.

    Attributes:
        rows: this rank's rows, ``[buckets * W + 1, width]``; the last row is unused and stays zero.
        usage: the usage of the rows.
        table: the table.
        buckets: the buckets of this rank.
        first_rows: the function from ids to initial values, see ``hvdkit.sharding.hashing``.
        training: True: new ids are assigned rows. False: they are not. None: unspecified; gradients raise an error.
    """

    rows: tf.Variable
    usage: RowUsage
    table: Table
    buckets: range
    first_rows: Callable[[tf.Tensor], tf.Tensor]
    training: bool | None

    def route(self, ids: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the owner of each id, int32, and the ids to send to it."""
        keys = keys_of(bucket_of(ids, self.table.buckets), "div", self.table.buckets, size)
        return tf.cast(keys % size, tf.int32), ids

    def read(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the rows of ids ``[n]``, ``[n, width]``; zeros for ids without a row."""
        with tf.device(self.rows.device):
            unique_ids, position = tf.unique(ids)
            rows = tf.gather(self._find_rows(unique_ids), position)
            values = self.rows.sparse_read(rows)
            values = tf.where(tf.equal(rows, self._unused_row)[:, None], tf.zeros_like(values), values)
            return self._without_gradient(values) if self.training is None else values

    def _without_gradient(self, rows: tf.Tensor) -> tf.Tensor:
        """Raise in the gradient if ``training`` was not specified: new ids would silently never learn."""
        remedy = "pass training=True to the layer (the model's call must forward it), or False to keep its ids"
        expected = f"True where table {self.table.name!r}, whose ids change, is trained"
        return tf.raw_ops.PreventGradient(input=rows, message=describe("training", None, expected, remedy))

    @property
    def _unused_row(self) -> int:
        return len(self.buckets) * BUCKET

    def _find_rows(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the row of each of the distinct ids; in training, assign rows to new ids."""
        clock = None
        if self.training:
            with tf.control_dependencies([ids]):  # a rejected step must not change the state
                clock = self.usage.clock.assign_add([1, 0])
        if not self.buckets:  # there are fewer buckets than ranks: all requests to this rank are empty
            return tf.fill([tf.size(ids)], tf.constant(self._unused_row, tf.int64))
        bucket = bucket_of(ids, self.table.buckets) - self.buckets.start
        real = ids != tf.constant(NO_ID, tf.int64)
        hits = tf.logical_and(self.usage.ids.sparse_read(bucket) == ids[:, None], real[:, None])
        is_known = tf.reduce_any(hits, 1)
        way = tf.argmax(tf.cast(hits, tf.int8), 1)
        rows = tf.where(is_known, bucket * BUCKET + way, self._unused_row)
        if clock is None:
            return rows
        now = clock[0]
        floor = tf.maximum(clock[1], clock[0] - _MAX_PENDING_LOOKUPS)
        self._record_use(tf.boolean_mask(tf.stack([bucket, way], 1), is_known), now)
        missing = tf.where(tf.logical_and(tf.logical_not(is_known), real))[:, 0]
        return tf.cond(tf.size(missing) > 0, lambda: self._admit(ids, bucket, rows, missing, now, floor), lambda: rows)

    def _record_use(self, cells: tf.Tensor, now: tf.Tensor) -> None:
        """Record a request for the rows at ``cells``, ``[n, 2]`` (bucket, way)."""
        steps = tf.zeros_like(cells[:, 0])
        if self.table.evict == "lfu":
            steps = tf.minimum(self.usage.used.gather_nd(cells) // _STEPS + 1, _MAX_STEPS)
        self.usage.used.scatter_nd_update(cells, steps * _STEPS + now)

    def _admit(
        self, ids: tf.Tensor, bucket: tf.Tensor, rows: tf.Tensor, new: tf.Tensor, now: tf.Tensor, floor: tf.Tensor
    ) -> tf.Tensor:
        """Assign rows to the ids at ``new``; return the rows of all ids.

        The new ids of a bucket, in ascending order, take its least used rows. Rows used in this step, or looked up
        since the last update, are not evicted. If a bucket runs out of rows, the remaining ids get zeros in this step.
        """
        order = tf.argsort(tf.gather(ids, new), stable=True)
        new = tf.gather(new, order)
        new = tf.gather(new, tf.argsort(tf.gather(bucket, new), stable=True))
        bucket = tf.gather(bucket, new)
        order_in_bucket = tf.range(tf.size(bucket)) - tf.searchsorted(bucket, bucket, side="left")
        used = self.usage.used.sparse_read(bucket)
        busy = tf.logical_and(used >= 0, used % _STEPS > floor)
        ways = tf.argsort(tf.where(busy, tf.int64.max, used), axis=1, stable=True)
        fits = order_in_bucket < BUCKET - tf.reduce_sum(tf.cast(busy, tf.int32), 1)
        way = tf.gather(ways, tf.minimum(order_in_bucket, BUCKET - 1), batch_dims=1)
        new = tf.boolean_mask(new, fits)
        bucket = tf.boolean_mask(bucket, fits)
        cells = tf.stack([bucket, tf.cast(tf.boolean_mask(way, fits), tf.int64)], 1)
        self._assign_rows(cells, tf.gather(ids, new), now)
        return tf.tensor_scatter_nd_update(rows, new[:, None], cells[:, 0] * BUCKET + cells[:, 1])

    def _assign_rows(self, cells: tf.Tensor, ids: tf.Tensor, now: tf.Tensor) -> None:
        """Assign the rows at ``cells``, ``[n, 2]`` (bucket, way), to new ids, and initialize them."""
        usage = self.usage
        first = _STEPS if self.table.evict == "lfu" else 0
        usage.ids.scatter_nd_update(cells, ids)
        usage.used.scatter_nd_update(cells, tf.fill([tf.size(ids)], first + now))
        usage.fresh.scatter_nd_update(cells, tf.fill([tf.size(ids)], True))
        rows = cells[:, 0] * BUCKET + cells[:, 1]
        self.rows.scatter_update(tf.IndexedSlices(self.first_rows(ids), rows))


def pop_new_rows(usage: RowUsage, gradient: tf.Tensor | tf.IndexedSlices, whole: bool) -> tf.Tensor:
    """Return the rows assigned to new ids since the last update, and clear their flags; called before an update.

    With ``whole``, check all rows, not only those in the gradient.
    """
    usage.clock.assign(tf.stack([usage.clock[0], usage.clock[0]]))
    if isinstance(gradient, tf.IndexedSlices) and not whole:
        rows = tf.cast(gradient.indices, tf.int64)
        rows = tf.boolean_mask(rows, rows < usage.fresh.shape[0] * BUCKET)
        cells = tf.stack([rows // BUCKET, rows % BUCKET], 1)
        cells = tf.boolean_mask(cells, usage.fresh.gather_nd(cells))
    else:
        cells = tf.where(usage.fresh)
    usage.fresh.scatter_nd_update(cells, tf.fill([tf.shape(cells)[0]], False))
    return cells[:, 0] * BUCKET + cells[:, 1]


def warn_of_full_buckets(variables: Iterable[AnyVariable]) -> None:
    """Warn once of each table in which ids of full buckets give way to each other although other rows are free.

    A few thousand buckets of the chief are looked at, without communication.
    """
    for variable in variables if cluster.is_chief() else ():
        shard = shard_of(variable)
        if shard is None or shard.usage is None:
            continue
        # Not a slice, which copies the whole variable.
        ids = shard.usage.ids.sparse_read(tf.range(min(shard.usage.ids.shape[0], _MOST_BUCKETS_CHECKED)))
        taken = np.count_nonzero(ids.numpy() != NO_ID, axis=1)
        is_full = np.mean(taken) > (1 - _FREE_SHARE) * BUCKET if len(taken) else True
        if not is_full and np.mean(taken == BUCKET) > _FULL_SHARE:
            table = f"table {shard.pieces[0].table!r} of {shard.owner}"
            warn_once(
                f"{table}: ids evict each other although rows are free, because an id may only occupy one of {BUCKET} "
                "rows; choose input_dim twice as large as the number of ids to keep; "
                f"{see('embeddings#ids-that-come-and-go')}"
            )
