"""The global order of examples, cut for one rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import optree

from hvdkit.arguments import integer
from hvdkit.cluster.progress import spending
from hvdkit.data import arguments, order
from hvdkit.data.arrays import ArraySource
from hvdkit.data.keras_dataset import batches_at_once, keras_dataset
from hvdkit.errors import describe
from hvdkit.memory import tensor_of


class GlobalBatches(Iterator[Any]):
    """Iterate over this rank's rows of global batches whose content does not depend on the number of ranks.

    The order of examples is a function of ``shuffle_seed`` and the epoch. Rank r of N gets rows
    ``[r*B//N, (r+1)*B//N)`` of each global batch of B examples: the ranks' local batches, concatenated in rank
    order, are the batch that one process would see, and all ranks make the same number of steps. B need not be a
    multiple of N.

    A short last batch of an epoch is dropped (``remainder="drop"``) or filled up to B (``"pad"``) with
    examples from the start of the epoch's order, round and round if need be; a stream fills it with the batch's own
    first examples. Filler has ``mask`` False and ``sample_weight`` 0.

    Args:
        arrays_or_source: The whole data, the same on every rank: an array ``[n, ...]``, a nested tuple, list or dict
            of arrays of one length (NumPy arrays, memory maps, TensorFlow tensors, h5py data sets, or any object with
            ``len`` and indexing by an integer array), or a ``tf.data.Dataset`` of single examples. Of files, only
            the rows of this rank are read.
        global_batch_size: B, over all ranks; at least N.
        shuffle_seed: Shuffle each epoch by this seed, an integer >= 0. None keeps the order of the data.
        epochs: Stop after so many epochs. None goes on for ever.
        remainder: What becomes of an epoch's short last batch: "pad" or "drop".
        with_sample_weight: Yield ``(x, y, sample_weight)`` for data ``(x, y)``, as Keras expects it.
        as_tensors: Yield TensorFlow tensors, made without a copy, which a ``tf.function`` takes faster than arrays.
        map_fn: For a ``tf.data.Dataset``: a function from one example to another, run on this rank's rows only.
        shuffle_buffer: For a ``tf.data.Dataset``: shuffle through a buffer of so many examples. The shuffle is
            complete when it is at least the number of examples.
        rank: r, and
        size: N, to override the cluster's. For the data-parallel part of a larger mesh, and for use without a cluster.

    Yields:
        What was given (array for array, tuple for tuple, dict for dict), each ``[local rows, ...]``, where local rows
        = ``(r+1)*B//N - r*B//N``. NumPy arrays; TensorFlow tensors from a ``tf.data.Dataset`` or ``as_tensors``.

    Raises:
        TypeError: The data is not made of arrays, or is made of object arrays; an argument has the wrong type.
        ValueError: Arrays empty or of unequal length, B < N, no full batch under "drop", or an argument out of range.

    Example:
        >>> batches = GlobalBatches(np.arange(5), 2, epochs=1, rank=0, size=1)
        >>> [(batch.tolist(), batches.mask.tolist()) for batch in batches]
        [([0, 1], [True, True]), ([2, 3], [True, True]), ([4, 0], [True, False])]
        >>> batches.state["epoch"], batches.state["step"]
        (1, 0)
    """

    def __init__(
        self,
        arrays_or_source: Any,
        global_batch_size: int,
        *,
        shuffle_seed: int | None = None,
        epochs: int | None = None,
        remainder: order.Remainder = "pad",
        with_sample_weight: bool = False,
        as_tensors: bool = False,
        map_fn: Callable[..., Any] | None = None,
        shuffle_buffer: int | None = None,
        rank: int | None = None,
        size: int | None = None,
    ):
        self._rank, self._size = arguments.world(rank, size)
        self._batch_size = integer("global_batch_size", global_batch_size, minimum=1)
        self._seed = None if shuffle_seed is None else integer("shuffle_seed", shuffle_seed, minimum=0)
        self._epochs = None if epochs is None else integer("epochs", epochs, minimum=1)
        self._remainder = arguments.remainder(remainder)
        if self._batch_size < self._size:
            raise ValueError(
                describe("global_batch_size", self._batch_size, f"at least {self._size}, the number of ranks",
                         "raise it, or start fewer ranks: each needs an example in every batch")
            )  # fmt: skip
        self._source = arguments.source(arrays_or_source, map_fn, shuffle_buffer)
        self._rows = order.local_rows(self._batch_size, self._rank, self._size)
        self._with_sample_weight, self._as_tensors = with_sample_weight, as_tensors
        self._weights: tuple[int, Any] = (0, None)  # the last global_count asked for, and its sample_weight
        if with_sample_weight:
            self._require_pairs("with_sample_weight=True")
        self._steps_per_epoch = self._known_steps_per_epoch()
        self._order_check = order.order_check(self._seed)
        self._epoch = self._step = 0  # of the next batch
        self._restores = self._epoch_yielded = 0
        self._count: int | None = None  # b of the batch just yielded
        self._reader: Iterator[tuple[Any, int]] | None = None

    def __iter__(self) -> GlobalBatches:
        return self

    def __next__(self) -> Any:
        while self._epochs is None or self._epoch < self._epochs:
            with spending("input"):
                batch = self._read()
            if batch is not None:
                return batch
            self._end_epoch()
        raise StopIteration

    # ---- about the batch just yielded -------------------------------------------------------------------------

    @property
    def global_count(self) -> int:
        """b: the number of real examples of the batch just yielded, over all ranks."""
        if self._count is None:
            raise RuntimeError(describe("GlobalBatches", "no batch yet", "a batch", "call next() on it first"))
        return self._count

    @property
    def mask(self) -> np.ndarray:
        """Bool ``[local rows]``: False for the filler in the batch just yielded."""
        return order.real_rows(self.global_count, self._rows)

    @property
    def count(self) -> int:
        """The number of real examples of this rank in the batch just yielded; 0 is possible."""
        first, last = self._rows
        return min(max(self.global_count - first, 0), last - first)

    @property
    def sample_weight(self) -> Any:
        """Float32 ``[local rows]``: ``mask * N * L / b``, with L local rows and b = ``global_count``.

        Each rank's ``mean(sample_weight * loss)``, averaged over the ranks, is the mean of the loss over the b real
        examples of the global batch. So is the gradient.
        """
        if self._as_tensors and self._weights[0] == self.global_count:
            return self._weights[1]
        weights = order.sample_weights(self.mask, self.global_count, self._size)
        self._weights = self.global_count, tensor_of(weights) if self._as_tensors else weights
        return self._weights[1]

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the batch just yielded."""
        return self._epoch_yielded

    @property
    def step(self) -> int:
        """The number of batches yielded since the start of training, over all epochs and restores."""
        return self._epoch * (self._steps_per_epoch or 0) + self._step

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of batches in an epoch; None for a stream of unknown length in its first epoch."""
        return self._steps_per_epoch

    @property
    def local_rows(self) -> tuple[int, int]:
        """The first, and one past the last, row of each global batch that are this rank's."""
        return self._rows

    # ---- state ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """Where the next batch is: a small dict fit for JSON, the same on every rank and at every N."""
        return self.state_at(self.step)

    def state_at(self, global_step: int) -> dict[str, Any]:
        """Return what :attr:`state` is after ``global_step`` batches since the start of training.

        A pure function, for a training loop whose input runs ahead of it (Keras ``fit``): save
        ``state_at(steps done)``, whatever has been prefetched.

        Raises:
            ValueError: ``global_step`` is negative, or beyond what has been read of a stream of unknown length.
        """
        integer("global_step", global_step, minimum=0)
        steps = self._steps_per_epoch
        if steps is None and global_step > self._step:
            raise ValueError(
                describe("global_step", global_step, f"at most {self._step}, the batches read so far",
                         "read a whole epoch first, or give the length: "
                         "dataset.apply(tf.data.experimental.assert_cardinality(n))")
            )  # fmt: skip
        epoch, step = (0, global_step) if steps is None else divmod(global_step, steps)
        return {"epoch": epoch, "step": step, "global_step": global_step, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved ``state``, at any number of ranks.

        Raises:
            ValueError: The state is of another seed, data set size or batch size, so that its position means
                nothing here; or it is not a state.
        """
        arguments.check_state(state, self._identity())
        if self._steps_per_epoch is None:
            self._steps_per_epoch = state["steps_per_epoch"]
        self._epoch = self._epoch_yielded = integer("state['epoch']", state["epoch"], minimum=0)
        self._step = integer("state['step']", state["step"], minimum=0)
        self._count = self._reader = None
        self._restores += 1

    def fingerprint(self) -> dict[str, Any]:
        """Return what is equal on all ranks with the same data, for JSON: seed, sizes, dtypes, a few checksums."""
        return {**self._source.fingerprint(), "seed": self._seed, "batch_size": self._batch_size,
                "remainder": self._remainder}  # fmt: skip

    def as_keras(self) -> Any:
        """Return the same batches, from here on, as a ``tf.data.Dataset`` of ``(x, y, sample_weight)`` for ``fit``.

        It has ``steps_per_epoch`` elements, and each pass over it goes on with the next ones, so ``fit(dataset,
        epochs=3)`` needs no other argument. It reads ahead on its own: this iterator does not move. Save
        ``state_at(steps done)``. After :meth:`restore` the next pass starts there.

        Keras weighs its metrics as it weighs the loss. A short last batch needs a large weight in the loss, which
        counts its few examples many times over in the metrics: leave it out with ``remainder="drop"`` (with a seed
        the examples left out are others in every epoch). With ``"pad"`` a warning says so.

        Raises:
            TypeError: The data is not a pair ``(x, y)``.
            ValueError: A stream's length is unknown.

        Example:
            >>> batches = GlobalBatches((x, y), 256, shuffle_seed=0, remainder="drop")  # doctest: +SKIP
            >>> model.fit(batches.as_keras(), epochs=3)  # doctest: +SKIP
        """
        self._require_pairs("as_keras()")
        if self._steps_per_epoch is None:
            raise ValueError(
                describe("arrays_or_source", "a tf.data.Dataset of unknown length", "a known one",
                         "give it: dataset.apply(tf.data.experimental.assert_cardinality(n))")
            )  # fmt: skip
        if self._rank == 0 and self._remainder == "pad":
            arguments.warn_of_filler(self._source.examples, self._batch_size)
        spec = self._source.batch_spec(self._rows[1] - self._rows[0])
        several = batches_at_once(spec) if isinstance(self._source, ArraySource) else 1
        return keras_dataset(
            lambda at: self._several_at(at, several), lambda: (self._restores, self.step),
            self._steps_per_epoch, spec, at_once=several,
        )  # fmt: skip

    # ---- inside -----------------------------------------------------------------------------------------------

    def _read(self) -> Any:
        """Return the next batch of this epoch, or None at its end."""
        if self._reader is None:
            self._reader = self._source.open(
                self._epoch, self._step, self._rows, self._batch_size, self._seed, self._remainder
            )
        try:
            batch, count = next(self._reader, _END)
        except BaseException:
            self._reader = None  # a generator that raised looks exhausted: never take that for an epoch's end
            raise
        if count == 0:
            return None
        self._step += 1
        if self._steps_per_epoch is not None and self._step > self._steps_per_epoch:
            raise self._unequal_epochs("more")
        self._count, self._epoch_yielded = count, self._epoch
        if self._as_tensors:
            batch = optree.tree_map(tensor_of, batch)
        return (*batch, self.sample_weight) if self._with_sample_weight else batch

    def _end_epoch(self) -> None:
        if self._steps_per_epoch is None:
            if self._step == 0:
                raise _no_batch(f"a stream that ended before {self._batch_size} examples", self._batch_size)
            self._steps_per_epoch = self._step
        elif self._step < self._steps_per_epoch:
            raise self._unequal_epochs(str(self._step))
        self._epoch, self._step, self._reader = self._epoch + 1, 0, None

    def _known_steps_per_epoch(self) -> int | None:
        examples = self._source.examples
        if examples is None:
            return None
        steps = order.steps_per_epoch(examples, self._batch_size, self._remainder)
        if steps == 0:
            raise _no_batch(f"{examples} examples", self._batch_size)
        return steps

    def _identity(self) -> dict[str, Any]:
        """Return what a position in the global order depends on besides the data."""
        return {
            "seed": self._seed,
            "examples": self._source.examples,
            "batch_size": self._batch_size,
            "remainder": self._remainder,
            "steps_per_epoch": self._steps_per_epoch,
            "shuffle_buffer": self._source.shuffle_buffer if self._seed is not None else None,
            "order_check": self._order_check,
        }

    def _copy_at(self, global_step: int) -> GlobalBatches:
        """Return an iterator of its own over the same data that yields (x, y, sample_weight) from there."""
        other = copy.copy(self)
        other._with_sample_weight, other._as_tensors = True, False
        other.restore(self.state_at(global_step))
        return other

    def _several_at(self, global_step: int, most: int) -> Iterator[tuple[int, Any]]:
        """Yield, from there on, numbers of batches and the batches ``(x, y, sample_weight)``; see keras_dataset."""
        if most == 1 or not isinstance(self._source, ArraySource):
            yield from ((1, batch) for batch in self._copy_at(global_step))
            return
        end = math.inf if self._epochs is None else self._epochs * (self._steps_per_epoch or 0)
        how = (self._rows, self._batch_size, self._seed, self._remainder)
        for batches, counts in self._source.open_several(global_step, most, *how):
            if global_step >= end:
                return
            weights = [order.sample_weights(order.real_rows(n, self._rows), n, self._size) for n in counts]
            yield len(counts), (*batches, np.stack(weights))
            global_step += len(counts)

    def _require_pairs(self, what: str) -> None:
        structure = self._source.structure
        if not isinstance(structure, tuple) or len(structure) != 2:
            raise TypeError(
                describe("arrays_or_source", f"a {type(structure).__name__}", f"a tuple (x, y) for {what}",
                         "pass (x, y), or read .sample_weight after each batch")
            )  # fmt: skip

    def _unequal_epochs(self, found: str) -> ValueError:
        return ValueError(
            describe("arrays_or_source", f"a stream of {found} batches in epoch {self._epoch}",
                     f"{self._steps_per_epoch}, as before",
                     "make the stream the same each time it is read (no unseeded filter or sampling)")
        )  # fmt: skip


def _no_batch(got: str, batch_size: int) -> ValueError:
    return ValueError(
        describe("arrays_or_source", got, f"at least one batch of {batch_size}",
                 "lower global_batch_size, or pass remainder='pad'")
    )  # fmt: skip


_END: tuple[Any, int] = (None, 0)
