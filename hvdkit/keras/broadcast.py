"""Broadcast the chief's values before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdkit.keras.plain_fit import CheckedCallback
from hvdkit.keras.supervised_fit import is_supervised
from hvdkit.layers import synchronize_batch_normalization
from hvdkit.optimizer.inner_optimizers import gradient_sums_of, updater_of
from hvdkit.optimizer.mixin import ranks_of
from hvdkit.sharding.variables import broadcast_and_gather
from hvdkit.supervisor.divergence import check_first_update

if TYPE_CHECKING:
    import keras


class BroadcastInitial(CheckedCallback):
    """Broadcast the chief's weights and optimizer state before the first step.

    Also makes ``BatchNormalization(synchronized=True)`` use the statistics of the global batch
    (``hk.layers.synchronize_batch_normalization``).

    Args:
        root: the rank whose values are broadcast.

    Raises:
        CollectiveMismatchError: shapes or dtypes of variables differ between ranks, or weights differ after the first
            update because the optimizer does not average gradients; the message names the rank.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", metrics=["mae"])
        >>> x, y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")  # this rank's data
        >>> history = model.fit(x, y, verbose=0, callbacks=[hk.callbacks.BroadcastInitial()])
        >>> digest = hk.compare_variables(model.variables)  # equal on all ranks
    """

    def __init__(self, root: int = 0) -> None:
        super().__init__()
        self.root = root
        self._done = self._compared = False

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Broadcast now if the model is already built."""
        self._done = self._compared = False
        synchronize_batch_normalization(self.model, process_set=ranks_of(self.model.optimizer))
        if is_supervised(self.model):
            self._done = True  # the Supervisor has given each rank the values of the chief, or restored its own
        elif self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Broadcast after the first step if that step built the model; compare weights after the first update."""
        if not self._done:
            self._broadcast()
        elif not self._compared and batch + 1 >= _steps_per_update(self.model.optimizer):
            self._compared = True
            check_first_update(self.model, self.model.optimizer, batch + 1)

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        variables = [*self.model.variables, *optimizer.variables]
        broadcast_and_gather(variables, lambda: None, self.root, of_ranks=gradient_sums_of(optimizer))
        self._done = True


def _steps_per_update(optimizer: keras.Optimizer) -> int:
    return getattr(updater_of(optimizer), "gradient_accumulation_steps", None) or 1
