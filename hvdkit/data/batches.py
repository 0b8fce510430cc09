"""This rank's rows of global batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import optree

from hvdkit.cluster.progress import spending
from hvdkit.data import arguments, keras_dataset, order
from hvdkit.data.aligned import Nest, tensor_of
from hvdkit.data.batch_plan import BatchPlan, DataState
from hvdkit.data.growth import Growth
from hvdkit.data.position import DataPosition
from hvdkit.data.reader import Reader, read_epoch
from hvdkit.errors import describe

if TYPE_CHECKING:
    import tensorflow as tf

    from hvdkit.data.files.source import FileSource
    from hvdkit.data.mixtures import Mixture


class GlobalBatches(Iterator[Nest]):
    """Iterate over this rank's rows of global batches whose content does not depend on the number of ranks.

    The order of examples is a function of ``shuffle_seed`` and the epoch. Rank r of N gets rows
    ``[r*B//N, (r+1)*B//N)`` of each global batch of B examples: the ranks' local batches, concatenated in rank order,
    equal the batch of a single process, and all ranks run the same number of steps. B need not be a multiple of N.

    A batch has the structure of the data (array for array, tuple for tuple, dict for dict). Each leaf is
    ``[local rows, ...]`` with ``(r+1)*B//N - r*B//N`` local rows: a NumPy array, or a TensorFlow tensor from a
    ``tf.data.Dataset`` or with ``as_tensors``.

    A short last batch of an epoch is dropped (``remainder="drop"``) or padded to B (``"pad"``) with examples from the
    start of the epoch's order, repeated if necessary; for a stream, with the first examples of the batch itself. Filler
    has ``mask`` False and ``sample_weight`` 0.

    Args:
        arrays_or_source: The entire data, the same on every rank: an array ``[n, ...]``, a nested tuple, list or dict
            of arrays of equal length (NumPy arrays, memory maps, TensorFlow tensors, h5py data sets, or any object with
            ``len`` and indexing by an integer array), a source of files such as ``hk.data.parquet``, or a
            ``tf.data.Dataset`` of single examples. From files, only the rows of this rank are read. Several sources are
            mixed with ``hk.data.mixture``.
        global_batch_size: B, over all ranks; at least N.
        shuffle_seed: Shuffle each epoch with this seed, an integer >= 0. None keeps the order of the data.
        shuffle: "full": all examples are permuted. "blocks", for files: their blocks, such as row groups, are permuted,
            then rows within windows, so that each rank reads its own blocks only. Without a seed, blocks and rows keep
            their order, but each batch has rows from ``interleave`` places in the data.
        epochs: Number of epochs. None repeats endlessly: to loop over epochs use ``one_epoch``.
        remainder: How to handle an epoch's short last batch: "pad" or "drop".
        with_sample_weight: Yield ``(x, y, sample_weight)`` for data ``(x, y)``, as Keras expects it.
        as_tensors: Yield TensorFlow tensors, created without a copy; a ``tf.function`` takes them faster than arrays.
        map_fn: For a ``tf.data.Dataset``: a function that maps an example, run on this rank's rows only.
        shuffle_buffer: For a ``tf.data.Dataset``: size of the shuffle buffer in examples; default: 10,000. The shuffle
            is uniform if it is at least the number of examples. For ``shuffle="blocks"``: examples in the windows of
            all lanes; default: 262,144.
        interleave: For ``shuffle="blocks"``: the number of lanes; default: 16. Each batch has rows from all lanes, and
            each lane reads its own blocks. Choose a multiple of N, and keep it when N changes.
        growth: For files that are added during the run; see ``add_new_files``. "append": epochs read the files
            that were there before, and the new ones. "replace": each epoch reads the files that are new to it. The
            state names the files.
        rank: r; default: that of the cluster. For the data-parallel part of a larger mesh, and for use without a
            cluster.
        size: N; default: that of the cluster.

    Raises:
        TypeError: The data does not consist of arrays, or has object arrays; an argument has the wrong type, or is not
            for this kind of data.
        ValueError: Arrays empty or of unequal length, B < N, less than one batch with "drop", or an argument out of
            range.

    Examples:
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> batches = hk.data.GlobalBatches(np.arange(5), 2, epochs=1, rank=0, size=1)  # usually after hk.init()
        >>> [(batch.tolist(), batches.mask.tolist()) for batch in batches]
        [([0, 1], [True, True]), ([2, 3], [True, True]), ([4, 0], [True, False])]
        >>> batches.state["epoch"], batches.state["step"]
        (1, 0)

        Rank 1 of 2 of the same data:

        >>> batches = hk.data.GlobalBatches(np.arange(5), 2, epochs=1, rank=1, size=2)
        >>> [batch.tolist() for batch in batches], batches.mask.tolist(), batches.local_rows
        ([[1], [3], [0]], [False], (1, 2))
        >>> batches.count, batches.global_count, batches.sample_weight.tolist()  # of the last batch
        (0, 1, [0.0])
        >>> batches.epoch, batches.step, batches.steps_per_epoch, batches.available_epochs, batches.is_even
        (0, 3, 3, 1, False)
        >>> batches.plan.batch_size, batches.plan.remainder
        (2, 'pad')
    """

    def __init__(
        self,
        arrays_or_source: Nest | FileSource | Mixture | tf.data.Dataset,
        global_batch_size: int,
        *,
        shuffle_seed: int | None = None,
        shuffle: order.Mode = "full",
        epochs: int | None = None,
        remainder: order.Remainder = "pad",
        with_sample_weight: bool = False,
        as_tensors: bool = False,
        map_fn: Callable[..., object] | None = None,
        shuffle_buffer: int | None = None,
        interleave: int | None = None,
        growth: Growth | None = None,
        rank: int | None = None,
        size: int | None = None,
    ):
        plan = arguments.plan_of(
            arrays_or_source,
            global_batch_size,
            shuffle_seed=shuffle_seed,
            shuffle=shuffle,
            epochs=epochs,
            remainder=remainder,
            map_fn=map_fn,
            shuffle_buffer=shuffle_buffer,
            interleave=interleave,
            growth=growth,
            rank=rank,
            size=size,
        )
        if with_sample_weight:
            arguments.require_pairs(plan.source)
        self._with_sample_weight = with_sample_weight
        self._as_tensors = as_tensors
        # A cache: the last global_count, and its sample_weight.
        self._weights: tuple[int, np.ndarray | tf.Tensor | None] = (0, None)
        self._position = DataPosition(plan)
        self._epoch_yielded = 0
        self._count: int | None = None  # b of the batch just yielded
        self._reader: Reader | None = None

    def __iter__(self) -> GlobalBatches:
        return self

    def __next__(self) -> Nest:
        while self._reader is not None or self.plan.has_epoch(self._position.epoch):
            batch = self._read()
            if batch is not None:
                return batch
        raise StopIteration

    def one_epoch(self) -> Iterator[Nest]:
        """Yield the rest of this epoch, or the next epoch if this one has ended. Advances this iterator.

        Yields:
            Batches, as iteration does.

        Examples:
            >>> import numpy as np
            >>> import hvdkit as hk
            >>> batches = hk.data.GlobalBatches(np.arange(4), 2, rank=0, size=1)
            >>> [[batch.tolist() for batch in batches.one_epoch()] for epoch in range(2)]
            [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]
        """
        has_yielded = False
        while self._reader is not None or self.plan.has_epoch(self._position.epoch):
            batch = self._read()
            if batch is not None:
                has_yielded = True
                yield batch
            elif has_yielded:
                return

    def __copy__(self) -> GlobalBatches:
        other = object.__new__(type(self))
        # An open reader can advance one iterator only.
        other.__dict__.update(self.__dict__, _reader=None, _position=copy.copy(self._position))
        return other

    def __repr__(self) -> str:
        """Show the sizes, and a hint for users: Keras's error about unsupported data contains this text."""
        return f"GlobalBatches({self.plan}) [for Keras: hk.fit(model, batches), or model.fit(batches.as_keras())]"

    @property
    def plan(self) -> BatchPlan:
        """Which rows of which global batches this rank reads: a value, replaced when files are added or restored."""
        return self._position.plan

    # ---- about the batch just yielded -------------------------------------------------------------------------

    @property
    def global_count(self) -> int:
        """The number b of real examples of the batch just yielded, over all ranks."""
        if self._count is None:
            raise RuntimeError(describe("GlobalBatches", "no batch yet", "a batch", "call next() on it first"))
        return self._count

    @property
    def mask(self) -> np.ndarray:
        """Bool ``[local rows]``: False for the filler in the batch just yielded."""
        return order.real_rows(self.global_count, self.local_rows)

    @property
    def count(self) -> int:
        """The number of real examples of this rank in the batch just yielded; may be 0."""
        return int(np.count_nonzero(self.mask))

    @property
    def sample_weight(self) -> np.ndarray | tf.Tensor:
        """Float32 ``[local rows]``: ``mask * N * L / b``, where L is the number of local rows and b ``global_count``.

        ``mean(sample_weight * loss)``, averaged over the ranks, is the mean of the loss over the b real examples of
        the global batch. The same holds for the gradient.
        """
        if self._as_tensors and self._weights[0] == self.global_count:
            return self._weights[1]
        weights = order.sample_weights(self.mask, self.global_count, self.plan.rank_rows.size)
        self._weights = self.global_count, tensor_of(weights) if self._as_tensors else weights
        return self._weights[1]

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the batch just yielded."""
        return self._epoch_yielded

    @property
    def step(self) -> int:
        """The number of batches yielded since the start of training, over all epochs and restores."""
        return self.plan.global_step(self._position.epoch, self._position.step)

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of batches in an epoch; None for a stream of unknown length in its first epoch."""
        return self.plan.steps_per_epoch

    @property
    def available_epochs(self) -> int | None:
        """The number of epochs that can be read before files are added; None for no limit."""
        return self.plan.available_epochs

    @property
    def local_rows(self) -> tuple[int, int]:
        """This rank's rows of each global batch, as (first, one past the last)."""
        return self.plan.local_rows

    @property
    def state(self) -> DataState:
        """The position of the next batch: a small JSON-compatible dict, the same on every rank and for every N."""
        return self._position.state

    def state_at(self, global_step: int) -> DataState:
        """Return the ``state`` after ``global_step`` batches since the start of training.

        A pure function, for a training loop that prefetches its input (Keras ``fit``): save ``state_at(steps done)``,
        regardless of how much has been prefetched.

        Args:
            global_step: steps over all epochs.

        Returns:
            A JSON-compatible dict, for ``restore``.

        Raises:
            ValueError: ``global_step`` is negative, before the last files were added, or beyond what has been read of a
                stream of unknown length.

        Examples:
            >>> import numpy as np
            >>> import hvdkit as hk
            >>> batches = hk.data.GlobalBatches(np.arange(8), 2, rank=0, size=1)  # 4 steps per epoch
            >>> state = batches.state_at(5)
            >>> state["epoch"], state["step"], state["global_step"]
            (1, 1, 5)
        """
        return self._position.plan.state_at(global_step, read=self._position.step)

    def restore(self, state: DataState) -> None:
        """Continue from a saved ``state``, at any number of ranks.

        Args:
            state: ``state`` of this or an earlier run, or the result of ``state_at``.

        Raises:
            TypeError: The state is not a dict.
            ValueError: The state is from a different seed, data set size or batch size, so that its position is
                meaningless here; or it is not a state.

        Examples:
            >>> import numpy as np
            >>> import hvdkit as hk
            >>> saved = hk.data.GlobalBatches(np.arange(8), 2, shuffle_seed=0, rank=0, size=1).state_at(global_step=5)
            >>> saved["epoch"], saved["step"]
            (1, 1)
            >>> batches = hk.data.GlobalBatches(np.arange(8), 2, shuffle_seed=0, rank=1, size=2)  # another rank count
            >>> batches.restore(saved)
            >>> len(list(batches.one_epoch()))  # steps left in epoch 1
            3
        """
        self._position.restore(state)
        self._epoch_yielded = self._position.epoch
        self._count = None
        self._reader = None

    def add_new_files(self, epoch: int | None = None) -> list[str]:
        """Look for files that were added since the last call, and read them from the next epoch on, or as ``epoch``.

        For ``growth=``. All ranks must call this at the end of an epoch. New files come after the present ones in the
        order of the data, and keep their place when they are restored. Write a file under a name that begins with "."
        or "_", then rename it, so that it is found when it is complete.

        Args:
            epoch: The first epoch that reads the new files; default: the next. For ``hk.fit`` and ``as_keras``, which
                do not advance this iterator, pass the ``initial_epoch`` of the next ``fit``.

        Returns:
            The names of the new files. An empty list if nothing changes: no file is new, or, with
                ``growth="replace"``, the new files have too few rows for a batch. Files of which no batch has been read
                yet are not replaced: the epoch reads them and the new ones.

        Raises:
            TypeError: The data are not files with ``growth=``.
            ValueError: The epoch has not ended, or ``epoch`` is before the next.
            DataError: A new file is damaged, or one that is to be read again has changed or disappeared.
            CollectiveMismatchError: Ranks call this at different epochs, or see different files.

        Examples:
            >>> import pathlib, tempfile
            >>> import numpy as np
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> folder = pathlib.Path(hk.broadcast_object(tempfile.mkdtemp()))  # one folder for all ranks
            >>> if hk.is_chief():
            ...     np.save(folder / "day-1.npy", np.arange(100))
            >>> hk.barrier()
            >>> batches = hk.data.GlobalBatches(hk.data.npy(folder), 50, growth="replace")
            >>> sum(batches.global_count for batch in batches.one_epoch())
            100
            >>> if hk.is_chief():  # usually another program
            ...     np.save(folder / "_day-2.npy", np.arange(200))
            ...     _ = (folder / "_day-2.npy").rename(folder / "day-2.npy")
            >>> hk.barrier()
            >>> batches.add_new_files()  # in a loop, with time.sleep, until there is one
            ['day-2.npy']
            >>> sum(batches.global_count for batch in batches.one_epoch())
            200
        """
        self._reader = None  # of an epoch that has ended
        new = self._position.add_new_files(epoch)
        if new:
            self._epoch_yielded = self._position.epoch
        return new

    def fingerprint(self) -> dict[str, object]:
        """Return a JSON-compatible fingerprint, equal on ranks with equal data and order.

        It has the arguments that determine the order, sizes, dtypes and checksums.

        Returns:
            Values by name, to compare.

        Examples:
            >>> import numpy as np
            >>> import hvdkit as hk
            >>> batches = hk.data.GlobalBatches(np.arange(8), 2, shuffle_seed=7, rank=0, size=1)
            >>> same = hk.data.GlobalBatches(np.arange(8), 2, shuffle_seed=7, rank=1, size=2)
            >>> batches.fingerprint() == same.fingerprint()
            True
        """
        return self.plan.fingerprint()

    def as_keras(self) -> tf.data.Dataset:
        """Return the remaining batches as a ``tf.data.Dataset`` of ``(x, y, sample_weight)`` for ``fit``.

        It has ``steps_per_epoch`` elements (for a stream of unknown length, as many as the epoch has), and each pass
        continues with the next ones, so ``fit(dataset, epochs=3)`` needs no other argument. It prefetches
        independently, without advancing this iterator. Save ``state_at(steps done)``. After ``restore`` the next
        pass starts there. After ``add_new_files(epoch=)``, call this again: the number of steps may have changed.

        ``sample_weight`` has the rank of the labels, ``[rows, 1, ...]``, to be multiplied with losses of any shape. For
        data ``(x, y, w)`` it is multiplied by w. Data without labels (an array, a dict, ``(x,)``) are yielded without
        weights, which is correct only if all ranks have the same number of rows, without filler.

        Keras applies the weights of the loss to its metrics as well. A short last batch needs a large weight in the
        loss, which overcounts its examples in the metrics: drop it with ``remainder="drop"`` (with a seed, different
        examples are dropped in every epoch). ``"pad"`` logs a warning to the user.

        Returns:
            A data set of this rank's rows.

        Raises:
            TypeError: The data is a list, or a tuple of more than three.
            ValueError: Data without labels need weights: N does not divide B, or an epoch's last batch may be short.

        Examples:
            >>> import keras
            >>> import numpy as np
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            >>> model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
            >>> data = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")
            >>> batches = hk.data.GlobalBatches(data, 12, shuffle_seed=0, remainder="drop")
            >>> callbacks = [hk.callbacks.BroadcastInitial(), hk.callbacks.MetricAverage()]
            >>> history = model.fit(batches.as_keras(), epochs=3, verbose=0, callbacks=callbacks)
            >>> len(history.epoch), int(model.optimizer.iterations)  # 2 steps per epoch
            (3, 6)
        """
        return keras_dataset.weighted_batches(self._position)

    @property
    def is_even(self) -> bool:
        """True if all ranks are known to have the same number of real examples in every batch, without filler."""
        return self.plan.is_even

    def _read(self) -> Nest | None:
        """Return the next batch of this epoch; or None at its end, and continue with the next epoch."""
        position = self._position
        with spending("input"):
            if self._reader is None:
                self._reader = read_epoch(position.plan, position.epoch, position.step)
            try:
                batch, (self._count,), _ = next(self._reader)
            except StopIteration as end:
                self._reader = None
                position.end_epoch(end.value)
                return None
            except BaseException:
                self._reader = None  # a generator that raised looks exhausted, which is not the end of the epoch
                raise
            position.step += 1
            self._epoch_yielded = position.epoch
            if self._as_tensors:
                batch = optree.tree_map(tensor_of, batch)
            return (*batch, self.sample_weight) if self._with_sample_weight else batch
