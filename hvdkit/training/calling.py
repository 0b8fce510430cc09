"""Callbacks of ``hk.fit``: those that write run on the chief, the others on every rank with equal logs."""

from __future__ import annotations

from typing import Any

import keras
from keras.src import tree

from hvdkit import cluster
from hvdkit.collectives import broadcast_object
from hvdkit.collectives.agreement import Call, agree, attempt
from hvdkit.errors import CollectiveMismatchError, HvdkitError, describe
from hvdkit.training.hooks import Session

_own = keras.callbacks
# They write files, or talk to a server.
WRITERS = (_own.ModelCheckpoint, _own.CSVLogger, _own.TensorBoard, _own.BackupAndRestore, _own.RemoteMonitor)


def checked_model(model: Any) -> None:
    """Raise if ``model`` is not a compiled Keras model that ``hk.fit`` can train."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            describe("model", type(model).__name__, "a Keras model", "pass the model first: hk.fit(model, x)")
        )
    if not model.compiled:
        raise ValueError(describe("model", "one that is not compiled", "a compiled model", "call model.compile before"))
    if cluster.size() > 1:
        _check_layers(model)
        _check_losses(model)


def _check_layers(model: Any) -> None:
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Masking) or getattr(layer, "mask_zero", False):
            got, remedy = (
                f"{layer.name!r}, which makes a mask",
                "leave mask_zero and Masking out, or pass sample_weight",
            )
            raise HvdkitError(describe("model", got, "layers that hk.fit supports so far", remedy))


def _check_losses(model: Any) -> None:
    losses = tree.flatten(model.loss) if model.loss is not None else []
    for loss in losses:
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in ("sum_over_batch_size", "mean"):
            got = f"{getattr(loss, 'name', loss)} with reduction={reduction!r}"
            remedy = "use reduction='sum_over_batch_size'"
            raise HvdkitError(describe("loss", got, "a loss that hk.fit supports so far", remedy))


class Callbacks(keras.callbacks.CallbackList):
    """Keras's list of callbacks, whose ranks agree at the end of each epoch.

    Args:
        callbacks: a callback, a list of them, or None.
        session: of the model.
        verbose, epochs, steps: as in Keras.
        trains: False for evaluations and predictions.
    """

    def __init__(
        self, callbacks: Any, session: Session, *, verbose: Any, epochs: int, steps: int | None, trains: bool = True
    ) -> None:
        listed = tree.flatten(callbacks) if callbacks else []
        mine = [c for c in listed if cluster.is_chief() or not isinstance(c, WRITERS)]
        shown = verbose if cluster.is_chief() else 0
        self._session = session
        self._is_first_batch = self._is_first_test_batch = True
        super().__init__(
            mine,
            add_history=trains,
            add_progbar=shown != 0,
            verbose=shown,
            epochs=epochs,
            steps=steps,
            model=session.model,
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """Call the callbacks; then every rank goes on with the chief's variables, which one may have restored."""
        problem = attempt(lambda: super(Callbacks, self).on_train_begin(logs))
        self._agree("on_train_begin", problem, None)
        self.model._initial_epoch = broadcast_object(self.model._initial_epoch)
        self._session.begin_again()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Call the callbacks; the first batch of the epoch is compared."""
        self._is_first_batch = True
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks, after the ranks have compared the global batch if it is an epoch's first."""
        if self._is_first_batch:
            self._is_first_batch = False
            self._compare_batch()
        super().on_train_batch_end(batch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Call the callbacks; the first batch of the evaluation is compared."""
        self._is_first_test_batch = True
        super().on_test_begin(logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks, after the ranks have compared the global batch if it is the first."""
        if self._is_first_test_batch:
            self._is_first_test_batch = False
            self._compare_batch()
        super().on_test_batch_end(batch, logs)

    def _compare_batch(self) -> None:
        digest = self._session.steps.last_digest
        calls = agree(Call("the first global batch", payload=0 if digest is None else int(digest.numpy())))
        for rank, call in enumerate(calls):
            if call.payload != calls[0].payload:
                got, expected = (
                    f"another first batch on rank {rank} than on rank 0",
                    "equal global batches on all ranks",
                )
                remedy = "give shuffle(), random maps and splits of the dataset a seed, and every rank the same files"
                raise CollectiveMismatchError(describe("x", got, expected, remedy))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Call the callbacks; what one raises on one rank raises on all, and all stop or none does."""
        problem = attempt(lambda: super(Callbacks, self).on_epoch_end(epoch, logs))
        self._agree(f"on_epoch_end of epoch {epoch}", problem, bool(self.model.stop_training))

    def _agree(self, when: str, problem: Exception | None, decision: Any) -> None:
        calls = agree(Call(f"callbacks' {when}", payload=decision, problem=problem))
        for rank, call in enumerate(calls):
            if call.payload != calls[0].payload:
                got, expected = f"{call.payload} on rank {rank} in {when}", f"{calls[0].payload}, as on rank 0"
                remedy = "decide from the logs, which are equal on all ranks"
                raise CollectiveMismatchError(describe("callbacks", got, expected, remedy))
