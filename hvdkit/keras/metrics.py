"""Metrics over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras
import numpy as np

from hvdkit.collectives import Sum, grouped_allreduce
from hvdkit.keras.plain_fit import CheckedCallback
from hvdkit.keras.supervised_fit import is_supervised
from hvdkit.layers.batch_norm import average_temporarily, synchronize_batch_normalization
from hvdkit.optimizer.mixin import ranks_of
from hvdkit.supervisor.divergence import check_first_update

if TYPE_CHECKING:
    import tensorflow as tf


class MetricAverage(CheckedCallback):
    """Compute the training and validation metrics of each epoch over the samples of all ranks.

    A Keras metric keeps sums (a mean its total and count; AUC its counts by threshold). These are summed over ranks
    before computing the result, so each rank counts in proportion to its samples, even if it has none. Averaging the
    ranks' results would not do that. Metrics whose state is not a sum cannot be combined this way. Weighted metrics
    use the sample weights passed to them, including those of ``GlobalBatches``. During validation, and from the end of
    an epoch until the next one, moving statistics of BatchNormalization layers are averaged over ranks
    (``hk.layers.average_moving_statistics``); these averages are evaluated and saved by other callbacks.

    Users put it before callbacks that read the metrics (ModelCheckpoint, EarlyStopping). After ``model.evaluate``, call
    ``results``.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", metrics=["mae"])
        >>> x, y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")  # this rank's data
        >>> callbacks = [hk.callbacks.BroadcastInitial(), hk.callbacks.MetricAverage()]
        >>> history = model.fit(x, y, validation_data=(x, y), verbose=0, callbacks=callbacks)
        >>> sorted(history.history)  # over the samples of all ranks
        ['loss', 'mae', 'val_loss', 'val_mae']
    """

    def __init__(self) -> None:
        super().__init__()
        self._training: dict[str, float | np.ndarray] = {}
        self._validation: dict[str, float | np.ndarray] = {}
        self._fitting = self._compared = False
        self._local: list[tuple[keras.Variable, tf.Tensor]] = []

    @staticmethod
    def results(model: keras.Model) -> dict[str, float | np.ndarray]:
        """Return the metrics of ``model`` combined over all ranks. Every rank must call it.

        Args:
            model: a compiled Keras model, after ``model.evaluate`` on this rank's data.

        Returns:
            The results by name, the same on every rank. A metric with several values, e.g. per class, gives an array.

        Examples:
            >>> import keras
            >>> import numpy as np
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            >>> model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", metrics=["mae"])
            >>> x, y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")  # this rank's data
            >>> hk.broadcast_variables(model.variables)
            >>> local = model.evaluate(x, y, verbose=0)
            >>> sorted(hk.callbacks.MetricAverage.results(model))
            ['loss', 'mae']
        """
        variables = model.metrics_variables
        local = [np.asarray(v) for v in variables]
        for variable, total in zip(variables, grouped_allreduce(local, Sum), strict=True):
            variable.assign(total)
        arrays = {name: np.asarray(value) for name, value in model.get_metrics_result().items()}
        results = {name: float(array) if array.ndim == 0 else array for name, array in arrays.items()}
        for variable, value in zip(variables, local, strict=True):
            variable.assign(value)
        return results

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Treat evaluations from now on as validation."""
        synchronize_batch_normalization(self.model, process_set=ranks_of(self.model.optimizer))
        self._fitting = True
        self._compared = False
        self._local = []

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Record the end of ``fit``."""
        self._fitting = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Clear the metrics of the previous epoch, and restore this rank's moving statistics."""
        super().on_epoch_begin(epoch, logs)
        self._training = {}
        self._validation = {}
        self._restore_local()

    def _restore_local(self) -> None:
        for variable, value in self._local:
            variable.assign(value)
        self._local = []

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        """Store the training metrics before validation resets them; a rank without validation data would not reset."""
        if self._fitting:
            self._local = average_temporarily(self.model, process_set=ranks_of(self.model.optimizer))
            self._training = self.results(self.model)
            self.model.reset_metrics()

    def on_test_end(self, logs: dict[str, float | np.ndarray] | None = None) -> None:
        """Store the validation metrics, and write them to ``logs``, for later callbacks."""
        if self._fitting:
            self._validation = self.results(self.model)
            if logs is not None:
                logs.update(self._validation)
            self._restore_local()

    def on_epoch_end(self, epoch: int, logs: dict[str, float | np.ndarray] | None = None) -> None:
        """Write the combined metrics to ``logs``, for later callbacks and History."""
        if not self._compared:
            self._compared = True
            check_first_update(self.model, self.model.optimizer, int(np.asarray(self.model.optimizer.iterations)))
        if not is_supervised(self.model):
            self._local = average_temporarily(self.model, process_set=ranks_of(self.model.optimizer))
        combined = self._training or self.results(self.model)
        combined = combined | {f"val_{name}": value for name, value in self._validation.items()}
        if logs is not None:
            logs.update(combined)
