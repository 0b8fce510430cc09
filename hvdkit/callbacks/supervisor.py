"""The Supervisor as a Keras callback."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras

from hvdkit import cluster
from hvdkit.callbacks.steps import stateful_callbacks
from hvdkit.cluster.logs import get_logger
from hvdkit.errors import HvdkitError, describe
from hvdkit.optimizer.mixins import set_supervised
from hvdkit.supervisor.session import Supervisor


class SupervisorCallback(keras.callbacks.Callback):
    """Restores or initialises, saves, summarises and stops ``model.fit`` as :class:`hvdkit.Supervisor` does a loop.

    Start the same script again, and ``fit`` goes on in the epoch and at the batch where it was saved. It takes the
    place of :class:`BroadcastInitial`, ``keras.callbacks.BackupAndRestore`` and ``keras.callbacks.TensorBoard``.
    Callbacks after it see the restored state; one that changes what is saved, after each step, goes before it.

    Args:
        logdir: the run's folder, shared by all ranks.
        until: end ``fit`` when so many steps have been trained in all; a run that is there already trains none.
        data: the ``GlobalBatches`` whose ``as_keras()`` is given to ``fit``; its position is saved. Without it,
            ``fit`` goes on at the beginning of the epoch that it was in.
        variables: as for :class:`hvdkit.Supervisor`.
        state: likewise. The states of hvdkit's own callbacks (warm-up, step counts) are saved as well.
        **options: any other argument of :class:`hvdkit.Supervisor`: ``save_model_secs``, ``max_to_keep``, ...

    Attributes:
        supervisor: the session of the ``fit`` that runs, or ran last; None before.

    Raises:
        What the Supervisor raises; SystemExit with code 75 at the end of ``fit`` after SIGTERM or SIGINT.

    Example::

        keep = hk.callbacks.SupervisorCallback("runs/mnist", data=batches, save_model_secs=60)
        model.fit(batches.as_keras(), epochs=10, callbacks=[keep, hk.callbacks.MetricAverage()])
    """

    def __init__(
        self,
        logdir: str | Path,
        *,
        until: int | None = None,
        data: Any = None,
        variables: Iterable[Any] = (),
        state: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        super().__init__()
        self.supervisor: Supervisor | None = None
        self._logdir, self._until, self._data, self._options = logdir, until, data, options
        self._variables, self._state = list(variables), dict(state or {})
        self._seen = self._ends_at = 0  # batches of this epoch, and where it ends if it was begun by an earlier run
        self._counting: list[Any] = []
        self._epoch = _Epoch()

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore or initialise, and tell Keras the epoch to go on with."""
        self._counting, self._epoch = stateful_callbacks(self.model), _Epoch()
        self.supervisor = Supervisor(
            self._logdir,
            model=self.model,
            data=self._data,
            variables=self._variables,
            state={**self._state, "callbacks": _States([*self._counting, self._epoch])},
            **self._options,
        )
        self.supervisor.enter_fit()
        set_supervised(self.model, True)
        self._find_place()

    def _find_place(self) -> None:
        step, steps = self._session.global_step, self._steps_per_epoch() or 0
        if steps % self.model.steps_per_execution:  # Keras then runs into the next epoch, and its steps are no epochs'
            raise ValueError(
                describe(
                    "steps_per_execution",
                    self.model.steps_per_execution,
                    f"a divisor of the epoch's {steps} steps",
                    "pass one to model.compile",
                )
            )
        epoch, begun = divmod(step, steps) if steps else self._epoch.at(step)
        self.model._initial_epoch = sys.maxsize if self._is_done() else epoch
        self._ends_at = 0
        if begun and self._data is None:
            self._warn(
                "fit: continues at step %d, in the middle of an epoch, whose batches are seen again; pass data=", step
            )
        elif begun and steps:
            self._ends_at = steps - begun

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count the batches of this epoch."""
        self._seen = 0
        self._epoch.begin(epoch, self._session.global_step)

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Note the steps done; with ``steps_per_execution`` Keras calls once for several."""
        for callback in self._counting:
            callback.count(batch)  # before a save takes their states: their own turn may come after this one's
        steps, self._seen = batch + 1 - self._seen, batch + 1
        session = self._session
        session.advance(steps, logs or {}, ahead=True)
        if session.should_stop() or self._is_done():
            self.model.stop_training = True
        elif self._ends_at and self._seen >= self._ends_at and not self.model.stop_training:
            self.model.stop_training = _END_OF_EPOCH

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Write the epoch's metrics, and let ``fit`` go on after an epoch that an earlier run had begun."""
        if not self.model.stop_training:  # otherwise training was stopped within the epoch
            self._epoch.begin(epoch + 1, self._session.global_step)
        self._session.summary(**{f"epoch_{name}": value for name, value in (logs or {}).items()})
        if getattr(self.model.optimizer, "use_ema", False):
            # At the end of fit, before it calls on_train_end, Keras puts the averages in the weights' place.
            self._session.save(wait=False)
        if self._ends_at:
            self._ends_at = 0
            self._data.restore(self._data.state_at(self._session.global_step))  # the next pass starts here
        if self.model.stop_training is _END_OF_EPOCH:
            self.model.stop_training = False

    def on_train_end(self, logs: Any = None) -> None:
        """Save what is not saved yet, and end the session."""
        self.model._initial_epoch = None
        set_supervised(self.model, False)
        self._session.__exit__(None, None, None)

    @property
    def _session(self) -> Supervisor:
        if self.supervisor is None:
            raise HvdkitError("SupervisorCallback: used outside model.fit")
        return self.supervisor

    def _is_done(self) -> bool:
        return self._until is not None and self._session.global_step >= self._until

    def _steps_per_epoch(self) -> int | None:
        return self.params.get("steps") if self._data is None else self._data.steps_per_epoch

    @staticmethod
    def _warn(words: str, *values: Any) -> None:
        if cluster.is_chief():
            get_logger().warning(words, *values)


class _EndOfEpoch:
    """Ends the epoch, as ``stop_training = True`` does, and can be told from another callback's wish to stop."""

    def __bool__(self) -> bool:
        return True


_END_OF_EPOCH = _EndOfEpoch()


class _Epoch:
    """The current epoch and its first step, for data of unknown length."""

    def __init__(self) -> None:
        self._number = self._first_step = 0

    def begin(self, number: int, step: int) -> None:
        """Note an epoch that begins at ``step``."""
        self._number, self._first_step = number, step

    def at(self, step: int) -> tuple[int, int]:
        """Return the epoch at ``step``, and how many of its steps are done."""
        return self._number, step - self._first_step

    @property
    def state(self) -> dict[str, int]:
        """Return what is saved."""
        return {"number": self._number, "first_step": self._first_step}

    def restore(self, state: dict[str, int]) -> None:
        """Go on where ``state`` was saved."""
        self.begin(state["number"], state["first_step"])


class _States:
    """The states of hvdkit's callbacks and the epoch, by class; a new one keeps its initial state."""

    def __init__(self, callbacks: Iterable[Any]):
        self._callbacks: dict[str, Any] = {}
        for callback in callbacks:
            same = sum(name.startswith(type(callback).__name__) for name in self._callbacks)
            self._callbacks[f"{type(callback).__name__}{same or ''}"] = callback

    @property
    def state(self) -> dict[str, Any]:
        """Return every callback's state."""
        return {name: callback.state for name, callback in self._callbacks.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Give every callback its state back."""
        for name, callback in self._callbacks.items():
            if name in state:
                callback.restore(state[name])
