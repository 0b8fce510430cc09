"""The Supervisor as a Keras callback."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras

from hvdkit import cluster
from hvdkit.checkpoint.files import RunPath, run_path
from hvdkit.cluster.agreement import gather
from hvdkit.cluster.logs import get_logger
from hvdkit.data.position import ArrayPosition
from hvdkit.errors import CheckpointError, HvdkitError, describe
from hvdkit.keras.callback_states import CallbackStates, RestorableState, check_callbacks, continue_logs
from hvdkit.keras.fit_session import is_running
from hvdkit.keras.measured_function import choice_of
from hvdkit.keras.plain_fit import CheckedCallback
from hvdkit.keras.step_callbacks import stateful_callbacks
from hvdkit.keras.supervised_fit import begin_supervision, end_supervision
from hvdkit.optimizer.inner_optimizers import keeps_averages
from hvdkit.sharding.shards import AnyVariable
from hvdkit.supervisor.session import Supervisor
from hvdkit.supervisor.summaries import numbers_in

if TYPE_CHECKING:
    from hvdkit.data.batches import GlobalBatches
    from hvdkit.data.position import DataPosition


class SupervisorCallback(CheckedCallback):
    """Run ``hk.Supervisor`` in ``model.fit``: restore or initialize, save, write summaries, and stop.

    When the user starts the same script again, ``fit`` resumes at the epoch and batch of the last save. Replaces
    ``hk.callbacks.BroadcastInitial``, ``keras.callbacks.BackupAndRestore`` and ``keras.callbacks.TensorBoard``. Put
    callbacks that read the restored state after it, and callbacks that change saved state after each step before it.

    In plain ``fit``, put the callbacks of ``callbacks=`` before it, but ``CSVLogger`` after it.

    Args:
        logdir: the run's folder, shared by all ranks, or its URL in an object store.
        until: end ``fit`` after this total number of steps; a run that has already reached it doesn't train.
        data: the ``GlobalBatches`` whose ``as_keras()`` is passed to plain ``fit``; its position is saved. Without it,
            plain ``fit`` resumes at the beginning of its last epoch. ``hk.fit`` knows its data.
        variables: as for ``hk.Supervisor``.
        state: as for ``hk.Supervisor``. States of hvdkit's callbacks (warm-up, step counts) are also saved.
        callbacks: callbacks of the same plain ``fit`` whose states are saved, too: ``EarlyStopping``,
            ``ReduceLROnPlateau``, ``ModelCheckpoint``, and others that define ``get_state()``, which returns plain
            JSON values, and ``set_state(state)``. ``hk.fit`` passes all its callbacks. A ``CSVLogger`` appends if the
            run continues. If ``EarlyStopping`` has ended the run, it doesn't train.
        save_epochs: also save at the end of epochs, as long as saves take less than a tenth of the time.
        **options: any other argument of ``hk.Supervisor``: ``save_model_secs``, ``max_to_keep``, ...

    Attributes:
        supervisor: the session of the current or last ``fit``; None before the first.
        stopped_by: the class of a restored callback that had ended the run, which ``fit`` then doesn't continue; or "".

    Raises:
        TypeError: an element of ``callbacks`` is not a Keras callback.
        ValueError: ``callbacks`` contains a ``SwapEMAWeights(swap_on_epoch=True)``, whose averages would be saved.
        HvdkitError: in ``fit``, as for ``hk.Supervisor``.
        SystemExit: with code 75, after SIGTERM, SIGINT or SIGUSR1: at the end of ``fit``, or instead of the validation
            of an incomplete epoch, without calling ``on_epoch_end`` and ``on_train_end`` of other callbacks.

    Examples:
        >>> import tempfile
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> data = np.ones((24, 4), "float32"), np.ones((24, 1), "float32")
        >>> batches = hk.data.GlobalBatches(data, 12, shuffle_seed=0)
        >>> logdir = hk.broadcast_object(tempfile.mkdtemp())  # one folder for all ranks, e.g. "runs/mnist"
        >>> supervisor = hk.callbacks.SupervisorCallback(logdir, data=batches, save_model_secs=60)
        >>> callbacks = [supervisor, hk.callbacks.MetricAverage()]
        >>> history = model.fit(batches.as_keras(), epochs=3, verbose=0, callbacks=callbacks)
        >>> supervisor.supervisor.global_step, hk.checkpoint.latest(logdir).name
        (6, 'step-000000006')
    """

    def __init__(
        self,
        logdir: str | RunPath,
        *,
        until: int | None = None,
        data: GlobalBatches | None = None,
        variables: Iterable[AnyVariable] = (),
        state: Mapping[str, Any] | None = None,
        callbacks: keras.callbacks.Callback | Iterable[keras.callbacks.Callback] = (),
        save_epochs: bool = False,
        **options: Any,
    ):
        super().__init__()
        self.supervisor: Supervisor | None = None
        self._logdir = run_path(logdir, "logdir")
        self._until = until
        self._given_data = data
        self._data: GlobalBatches | ArrayPosition | DataPosition | None = data
        self._options = options
        self._variables = list(variables)
        self._state = dict(state or {})
        self._callbacks = check_callbacks(callbacks)
        self._states = CallbackStates([], [])
        self._has_states = False  # whether a callback of any rank has a state that changes at the end of an epoch
        self.stopped_by = ""
        self._save_epochs = save_epochs
        self._epoch_steps = 0  # steps done in this epoch
        self._remaining_steps = 0  # steps left in an epoch that an earlier run began; 0 for any other epoch
        self._step_counters: list[Any] = []
        self._epoch = _Epoch()

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Restore or initialize, and set Keras's initial epoch."""
        self._step_counters = stateful_callbacks(self.model)
        self._epoch = _Epoch()
        choice = choice_of(self.model)
        own: list[RestorableState] = [*self._step_counters, self._epoch, *([] if choice is None else [choice])]
        self._states = CallbackStates(own, self._callbacks)
        # Callbacks that write files run on the chief only.
        self._has_states = any(gather(cluster.exchange(), "states of callbacks", lambda: self._states.change_at_end))
        self.supervisor = Supervisor(
            self._logdir,
            model=self.model,
            data=self._data,
            variables=self._variables,
            state={**self._state, **self._states.to_save()},
            **self._options,
        )
        is_plain_fit = not is_running(self.model)
        self.supervisor.enter_fit(reports=is_plain_fit)
        begin_supervision(self.model, of_plain_fit=is_plain_fit)
        self._set_initial_epoch()
        if is_plain_fit:
            self._states.apply()  # to the callbacks before this one, which Keras calls first

    def _set_initial_epoch(self) -> None:
        step = self._session.global_step
        steps = self._steps_per_epoch() or 0
        if steps % self.model.steps_per_execution:  # Keras would then run into the next epoch
            got = self.model.steps_per_execution
            expected = f"a divisor of the epoch's {steps} steps"
            raise ValueError(describe("steps_per_execution", got, expected, "pass one to model.compile"))
        epoch, done_steps = self._epoch_at(step, steps)
        self.stopped_by = self._states.stopped_by
        initial_epoch = sys.maxsize if self._is_done() or self.stopped_by else epoch
        self.model._initial_epoch = initial_epoch
        if self._session.restored_from is not None:
            continue_logs(self._callbacks, initial_epoch)
        self._remaining_steps = 0
        if done_steps and (self._data is None or not self._data.state["step"]):
            message = (
                "fit: continues at step %d, in the middle of an epoch, whose batches are repeated; to continue within "
                "the epoch, train on arrays or hk.data.GlobalBatches: hk.fit(model, batches, logdir=...), or in plain "
                "fit, SupervisorCallback(logdir, data=batches)"
            )
            if cluster.is_chief() and initial_epoch < self.params["epochs"]:
                get_logger().warning(message, step)
        elif done_steps and steps:
            self._remaining_steps = steps - done_steps
        if isinstance(self._data, ArrayPosition):
            self._data.repeated = step - epoch * steps - self._steps_begun

    def _epoch_at(self, step: int, steps: int) -> tuple[int, int]:
        """Return the epoch at ``step``, and how many of its steps are done. Batches may have been repeated before."""
        if steps and self._data is not None and self._session.restored_from is not None:
            state = self._data.state
            if state["epoch"] or state["step"]:
                return state["epoch"], state["step"]
        epoch, done = self._epoch.at(step)
        return (epoch + done // steps, done % steps) if steps else (epoch, done)

    @property
    def _steps_begun(self) -> int:
        """The steps of this epoch that an earlier run has done, if they are not repeated."""
        return (self._steps_per_epoch() or 0) - self._remaining_steps if self._remaining_steps else 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Start counting the batches of this epoch."""
        super().on_epoch_begin(epoch, logs)
        self._states.apply(last=True)  # now that all callbacks have begun training
        self.model._initial_epoch = None  # has been read, and is not for the fit of a callback
        self._epoch_steps = 0
        self._epoch.begin(epoch, self._session.global_step - self._steps_begun)

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Count the steps done; with ``steps_per_execution``, Keras calls once for several steps."""
        for callback in self._step_counters:
            callback.count(batch)  # before a save reads their states, as they may run after this callback
        steps = batch + 1 - self._epoch_steps
        self._epoch_steps = batch + 1
        session = self._session
        session.advance(steps, logs or {}, prefetched=True)
        if session.should_stop() or self._is_done():
            self.model.stop_training = True
        elif self._remaining_steps and self._epoch_steps >= self._remaining_steps and not self.model.stop_training:
            self.model.stop_training = _END_OF_EPOCH

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        """End ``fit`` without validation if a signal stopped it within an epoch: the launcher may soon kill the ranks.

        An epoch that is complete is validated: the next run does not repeat it.
        """
        if self.supervisor is not None and self.supervisor.preempted and not self._is_epoch_complete():
            self._end_session()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Write the epoch's metrics, and continue ``fit`` after an epoch that an earlier run began."""
        if not self.model.stop_training:  # otherwise training stopped within the epoch
            self._epoch.begin(epoch + 1, self._session.global_step)
        self._session.summary(**numbers_in({f"epoch_{name}": value for name, value in (logs or {}).items()}))
        if self._remaining_steps and self._data is not None and not self._session.preempted:
            self._remaining_steps = 0
            self._data.restore(self._data.state_at(self._session.global_step))  # the next pass starts here
        if self.model.stop_training is _END_OF_EPOCH:
            self.model.stop_training = False
        if not is_running(self.model):
            end_epoch(self, epoch)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Save any unsaved state and end the session."""
        self._end_session()

    def _end_session(self) -> None:
        self._states.apply(last=True)  # also if there was no epoch
        end_supervision(self.model)
        self._session.__exit__(None, None, None)

    @property
    def _session(self) -> Supervisor:
        if self.supervisor is None:
            raise HvdkitError("SupervisorCallback: used outside model.fit")
        return self.supervisor

    def _is_done(self) -> bool:
        return self._until is not None and self._session.global_step >= self._until

    def _is_epoch_complete(self) -> bool:
        steps = self._steps_per_epoch()
        return steps is not None and self._epoch.at(self._session.global_step)[1] % steps == 0

    def _steps_per_epoch(self) -> int | None:
        return self.params.get("steps") if self._data is None else self._data.steps_per_epoch


def join_fit(
    supervisor: SupervisorCallback,
    callbacks: Iterable[keras.callbacks.Callback],
    position: ArrayPosition | DataPosition | None,
) -> None:
    """Have a Supervisor save the states of an ``hk.fit``: its callbacks', and the position if the user gave no data."""
    supervisor._callbacks = [each for each in callbacks if each is not supervisor]
    if supervisor._given_data is None:
        supervisor._data = position


@contextlib.contextmanager
def closing_sessions(callbacks: Iterable[keras.callbacks.Callback]) -> Iterator[None]:
    """Close the sessions of an ``hk.fit`` that raises, which releases their folders. Not collective."""
    try:
        yield
    except BaseException:
        for callback in callbacks:
            if isinstance(callback, SupervisorCallback) and callback.supervisor is not None:
                with contextlib.suppress(CheckpointError):  # its folder may be gone
                    callback.supervisor.close()
        raise


def steps_begun(supervisor: SupervisorCallback) -> int:
    """Return the steps of the current epoch that an earlier run has trained, and this one does not repeat."""
    return supervisor._steps_begun


def end_epoch(supervisor: SupervisorCallback, epoch: int) -> None:
    """Save at the end of an epoch. ``hk.fit`` calls it after the ``on_epoch_end`` of all callbacks."""
    session = supervisor._session
    model = supervisor.model
    has_decided = supervisor._has_states
    is_last = model.stop_training or epoch + 1 >= supervisor.params["epochs"]
    if session.preempted:
        if has_decided and supervisor._is_epoch_complete():  # the save in its last step was before its end
            session.save()
    elif keeps_averages(model.optimizer) or (is_last and has_decided):
        # Before on_train_end, Keras replaces the weights by their averages, and EarlyStopping by the best ones.
        session.save(wait=False)
    else:
        session.end_epoch(saves=supervisor._save_epochs, has_changed=has_decided)


# Ends the epoch like stop_training = True, but is distinguishable from another callback's request to stop.
_END_OF_EPOCH = object()


class _Epoch:
    """The current epoch and its first step. The class name is a key in checkpoints."""

    def __init__(self) -> None:
        self._number = self._first_step = 0

    def begin(self, number: int, step: int) -> None:
        """Begin an epoch at ``step``."""
        self._number = number
        self._first_step = step

    def at(self, step: int) -> tuple[int, int]:
        """Return the epoch at ``step`` and the number of its steps that are done."""
        return self._number, step - self._first_step

    @property
    def state(self) -> dict[str, int]:
        """Return the state to save."""
        return {"number": self._number, "first_step": self._first_step}

    def restore(self, state: dict[str, int]) -> None:
        """Continue from a saved ``state``."""
        self.begin(state["number"], state["first_step"])
