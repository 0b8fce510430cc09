"""Callbacks for ``model.fit`` on several ranks. Pass hvdkit's callbacks on every rank, in the same order."""

from hvdkit.callbacks.broadcast import BroadcastInitial
from hvdkit.callbacks.chief import on_chief
from hvdkit.callbacks.metrics import MetricAverage
from hvdkit.callbacks.step_callbacks import LearningRateWarmup, StepLog, StopOnDivergence, StopOnNonFinite, check_finite
from hvdkit.callbacks.supervisor import SupervisorCallback

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
