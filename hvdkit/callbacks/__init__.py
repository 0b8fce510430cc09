"""Callbacks that make ``model.fit`` right on many ranks. Pass those of this package on every rank, in one order."""

from hvdkit.callbacks.chief import on_chief
from hvdkit.callbacks.metrics import MetricAverage
from hvdkit.callbacks.start import BroadcastInitial
from hvdkit.callbacks.steps import LearningRateWarmup, StepLog, StopOnDivergence, StopOnNonFinite, check_finite
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
