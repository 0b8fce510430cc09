"""Shares of the global batches of :class:`hvdkit.data.GlobalBatches`, which each rank reads independently."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from hvdkit.data import GlobalBatches
from hvdkit.data.arguments import keras_parts
from hvdkit.data.keras_dataset import prefetched, shares_of_batches
from hvdkit.data.position import DataPosition
from hvdkit.errors import describe, integer
from hvdkit.internals import TFDatasetAdapter, make_class_weight_map_fn
from hvdkit.keras.shares import DataRank, Element, Shares

if TYPE_CHECKING:
    from hvdkit.keras.data_types import Tensors


class GlobalBatchShares(Shares):
    """This rank's shares of global batches, without padding rows.

    Args:
        batches: the user's batches; their position does not change.
        argument: the argument name, for error messages.
        steps: steps per Keras epoch; None for those of the data.
        initial_epoch: the Keras epoch in which training starts; None for evaluation and prediction, which read the
            first epoch of the data.

    Attributes:
        digest: digest of the data; the same on all ranks.

    Raises:
        TypeError: the data is not ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.
        ValueError: the batches are split for other ranks, or are neither at their start nor at the first epoch of
            training; or ``steps`` or ``initial_epoch`` is too small.
    """

    def __init__(
        self,
        batches: GlobalBatches,
        data_rank: DataRank,
        *,
        argument: str = "x",
        steps: int | None = None,
        class_weight: dict[int, float] | None = None,
        initial_epoch: int | None = None,
    ) -> None:
        plan = batches.plan
        keras_parts(plan.source.structure)
        if (plan.rank_rows.rank, plan.rank_rows.size) != (data_rank.index, data_rank.size):
            got = f"GlobalBatches of rank {plan.rank_rows.rank} of {plan.rank_rows.size}"
            expected = f"{data_rank.index} of {data_rank.size}"
            raise ValueError(describe(argument, got, expected, "leave out rank= and size= of GlobalBatches"))
        if plan.files is not None and steps is not None:
            remedy = "leave it out: epochs end where files are added"
            raise ValueError(describe("steps_per_epoch", steps, "None for GlobalBatches(growth=)", remedy))
        if initial_epoch is not None:
            integer("initial_epoch", initial_epoch, minimum=0)
            if steps is not None:
                integer("steps_per_epoch", steps, minimum=1)
        self._trains = initial_epoch is not None
        self._steps = steps
        self._initial_epoch = initial_epoch or 0
        self._data_steps = plan.steps_per_epoch
        plan = plan.without_filler()
        if self._trains:
            self._check_position(batches, argument)
            self._data = DataPosition(plan)
            self._data.move_to(*self._start(self._initial_epoch))
        else:
            self._data = DataPosition(plan.without_limit())
            self._data.move_to(plan.first_epoch, 0)
        self._class_weight = class_weight
        self._argument = argument
        self.digest = json.dumps(batches.fingerprint(), sort_keys=True, default=str)
        dataset = shares_of_batches(self._data)
        self._repeats = self._trains and self._data_steps is not None and steps not in (None, self._data_steps)
        if self._repeats:  # Keras's epochs end after `steps` batches, not where an epoch of the data ends
            dataset = dataset.repeat()
        super().__init__(TFDatasetAdapter(dataset), data_rank)

    def _start(self, epoch: int) -> tuple[int, int]:
        """Return the epoch and step of the data at which a Keras epoch begins."""
        if self._steps is None:
            return epoch, 0
        return divmod(epoch * self._steps, self._data_steps) if self._data_steps else (0, epoch * self._steps)

    def _check_position(self, batches: GlobalBatches, argument: str) -> None:
        state = batches.state
        start = self._start(self._initial_epoch)
        if (state["epoch"], state["step"]) not in ((0, 0), start):
            got = f"GlobalBatches at epoch {state['epoch']}, step {state['step']}"
            expected = (
                f"one at its start, or at epoch {start[0]}, step {start[1]}: epochs of hk.fit are those of the data"
            )
            remedy = "call batches.restore(batches.state_at(0)); pass initial_epoch= or logdir= to continue"
            raise ValueError(describe(argument, got, expected, remedy))

    def check_labels(self, model: keras.Model) -> None:
        """Raise ValueError if Keras's own steps would compute the model's loss from missing labels."""
        methods = ("train_step", "test_step", "compute_loss")
        has_own = any(getattr(type(model), name) is not getattr(keras.Model, name) for name in methods)
        if keras_parts(self._data.plan.source.structure) == 1 and model.loss is not None and not has_own:
            remedy = "make them part of the data: (x, y), or source.map(function) to return such pairs"
            raise ValueError(describe(self._argument, "GlobalBatches without labels", "those of the loss", remedy))

    def check_epochs(self, epochs: int) -> None:
        """Raise ValueError if the batches end before ``epochs`` Keras epochs."""
        available = self._data.plan.available_epochs
        data_steps = self._data_steps
        needed = epochs
        most = available
        if data_steps and self._steps:
            needed = -(-epochs * self._steps // data_steps)
            most = available and available * data_steps // self._steps
        if available is not None and needed > available:
            got = f"GlobalBatches(epochs={available})"
            remedy = f"pass GlobalBatches(epochs={needed}), or None"
            if available != self._data.plan.epochs:
                got = "GlobalBatches(growth='replace')"
                remedy = "call add_new_files after each epoch"
            raise ValueError(describe("epochs", f"{epochs}, with {got}", f"at most {most}", remedy))

    def check_saved(self) -> None:
        """Raise ValueError if a Supervisor cannot save and restore the position in the batches."""
        if self.may_end_anywhere:
            remedy = "set it: dataset.apply(tf.data.experimental.assert_cardinality(n))"
            raise ValueError(describe("x", "GlobalBatches of unknown length, with logdir=", "a known one", remedy))
        if self._data.plan.files is not None:
            remedy = "read them in a loop with hk.Supervisor, which restores the files of each epoch"
            raise ValueError(describe("x", "GlobalBatches(growth=), with logdir=", "one without growth=", remedy))

    @property
    def position(self) -> DataPosition | None:
        """The current position of training, for a Supervisor.

        None if Keras epochs differ from epochs of the data, or the length of the data is unknown.
        """
        return self._data if self._data_steps is not None and self._steps in (None, self._data_steps) else None

    def begin_training(self, epoch: int | None) -> None:
        """Move to the start of ``epoch``, unless a callback has restored a position within it."""
        if not self._trains:
            return
        start = self._start(epoch or self._initial_epoch)
        current = (self._data.epoch, self._data.step)
        is_within = self.position is not None and current >= start and current[0] == start[0]
        self._data.move_to(*(current if is_within else start))

    def _share_dataset(self) -> tf.data.Dataset:
        spec = self.inner.get_tf_dataset().element_spec[0]
        has_static_rows = tf.nest.flatten(spec)[0].shape[0] is not None
        may_end_anywhere = self.may_end_anywhere

        def take(data: Tensors, rows: tf.Tensor, digest: tf.Tensor) -> Element:
            _, _, info = self.data_rank.bounds_and_info(self._data.plan.batch_size if has_static_rows else rows)
            info["digest"] = digest
            if may_end_anywhere:
                info["may_end_anywhere"] = tf.constant(True)
            return self._add_class_weights(data), info

        return prefetched(self.inner.get_tf_dataset().map(take), self._data.plan)

    def _global_dataset(self) -> tf.data.Dataset:
        dataset = self.inner.get_tf_dataset()
        dataset = dataset.map(lambda data, rows, digest: (self._add_class_weights(data), {}))
        return prefetched(dataset, self._data.plan)

    def _add_class_weights(self, data: Tensors) -> Tensors:
        """Return a batch with class weights, or unchanged without them."""
        if self._class_weight is None:
            return data
        weigh = make_class_weight_map_fn(self._class_weight)
        return weigh(*data) if isinstance(data, tuple) else weigh(data)

    def on_epoch_begin(self) -> None:
        """Restart at the first epoch of the data, except when training."""
        if not self._trains:
            self._data.move_to(self._data.plan.first_epoch, 0)

    @property
    def may_be_empty(self) -> bool:
        plan = self._data.plan
        examples = plan.source.examples
        if plan.remainder == "drop":
            return False
        return examples is None or 0 < examples % plan.batch_size < self.data_rank.size

    @property
    def may_end_anywhere(self) -> bool:
        return self._data_steps is None

    @property
    def num_batches(self) -> int | None:
        """Batches until the data end; None if unknown or endless."""
        return None if self._repeats else self._data_steps

    @property
    def mean_batch_size(self) -> float:
        return self._data.plan.mean_batch_size

    def settings(self) -> Mapping[str, object]:
        """Return the settings that must be equal on all ranks."""
        return self._data.plan.identity
