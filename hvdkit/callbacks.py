"""Keras callbacks for plain ``model.fit`` on several ranks, in which every rank calls ``fit`` on its own data.

They give all ranks the chief's initial values, combine metrics, save and resume, warm up the learning rate, log steps,
and stop on non-finite losses or diverged ranks. Pass them on every rank, in the same order: most of them call
collectives. ``hk.fit`` needs only those for saving, learning rates and logs. They are defined in ``hvdkit.keras``.
"""

from hvdkit.keras.broadcast import BroadcastInitial
from hvdkit.keras.chief import on_chief
from hvdkit.keras.metrics import MetricAverage
from hvdkit.keras.step_callbacks import LearningRateWarmup, StepLog, StopOnDivergence, StopOnNonFinite, check_finite
from hvdkit.keras.supervisor_callback import SupervisorCallback

__all__ = [
    "BroadcastInitial",
    "LearningRateWarmup",
    "MetricAverage",
    "StepLog",
    "StopOnDivergence",
    "StopOnNonFinite",
    "SupervisorCallback",
    "check_finite",
    "on_chief",
]
