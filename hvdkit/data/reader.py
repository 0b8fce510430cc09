"""Reads the batches of a plan."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from hvdkit.data.aligned import Nest
from hvdkit.data.arrays import ArraySource
from hvdkit.data.batch_plan import BatchPlan, no_batch
from hvdkit.data.files.reading_ahead import in_order, require_running
from hvdkit.data.files.source import FileSource
from hvdkit.data.files.storage import close_idle
from hvdkit.data.mixtures import Mixture
from hvdkit.data.stream import StreamSource
from hvdkit.errors import describe


class RankBatch(NamedTuple):
    """This rank's rows of a global batch, or of several.

    Attributes:
        rows: The data: arrays or tensors ``[rows, ...]``; ``[batches, rows, ...]`` of several batches.
        counts: The number of real examples of each global batch, over all ranks.
        digest: Of a stream's batch without filler, before ``map_fn``, to compare the ranks' streams; otherwise 0.
    """

    rows: Nest
    counts: list[int]
    digest: int = 0


Reader = Generator[RankBatch, None, int]
"""Yields batches, and returns the number of steps of their epoch."""


def read_epoch(plan: BatchPlan, epoch: int, step: int, max_batches: int = 1) -> Reader:
    """Return a generator of the batches of an epoch, from a step on, that returns the number of steps of the epoch.

    If ``max_batches`` is larger than 1, each item of arrays has up to that many batches with equal numbers of rows.
    """
    source = plan.source
    if isinstance(source, StreamSource):
        return _read_stream(plan, source, epoch, step)
    if isinstance(source, ArraySource):
        return _read_arrays(plan, source, epoch, step, max_batches)
    return _read_files(plan, source, epoch, step)


def read_on(
    plan: BatchPlan, epoch: int, step: int, max_batches: int = 1, *, is_endless: bool
) -> Generator[RankBatch, None, int | None]:
    """Yield the batches of all epochs, from a step of an epoch on; return the number of steps of an epoch, if known.

    If not ``is_endless``, read one epoch, or the next one if this one has ended.
    """
    while plan.has_epoch(epoch):
        steps = yield from read_epoch(plan, epoch, step, max_batches)
        plan = plan.with_length(steps)
        if not is_endless and step < steps:
            break
        epoch += 1
        step = 0
    return plan.steps_per_epoch


def _read_arrays(plan: BatchPlan, source: ArraySource, epoch: int, step: int, max_batches: int) -> Reader:
    for indices, counts in plan.rows_from(epoch, step, max_batches):
        yield RankBatch(source.read(indices), counts)
    return plan.steps_per_epoch or 0


def _read_files(plan: BatchPlan, source: FileSource | Mixture, epoch: int, step: int) -> Reader:
    """Read with threads, ahead of the step. Files are closed when the epoch ends."""
    reader = source.reader(plan.shuffle)

    def read(rows: tuple[np.ndarray, list[int]]) -> RankBatch:
        require_running()
        indices, counts = rows
        return RankBatch(reader.read(indices), counts)

    for batch in in_order(read, plan.rows_from(epoch, step), at_end=close_idle):
        reader.next_batch()
        if plan.files is not None:
            plan.files.begun.set()
        yield batch
    return plan.steps_per_epoch or 0


def _read_stream(plan: BatchPlan, source: StreamSource, epoch: int, step: int) -> Reader:
    steps = plan.steps_per_epoch
    for rows, count, digest in source.open(epoch, step, plan.rank_rows, plan.shuffle, plan.remainder):
        step += 1
        if steps is not None and step > steps:
            raise _unequal_epochs("more", epoch, steps)
        yield RankBatch(rows, [count], digest)
    if steps is None and step == 0:
        raise no_batch(f"a stream that ended before {plan.batch_size} examples", plan.batch_size)
    if steps is not None and step < steps:
        raise _unequal_epochs(str(step), epoch, steps)
    return step


def _unequal_epochs(got_steps: str, epoch: int, steps: int) -> ValueError:
    got = f"a stream of {got_steps} batches in epoch {epoch}"
    remedy = "make the stream the same each time it is read (no unseeded filter or sampling)"
    return ValueError(describe("arrays_or_source", got, f"{steps}, as before", remedy))
