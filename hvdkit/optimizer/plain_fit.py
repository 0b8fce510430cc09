"""Check that Keras's own ``fit`` runs consistently on all ranks: equal weights and decisions, different data.

Keras gives an optimizer no reference to the ``fit`` that calls it, so the first ``fit`` is found on the call stack of
the optimizer's first step. Later calls of ``fit`` and ``evaluate`` are intercepted in ``make_train_function`` and
``make_test_function``, which Keras calls before the first batch. ``hk.fit`` doesn't need any of this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
import xxhash

from hvdkit import cluster
from hvdkit.cluster.agreement import agree, compare, gather
from hvdkit.cluster.logs import get_logger
from hvdkit.collectives.batch_share import is_share, within_share
from hvdkit.collectives.conversion import untracked_variable
from hvdkit.collectives.digests import digest, digest_of_batch, tf_variable
from hvdkit.collectives.weak_registry import Attached
from hvdkit.errors import ClusterError, CollectiveMismatchError, describe
from hvdkit.internals import DataAdapter
from hvdkit.optimizer.caller import locals_of
from hvdkit.optimizer.rank_state import compare_state, digests_of, state_of
from hvdkit.sharding.shards import differs_by_rank
from hvdkit.sharding.variables import broadcast_variables
from hvdkit.sharding.vocabulary import warn_of_full_buckets
from hvdkit.watchdog.reporter import reporter

_SAMPLED_ROWS = 64
_REMEDY = "use hk.fit, or pass hk.callbacks.BroadcastInitial() and build the model before fit"
# Callbacks that write files, and their path attributes.
_PATHS = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.TensorBoard: "log_dir",
    keras.callbacks.BackupAndRestore: "backup_dir",
}
if hasattr(keras.callbacks, "OrbaxCheckpoint"):  # since Keras 3.14
    _PATHS[keras.callbacks.OrbaxCheckpoint] = "directory"


class _FitStart(NamedTuple):
    """The state of one rank at the beginning of ``fit``."""

    steps: tuple[Any, Any]  # batches per epoch, and epochs; None if unknown
    weights: bytes  # digest of trainable variables, slots and learning rates
    data: bytes | None  # digest of sampled rows of the arrays passed to fit; None for other data
    paths: dict[str, str]  # class of each callback that writes files, by path
    evaluated: list[bytes | None]  # digests of the arrays passed to evaluate since the last fit began


def begin_fit(model: Any, optimizer: Any, group: cluster.Group | None) -> None:
    """Broadcast the chief's weights if ranks differ; warn if ranks train on the same data.

    Called on every rank in an optimizer's first step. Later calls of the model's ``fit`` are checked in the same way.
    While the step is being traced, weights can still be changed. In eager mode, its forward pass has already run.

    Raises:
        CollectiveMismatchError: as for :meth:`FitMonitor.begin`.
    """
    if cluster.size() == 1:
        return
    monitor = FitMonitor.of(model, group)
    monitor.optimizers.append(optimizer)
    object.__setattr__(optimizer, "_hvdkit_monitor", monitor)  # bypass Keras's tracking
    fit_locals = locals_of("fit", having="epoch_iterator")
    if not within_share() and not _called_by_hvdkit(fit_locals):
        monitor.begin(fit_locals, is_late=not tf.inside_function())
        monitor.note_batch()


def note_combined(model: keras.Model) -> None:
    """Record that the results of ``evaluate`` have been combined over ranks."""
    if (monitor := _MONITORS.get(model)) is not None:
        monitor.evaluated.clear()


class FitMonitor:
    """Compares the ranks whenever Keras's own ``fit`` trains a model. Stored on the model.

    Args:
        model: a Keras model.
        group: the ranks that train it; None for all.

    Attributes:
        optimizers: the distributed optimizers that have trained the model.
        evaluated: digests of the arrays passed to ``evaluate`` since the last ``fit`` began.
        batch: digest of the first batch of this ``fit``; 0 if unknown.
    """

    def __init__(self, model: Any, group: cluster.Group | None) -> None:
        self._model = weakref.ref(model)
        self._group = group
        self.optimizers: list[Any] = []
        self.evaluated: list[bytes | None] = []
        self._warned: set[str] = set()
        self._graph: Callable[[], Any] = lambda: None
        self.batch = untracked_variable(0, tf.int64, "hvdkit_first_batch")

    @classmethod
    def of(cls, model: Any, group: cluster.Group | None) -> FitMonitor:
        """Return a model's watch."""
        monitor = _MONITORS.get(model)
        if monitor is None:
            monitor = cls(model, group)
            callbacks = {"make_train_function": monitor.on_fit, "make_test_function": monitor.on_evaluate}
            for name, callback in callbacks.items():
                object.__setattr__(model, name, _followed_by(getattr(model, name), callback))
            _MONITORS.set(model, monitor)
        return monitor

    def warn(self, topic: str, message: str) -> None:
        """Log a warning on the chief, once per topic."""
        if topic not in self._warned and cluster.is_chief():
            get_logger().warning("%s", message)
        self._warned.add(topic)

    # ---- before the first batch ---------------------------------------------------------------------------------

    def on_fit(self) -> None:
        """Compare the ranks at the beginning of plain ``fit``. Every rank must call it."""
        fit_locals = locals_of("fit", having="epoch_iterator")
        trains = any(getattr(self._model(), "optimizer", None) is optimizer for optimizer in self.optimizers)
        if trains and fit_locals and not _called_by_hvdkit(fit_locals):
            self.begin(fit_locals, is_late=False)

    def on_evaluate(self) -> None:
        """Record the data passed to ``evaluate``. Not collective: a single rank may call it."""
        fit_locals = locals_of("evaluate", having="epoch_iterator")
        if not fit_locals or fit_locals.get("use_cached_eval_dataset") or _called_by_hvdkit(fit_locals):
            return
        if is_share(fit_locals.get("x")):
            self.warn(
                "evaluate",
                "evaluate: figures are those of this rank's rows; use hk.evaluate(model, ...) on the whole data, or "
                "hk.callbacks.MetricAverage.results(model) on every rank after it",
            )
        self.evaluated.append(_digest_of_arrays(fit_locals.get("x"), fit_locals.get("y")))

    def begin(self, fit_locals: dict[str, Any], *, is_late: bool) -> None:
        """Compare the ranks, synchronize the weights, and install the callback that compares ranks later on.

        Args:
            fit_locals: local variables of Keras's ``fit``.
            is_late: whether a forward pass has already used the weights.

        Raises:
            CollectiveMismatchError: the number of steps differs between ranks, or several ranks write the same files;
                or the weights differ, in eager mode or with ``process_set``.
        """
        model = self._model()
        callbacks = fit_locals.get("callbacks")
        assert model is not None
        params = getattr(callbacks, "params", None) or {}
        with tf.init_scope():
            # Variables created while tracing have no values yet; they are compared after fit.
            slots = [v for optimizer in self.optimizers for v in _slots(optimizer)]
            equal = [v for v in [*model.trainable_variables, *slots] if not differs_by_rank(v) and _has_value(v)]
            self.batch.assign(0)
            exchange = cluster.exchange(self._group)
            ranks = gather(
                exchange,
                "the beginning of fit",
                lambda: _FitStart(
                    (params.get("steps"), params.get("epochs")),
                    _digest(equal),
                    _digest_of_arrays(fit_locals.get("x"), fit_locals.get("y")),
                    _paths(callbacks),
                    self.evaluated,
                ),
            )
            self.evaluated = []
            steps = [other.steps for other in ranks]
            compare(steps, "fit: (steps per epoch, epochs)", "use hk.fit", ranks=exchange.ranks)
            if ranks[0].data is not None:
                self.warn_of_equal_data([other.data for other in ranks], "arrays")
            _check_paths(ranks, exchange.ranks)
            self._warn_of_evaluations(ranks)
            weights_of_ranks = [other.weights for other in ranks]
            if len(set(weights_of_ranks)) > 1:
                differ = "different weights, slots or learning rate before the first step", "equal ones"
                if is_late or self._group is not None:
                    compare(weights_of_ranks, "model", _REMEDY, ranks=exchange.ranks, show=lambda *_: differ)
                got = "weights, slots or a learning rate that differ between ranks before the first step"
                self.warn("weights", f"fit: got {got}: all ranks start with the chief's; {_REMEDY}")
                broadcast_variables([v for v in [*model.variables, *slots] if _has_value(v)])
            if isinstance(callbacks, keras.callbacks.CallbackList):
                self._append_comparison(callbacks)
            _report_exceptions(model)

    def _append_comparison(self, callbacks: keras.callbacks.CallbackList) -> None:
        if any(isinstance(each, _RankComparison) for each in callbacks.callbacks):
            return
        comparison = _RankComparison(self, self._group)
        comparison.set_model(callbacks.model)
        comparison.set_params(callbacks.params)
        callbacks.callbacks.append(comparison)

    def note_batch(self) -> None:
        """Record the digest of the first batch of this ``fit``, in the graph of the step or in eager mode."""
        if within_share():
            return
        data = locals_of("one_step_on_data", having="data").get("data")
        tensors = [x for x in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(x)]
        if not tensors:
            return
        if not tf.is_symbolic_tensor(tensors[0]):
            with tf.init_scope():
                if not int(self.batch):
                    self.batch.assign(_nonzero(digest_of_batch(data)))
            return
        if self._graph() is tensors[0].graph:  # a step may apply several updates
            return
        self._graph = weakref.ref(tensors[0].graph)
        known = self.batch.read_value()
        self.batch.assign(tf.cond(tf.equal(known, 0), lambda: _nonzero(digest_of_batch(data)), lambda: known))

    # ---- warnings -----------------------------------------------------------------------------------------------

    def warn_of_equal_data(self, digests: list[Any], what: str) -> None:
        """Warn if all ranks train on the same data: ``what``, with the ``digests`` in rank order."""
        number = cluster.group(cluster.DATA).size  # ranks along other mesh axes share a batch
        if number > 1 and len(set(digests)) == 1:
            self.warn(
                "data",
                f"fit: each of {number} ranks trains on the same {what}: an epoch is {number} passes over the data; "
                "use hk.fit(model, ...), which divides each batch, or give each rank its own rows",
            )

    def _warn_of_evaluations(self, ranks: list[_FitStart]) -> None:
        if len({len(other.evaluated) for other in ranks}) > 1:  # an evaluation on the chief only
            return
        for digests in zip(*(other.evaluated for other in ranks), strict=True):
            if None not in digests and len(set(digests)) > 1:
                self.warn(
                    "evaluate",
                    "evaluate: each rank has evaluated only its own rows, so that results differ between ranks; use "
                    "hk.evaluate(model, ...) on the whole data, or hk.callbacks.MetricAverage.results(model) after it",
                )


# Stored on the model: a watch references optimizers, whose learning-rate function may reference the model.
_MONITORS: Attached[FitMonitor] = Attached("_hvdkit_monitor")


class _EpochEnd(NamedTuple):
    """The state of one rank at the end of an epoch."""

    stops: bool  # whether a callback has set stop_training
    rate: float | None
    logs: dict[str, float]  # numbers passed to callbacks and History
    batch: int  # digest of the first batch of this fit; 0 if unknown
    state: list[tuple[str, bytes]]  # digests of what layers and steps update without a gradient


class _RankComparison(keras.callbacks.Callback):
    """Compares ranks at the end of each epoch and of training, after all other callbacks."""

    def __init__(self, monitor: FitMonitor, group: cluster.Group | None) -> None:
        super().__init__()
        self._monitor = monitor
        self._group = group

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Raise if the decisions of ranks differ; warn if their logs differ or their first batches are equal.

        Raises:
            CollectiveMismatchError: only some ranks stop, or learning rates or the model's state differ.
        """
        known = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        batch = int(self._monitor.batch)
        exchange = cluster.exchange(self._group)
        model = self.model
        ranks = gather(
            exchange,
            "the end of an epoch",
            lambda: _EpochEnd(
                bool(model.stop_training), _rate(model.optimizer), known, batch, digests_of(state_of(model))
            ),
        )
        remedy = "use hk.fit, or put hk.callbacks.MetricAverage() before callbacks that decide"
        when = f"after epoch {epoch + 1}"
        compare([each.stops for each in ranks], f"callbacks: stop_training {when}", remedy, ranks=exchange.ranks)
        compare([each.rate for each in ranks], f"callbacks: learning rate {when}", remedy, ranks=exchange.ranks)
        compare_state([each.state for each in ranks], exchange.ranks, remedy="use hk.fit, and ")
        warn_of_full_buckets(model.trainable_variables)
        names = [name for name in known if any(each.logs.get(name) != known[name] for each in ranks)]
        if names:
            values = ", ".join(f"{each.logs.get(names[0])}" for each in ranks)
            got = f"{names[0]} differs between ranks ({values} in rank order), also for callbacks and History"
            self._monitor.warn("logs", f"fit: {got}; {remedy}")
        if batch:
            self._monitor.warn_of_equal_data([each.batch for each in ranks], "batches")

    def on_train_end(self, logs: Any = None) -> None:
        """Compare the weights.

        Raises:
            CollectiveMismatchError: weights differ; raised on every rank.
        """
        agree(
            cluster.exchange(self._group),
            lambda: _digest([v for v in self.model.trainable_variables if not differs_by_rank(v)]),
            "weights at the end of fit",
            _REMEDY,
            show=lambda *_: ("different weights, although they were equal before", "equal ones"),
        )


def _check_paths(starts: list[_FitStart], ranks: Sequence[int]) -> None:
    """Raise on every rank if callbacks of several ranks write to the same path, which corrupts the files."""
    for path, name in (pair for start in starts for pair in start.paths.items()):
        writers = [rank for rank, start in zip(ranks, starts, strict=True) if path in start.paths]
        if len(writers) > 1:
            got = f"{name} that writes {path!r} on ranks {writers[0]} and {writers[1]}"
            got += f" and {len(writers) - 2} more" * (len(writers) > 2)
            remedy = "use hk.fit, which has the chief write, or pass hk.callbacks.on_chief(callback)"
            raise CollectiveMismatchError(describe("callbacks", got, "one rank that writes to a path", remedy))


def _slots(optimizer: Any) -> list[Any]:
    """Return slots and counters, without locally accumulated gradients."""
    parts = [optimizer, getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    sums = {id(v) for part in parts for v in getattr(part, "_accumulated_gradients", ())}
    return [v for v in optimizer.variables if id(v) not in sums]


def _rate(optimizer: Any) -> float | None:
    rate = getattr(optimizer, "learning_rate", None)
    return None if rate is None else float(np.asarray(rate))


def _digest(variables: list[Any]) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(map(digest, variables)))


def _has_value(variable: Any) -> bool:
    return bool(tf_variable(variable).is_initialized())


def _report_exceptions(model: Any) -> None:
    """Have the watchdog learn of exceptions in the model's steps, which the program may catch."""
    step = model.train_function
    if step is None or isinstance(step, _ReportingStep):
        return
    object.__setattr__(model, "train_function", _ReportingStep(step))  # bypass Keras's tracking


class _ReportingStep:
    """A model's ``train_function`` that reports exceptions."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step

    def __call__(self, iterator: Any) -> Any:
        try:
            return self._step(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):  # the end of the data
            raise
        except Exception as error:
            explained = reporter().explained(error)
            if explained is error:
                raise
            raise explained from (error if isinstance(explained, ClusterError) else error.__cause__)


def _followed_by(function: Callable[..., Any], then: Callable[[], None]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        then()
        return result

    return called


def _called_by_hvdkit(fit_locals: dict[str, Any]) -> bool:
    """Return True if these local variables are of a Keras method that ``hk.fit`` or ``hk.evaluate`` called."""
    return isinstance(fit_locals.get("x"), DataAdapter)


def _nonzero(number: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_or(number, tf.ones([], tf.int64))


def _paths(callbacks: Any) -> dict[str, str]:
    """Return the class names of callbacks that write files, by absolute path."""
    paths: dict[str, str] = {}
    for callback in getattr(callbacks, "callbacks", ()):
        for kind, attribute in _PATHS.items():
            if isinstance(callback, kind):
                path = str(getattr(callback, attribute))
                paths[path if "://" in path else str(Path(path).resolve())] = type(callback).__name__
    return paths


def _digest_of_arrays(x: Any, y: Any) -> bytes | None:
    """Return a digest of sampled rows of arrays; None for other data."""
    arrays = [part for part in tf.nest.flatten([x, y]) if part is not None]
    if not arrays or not all(isinstance(part, (np.ndarray, tf.Tensor)) and len(part.shape) for part in arrays):
        return None
    hasher = xxhash.xxh3_128()
    for part in arrays:
        hasher.update(repr(part.shape).encode())
        for row in sorted(set(np.linspace(0, part.shape[0] - 1, _SAMPLED_ROWS).astype(int))) if part.shape[0] else ():
            hasher.update(np.asarray(part[row]).tobytes())
    return hasher.digest()
