"""Check that Keras's own ``fit`` runs consistently on all ranks: equal weights and decisions, different data.

The first of hvdkit's callbacks in a ``fit`` compares the ranks before the first batch. After each epoch and at the end,
they are compared in hooks of Keras's History, which Keras calls after those of all other callbacks. ``hk.fit`` has its
own comparisons and needs none of this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, SupportsFloat, TypeGuard

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.agreement import compare, gather
from hvdkit.cluster.logs import get_logger
from hvdkit.collectives.conversion import untracked_variable
from hvdkit.collectives.digests import digest_in_any_order
from hvdkit.collectives.weak_registry import Attached
from hvdkit.errors import ClusterError
from hvdkit.internals import is_default
from hvdkit.keras.attribute_swap import exchange_attributes
from hvdkit.keras.chief import StopRequest, is_on_chief
from hvdkit.keras.compiled_functions import jit_mode, makers_of, uses_whole_step
from hvdkit.keras.fit_session import end_of_plain_fit, is_running
from hvdkit.keras.measured_function import Function
from hvdkit.keras.model_optimizers import optimizers_of
from hvdkit.keras.rank_state import compare_state, digests_of, state_of
from hvdkit.keras.supervised_fit import is_supervised
from hvdkit.layers.batch_norm import average_moving_statistics, check_batch_normalization
from hvdkit.optimizer.callback_paths import check_paths, running_callbacks, written_paths
from hvdkit.optimizer.equal_ranks import compare_end, digest_of, mark_checked, synchronize_start, with_values
from hvdkit.optimizer.inner_optimizers import slots_of
from hvdkit.optimizer.mixin import ranks_of
from hvdkit.sharding.vocabulary import warn_of_full_buckets
from hvdkit.watchdog.reporter import reporter

if TYPE_CHECKING:
    from hvdkit.keras.data_types import Tensors

_HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]


class CheckedCallback(keras.callbacks.Callback):
    """Base class of hvdkit's callbacks: in plain ``fit``, the first one in the list compares the ranks."""

    def set_model(self, model: keras.Model) -> None:
        """Set the model; in the first callback of a ``fit``, begin its checks."""
        super().set_model(model)
        if not is_on_chief(self) and (checks := PlainFitChecks.of(model)) is not None:
            checks.enter(self)

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Compare the ranks before the first batch of ``fit``."""
        if (checks := PlainFitChecks.of(self.model)) is not None:
            checks.begin_epoch(self)


class _EpochEnd(NamedTuple):
    """The state of one rank after an epoch."""

    stops: bool  # whether a callback has set stop_training
    requests_stop: bool  # whether a callback of the chief only has set it
    rate: float | None
    logs: dict[str, float]  # numbers passed to callbacks and History
    rows: int  # digest of the rows of the first epoch, in any order; 0 if unknown
    state: list[tuple[str, bytes]]  # digests of what layers and steps update without a gradient


class PlainFitChecks:
    """Compares the ranks in Keras's own ``fit`` of a model. Kept with the model, for its next ``fit``."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._owner: keras.callbacks.Callback | None = None  # the callback that compares; None between calls of fit
        self._history: keras.callbacks.History | None = None  # of the current or last fit
        self._group: cluster.Group | None = None
        self._optimizers: list[keras.Optimizer] = []
        self._has_begun = False  # whether the beginning of this fit has been compared
        self._warned: set[str] = set()
        self._stop_request = StopRequest()
        self._error: Exception | None = None  # of a callback of the chief only, at the end of an epoch
        # Whether the rows of this epoch are read, and their digest. One variable, as each costs two calls in a step.
        self._rows = untracked_variable(np.zeros(2, np.int64), tf.int64, "hvdkit_rows")
        self._changes = contextlib.ExitStack()  # undoes at the end of this fit what it has changed
        self._train_function: Function | None = None  # which reads rows

    @classmethod
    def of(cls, model: keras.Model) -> PlainFitChecks | None:
        """Return a model's checks; None on one rank, in ``hk.fit``, and without distributed optimizers."""
        if cluster.size() == 1 or is_running(model) or not optimizers_of(model):
            return None
        checks = _CHECKS.get(model)
        if checks is None:
            checks = cls(model)
            _CHECKS.set(model, checks)
        return checks

    def enter(self, callback: keras.callbacks.Callback) -> None:
        """Have ``callback`` compare the ranks, if it is the first in a new ``fit``. Not collective."""
        history = getattr(self._model, "history", None)
        # For every fit, Keras assigns a new History to the model before it calls set_model of the callbacks.
        if history is None or history is self._history:
            return
        self.release()  # the previous fit may have raised
        self._owner = callback
        self._history = history
        self._optimizers = optimizers_of(self._model)
        mark_checked(self._optimizers, True)
        self._changes.callback(mark_checked, self._optimizers, False)
        hooks = {"on_epoch_end": self._after(history.on_epoch_end, self._compare_epoch)}
        hooks["on_train_end"] = self._after(history.on_train_end, self._finish)
        self._replace(history, hooks)
        end_of_plain_fit.set(self._model, self.release)

    def begin_epoch(self, callback: keras.callbacks.Callback) -> None:
        """Before the first epoch, compare the ranks, and give them the chief's weights. Every rank must call it.

        Raises:
            ValueError: a BatchNormalization is not synchronized.
            CollectiveMismatchError: the number of steps or the use of XLA differs between ranks, several ranks write to
                one path, or with ``process_set`` the weights differ.
        """
        params = callback.params or {}
        if self._owner is not callback or self._has_begun:
            return
        self._has_begun = True
        model = self._model
        self._group = ranks_of(self._optimizers[0])
        slots = [v for optimizer in self._optimizers for v in slots_of(optimizer)]
        equal = with_values([*model.trainable_variables, *slots])

        def start() -> tuple[object, str, bytes, dict[str, str]]:
            check_batch_normalization(model)
            steps = params.get("steps"), params.get("epochs")
            return steps, jit_mode(model), digest_of(equal), written_paths(lambda other: other is model)

        exchange = cluster.exchange(self._group)
        ranks = gather(exchange, "the beginning of fit", start)
        steps = [each for each, _, _, _ in ranks]
        compare(steps, "fit: (steps per epoch, epochs)", "use hk.fit", ranks=exchange.ranks)
        remedy = "pass the same jit_compile, and set HVDKIT_JIT_COMPILE to the same, on every rank"
        compare([how for _, how, _, _ in ranks], "fit: use of XLA (jit_compile)", remedy, ranks=exchange.ranks)
        check_paths([paths for _, _, _, paths in ranks], exchange.ranks)
        others = with_values(model.non_trainable_variables)
        synchronize_start([weights for _, _, weights, _ in ranks], [*equal, *others], self._group)
        self._replace_step()
        self._replace_hooks()

    def release(self) -> None:
        """Undo what the current or last ``fit`` has changed."""
        self._changes.close()
        self._owner = None
        self._has_begun = False
        self._optimizers = []
        self._stop_request = StopRequest()
        self._error = None

    def _replace(self, target: object, attributes: Mapping[str, object]) -> None:
        """Replace attributes of ``target`` until the end of this ``fit``."""
        self._changes.callback(exchange_attributes, target, exchange_attributes(target, attributes))

    @staticmethod
    def _after(hook: Callable[..., None], then: Callable[..., None]) -> Callable[..., None]:
        def both(*args: object, **kwargs: object) -> None:
            hook(*args, **kwargs)
            then(*args, **kwargs)

        return both

    # ---- before the first batch ---------------------------------------------------------------------------------

    def _replace_hooks(self) -> None:
        """Have what callbacks of the chief only decide wait for the end of the epoch, where all ranks learn of it."""
        for callback in running_callbacks(lambda other: other is self._model):
            if is_on_chief(callback):
                own = {name: getattr(callback, name) for name in _HOOKS}
                changed = {name: hook for name, hook in own.items() if not is_default(hook)}
                hooks = {name: self._deferring(callback, name, hook) for name, hook in changed.items()}
                self._replace(callback, hooks)

    def _deferring(
        self, callback: keras.callbacks.Callback, name: str, hook: Callable[..., None]
    ) -> Callable[..., None]:
        def deferring(*args: object, **kwargs: object) -> None:
            try:
                with self._stop_request.noticing(self._model, callback, name):
                    hook(*args, **kwargs)
            except Exception as error:
                if name != "on_epoch_end":  # the other ranks go on
                    reporter().note_raised(error)
                    raise
                self._error = self._error or error

        return deferring

    def _replace_step(self) -> None:
        """Read the rows of the first epoch, and have the watchdog learn of exceptions that the program may catch.

        With ``jit_compile=True``, the new functions compile what lies between exchanges, as in ``hk.fit``.
        """
        model = self._model
        step = model.train_step

        def reading_rows(data: Tensors) -> object:
            reads = self._rows.read_value()[0] > 0
            digest = tf.cond(reads, lambda: digest_in_any_order(data), lambda: tf.zeros([], tf.int64))
            self._rows.assign_add(tf.stack([tf.zeros([], tf.int64), digest]))
            return step(data)

        self._rows.assign([1, 0])
        attributes: dict[str, object] = {"train_step": reading_rows, **makers_of(model)}
        if model.jit_compile and not uses_whole_step(model):
            attributes["_jit_compile"] = False  # of a whole step, which has no exchanges
        self._replace(model, attributes)
        if model.train_function is self._train_function is not None:  # traced in an earlier fit
            return
        object.__setattr__(model, "train_function", None)  # bypass Keras's tracking
        model.make_train_function()
        self._train_function = _reporting(model.train_function)
        object.__setattr__(model, "train_function", self._train_function)

    # ---- after an epoch -----------------------------------------------------------------------------------------

    def _compare_epoch(self, epoch: int, logs: Mapping[str, npt.ArrayLike] | None = None) -> None:
        """Raise if the decisions of ranks differ; warn if their logs differ or their rows are equal.

        All ranks stop if a callback of the chief only has set ``stop_training``.

        Raises:
            CollectiveMismatchError: only some ranks stop, or learning rates or the model's state differ.
            Exception: a callback of the chief only has raised it.
        """
        known = {name: float(value) for name, value in (logs or {}).items() if _is_real(value)}
        rows = int(self._rows[1])
        exchange = cluster.exchange(self._group)
        model = self._model

        def end() -> _EpochEnd:
            if self._error is not None:
                raise self._error
            return _EpochEnd(
                bool(model.stop_training),
                self._stop_request.is_made,
                _rate(model.optimizer),
                known,
                rows,
                digests_of(state_of(model)),
            )

        ranks = gather(exchange, "the end of an epoch", end)
        remedy = "use hk.fit, or put hk.callbacks.MetricAverage() before callbacks that decide"
        when = f"after epoch {epoch + 1}"
        compare([each.stops for each in ranks], f"callbacks: stop_training {when}", remedy, ranks=exchange.ranks)
        compare([each.rate for each in ranks], f"callbacks: learning rate {when}", remedy, ranks=exchange.ranks)
        compare_state([each.state for each in ranks], exchange.ranks, remedy="use hk.fit, and ")
        warn_of_full_buckets(model.trainable_variables)
        common = [name for name in known if all(name in each.logs for each in ranks)]
        names = [
            name
            for name in common
            if not all(np.array_equal(each.logs[name], known[name], equal_nan=True) for each in ranks)
        ]
        if names:
            values = ", ".join(f"{each.logs[names[0]]}" for each in ranks)
            got = f"{names[0]} differs between ranks ({values} in rank order), also for callbacks and History"
            self._warn("logs", f"fit: {got}; {remedy}")
        if any(each.requests_stop for each in ranks):
            self._stop_request.grant(model)
        if rows:
            self._warn_of_equal_data([each.rows for each in ranks])
        self._rows.assign([0, 0])

    def _finish(self, logs: Mapping[str, npt.ArrayLike] | None = None) -> None:
        """Raise CollectiveMismatchError if weights differ; average moving statistics. Every rank must call it."""
        try:
            if self._has_begun:
                compare_end(self._model.trainable_variables, self._group)
                if not is_supervised(self._model):
                    average_moving_statistics(self._model, process_set=self._group)
        finally:
            self.release()

    def _warn_of_equal_data(self, digests: list[int]) -> None:
        number = min(cluster.group(cluster.DATA).size, len(digests))  # ranks along other mesh axes share a batch
        if number > 1 and len(set(digests)) == 1:
            self._warn(
                "data",
                f"fit: each of {number} ranks trains on the same data: an epoch is {number} passes over the data; "
                "use hk.fit(model, ...), which divides each batch, or give each rank its own rows",
            )

    def _warn(self, topic: str, message: str) -> None:
        """Log a warning on the chief, once per topic."""
        if topic not in self._warned and cluster.is_chief():
            get_logger().warning("%s", message)
        self._warned.add(topic)


# Stored on the model, which the checks reference.
_CHECKS: Attached[PlainFitChecks] = Attached("_hvdkit_checks")


def _is_real(value: npt.ArrayLike) -> TypeGuard[SupportsFloat]:
    return np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number)


def _rate(optimizer: keras.Optimizer) -> float | None:
    rate = getattr(optimizer, "learning_rate", None)
    return None if rate is None else float(np.asarray(rate))


def _reporting(step: Function) -> Function:
    """Return a model's ``train_function`` that reports exceptions to the watchdog."""

    def reporting(iterator: Iterator[object]) -> object:
        try:
            return step(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):  # the end of the data
            raise
        except Exception as error:
            explained = reporter().explained(error)
            if explained is error:
                raise
            raise explained from (error if isinstance(explained, ClusterError) else error.__cause__)

    return reporting
