"""Notice that this rank trains although no gradients have been combined: N ranks train N unrelated models.

Keras calls nothing of hvdkit in a program with a plain optimizer, and hvdkit changes nothing in Keras. Therefore, until
a collective combines tensors, a thread looks at the stacks of this process ten times a second, and finds:

* Keras's ``fit``, and whether an epoch has ended in it;
* ``apply`` of Keras's optimizers, in a training loop or while a step is traced.

At the exit of the program, models and optimizers that still exist are searched, too. An optimizer whose number of
iterations is 0 has not trained. One that was loaded from a file counts as trained only if it is found on a stack, in a
graph, or as the optimizer of a model whose training function exists.

Collectives of single numbers, such as the mean of a loss or a metric, combine no gradients, except if all variables of
the optimizer are single numbers.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from hvdkit.cluster.logs import get_logger

_SECONDS = 0.1
_FIT = ("keras", "trainer.py")
_APPLY = ("keras", "optimizer.py")


class _Updates(NamedTuple):
    """The updates of an optimizer.

    Attributes:
        iterations: the optimizer's variable that counts them.
        is_of_numbers: each variable that it trains is a single number.
    """

    iterations: Any
    is_of_numbers: bool


class LoneTraining:
    """Watches for training without combined gradients, and reports it once.

    Attributes:
        is_combined: whether a collective has combined tensors of several ranks, or gradients are combined.
    """

    def __init__(self) -> None:
        self.is_combined = False
        self._has_combined_numbers = False
        self._is_reported = False
        self._size = 1
        self._fits: dict[int, _Updates] = {}  # of the optimizers of running fits, by the id of the model
        self._applied: dict[int, _Updates] = {}  # of optimizers seen in a step, by their id
        self._earlier: dict[int, int] = {}  # numbers of iterations when the world began, by the variable's id
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, size: int) -> None:
        """Start to watch this process, one of ``size`` ranks."""
        self._size = size
        self.is_combined = False
        self._has_combined_numbers = False
        self._is_reported = False
        self._fits = {}
        self._applied = {}
        if self._thread is not None:  # a world before this one may have trained
            self._earlier = {id(each.iterations): _number(each.iterations) for each in _trained()}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=[self._ended], name="hvdkit-lone-training", daemon=True)
        self._thread.start()

    def add_collective(self, values: Iterable[Any]) -> None:
        """Take note of a collective that combines ``values``: numbers, arrays or tensors."""
        self._has_combined_numbers = True
        self.is_combined |= not all(_is_number(each) for each in values)

    def end(self) -> None:
        """Stop watching, at the end of the program or of the world; report a loop that has trained alone."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_SECONDS * 10)
        if self.is_combined or self._is_reported or self._size == 1:
            return
        with contextlib.suppress(Exception):  # other threads may change the objects
            for updates in [*self._fits.values(), *self._applied.values(), *_trained()]:
                self._report_if_trained(updates)

    def _run(self, ended: threading.Event) -> None:
        while not (ended.wait(_SECONDS) or self.is_combined or self._is_reported):
            with contextlib.suppress(Exception):  # frames change while they are read
                self._look()

    def _look(self) -> None:
        running: dict[int, _Updates] = {}
        own = threading.get_ident()
        for thread, frame in sys._current_frames().items():
            if thread != own:
                for caller in _frames(frame):
                    self._look_at(caller, running)
        for key, updates in self._fits.items():
            if key not in running:  # a fit that ended
                self._report_if_trained(updates)
        self._fits = running

    def _look_at(self, frame: FrameType, running: dict[int, _Updates]) -> None:
        code = frame.f_code
        if code.co_name == "fit" and "epoch_iterator" in (*code.co_varnames, *code.co_cellvars):
            if not _is_in(code.co_filename, *_FIT):
                return
            variables = frame.f_locals
            optimizer = getattr(variables.get("self"), "optimizer", None)
            if optimizer is None:
                return
            updates = _updates(optimizer)
            running[id(variables["self"])] = updates
            first = variables.get("initial_epoch") or 0
            if variables.get("epoch", first) > first:
                self._report_if_trained(updates)
        elif code.co_name in ("apply", "apply_gradients") and _is_in(code.co_filename, *_APPLY):
            optimizer = frame.f_locals.get("self")
            self._applied[id(optimizer)] = _updates(optimizer)

    def _report_if_trained(self, updates: _Updates) -> None:
        if self.is_combined or self._is_reported:
            return
        if _number(updates.iterations) <= self._earlier.get(id(updates.iterations), 0):
            return
        if self._has_combined_numbers and updates.is_of_numbers:
            return
        self._is_reported = True
        get_logger().warning(
            "training: no gradients have been combined: each of %d ranks trains its own model; use "
            "hk.fit(model, ...) in place of model.fit, or hk.DistributedOptimizer(optimizer); see "
            "`hvdkit docs pitfalls#weights-and-optimizer`",
            self._size,
        )


@cache
def lone_training() -> LoneTraining:
    """Return the :class:`LoneTraining` of this process."""
    return LoneTraining()


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_in(file: str, package: str, name: str) -> bool:
    return f"/{package}/src/" in file and file.endswith(name)


def _number(iterations: Any) -> int:
    """Return the value of an optimizer's ``iterations``; 0 if it cannot be read."""
    try:
        return int(iterations.numpy())
    except Exception:
        return 0


def _is_number(value: Any) -> bool:
    """Return True for a number, and for an array or tensor that has one element as far as is known."""
    try:
        return math.prod(np.shape(value)) == 1
    except (TypeError, ValueError):  # a tensor of unknown shape
        return False


def _updates(optimizer: Any) -> _Updates:
    variables = getattr(optimizer, "_trainable_variables", None) or ()  # empty until the optimizer is built
    return _Updates(optimizer.iterations, bool(variables) and all(_is_number(each) for each in variables))


def _trained() -> Iterator[_Updates]:
    """Yield the updates of existing optimizers that have trained: by a model's function, or in a graph."""
    keras = sys.modules.get("keras")
    tf = sys.modules.get("tensorflow")
    if keras is None or tf is None:
        return
    optimizers: list[Any] = []
    captured: set[int] = set()
    for each in gc.get_objects():
        kind = type(each)
        if issubclass(kind, keras.optimizers.Optimizer):
            optimizers.append(each)
        elif issubclass(kind, keras.Model):
            optimizer = getattr(each, "optimizer", None)
            if optimizer is not None and getattr(each, "train_function", None) is not None:
                yield _updates(optimizer)
        elif issubclass(kind, tf.Graph) and hasattr(each, "captures"):
            captured.update(id(outer) for outer, _ in each.captures)
    for optimizer in optimizers:
        handle = getattr(optimizer.iterations.value, "handle", None)
        if id(handle) in captured:
            yield _updates(optimizer)
