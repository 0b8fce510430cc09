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
from hvdkit.errors import CollectiveMismatchError
from hvdkit.machine.terminal import on_terminal
from hvdkit.sharding.variables import compare_variables
from hvdkit.training.data_end import report_end_of_data
from hvdkit.training.fit_session import FitSession
from hvdkit.training.model_optimizers import check_originals, optimizers_of
from hvdkit.training.shares import Shares

# Callbacks that write files or connect to a server.
_WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.RemoteMonitor,
)
_CHIEF_ONLY = (*_WRITERS, keras.callbacks.ProgbarLogger, keras.callbacks.History)  # may be passed on the chief only


def _reads_batch_logs(callback: Any) -> bool:
    """Return True if a callback reads the logs of training batches, which must then be combined over ranks."""
    if isinstance(callback, (keras.callbacks.ProgbarLogger, keras.callbacks.History)):
        return False
    if type(callback).__module__.startswith("hvdkit."):
        return False
    if isinstance(callback, keras.callbacks.TensorBoard):
        return callback.update_freq != "epoch"
    if isinstance(callback, (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)):
        return callback.save_freq != "epoch"
    return not (is_default(callback.on_batch_end) and is_default(callback.on_train_batch_end))


def _compare_callbacks(callbacks: list[Any], begin: Callable[[], None]) -> bool:
    """Call ``begin`` and compare the ranks' lists of callbacks; return whether any reads the logs of training batches.

    Ranks may differ in callbacks that write or display on the chief.
    """

    def describe_callbacks() -> tuple[list[str], bool]:
        begin()
        on_all_ranks = [c for c in callbacks if not (isinstance(c, _CHIEF_ONLY) or is_on_chief(c))]
        return [type(c).__name__ for c in on_all_ranks], any(map(_reads_batch_logs, callbacks))

    ranks = gather(cluster.exchange(), "callbacks' set_model", describe_callbacks)
    remedy = "pass the same list on every rank, and hk.callbacks.on_chief(callback) for what runs on the chief only"
    compare([names for names, _ in ranks], "callbacks", remedy)
    return any(reads_logs for _, reads_logs in ranks)


def _local_verbose(verbose: Any) -> Any:
    """Return this rank's ``verbose``; "auto" is a progress bar in terminals and notebooks, else a line per epoch."""
    if not cluster.is_chief():
        return 0
    if verbose == "auto":
        return 1 if on_terminal() or "ipykernel" in sys.modules else 2
    return verbose


class CallbackList(keras.callbacks.CallbackList):
    """Keras's list of callbacks, which also compares ranks at the end of each epoch.

    ``validation`` is evaluated after epochs; ``trains`` is False for evaluations and predictions.
    """

    def __init__(
        self,
        callbacks: Any,
        session: FitSession,
        data: Shares,
        validation: Shares | None = None,
        *,
        verbose: Any,
        epochs: int,
        steps: int | None,
        trains: bool = True,
    ) -> None:
        all_callbacks = tree.flatten(callbacks) if callbacks else []
        local_callbacks = [c for c in all_callbacks if cluster.is_chief() or not isinstance(c, _WRITERS)]
        local_verbose = _local_verbose(verbose)
        self._session, self._data = session, data
        self._test_data = validation if trains else data
        self._is_first_batch = self._is_first_update = True

        def begin() -> None:
            super(CallbackList, self).__init__(
                local_callbacks,
                add_history=trains,
                add_progbar=local_verbose != 0,
                verbose=local_verbose,
                epochs=epochs,
                steps=steps or data.num_batches,
                model=session.model,
            )

        self._combines_batch_logs = _compare_callbacks(all_callbacks, begin) and trains
        if self._combines_batch_logs:
            self._async_train = False  # an exchange in a thread could interleave with another one

    def on_train_begin(self, logs: Any = None) -> None:
        """Call the callbacks, then broadcast the chief's variables, as a callback may have restored them."""
        gather(cluster.exchange(), "callbacks' on_train_begin", lambda: super(CallbackList, self).on_train_begin(logs))
        self.model._initial_epoch = broadcast_object(self.model._initial_epoch)
        self._data.begin_training(self.model._initial_epoch)
        self._session.broadcast_again()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Call the callbacks; the first batch of the epoch will be compared."""
        self._is_first_batch = True
        self._session.may_end_anywhere = self._data.may_end_anywhere
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks, after comparing the first global batch of an epoch between ranks."""
        if self._is_first_batch:
            self._compare_batch()
        if self._is_first_update:
            self._compare_weights()
        if not self._combines_batch_logs:
            super().on_train_batch_end(batch, logs)
            return
        logs = self._session.metric_combiner.combine(logs)
        when = f"on_train_batch_end of batch {batch}"
        self._agree(when, lambda: super(CallbackList, self).on_train_batch_end(batch, logs))

    def on_test_begin(self, logs: Any = None) -> None:
        """Call the callbacks; the first batch of the evaluation will be compared."""
        self._is_first_batch = True
        self._session.may_end_anywhere = self._test_data is not None and self._test_data.may_end_anywhere
        super().on_test_begin(logs)

    def on_predict_end(self, logs: Any = None) -> None:
        """Call the callbacks, after the last batch on every rank."""
        if self._data.may_end_anywhere:
            report_end_of_data()
        super().on_predict_end(logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks, after comparing the first global batch between ranks."""
        if self._is_first_batch:
            self._compare_batch()
        super().on_test_batch_end(batch, logs)

    def _compare_batch(self) -> None:
        """Compare the ranks' global batches, and check that the state of all metrics can be combined."""
        self._is_first_batch = False

        def digest() -> int:
            self._session.metric_checks.check()
            return int(self._session.steps.digests.numpy())

        digests = gather(cluster.exchange(), "the first global batch", digest)
        remedy = "give shuffle(), random maps and splits of the dataset a seed, and every rank the same files"
        compare(digests, "x", remedy, show=lambda *_: ("a different first batch", "equal global batches"))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Call the callbacks. An error on one rank raises on all ranks, and either all ranks stop or none."""

        def call() -> None:
            super(CallbackList, self).on_epoch_end(epoch, logs)
            check_originals(self.model)

        self._agree(f"on_epoch_end of epoch {epoch}", call)

    def _compare_weights(self) -> None:
        """Compare weights after the first update; they differ if an optimizer does not combine gradients."""
        self._is_first_update = False
        try:
            compare_variables(self.model.trainable_variables)
        except CollectiveMismatchError as error:
            remedy = "keep every optimizer of train_step in an attribute of the model, so that hk.fit distributes it"
            raise CollectiveMismatchError(f"after the first update: {error}; {remedy}") from error

    def _agree(self, when: str, call: Callable[[], None]) -> None:
        """Call the callbacks and compare their decisions, which must be equal on all ranks."""

        def decide() -> dict[str, Any]:
            call()
            rates = [float(np.asarray(optimizer.learning_rate)) for optimizer in optimizers_of(self.model)]
            return {"stop_training": bool(self.model.stop_training), "learning rates": rates}

        remedy = "decide from the logs, which are equal on all ranks"
        agree(cluster.exchange(), decide, f"callbacks' {when}", remedy)
