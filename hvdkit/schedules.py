"""Learning-rate schedules for several ranks."""

from __future__ import annotations

import keras
import tensorflow as tf

from hvdkit.errors import describe


@keras.saving.register_keras_serializable(package="hvdkit")
class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """Scale a learning rate for a larger global batch, with linear warm-up.

    At step s, with b(s) the learning rate for one rank:

        lr(s) = b(s) * (1 + (scale - 1) * min(s / steps, 1))

    The linear scaling rule and gradual warm-up are from Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet
    in 1 Hour", 2017, section 2.2.

    Args:
        base: the learning rate or schedule for one rank's batch.
        scale: global batch size divided by one rank's batch size, e.g. ``hk.size()``.
        steps: steps over which the factor grows from 1 to ``scale``; 0 scales immediately.

    Raises:
        ValueError: ``scale`` is not positive, or ``steps`` is negative.

    Examples:
        >>> import keras
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> schedule = hk.schedules.Warmup(0.1, scale=4, steps=500)  # usually scale=hk.size()
        >>> [round(float(schedule(step)), 3) for step in (0, 250, 500, 1000)]
        [0.1, 0.25, 0.4, 0.4]
        >>> optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(schedule))
    """

    def __init__(
        self,
        base: float | keras.optimizers.schedules.LearningRateSchedule | dict[str, object],
        *,
        scale: float,
        steps: int,
    ) -> None:
        super().__init__()
        if not scale > 0:
            raise ValueError(describe("scale", scale, "a number > 0", "pass e.g. hk.size()"))
        if steps < 0:
            raise ValueError(describe("steps", steps, "a number of steps >= 0", "pass 0 to scale at once"))
        if isinstance(base, dict):
            base = keras.saving.deserialize_keras_object(base)
        self.base = base
        self.scale = float(scale)
        self.steps = int(steps)

    def __call__(self, step: float | tf.Tensor | keras.Variable) -> tf.Tensor:
        """Return the learning rate at ``step`` (a number or scalar tensor) as a float32 scalar."""
        rate = self.base(step) if callable(self.base) else self.base
        fraction = tf.minimum(tf.cast(step, tf.float32) / self.steps, 1.0) if self.steps else 1.0
        return tf.cast(rate, tf.float32) * (1.0 + (self.scale - 1.0) * fraction)

    def get_config(self) -> dict[str, object]:
        """Return the arguments for Keras's serialization."""
        base = keras.saving.serialize_keras_object(self.base) if callable(self.base) else self.base
        return {"base": base, "scale": self.scale, "steps": self.steps}
