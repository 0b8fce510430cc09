"""A model's training function that measures whether its steps are faster with XLA, and then uses the faster way.

A run begins without XLA. Compiling takes seconds, so it is tried only after the run has trained for some time. In the
trial, blocks of compiled and uncompiled steps take turns; all of them train. Then all ranks use the way whose slowest
rank is faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.agreement import gather
from hvdkit.cluster.logs import get_logger
from hvdkit.collectives.weak_registry import Attached
from hvdkit.internals import is_op_determinism_enabled

if TYPE_CHECKING:
    import keras

Function = Callable[[Iterator[object]], object]
AFTER_SECONDS = 30.0
_FIRST_CHECK = 32  # calls before the first look at the time; then at twice as many, and so on
_BLOCK = 6
_BLOCKS = 4
_LEAST_GAIN = 0.97


class MeasuredChoice:
    """Whether a model's training steps run with XLA. A Supervisor saves it with the run."""

    def __init__(self) -> None:
        self.is_compiled: bool | None = None  # before it is decided

    @property
    def state(self) -> dict[str, bool | None]:
        """The choice, JSON-serializable."""
        return {"is_compiled": self.is_compiled}

    def restore(self, state: dict[str, bool | None]) -> None:
        """Restore a saved choice."""
        self.is_compiled = state["is_compiled"]


_CHOICES: Attached[MeasuredChoice] = Attached("_hvdkit_measured_choice")


def choice_of(model: keras.Model) -> MeasuredChoice | None:
    """Return the choice of a model whose steps are measured, or None."""
    return _CHOICES.get(model)


class MeasuredFunction:
    """A training function of Keras: runs a step by ``plain``, without XLA, or by ``compiled``."""

    def __init__(self, model: keras.Model, plain: Function, compiled: Function) -> None:
        self.choice = _CHOICES.get(model) or MeasuredChoice()
        _CHOICES.set(model, self.choice)
        self._ways = {False: plain, True: compiled}
        self._calls = 0
        self._began: float | None = None
        self._trial: list[bool] = []  # the ways of the next steps of the trial
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        if is_op_determinism_enabled() and self.choice.is_compiled is None:
            self.choice.is_compiled = False  # a choice by time would not be reproducible

    def __call__(self, iterator: Iterator[object]) -> object:
        """Run the next step."""
        if self.choice.is_compiled is not None:
            return self._ways[self.choice.is_compiled](iterator)
        if not self._trial:
            self._look_at_time()
        if not self._trial:
            return self._ways[False](iterator)
        way = self._trial.pop(0)
        began = time.monotonic()
        logs = self._ways[way](iterator)
        for value in tf.nest.flatten(logs)[:1]:
            value.numpy()  # wait for the step
        self._seconds[way].append(time.monotonic() - began)
        if not self._trial:
            self._decide()
        return logs

    def _look_at_time(self) -> None:
        """Begin the trial if all ranks have trained for long enough; the same calls exchange the time on all ranks."""
        if self._began is None:
            self._began = time.monotonic()
        self._calls += 1
        if self._calls < _FIRST_CHECK or self._calls & (self._calls - 1):
            return
        elapsed = time.monotonic() - self._began
        if max(gather(cluster.exchange(), "jit_compile: time of the run", lambda: elapsed)) >= AFTER_SECONDS:
            self._trial = ([False] * _BLOCK + [True] * _BLOCK) * _BLOCKS

    def _decide(self) -> None:
        """Choose the way whose slowest rank is faster."""
        mine = {way: _median(seconds) for way, seconds in self._seconds.items()}
        ranks = gather(cluster.exchange(), "jit_compile: time of a step", lambda: mine)
        plain, compiled = (max(each[way] for each in ranks) for way in (False, True))
        self.choice.is_compiled = compiled < _LEAST_GAIN * plain
        if cluster.is_chief():
            chosen = "with XLA" if self.choice.is_compiled else "without XLA"
            text = "jit_compile: a step takes %.1f ms with XLA and %.1f ms without: the run continues %s"
            get_logger().info(text, 1000 * compiled, 1000 * plain, chosen)


def _median(seconds: list[float]) -> float:
    """Return the median without the first step of each block, of which the very first is compiled."""
    return statistics.median(value for place, value in enumerate(seconds) if place % _BLOCK)
