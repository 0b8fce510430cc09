"""Horovod's Keras callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hvdkit import cluster
from hvdkit.cluster.logs import get_logger
from hvdkit.errors import describe
from hvdkit.keras.broadcast import BroadcastInitial
from hvdkit.keras.metrics import MetricAverage
from hvdkit.keras.plain_fit import CheckedCallback
from hvdkit.keras.step_callbacks import LearningRateWarmup

if TYPE_CHECKING:
    import keras

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(BroadcastInitial):
    """Broadcast the variables of ``root_rank`` (``hk.callbacks.BroadcastInitial``).

    Args:
        root_rank: the rank whose values are broadcast.
        device: ignored.
        local_variables: not supported: call ``hk.register_local_variables`` instead.

    Raises:
        ValueError: ``local_variables`` is not None.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> x, y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")  # this rank's data
        >>> callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        >>> history = model.fit(x, y, verbose=0, callbacks=callbacks)
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: object = None) -> None:
        super().__init__(root_rank)
        if local_variables is not None:
            remedy = "call hk.register_local_variables"
            raise ValueError(describe("local_variables", "variables", "None", remedy))


class MetricAverageCallback(MetricAverage):
    """Combine metrics over ranks, weighted by samples (``hk.callbacks.MetricAverage``).

    Args:
        device: ignored.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> x, y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")  # this rank's data
        >>> callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        >>> history = model.fit(x, y, verbose=0, callbacks=callbacks)
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()


class LearningRateWarmupCallback(LearningRateWarmup):
    """Increase the learning rate linearly from ``initial_lr / size`` to ``initial_lr``.

    Args:
        initial_lr: the rate after warm-up, scaled for all ranks: e.g. ``0.1 * hvd.size()``.
        warmup_epochs: epochs over which the rate grows.
        momentum_correction: ignored, as in Horovod once ``fit`` has compiled its step.
        steps_per_epoch: batches per epoch; required if Keras does not know the number.
        verbose: 1 to log a line on the chief at the end.

    Raises:
        ValueError: when training begins, if the steps per epoch are unknown.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> x, y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")  # this rank's data
        >>> warmup = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=2)
        >>> callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), warmup]
        >>> history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
        >>> round(float(model.optimizer.learning_rate), 6)
        0.4
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(initial_lr=initial_lr)
        self._epochs = warmup_epochs
        self._steps_per_epoch = steps_per_epoch
        self._verbose = verbose

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Read the number of steps per epoch from Keras."""
        self.steps = int(self._epochs * _steps_per_epoch(self, self._steps_per_epoch))
        super().on_train_begin(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Log that warm-up is finished."""
        super().on_epoch_end(epoch, logs)
        if self._verbose and self._reached and cluster.is_chief():
            self._verbose = 0
            rate = float(np.asarray(self.model.optimizer.learning_rate))
            get_logger().info("epoch %d: learning rate warm-up is finished, at %g", epoch + 1, rate)


class LearningRateScheduleCallback(CheckedCallback):
    """Set the learning rate to ``initial_lr * multiplier(epoch)`` in the epochs ``[start_epoch, end_epoch)``.

    Args:
        initial_lr: the base rate.
        multiplier: a number, or a function of the epoch. The epoch is an integer if ``staircase``, otherwise a float
            that includes the completed fraction of the epoch.
        start_epoch: the first epoch.
        end_epoch: the end of the range, exclusive; None for no end.
        staircase: change the rate only at the beginning of epochs.
        momentum_correction: ignored, as in Horovod once ``fit`` has compiled its step.
        steps_per_epoch: as for ``LearningRateWarmupCallback``; for ``staircase=False``.

    Raises:
        ValueError: during training, if the steps per epoch are needed and unknown.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> x, y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")  # this rank's data
        >>> decay = hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=lambda epoch: 0.5**epoch)
        >>> callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), decay]
        >>> history = model.fit(x, y, epochs=3, verbose=0, callbacks=callbacks)
        >>> round(float(model.optimizer.learning_rate), 6)  # in epoch 2
        0.025
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self._rate = initial_lr
        self._start = start_epoch
        self._end = end_epoch
        self._multiplier: Callable[[float], float] = multiplier if callable(multiplier) else lambda _: multiplier
        # Horovod sets the rate of a constant multiplier once per epoch.
        self._staircase = staircase or not callable(multiplier)
        self._steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Set the rate of the epoch."""
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch
        if self._staircase:
            self._set(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Set the rate of the step."""
        if not self._staircase:
            self._set(self._epoch + batch / _steps_per_epoch(self, self._steps_per_epoch))

    def _set(self, epoch: float) -> None:
        if self._start <= self._epoch and (self._end is None or self._epoch < self._end):
            self.model.optimizer.learning_rate = self._rate * self._multiplier(epoch)


def _steps_per_epoch(callback: keras.callbacks.Callback, steps_per_epoch: int | None) -> int:
    steps = steps_per_epoch or callback.params.get("steps")
    if not steps:
        raise ValueError(describe("steps_per_epoch", steps, "a number, because Keras does not know it", "pass it"))
    return int(steps)
