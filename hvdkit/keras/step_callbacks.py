"""Callbacks that count steps: learning-rate warm-up, logging, and stopping on non-finite loss or divergence."""

from __future__ import annotations

import math
import time
import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.logs import get_logger
from hvdkit.cluster.progress import progress
from hvdkit.collectives import allreduce
from hvdkit.errors import NonFiniteError, describe
from hvdkit.keras.plain_fit import CheckedCallback
from hvdkit.optimizer.inner_optimizers import updater_of
from hvdkit.supervisor.divergence import DivergenceDetector, replicated

# Callbacks with state, by model. A callback references its model, so both are held weakly here.
_stateful: weakref.WeakKeyDictionary[keras.Model, list[weakref.ref[_StepCounter]]] = weakref.WeakKeyDictionary()


class _StepCounter(CheckedCallback):
    """Counts steps since the first ``fit``; with ``steps_per_execution``, Keras calls once for several steps.

    :meth:`restore` continues the count where a checkpoint was saved. It may be called before or after
    ``on_train_begin``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before_epoch = 0
        self._done = 0
        self._history: keras.callbacks.History | None = None

    def set_model(self, model: keras.Model) -> None:
        """Set the model and register this callback for its ``fit``."""
        super().set_model(model)
        self._history = getattr(model, "history", None)
        other_callbacks = [ref for ref in _stateful.get(model, []) if ref() not in (None, self)]
        _stateful[model] = [*other_callbacks, weakref.ref(self)]

    @property
    def state(self) -> dict[str, Any]:
        """The state to save in a checkpoint, JSON-serializable."""
        return {"steps": self._done}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the ``state`` of an earlier run.

        Args:
            state: as saved.
        """
        self._before_epoch = self._done = state["steps"]

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Store the number of steps before this epoch."""
        super().on_epoch_begin(epoch, logs)
        self._before_epoch = self._done

    def count(self, batch: int) -> int:
        """Return the number of steps done after Keras's ``batch``; idempotent.

        Args:
            batch: the batch's number in its epoch, or with ``steps_per_execution`` that of the last one.

        Returns:
            Steps since the first ``fit``.
        """
        self._done = self._before_epoch + batch + 1
        _report_step(self, self._done)
        return self._done


def _report_step(callback: _StepCounter, step: int) -> None:
    now = progress()
    if now.flight.step is None:  # otherwise the Supervisor counts
        now.count_step(step)
    profile = now.profile
    if profile is not None:
        profile.at_step(step, f"{type(callback).__name__} {id(callback)}")


def stateful_callbacks(model: keras.Model) -> list[_StepCounter]:
    """Return the callbacks of the current ``fit`` of ``model`` with a ``state`` to checkpoint, in order.

    All of them are known before the first ``on_train_begin``. Callbacks after the caller have not counted the batch yet
    when the caller's ``on_train_batch_end`` runs, so call ``count(batch)`` of each before reading its ``state``.

    Example::

        states = [callback.state for callback in stateful_callbacks(self.model)]
    """
    # For every fit, Keras assigns a new History to the model before it calls set_model of the callbacks.
    callbacks = [ref() for ref in _stateful.get(model, [])]
    return [c for c in callbacks if c is not None and c._history is getattr(model, "history", None)]


class LearningRateWarmup(_StepCounter):
    """Multiply the optimizer's learning rate by the number of ranks, ramping up linearly over the first steps.

    The optimizer's learning rate must be the rate for one rank: ``SGD(0.1)``, not ``SGD(0.1 * hk.size())``, which would
    be scaled twice. Users whose rate is already scaled for all ranks pass it as ``initial_lr``, as for Horovod's
    callback; the rate then grows from ``initial_lr / scale`` to ``initial_lr``. For decaying rates, use
    ``hk.schedules.Warmup``, which has the same formula and source.

    A run that resumes from a checkpoint keeps its original rate and factor, even on another number of ranks, as the
    global batch does not change.

    Args:
        steps: steps over which the rate grows; 0 scales immediately.
        scale: final factor. Default: ``hk.size()``.
        initial_lr: the final rate, regardless of the optimizer's current rate.

    Raises:
        ValueError: ``steps`` is negative, or ``scale`` or ``initial_lr`` is not positive.
        TypeError: when training begins, if the optimizer's rate is a schedule.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> x, y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")  # this rank's data
        >>> warmup = hk.callbacks.LearningRateWarmup(steps=8, scale=4)  # scale: by default hk.size()
        >>> history = model.fit(x, y, batch_size=2, verbose=0, callbacks=[hk.callbacks.BroadcastInitial(), warmup])
        >>> round(float(model.optimizer.learning_rate), 6)  # 4 * 0.1, after 16 steps
        0.4

        A checkpoint saves its state automatically; to do so manually:

        >>> resumed = hk.callbacks.LearningRateWarmup(steps=8)
        >>> resumed.restore(warmup.state)
        >>> resumed.state["steps"]
        16
    """

    def __init__(self, steps: int = 500, *, scale: float | None = None, initial_lr: float | None = None) -> None:
        super().__init__()
        if initial_lr is not None and not initial_lr > 0:
            raise ValueError(describe("initial_lr", initial_lr, "a rate > 0, or None", "pass e.g. 0.1 * hk.size()"))
        if steps < 0 or (scale is not None and not scale > 0):
            expected = "steps >= 0 and scale > 0"
            raise ValueError(describe("steps, scale", (steps, scale), expected, "pass e.g. steps=500"))
        self.steps = steps
        self.scale = scale
        self._initial_lr = initial_lr
        self._base: float | None = None
        self._factor = 1.0
        self._reached = False

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Read the optimizer's rate as the rate for one rank; a second ``fit`` continues from the first."""
        optimizer = self.model.optimizer
        if isinstance(updater_of(optimizer)._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            remedy = "wrap it instead: hk.schedules.Warmup(schedule, scale=hk.size(), steps=500)"
            raise TypeError(describe("learning rate", "a schedule", "a number that the callback can change", remedy))
        if self._base is None:
            self._factor = float(cluster.size() if self.scale is None else self.scale)
            rate = self._initial_lr
            self._base = float(np.asarray(optimizer.learning_rate)) if rate is None else rate / self._factor
            if cluster.is_chief() and self._factor != 1:
                final = self._base * self._factor
                get_logger().info("the learning rate grows from %g to %g in %d steps", self._base, final, self.steps)

    @property
    def state(self) -> dict[str, Any]:
        """The steps, the initial rate and factor, and whether the factor has been reached."""
        return {**super().state, "base": self._base, "factor": self._factor, "reached": self._reached}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the ``state`` of an earlier run, regardless of the optimizer's current rate.

        Args:
            state: as saved.
        """
        super().restore(state)
        if state["base"] is not None:  # None if the state was saved before training began
            self._base = state["base"]
            self._factor = state["factor"]
            self._reached = state["reached"]

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Set the rate of this step until the factor is reached; later changes by others are kept."""
        step = self._before_epoch + batch
        if not self._reached and self._base is not None:
            fraction = min(step / self.steps, 1.0) if self.steps else 1.0
            self.model.optimizer.learning_rate = self._base * (1.0 + (self._factor - 1.0) * fraction)
            self._reached = fraction == 1.0

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Count the steps done."""
        self.count(batch)


class StopOnNonFinite(_StepCounter):
    """Stop training when the loss becomes NaN or infinite, and report the step and the rank.

    The error of the affected rank ends the whole job.

    Args:
        stop: False to warn once and continue.

    Raises:
        NonFiniteError: in ``fit``, on the rank whose loss is NaN or infinite.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> x, y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")  # this rank's data
        >>> y[3] = np.nan
        >>> try:
        ...     history = model.fit(x, y, verbose=0, callbacks=[hk.callbacks.StopOnNonFinite()])
        ... except hk.NonFiniteError as error:
        ...     print(error)
        loss: got nan at step 1 on rank ..., expected a finite number; lower the learning rate or clip

        The steps done are saved in checkpoints automatically; to do so manually:

        >>> callback = hk.callbacks.StopOnNonFinite()
        >>> callback.restore({"steps": 100})
        >>> callback.state
        {'steps': 100}
    """

    def __init__(self, *, stop: bool = True) -> None:
        super().__init__()
        self.stop = stop
        self._warned = False

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Check the loss that Keras reports, the mean over the epoch so far: a single bad step makes it non-finite."""
        step = self.count(batch)
        loss = (logs or {}).get("loss", 0.0)
        if not self._warned and not math.isfinite(loss):
            self._warned = True
            check_finite(loss, step=step, stop=self.stop)


class StopOnDivergence(_StepCounter):
    """Stop training when parameters or optimizer slots have diverged between ranks.

    All ranks compare them bit for bit every few steps. Put it after BroadcastInitial.

    Args:
        every: steps between comparisons.

    Raises:
        ValueError: ``every`` is not an integer >= 1.
        TypeError: ``every`` is not an integer.
        CollectiveMismatchError: in ``fit``, if ranks differ; the message names the rank, the variable and the step.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> x, y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")  # this rank's data
        >>> callbacks = [hk.callbacks.BroadcastInitial(), hk.callbacks.StopOnDivergence(every=500)]
        >>> history = model.fit(x, y, verbose=0, callbacks=callbacks)

        The steps done are saved in checkpoints automatically; to do so manually:

        >>> resumed = hk.callbacks.StopOnDivergence(every=500)
        >>> resumed.restore(callbacks[1].state)
        >>> resumed.state
        {'steps': 1}
    """

    def __init__(self, every: int = 500) -> None:
        super().__init__()
        self._detector = DivergenceDetector(lambda: replicated(self.model, self.model.optimizer), every=every)

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Compare the ranks every ``every`` steps."""
        self._detector.check(self.count(batch))


def check_finite(loss: float, *, step: int, stop: bool = True) -> None:
    """Raise an error (or warn, if ``stop`` is False) if this rank's ``loss`` is NaN or infinite.

    Args:
        loss: the loss of a step.
        step: the step's number, for the message.
        stop: False to log a warning instead.

    Raises:
        NonFiniteError: ``loss`` is NaN or infinite; the message names step and rank.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> hk.callbacks.check_finite(0.25, step=6)
        >>> try:
        ...     hk.callbacks.check_finite(float("nan"), step=7)
        ... except hk.NonFiniteError as error:
        ...     print(error)
        loss: got nan at step 7 on rank ..., expected a finite number; lower the learning rate or clip
    """
    if math.isfinite(loss):
        return
    got = f"{loss} at step {step} on rank {cluster.rank()}"
    message = describe("loss", got, "a finite number", "lower the learning rate or clip")
    if stop:
        raise NonFiniteError(message)
    get_logger().warning("%s; training continues (stop=False)", message)


class StepLog(_StepCounter):
    """Log step, loss, examples/sec and sec/batch on the chief every few steps, as in the CIFAR-10 tutorial.

    Use it as a callback in ``fit``, or call ``step`` in a custom training loop. To resume such a loop from a
    checkpoint, save it as well: ``hk.Supervisor(..., state={"log": log})``.

    Args:
        global_batch_size: examples per step, over all ranks.
        every: steps between log lines.

    Raises:
        ValueError: an argument is not at least 1.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> log = hk.callbacks.StepLog(global_batch_size=128, every=10)
        >>> for step, loss in enumerate([0.5] * 20, start=1):
        ...     log.step(step, loss)  # on stderr: ... step 10, loss = 0.50 (... examples/sec; ... sec/batch)
        >>> resumed = hk.callbacks.StepLog(global_batch_size=128)
        >>> resumed.restore(log.state)
    """

    def __init__(self, global_batch_size: int, *, every: int = 10) -> None:
        super().__init__()
        if every < 1:
            raise ValueError(describe("every", every, "a number of steps >= 1", "pass e.g. 10"))
        self.global_batch_size = global_batch_size
        self.every = every
        self._logged = 0
        self._since = time.perf_counter()

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the ``state`` of an earlier run, excluding the time in between.

        Args:
            state: as saved.
        """
        super().restore(state)
        self._logged = self._done
        self._since = time.perf_counter()

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Count the steps of ``fit``; the loss is the mean over the epoch so far and over all ranks."""
        step = self.count(batch)
        if self._due(step):
            self.step(step, allreduce(float((logs or {}).get("loss", math.nan))))

    def step(self, step: int, loss: float | tf.Tensor | np.ndarray) -> None:
        """Log a line on the chief if ``step`` is due.

        Args:
            step: the number of the step, from 1.
            loss: a number or scalar tensor, only read if a line is due.
        """
        self._done = step
        _report_step(self, step)
        if not self._due(step):
            return
        steps = step - self._logged
        self._logged = step
        if cluster.is_chief():
            value = float(loss)
            notes = progress().flight.notes
            notes.at_loss(value)
            notes.expect_examples(self.global_batch_size)
            seconds = (time.perf_counter() - self._since) / steps
            rate = self.global_batch_size / seconds
            get_logger().info("step %d, loss = %.4f (%.1f examples/sec; %.3f sec/batch)", step, value, rate, seconds)
            self._since = time.perf_counter()

    def _due(self, step: int) -> bool:
        return step // self.every > self._logged // self.every
