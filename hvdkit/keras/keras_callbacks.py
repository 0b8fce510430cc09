"""Callbacks of ``hk.fit``: those that write files run on the chief, all others on every rank with equal logs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from hvdkit import cluster
from hvdkit.cluster.agreement import compare, gather
from hvdkit.cluster.logs import warn_once
from hvdkit.cluster.progress import progress
from hvdkit.errors import CollectiveMismatchError, describe, see
from hvdkit.internals import is_default, pythonify_logs
from hvdkit.keras.callback_states import refuse_swapped_averages
from hvdkit.keras.checking.step_recording import StepRecorder
from hvdkit.keras.chief import StopRequest, is_on_chief
from hvdkit.keras.chief_variables import build_for
from hvdkit.keras.data_end import report_end_of_data
from hvdkit.keras.fit_session import FitSession
from hvdkit.keras.metric_combiner import Logs
from hvdkit.keras.model_optimizers import optimizers_of
from hvdkit.keras.row_gathering import gather_rows
from hvdkit.keras.shares import AnyTensor, Shares
from hvdkit.keras.supervisor_callback import SupervisorCallback, end_epoch, join_fit, steps_begun
from hvdkit.keras.trained_epochs import TrainedEpochs
from hvdkit.layers.batch_norm import check_batch_normalization
from hvdkit.machine.terminal import on_terminal
from hvdkit.optimizer.inner_optimizers import updaters_of
from hvdkit.sharding.shards import variable_optimizer
from hvdkit.sharding.variables import compare_variables
from hvdkit.supervisor.session import restored_of_ranks

T = TypeVar("T")
# Callbacks that write files or connect to a server.
WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.RemoteMonitor,
    *filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)]),  # since Keras 3.14
)
# Library and class of trackers' callbacks with hooks of batches, and the attribute that says whether they log batches.
_TRACKERS = {
    ("wandb", "WandbMetricsLogger"): "logging_batch_wise",
    ("mlflow", "MlflowCallback"): "log_every_n_steps",
}
_DISPLAYS = (keras.callbacks.ProgbarLogger, keras.callbacks.History)
_CHIEF_ONLY = (*WRITERS, *_DISPLAYS)  # may be passed on the chief only


def _tracker(callback: keras.callbacks.Callback) -> tuple[str, str]:
    """Return the library and the class of a callback."""
    return type(callback).__module__.partition(".")[0], type(callback).__name__


def _reads_batch_logs(callback: keras.callbacks.Callback) -> bool:
    """Return True if a callback reads the logs of training batches, which must then be combined over ranks."""
    if isinstance(callback, _DISPLAYS):
        return False
    if type(callback).__module__.startswith("hvdkit."):
        return isinstance(callback, StepRecorder)
    if isinstance(callback, keras.callbacks.TensorBoard):
        return bool(callback.update_freq != "epoch")
    if isinstance(callback, (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)):
        return bool(callback.save_freq != "epoch")
    if (logs_batches := _TRACKERS.get(_tracker(callback))) is not None:
        return bool(getattr(callback, logs_batches))
    return not (is_default(callback.on_batch_end) and is_default(callback.on_train_batch_end))


def _global_output(output: AnyTensor, rows: np.ndarray) -> AnyTensor:
    """Return the rows of an output of all ranks, as a tensor. Every rank must call it."""
    is_composite = isinstance(output, (tf.RaggedTensor, tf.SparseTensor))
    gathered = gather_rows(output if is_composite else output.numpy(), rows, keep=True)
    return gathered if is_composite else tf.convert_to_tensor(gathered, output.dtype)


def _may_raise(callback: keras.callbacks.Callback) -> bool:
    """Return True for a callback with code of the user, which may raise an error on one rank only."""
    is_own = not type(callback).__module__.startswith(("keras.", "hvdkit."))
    return is_own or isinstance(callback, keras.callbacks.LambdaCallback)


class _Needs(NamedTuple):
    """What the callbacks of a rank need."""

    batch_logs: bool  # the logs of training batches, combined over ranks
    test_logs: bool  # those of test batches
    outputs: bool  # the outputs of batches, gathered from all ranks
    agreement: bool  # an exchange after each hook: they have code of the user, which may raise on one rank only
    restoring: bool  # a broadcast when training begins: they may have restored the model

    @classmethod
    def of(cls, callbacks: list[keras.callbacks.Callback]) -> _Needs:
        own = [each for each in callbacks if _may_raise(each)]  # those of Keras read neither test logs nor outputs
        return cls(
            batch_logs=any(map(_reads_batch_logs, callbacks)),
            test_logs=any(not is_default(each.on_test_batch_end) for each in own),
            outputs=any(not (is_default(each.on_batch_end) and is_default(each.on_predict_batch_end)) for each in own),
            agreement=bool(own),
            restoring=any(not isinstance(each, _DISPLAYS) for each in callbacks),
        )


def _compare_callbacks(callbacks: list[keras.callbacks.Callback], begin: Callable[[], None]) -> _Needs:
    """Call ``begin`` and compare the ranks' lists of callbacks; return what those of any rank need.

    Ranks may differ in callbacks that write or display on the chief.
    """

    def describe_callbacks() -> tuple[list[str], _Needs]:
        begin()
        on_all_ranks = [c for c in callbacks if not (isinstance(c, _CHIEF_ONLY) or is_on_chief(c))]
        return [type(c).__name__ for c in on_all_ranks], _Needs.of(callbacks)

    ranks = gather(cluster.exchange(), "callbacks' set_model", describe_callbacks)
    for callback in callbacks if cluster.size() > 1 and cluster.is_chief() else ():
        if _tracker(callback) in _TRACKERS and not is_on_chief(callback):
            name = type(callback).__name__
            remedy = f"pass hk.callbacks.on_chief(lambda: {name}()) for one run"
            warn_once(f"callbacks: {name} logs a run on each of {cluster.size()} ranks; {remedy}")
    remedy = "pass the same list on every rank, and hk.callbacks.on_chief(callback) for what runs on the chief only"
    compare([names for names, _ in ranks], "callbacks", remedy)
    return _Needs(*(any(of_ranks) for of_ranks in zip(*(needs for _, needs in ranks), strict=True)))


def _check_averages(callbacks: Sequence[keras.callbacks.Callback], model: keras.Model) -> None:
    """Raise ValueError for ``SwapEMAWeights`` if it would swap only some of the averages, or a run would save them.

    It takes those of ``model.optimizer`` for whole ones, and does not know those of tables.
    """
    swaps = [each for each in callbacks if isinstance(each, keras.callbacks.SwapEMAWeights)]
    if not swaps:
        return
    if cluster.size() > 1 and getattr(getattr(model.optimizer, "_hvdkit", None), "shard_states", False):
        expected = "callbacks that do not need whole averages on each rank, with shard_states=True"
        raise ValueError(describe("callbacks", "SwapEMAWeights", expected, "leave shard_states out"))
    own = [variable_optimizer(variable) for variable in model.trainable_variables]
    if any(each.optimizer.use_ema for each in own if each is not None):
        expected = "tables whose own optimizers keep no averages, with this callback"
        raise ValueError(describe("callbacks", "SwapEMAWeights", expected, "leave use_ema out of these optimizers"))
    if any(isinstance(each, SupervisorCallback) for each in callbacks):
        refuse_swapped_averages(swaps)


def _local_verbose(verbose: int | str) -> int | str:
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
        callbacks: keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None,
        session: FitSession,
        data: Shares,
        validation: Shares | None = None,
        *,
        verbose: int | str,
        epochs: int,
        steps: int | None,
        trains: bool = True,
    ) -> None:
        all_callbacks = tree.flatten(callbacks) if callbacks else []
        local_callbacks = [c for c in all_callbacks if cluster.is_chief() or not isinstance(c, WRITERS)]
        self._session = session
        self.verbose = _local_verbose(verbose)
        self.trained = TrainedEpochs()  # epochs that have ended in this fit
        self._epoch_steps = 0
        self._data = data
        self._test_data = validation if trains else data
        self._is_first_batch = self._is_first_update = True
        self._stop_request = StopRequest()

        def begin() -> None:
            _check_averages(all_callbacks, session.model)
            super(CallbackList, self).__init__(
                local_callbacks,
                add_history=trains,
                add_progbar=self.verbose != 0,
                verbose=self.verbose,
                epochs=epochs,
                steps=steps or data.num_batches,
                model=session.model,
            )

        self.supervisors = [each for each in local_callbacks if isinstance(each, SupervisorCallback)]
        for supervisor in self.supervisors:
            join_fit(supervisor, local_callbacks, data.position)
        # Callbacks of the chief that other ranks do not have.
        on_chief = [each for each in local_callbacks if isinstance(each, WRITERS) or is_on_chief(each)]
        self._alone = on_chief if cluster.size() > 1 else []
        self._needs = _compare_callbacks(all_callbacks, begin)
        self._combines_batch_logs = self._needs.batch_logs and trains
        if self._combines_batch_logs:
            self._async_train = False  # an exchange in a thread could interleave with another one
        if self._needs.test_logs:
            self._async_test = False

    # ---- calling ------------------------------------------------------------------------------------------------

    def _call(self, hook: str, *args: object) -> None:
        """Call a hook of each callback; ``args`` ends with the logs, which they all share.

        As in Keras, hooks of batches get the logs by keyword, and the others by position: their argument may have
        another name.
        """
        *position, logs = args
        logs = pythonify_logs(logs)
        named = {"logs": logs} if "_batch_" in hook else {}
        given = position if named else [*position, logs]
        for callback in self.callbacks:
            if self._alone and callback in self._alone:
                noticing = self._stop_request.noticing(self.model, callback, hook)
                with self._session.running_alone(type(callback).__name__), noticing:
                    getattr(callback, hook)(*given, **named)
            else:
                getattr(callback, hook)(*given, **named)

    def _call_on_all_ranks(self, hook: str, *args: object) -> None:
        """Call a hook of each callback; an error on one rank raises on all ranks."""
        if self._needs.agreement:
            unit = "batch" if "_batch_" in hook else "epoch"
            when = f"callbacks' {hook}" + (f" of {unit} {args[0]}" if len(args) > 1 else "")
            self._gather(when, lambda: self._call(hook, *args))
        else:
            self._call(hook, *args)

    def _gather(self, when: str, call: Callable[[], T]) -> list[T]:
        """Return the results of ``call``, which calls callbacks, on all ranks; an error on one rank raises on all.

        All ranks stop if a callback of the chief has set ``stop_training``.
        """
        ranks = gather(cluster.exchange(), when, lambda: (call(), self._stop_request.is_made))
        if ranks[0][1]:
            self._stop_request.grant(self.model)
        return [result for result, _ in ranks]

    # ---- training -----------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Call the callbacks, then broadcast the chief's variables, as a callback may have restored them."""
        self._on_begin()
        model = self.model
        if self.supervisors and not model.built:
            build_for(model, self._data)
        if self._needs.restoring:

            def begin() -> tuple[int | None, bool]:
                self._call("on_train_begin", logs)
                return model._initial_epoch, model.optimizer is not None and model.optimizer.built

            ranks = self._gather("callbacks' on_train_begin", begin)
            model._initial_epoch, has_built_optimizer = ranks[0]
            sessions = [each.supervisor for each in self.supervisors if each.supervisor is not None]
            restored = [v for session in sessions for v in restored_of_ranks(session)]
            self._session.broadcast_again(self._data, has_built_optimizer=has_built_optimizer, restored=restored)
        else:
            self._call("on_train_begin", logs)
            self._session.broadcast_built(self._data)
        self._data.begin_training(model._initial_epoch)
        self._session.functions.before(self._data, trains=True)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Call the callbacks; the first batch of the epoch will be compared."""
        self._is_first_batch = True
        self._session.may_end_anywhere = self._data.may_end_anywhere
        self._data.begin_epoch(epoch)
        self._call_on_all_ranks("on_epoch_begin", epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._call("on_train_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Call the callbacks, after comparing the first global batch of an epoch between ranks."""
        self._epoch_steps = batch + 1
        if not self.supervisors:  # which count the steps of earlier runs, too
            progress().count_step(self.trained.steps + self._epoch_steps)
        if self._is_first_batch:
            self._compare_batch()
        if self._is_first_update:
            self._session.steps.check_step()
            self._compare_weights()
            progress().flight.notes.expect_examples(self._data.mean_batch_size)
        if self._async_train:
            super().on_train_batch_end(batch, logs)
        elif self._combines_batch_logs:
            combined = self._session.metric_combiner.combine(logs, of_batch=True)
            when = f"on_train_batch_end of batch {batch}"
            self._agree(when, lambda: self._call("on_train_batch_end", batch, combined))
        else:
            self._call("on_train_batch_end", batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, np.ndarray | float] | None = None) -> None:
        """Call the callbacks. An error on one rank raises on all ranks, and either all ranks stop or none."""
        begun = max(map(steps_begun, self.supervisors), default=0)
        stopped = bool(self.model.stop_training)
        self.trained.add(epoch, steps=self._epoch_steps, of=self.params.get("steps"), begun=begun, is_stopped=stopped)
        self._epoch_steps = 0
        if self._async_train:
            self._flush_futures()
        if logs and "loss" in logs:
            progress().flight.notes.at_loss(float(logs["loss"]))
        self._agree(f"on_epoch_end of epoch {epoch}", lambda: self._call("on_epoch_end", epoch, logs))
        for supervisor in self.supervisors:  # after what the others have decided
            end_epoch(supervisor, epoch)

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self._async_train:
            self._flush_futures()
        self._call_on_all_ranks("on_train_end", logs)
        self._on_end()

    # ---- evaluation and prediction ------------------------------------------------------------------------------

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Call the callbacks; the first batch of the evaluation will be compared."""
        self._is_first_batch = True
        self._session.may_end_anywhere = self._test_data is not None and self._test_data.may_end_anywhere
        self._on_begin()
        self._call_on_all_ranks("on_test_begin", logs)
        self._session.functions.before(self._test_data)

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._call("on_test_batch_begin", batch, logs)

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Call the callbacks, after comparing the first global batch between ranks."""
        if self._is_first_batch:
            self._compare_batch()
        if self._async_test:
            super().on_test_batch_end(batch, logs)
        elif self._needs.test_logs:
            combined = self._session.metric_combiner.combine(logs, of_batch=True)
            self._call_on_all_ranks("on_test_batch_end", batch, combined)
        else:
            self._call("on_test_batch_end", batch, logs)

    def on_test_end(self, logs: Logs | None = None) -> None:
        if self._async_test:
            self._flush_futures()
        self._call_on_all_ranks("on_test_end", logs)
        self._on_end()

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        self._on_begin()
        self._call_on_all_ranks("on_predict_begin", logs)
        self._session.functions.before(self._data)

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._call("on_predict_batch_begin", batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks, with the outputs of the global batch if a callback reads them."""
        outputs, rows = logs["outputs"]
        if self._needs.outputs and cluster.size() > 1:
            rows = np.asarray(rows)
            outputs = tree.map_structure(lambda x: _global_output(x, rows), outputs)
        if self._async_predict:
            super().on_predict_batch_end(batch, {"outputs": outputs})
        else:
            self._call("on_predict_batch_end", batch, {"outputs": outputs})

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Call the callbacks, after the last batch on every rank."""
        if self._data.may_end_anywhere:
            report_end_of_data()
        if self._async_predict:
            self._flush_futures()
        self._call_on_all_ranks("on_predict_end", logs)
        self._on_end()

    # ---- comparisons --------------------------------------------------------------------------------------------

    def _compare_batch(self) -> None:
        """Compare the ranks' global batches, and check that the state of all metrics can be combined."""
        self._is_first_batch = False

        def digest() -> tuple[int, list[int]]:
            self._session.metric_checks.check()
            return int(self._session.steps.digests.numpy()), self._session.steps.loss_scopes.test()

        found = gather(cluster.exchange(), "the first global batch", digest)
        digests = [digest for digest, _ in found]
        remedy = (
            "call keras.utils.set_random_seed(1) first, or give shuffle(), random maps and splits of data a seed; "
            "remove dataset.shard(size, rank), as hk.fit divides batches; give every rank the same files; a map with "
            "num_parallel_calls draws random numbers in any order: leave it out, or use tf.random.stateless_*; "
            f"{see('pitfalls#a-split-or-shuffle-without-a-seed')}"
        )
        if any(each is not None and each.has_workers for each in (self._data, self._test_data)):
            remedy = (
                "its workers draw random numbers in another order on each rank: set workers=1 and "
                "use_multiprocessing=False, or draw each batch from np.random.default_rng((seed, index))"
            )
        compare(digests, "x", remedy, show=lambda *_: ("a different first batch", "equal global batches"))
        self._session.steps.loss_scopes.decide([scopes for _, scopes in found])
        self._session.functions.after()

    def _compare_weights(self) -> None:
        """Compare weights after the first update; they differ if an optimizer does not combine gradients."""
        self._is_first_update = False
        check_batch_normalization(self.model)  # also layers that the first step has created
        try:
            compare_variables(self.model.trainable_variables)
        except CollectiveMismatchError as error:
            remedy = (
                "keep every optimizer of train_step in an attribute of the model, so that hk.fit distributes it; if "
                "train_step also moves weights by a gradient itself, as SAM does, average that with "
                f"hk.average_gradients first; {see('pitfalls#two-gradients-in-a-step-as-in-sam')}"
            )
            raise CollectiveMismatchError(f"after the first update: {error}; {remedy}") from error

    def _agree(self, when: str, call: Callable[[], None]) -> None:
        """Call the callbacks and compare their decisions, which must be equal on all ranks."""

        def decide() -> dict[str, object]:
            call()
            updaters = [each for optimizer in optimizers_of(self.model) for each in updaters_of(optimizer)]
            rates = [float(np.asarray(each.learning_rate)) for each in updaters]
            return {"stop_training": bool(self.model.stop_training), "learning rates": rates}

        remedy = "decide from the logs, which are equal on all ranks"
        compare(self._gather(f"callbacks' {when}", decide), f"callbacks' {when}", remedy)
