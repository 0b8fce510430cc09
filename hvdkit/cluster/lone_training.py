"""Notice that this rank trains although no gradients have been combined: N ranks train N unrelated models.

Keras calls nothing of hvdkit in a program with a plain optimizer, and hvdkit changes nothing in Keras. Therefore, until
a collective combines tensors, a thread looks for optimizers among the objects of this process: after a second, then at
intervals that double up to 15 s. The end of the program is another look.

While the program runs, only ``fit`` is reported, after its first epoch: some programs combine their weights less often
than after each step. At the end, every optimizer is that has trained. Its number of iterations has then grown since the
first look. Where this was the only look, it has trained if it has iterations and is in use, in a graph or by a model
that has made its training function; others may have been loaded from a file.

Collectives of single numbers, such as the mean of a loss or a metric, combine no gradients, except if all variables of
the optimizer are single numbers. Those of ``hk.evaluate`` and ``hk.predict`` never do.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hvdkit.cluster.live_objects import live_instances
from hvdkit.cluster.logs import get_logger
from hvdkit.errors import see
from hvdkit.watchdog.reporter import reporter

if TYPE_CHECKING:
    import keras
    import numpy.typing as npt
    import tensorflow as tf

COMBINES = "_hvdkit"
"""The attribute of an optimizer that combines gradients."""
_FIRST_SECONDS = 1.0
_LONGEST_SECONDS = 15.0


class _Use(NamedTuple):
    """How the program uses an optimizer.

    Attributes:
        is_used: a graph or a model's training function contains it.
        has_ended_epoch: an epoch has ended in the last ``fit`` of its model.
    """

    is_used: bool
    has_ended_epoch: bool


class LoneTraining:
    """Watches for training without combined gradients, and reports it, once more at the end.

    Attributes:
        is_combined: whether a collective has combined tensors of several ranks, or gradients are combined.
        is_evaluating: whether a collective is one of an evaluation or a prediction, and combines no gradients.
    """

    def __init__(self) -> None:
        self.is_combined = False
        self._has_combined_numbers = False
        self.is_evaluating = False
        self._is_reported = False
        self._size = 1
        # The number of iterations of each optimizer from which this world counts.
        self._first: weakref.WeakKeyDictionary[keras.optimizers.Optimizer, int] = weakref.WeakKeyDictionary()
        # Handles and values of restored numbers, by the handle's identity, which they keep from being used again.
        self._restored: dict[int, tuple[tf.Tensor, int]] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, size: int) -> None:
        """Start to watch this process, one of ``size`` ranks."""
        self._size = size
        self.is_combined = False
        self._has_combined_numbers = False
        self._is_reported = False
        self._first.clear()
        self._restored.clear()
        if self._thread is not None:  # a world before this one may have trained
            with contextlib.suppress(Exception):  # other threads may change the objects
                self._first.update((optimizer, _iterations(optimizer)) for optimizer in _optimizers())
        self._ended = threading.Event()
        self._thread = reporter().start_helper("hvdkit-lone-training", self._run, self._ended)

    def add_collective(self, values: Iterable[npt.ArrayLike | tf.Tensor]) -> None:
        """Take note of a collective that combines ``values``: numbers, arrays or tensors."""
        if self.is_evaluating:
            return
        self._has_combined_numbers = True
        self.is_combined |= not all(_is_number(each) for each in values)

    def note_restored(self, variables: Iterable[tf.Variable]) -> None:
        """Take note of the values that variables have from a checkpoint: optimizers count from them."""
        numbers = [each for each in variables if each.shape.rank == 0 and each.dtype.is_integer]
        self._restored.update((id(each.handle), (each.handle, int(each.numpy()))) for each in numbers)

    def end(self) -> None:
        """Stop watching, at the end of the program or of the world, after a last look; repeat an earlier report."""
        is_earlier = self._is_reported and not self._ended.is_set()
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_FIRST_SECONDS)
        if self._size > 1 and is_earlier and not self.is_combined:
            self._report()
        elif self._size > 1:
            self._look(is_last=True)

    def _run(self, ended: threading.Event) -> None:
        seconds = _FIRST_SECONDS
        while not (ended.wait(seconds) or self.is_combined or self._is_reported):
            self._look(is_last=False)
            seconds = min(2 * seconds, _LONGEST_SECONDS)

    def _look(self, *, is_last: bool) -> None:
        if self.is_combined or self._is_reported:
            return
        with contextlib.suppress(Exception):  # other threads may change the objects
            optimizers = _optimizers()
            combining = {id(_handle(each)) for each in optimizers if hasattr(each, COMBINES)}
            for optimizer, use in optimizers.items():
                handle = id(_handle(optimizer))
                if handle in combining:
                    continue
                number = _iterations(optimizer)
                first = self._first.setdefault(optimizer, 0 if use.is_used else number)
                _, restored = self._restored.get(handle, (None, 0))
                first = max(first, restored)
                if number <= first or not (is_last or use.has_ended_epoch):
                    continue
                if not (self._has_combined_numbers and _trains_numbers(optimizer)):
                    self._report()
                    return

    def doubt(self) -> str:
        """Return what the last line of a failed job adds, after a last look; "" if there is nothing to add."""
        if self._size > 1:
            self._look(is_last=True)
        return f"; before it: {_report_of(self._size)}" if self._is_reported and not self.is_combined else ""

    def _report(self) -> None:
        self._is_reported = True
        get_logger().warning(f"training: {_report_of(self._size)}")


@cache
def lone_training() -> LoneTraining:
    """Return the :class:`LoneTraining` of this process."""
    return LoneTraining()


@contextlib.contextmanager
def evaluation() -> Iterator[None]:
    """Decorate a function that evaluates or predicts: the metrics and rows that it combines are no gradients."""
    watch = lone_training()
    was_evaluating = watch.is_evaluating
    watch.is_evaluating = True
    try:
        yield
    finally:
        watch.is_evaluating = was_evaluating


def _report_of(size: int) -> str:
    return (
        f"no gradients have been combined: each of {size} ranks trains its own model; use "
        "hk.fit(model, ...) in place of model.fit, or hk.DistributedOptimizer(optimizer); "
        f"{see('pitfalls#weights-and-optimizer')}"
    )


def _optimizers() -> dict[keras.optimizers.Optimizer, _Use]:
    """Return the existing optimizers, and how the program uses each."""
    keras = sys.modules.get("keras")
    tf = sys.modules.get("tensorflow")
    if keras is None or tf is None:
        return {}
    of_models: set[int] = set()
    ended: set[int] = set()
    for model in live_instances(keras.Model):
        if getattr(model, "train_function", None) is not None:
            of_models.add(id(model.optimizer))
            history = getattr(model, "history", None)  # of the last fit; None for train_on_batch
            if history is not None and history.epoch:
                ended.add(id(model.optimizer))
    captured = {id(outer) for graph in live_instances(tf.Graph) for outer, _ in getattr(graph, "captures", ())}
    return {
        each: _Use(id(each) in of_models or id(_handle(each)) in captured, id(each) in ended)
        for each in live_instances(keras.optimizers.Optimizer)
    }


def _handle(optimizer: keras.optimizers.Optimizer) -> tf.Tensor | None:
    """Return the tensor by which graphs refer to an optimizer's number of iterations."""
    iterations = getattr(optimizer, "iterations", None)
    return getattr(getattr(iterations, "value", None), "handle", None)


def _iterations(optimizer: keras.optimizers.Optimizer) -> int:
    """Return an optimizer's number of iterations; 0 if it cannot be read."""
    try:
        return int(optimizer.iterations.numpy())
    except Exception:
        return 0


def _is_number(value: npt.ArrayLike | tf.Tensor | keras.Variable) -> bool:
    """Return True for a number, and for an array or tensor that has one element as far as is known."""
    try:
        return math.prod(np.shape(value)) == 1
    except (TypeError, ValueError):  # a tensor of unknown shape
        return False


def _trains_numbers(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return True if each variable of an optimizer is a single number."""
    variables = getattr(optimizer, "_trainable_variables", None) or ()  # empty until the optimizer is built
    return bool(variables) and all(_is_number(each) for each in variables)
