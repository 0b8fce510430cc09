"""The plan of an iteration: which rows of which global batches a rank reads. A pure value, without communication.

Iterators, readers and the adapter to Keras share one plan; each has its own position. A position is an epoch and the
step in it, from 0, of the next batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from hvdkit.data import order
from hvdkit.data.arrays import ArraySource
from hvdkit.data.files.source import FileSource
from hvdkit.data.growth import GrowingFiles
from hvdkit.data.mixtures import Mixture
from hvdkit.data.stream import StreamSource
from hvdkit.errors import describe, integer

Source = ArraySource | FileSource | Mixture | StreamSource
DataState: TypeAlias = dict[str, Any]  # JSON-compatible: a position, and what determines the order of the examples


@dataclass(frozen=True)
class BatchPlan:
    """The order of the examples, and the rows of each global batch that this rank reads.

    Attributes:
        source: The data.
        rank_rows: The rows of each global batch that are read for this rank.
        shuffle: How the examples of an epoch are ordered.
        remainder: How an epoch's short last batch is handled.
        epochs: The number of epochs that the user asked for; None for no limit.
        files: The files of ``source``, for data that grow.
        stream_steps: The number of batches in an epoch of a stream that does not know it, once it has been read.
        ignores_limits: Whether epochs are endless, whatever ``epochs`` and ``files`` say.

    Raises:
        ValueError: The data have less than one batch.
    """

    source: Source
    rank_rows: order.RankRows
    shuffle: order.Shuffle
    remainder: order.Remainder
    epochs: int | None = None
    files: GrowingFiles | None = None
    stream_steps: int | None = None
    ignores_limits: bool = False

    def __post_init__(self) -> None:
        if self.steps_per_epoch == 0:
            raise no_batch(f"{self.source.examples} examples", self.batch_size)

    def __str__(self) -> str:
        """Return the sizes, for messages."""
        return (
            f"examples={self.source.examples}, global_batch_size={self.batch_size}, shuffle_seed={self.shuffle.seed}, "
            f"remainder={self.remainder!r}"
        )

    @property
    def batch_size(self) -> int:
        """B, over all ranks."""
        return self.rank_rows.batch_size

    @cached_property
    def steps_per_epoch(self) -> int | None:
        """The number of batches in an epoch; None for a stream whose length is not known yet."""
        if self.source.examples is None:
            return self.stream_steps
        return order.steps_per_epoch(self.source.examples, self.batch_size, self.remainder)

    @cached_property
    def local_rows(self) -> tuple[int, int]:
        """This rank's rows of a full batch, as (first, one past the last)."""
        return self.rank_rows.rows(self.batch_size)

    @property
    def mean_batch_size(self) -> float:
        """Examples per step: less than B if an epoch's last batch is short."""
        examples = self.source.examples
        if self.remainder == "drop" or examples is None or not self.steps_per_epoch:
            return float(self.batch_size)
        return examples / self.steps_per_epoch

    @property
    def is_even(self) -> bool:
        """True if all ranks are known to have the same number of real examples in every batch, without filler."""
        examples = self.source.examples
        are_full = self.remainder == "drop" or (examples is not None and examples % self.batch_size == 0)
        return are_full and self.batch_size % self.rank_rows.size == 0

    # ---- the rows ----------------------------------------------------------------------------------------------

    def rows_from(self, epoch: int, step: int, max_batches: int = 1) -> Iterator[tuple[np.ndarray, list[int]]]:
        """Yield the examples in this rank's rows of an epoch's batches from ``step`` on, and the number of real ones.

        For sources with random access. The order of the epoch is computed once.

        Yields:
            int64 ``[rows]``, or ``[batches, rows]`` of up to ``max_batches`` batches with equal numbers of rows if this
            is larger than 1; and the number of real examples of each batch.
        """
        assert not isinstance(self.source, StreamSource)
        assert self.steps_per_epoch is not None
        batch_size = self.batch_size
        examples = self.source.examples
        epoch_order = self.source.order(self.shuffle, epoch, batch_size)
        full_steps = examples // batch_size
        while step < self.steps_per_epoch:
            count = min(batch_size, examples - step * batch_size)
            first, last = self.rank_rows.rows(count)
            start = step * batch_size
            positions = np.arange(start + first, start + last)
            if start + last > examples:  # filler, from the start of the epoch's order
                positions %= examples
            counts = [count]
            if max_batches > 1:  # a short last batch is yielded separately
                counts *= max(1, min(max_batches, full_steps - step))
                positions = positions + np.arange(len(counts))[:, None] * batch_size
            yield positions if epoch_order is None else epoch_order(positions).astype(np.int64), counts
            step += len(counts)

    # ---- positions ---------------------------------------------------------------------------------------------

    @cached_property
    def first_epoch(self) -> int:
        """The first epoch that reads ``source``."""
        return 0 if self.files is None else self.files.first_epoch

    @cached_property
    def first_step(self) -> int:
        """The number of batches before the first epoch, since the start of training."""
        return 0 if self.files is None else self.files.first_step

    @property
    def available_epochs(self) -> int | None:
        """The number of epochs that can be read before files are added; None for no limit."""
        limits = [] if self.ignores_limits else [self.epochs, None if self.files is None else self.files.end]
        return min((limit for limit in limits if limit is not None), default=None)

    def global_step(self, epoch: int, step: int) -> int:
        """Return the number of batches before a position, since the start of training."""
        return self.first_step + (epoch - self.first_epoch) * (self.steps_per_epoch or 0) + step

    def state_at(self, global_step: int, *, read: int) -> DataState:
        """Return the state to save after ``global_step`` batches since the start of training.

        Args:
            global_step: Steps over all epochs.
            read: The number of batches that have been read of a stream of unknown length.
        """
        integer("global_step", global_step, minimum=self.first_step)
        steps = self.steps_per_epoch
        if steps is None and global_step > read:
            assert_length = "dataset.apply(tf.data.experimental.assert_cardinality(n))"
            remedy = f"read a whole epoch first, or give the length: {assert_length}"
            raise ValueError(describe("global_step", global_step, f"at most {read}, the batches read so far", remedy))
        return self.state_of(self.first_epoch, global_step - self.first_step)

    def state_of(self, epoch: int, step: int) -> DataState:
        """Return the state to save at a position, whose step may be beyond the end of the epoch."""
        global_step = self.global_step(epoch, step)
        if self.steps_per_epoch is not None:
            epoch += step // self.steps_per_epoch
            step %= self.steps_per_epoch
        return {"epoch": epoch, "step": step, "global_step": global_step, **self.identity}

    def checked_position(
        self, epoch: object, step: object, epoch_name: str = "epoch", step_name: str = "step"
    ) -> tuple[int, int]:
        """Return an epoch and a step of it, after checking that they exist; the names are for the errors."""
        epoch = integer(epoch_name, epoch, minimum=0)
        step = integer(step_name, step, minimum=0)
        if epoch < self.first_epoch:
            remedy = "earlier epochs read other files: pass a later epoch, or restore a state of that epoch"
            raise ValueError(describe(epoch_name, epoch, f"at least {self.first_epoch}", remedy))
        if self.steps_per_epoch is not None and step > self.steps_per_epoch:
            remedy = "count steps from the start of the epoch"
            raise ValueError(describe(step_name, step, f"at most {self.steps_per_epoch}, those of an epoch", remedy))
        return epoch, step

    def has_epoch(self, epoch: int) -> bool:
        """Return whether an epoch can be read before files are added."""
        return self.available_epochs is None or epoch < self.available_epochs

    # ---- what determines the order -----------------------------------------------------------------------------

    @cached_property
    def source_identity(self) -> Mapping[str, object]:
        """What determines the order in addition to the seed and sizes."""
        return self.source.identity(self.shuffle)

    @cached_property
    def identity(self) -> dict[str, object]:
        """The settings that, with the data, determine the global order. JSON-compatible; part of the state."""
        return {
            "seed": self.shuffle.seed,
            "examples": self.source.examples,
            "batch_size": self.batch_size,
            "remainder": self.remainder,
            "steps_per_epoch": self.steps_per_epoch,
            "shuffle_buffer": self.shuffle.buffer,
            "order_check": order.order_check(self.shuffle.seed),
            **self.source_identity,
            **({} if self.files is None else self.files.state),
        }

    def fingerprint(self) -> dict[str, object]:
        """Return a JSON-compatible fingerprint, equal on ranks with equal data and order."""
        return {
            **self.source.fingerprint(),
            "seed": self.shuffle.seed,
            "batch_size": self.batch_size,
            "remainder": self.remainder,
            "shuffle": self.shuffle.mode,
            "shuffle_buffer": self.shuffle.buffer,
            "interleave": self.shuffle.lanes,
        }

    # ---- other plans -------------------------------------------------------------------------------------------

    def with_files(self, files: GrowingFiles) -> BatchPlan:
        """Return the plan of the epochs that read other files. Raises ValueError if they have less than one batch."""
        return replace(self, files=files, source=files.source)

    def with_length(self, steps: int) -> BatchPlan:
        """Return the plan of a stream of which ``steps`` batches per epoch have been read; this plan if it knows."""
        return self if self.steps_per_epoch is not None else replace(self, stream_steps=steps)

    def without_filler(self) -> BatchPlan:
        """Return the plan that divides only the real examples of a short batch."""
        return replace(self, rank_rows=replace(self.rank_rows, with_filler=False))

    def without_limit(self) -> BatchPlan:
        """Return the plan of endless epochs."""
        return replace(self, ignores_limits=True)


def no_batch(got: str, batch_size: int) -> ValueError:
    """Return the error of data with less than one batch."""
    remedy = "lower global_batch_size, or pass remainder='pad'"
    return ValueError(describe("arrays_or_source", got, f"at least one batch of {batch_size}", remedy))
