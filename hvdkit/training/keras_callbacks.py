"""Callbacks of ``hk.fit``: those that write files run on the chief, all others on every rank with equal logs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras.src import tree
from keras.src.utils import is_default

from hvdkit import cluster
from hvdkit.callbacks.chief import is_on_chief
from hvdkit.cluster.agreement import agree, compare, gather
from hvdkit.collectives import broadcast_object
from hvdkit.errors import CollectiveMismatchError, describe
from hvdkit.machine.terminal import on_terminal
from hvdkit.sharding.variables import compare_variables
from hvdkit.training.data_end import at_end_of_data
from hvdkit.training.fit_session import Session
from hvdkit.training.losses import check_loss
from hvdkit.training.preparation import check_originals, optimizers_of
from hvdkit.training.shares import Shares

_own = keras.callbacks
# Callbacks that write files or connect to a server.
WRITERS = (_own.ModelCheckpoint, _own.CSVLogger, _own.TensorBoard, _own.BackupAndRestore, _own.RemoteMonitor)
_OF_CHIEF = (*WRITERS, _own.ProgbarLogger, _own.History)  # may be passed on the chief only


def checked_model(model: Any) -> None:
    """Raise if ``model`` is not a compiled Keras model that ``hk.fit`` can train."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            describe("model", type(model).__name__, "a Keras model", "pass the model first: hk.fit(model, x)")
        )
    if not model.compiled:
        raise ValueError(describe("model", "one that is not compiled", "a compiled model", "call model.compile before"))
    for loss in tree.flatten(model.loss):
        if isinstance(loss, keras.losses.Loss):
            check_loss(loss)


def _sees_batches(callback: Any) -> bool:
    """Return True if a callback reads the logs of training batches, which must then be combined over ranks."""
    if type(callback).__module__.startswith("hvdkit.") or isinstance(callback, (_own.ProgbarLogger, _own.History)):
        return False
    if isinstance(callback, _own.TensorBoard):
        return callback.update_freq != "epoch"
    if isinstance(callback, (_own.ModelCheckpoint, _own.BackupAndRestore)):
        return callback.save_freq != "epoch"
    return not (is_default(callback.on_batch_end) and is_default(callback.on_train_batch_end))


def _compared(listed: list[Any], begin: Callable[[], None]) -> bool:
    """Compare the ranks' lists of callbacks; return whether any callback reads the logs of training batches.

    Raises:
        CollectiveMismatchError: the lists differ, except for callbacks that write or display on the chief.
    """

    def names() -> tuple[list[str], bool]:
        begin()
        kept = [type(c).__name__ for c in listed if not (isinstance(c, _OF_CHIEF) or is_on_chief(c))]
        return kept, any(map(_sees_batches, listed))

    ranks = gather(cluster.exchange(), "callbacks' set_model", names)
    remedy = "pass the same list on every rank, and hk.callbacks.on_chief(callback) for what runs on the chief only"
    compare([kept for kept, _ in ranks], "callbacks", remedy)
    return any(sees for _, sees in ranks)


def _shown(verbose: Any) -> Any:
    """Return this rank's ``verbose``; "auto" is a progress bar in terminals and notebooks, else a line per epoch."""
    if not cluster.is_chief():
        return 0
    if verbose == "auto":
        return 1 if on_terminal() or "ipykernel" in sys.modules else 2
    return verbose


class Callbacks(keras.callbacks.CallbackList):
    """Keras's list of callbacks, which also compares ranks at the end of each epoch.

    Args:
        callbacks: the user's callback, a list of them, or None.
        session: the session of the model.
        verbose, epochs, steps: as in Keras.
        data: the data for training, evaluation or prediction.
        validation: the data evaluated after epochs.
        trains: False for evaluations and predictions.
    """

    def __init__(
        self,
        callbacks: Any,
        session: Session,
        data: Shares,
        validation: Shares | None = None,
        *,
        verbose: Any,
        epochs: int,
        steps: int | None,
        trains: bool = True,
    ) -> None:
        listed = tree.flatten(callbacks) if callbacks else []
        mine = [c for c in listed if cluster.is_chief() or not isinstance(c, WRITERS)]
        shown = _shown(verbose)
        self._session, self._data = session, data
        self._tested = validation if trains else data
        self._is_first_batch = self._is_first_test_batch = self._is_first_update = True

        def begin() -> None:
            super(Callbacks, self).__init__(
                mine,
                add_history=trains,
                add_progbar=shown != 0,
                verbose=shown,
                epochs=epochs,
                steps=steps or data.num_batches,
                model=session.model,
            )

        self._shares_batches = _compared(listed, begin) and trains
        if self._shares_batches:
            self._async_train = False  # an exchange in a thread could interleave with another one

    def on_train_begin(self, logs: Any = None) -> None:
        """Call the callbacks, then broadcast the chief's variables, as a callback may have restored them."""
        gather(cluster.exchange(), "callbacks' on_train_begin", lambda: super(Callbacks, self).on_train_begin(logs))
        self.model._initial_epoch = broadcast_object(self.model._initial_epoch)
        self._data.begin(self.model._initial_epoch)
        self._session.begin_again()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Call the callbacks; the first batch of the epoch will be compared."""
        self._is_first_batch = True
        self._session.may_end_anywhere = self._data.may_end_anywhere
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks, after comparing the first global batch of an epoch between ranks."""
        if self._is_first_batch:
            self._is_first_batch = False
            self._compare_batch()
        if self._is_first_update:
            self._is_first_update = False
            self._compare_weights()
        if not self._shares_batches:
            super().on_train_batch_end(batch, logs)
            return
        logs = self._session.global_logs(logs)
        when = f"on_train_batch_end of batch {batch}"
        self._agree(when, lambda: super(Callbacks, self).on_train_batch_end(batch, logs))

    def on_test_begin(self, logs: Any = None) -> None:
        """Call the callbacks; the first batch of the evaluation will be compared."""
        self._is_first_test_batch = True
        self._session.may_end_anywhere = self._tested is not None and self._tested.may_end_anywhere
        super().on_test_begin(logs)

    def on_predict_end(self, logs: Any = None) -> None:
        """Call the callbacks, after the last batch on every rank."""
        if self._data.may_end_anywhere:
            at_end_of_data()
        super().on_predict_end(logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks, after comparing the first global batch between ranks."""
        if self._is_first_test_batch:
            self._is_first_test_batch = False
            self._compare_batch()
        super().on_test_batch_end(batch, logs)

    def _compare_batch(self) -> None:
        """Compare the ranks' global batches, and check that the state of all metrics can be combined."""

        def digest() -> int:
            self._session.check_metrics()
            return int(self._session.steps.digests.numpy())

        digests = gather(cluster.exchange(), "the first global batch", digest)
        remedy = "give shuffle(), random maps and splits of the dataset a seed, and every rank the same files"
        compare(digests, "x", remedy, show=lambda *_: ("another first batch", "equal global batches"))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Call the callbacks. An error on one rank raises on all ranks, and either all ranks stop or none."""

        def call() -> None:
            super(Callbacks, self).on_epoch_end(epoch, logs)
            check_originals(self.model)

        self._agree(f"on_epoch_end of epoch {epoch}", call)

    def _decisions(self) -> dict[str, Any]:
        """Return the decisions of callbacks that must be equal on all ranks."""
        rates = [float(np.asarray(each.learning_rate)) for each in optimizers_of(self.model)]
        return {"stop_training": bool(self.model.stop_training), "learning rates": rates}

    def _compare_weights(self) -> None:
        """Compare weights after the first update; they differ if an optimizer does not combine gradients.

        Raises:
            CollectiveMismatchError: the weights differ.
        """
        try:
            compare_variables(self.model.trainable_variables)
        except CollectiveMismatchError as error:
            remedy = "keep every optimizer of train_step in an attribute of the model, where hk.fit distributes it"
            raise CollectiveMismatchError(f"after the first update: {error}; {remedy}") from error

    def _agree(self, when: str, call: Callable[[], None]) -> None:
        """Call the callbacks and compare their decisions."""

        def decide() -> dict[str, Any]:
            call()
            return self._decisions()

        remedy = "decide from the logs, which are equal on all ranks"
        agree(cluster.exchange(), decide, f"callbacks' {when}", remedy)
