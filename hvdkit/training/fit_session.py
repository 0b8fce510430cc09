"""Changes that ``hk.fit`` makes to a model: attributes of that instance, most of which are restored afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from hvdkit import cluster
from hvdkit.cluster.logs import get_logger
from hvdkit.collectives import broadcast_object
from hvdkit.collectives.marks import Attached
from hvdkit.layers import synchronize_batch_normalization
from hvdkit.training.atomic_saving import save_whole_files
from hvdkit.training.data_end import at_end_of_data
from hvdkit.training.metric_checks import MetricChecks
from hvdkit.training.preparation import Variables, compare_optimizers, distribute_optimizers, seeds_of_rank
from hvdkit.training.results import Results
from hvdkit.training.swapping import swapped
from hvdkit.training.train_steps import Step, Steps

_FUNCTIONS = ("train_function", "test_function", "predict_function")
# Attributes that the traced steps depend on.
_COMPILED = ("_loss_tracker", "optimizer", "steps_per_execution", "run_eagerly", "_jit_compile")
_STEPS = ("train_step", "test_step", "predict_step")


class Session:
    """A model whose steps run on shares. Keeps the traced graphs between calls.

    Args:
        model: a Keras model with distributed optimizers.
        may_be_empty: whether a rank may get an empty share of a batch.

    Attributes:
        steps: the model's steps.
        may_end_anywhere: whether the current data may end at different steps on different ranks.
    """

    may_end_anywhere = False

    def __init__(self, model: Any, *, may_be_empty: bool) -> None:
        self.model = model
        self._variables = Variables(model)
        self.steps = Steps(model, self._variables.begin_new, may_be_empty=may_be_empty)
        self._functions: dict[str, Any] = dict.fromkeys(_FUNCTIONS)
        self._identity = _identity(model)
        self._results: Results | None = None
        self._checks = MetricChecks(model)
        self._is_running = False

    @classmethod
    def of(cls, model: Any, *, may_be_empty: bool) -> Session:
        """Return a model's session; reuse the previous one unless its dependencies have changed."""
        found = _SESSIONS.get(model)
        if found is not None and found._is_running:  # called by a callback
            if may_be_empty and not found.steps.may_be_empty:
                found.steps.may_be_empty = True
                object.__setattr__(model, "test_function", None)  # was traced without support for empty shares
            return found
        distribute_optimizers(model)
        synchronize_batch_normalization(model)
        save_whole_files(model)
        if (
            found is None
            or (may_be_empty and not found.steps.may_be_empty)
            or not all(mine is now for mine, now in zip(found._identity, _identity(model), strict=True))
        ):
            _warn_of_local_statistics(model)
            found = cls(model, may_be_empty=may_be_empty)
            _SESSIONS.set(model, found)
        return found

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Broadcast the chief's variables, and run the model's methods on shares. Every rank must call it."""
        if self._is_running:
            before = self.may_end_anywhere
            yield
            self.may_end_anywhere = before
            return
        compare_optimizers(self.model)
        self._variables.begin()
        model, steps = self.model, self.steps
        steps.begin()
        self._results = Results(model, model._get_metrics_result_or_logs, self._last_factor)
        changed = {
            "train_step": steps.of("train", self._own(model.train_step)),
            "test_step": steps.of("test", self._own(model.test_step)),
            "predict_step": steps.predictions(self._own(model.predict_step)),
            "_get_metrics_result_or_logs": self._at_end,
            **self._functions,
        }
        if cluster.size() > 1 and model.jit_compile:
            changed["_jit_compile"] = False
            if cluster.is_chief() and not any(self._functions.values()):
                get_logger().info("jit_compile: switched off for the model's steps: Horovod has no XLA kernels")
        with swapped(model, **changed):
            self._is_running = True
            try:
                yield
            finally:
                self._is_running = False
                self._functions = {name: vars(model).get(name) for name in _FUNCTIONS}

    def _own(self, step: Step) -> Step:
        """Wrap a step of the model so that it uses this rank's random seeds and tests metrics."""

        def own_step(data: Any) -> Any:
            with seeds_of_rank(), self._checks.trying():
                return step(data)

        return own_step

    def check_metrics(self) -> None:
        """Check that the state of all metrics can be combined. Call after a step, which creates their variables.

        Raises:
            ValueError: a metric cannot be combined.
        """
        self._checks.check()

    def _at_end(self, logs: Any) -> Any:
        """Replace ``_get_metrics_result_or_logs``, which Keras calls after an epoch or an evaluation."""
        assert self._results is not None
        if self.may_end_anywhere:
            at_end_of_data()
        return self._results.at_end(logs)

    def global_logs(self, logs: Any) -> Any:
        """Return a batch's logs combined over ranks. Every rank must call it, while the session runs."""
        assert self._results is not None
        return self._results.combined(logs)

    def begin_again(self) -> None:
        """Broadcast the chief's variables again, as a callback may have restored them."""
        optimizer = self.model.optimizer
        if broadcast_object(optimizer is not None and optimizer.built) and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self._variables.begin()

    def _last_factor(self) -> float:
        return float(self.steps.last_factor.numpy())


# Stored on the model, which the session's compiled steps reference.
_SESSIONS: Attached[Session] = Attached("_hvdkit_session")


def _identity(model: Any) -> tuple[Any, ...]:
    return tuple(getattr(model, name, None) for name in _COMPILED) + tuple(vars(model).get(name) for name in _STEPS)


def _warn_of_local_statistics(model: Any) -> None:
    """Warn on the chief if batch normalization uses local statistics, unlike in one process."""
    kind = keras.layers.BatchNormalization
    local = [x.name for x in model._flatten_layers() if isinstance(x, kind) and x.trainable and not x.synchronized]
    if local and cluster.is_chief() and cluster.group(cluster.DATA).size > 1:
        get_logger().warning(
            "BatchNormalization (%s%s): normalizes by each rank's rows, not by the global batch; use synchronized=True "
            "for the results of one process",
            ", ".join(local[:3]),
            ", ..." if len(local) > 3 else "",
        )
