"""The settings of Keras optimizers, to compare them between ranks and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import keras


def config_of(optimizer: keras.optimizers.Optimizer) -> dict[str, object]:
    """Return the config of an optimizer; its public attributes if it or its learning rate schedule has no config.

    Keras needs configs only for saving, so schedules that users write often have none.
    """
    import keras

    try:
        config: dict[str, object] = optimizer.get_config()
    except NotImplementedError:
        rate = optimizer._learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            shown: dict[str, object] | float = {"class": type(rate).__qualname__, **_public_values(rate)}
        else:
            shown = float(np.asarray(optimizer.learning_rate))
        config = {**_public_values(optimizer), "learning_rate": shown}
    return config


def _public_values(owner: object) -> dict[str, object]:
    """Return the public attributes of an object that are numbers, strings or tensors."""
    import keras

    values: dict[str, object] = {}
    for name, value in vars(owner).items():
        if name.startswith("_") or name == "built":
            continue
        if isinstance(value, (int, float, str)):
            values[name] = value
        elif keras.ops.is_tensor(value):
            values[name] = np.asarray(value).tolist()
    return values
