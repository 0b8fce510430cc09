"""Changes that ``hk.fit`` makes to a model: attributes of that instance, most of which are restored afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src import tree

from hvdkit import cluster
from hvdkit.cluster.agreement import gather
from hvdkit.cluster.logs import get_logger, warn_once
from hvdkit.collectives import broadcast_object
from hvdkit.collectives.weak_registry import Attached
from hvdkit.errors import ClusterError, describe
from hvdkit.layers import average_moving_statistics, synchronize_batch_normalization
from hvdkit.optimizer.rank_state import compare_constants, compare_state, digests_of, state_of
from hvdkit.sharding.shards import holding_of, is_seed_state
from hvdkit.sharding.variables import broadcast_variables
from hvdkit.training.atomic_saving import make_saving_atomic
from hvdkit.training.attribute_swap import swap_attributes
from hvdkit.training.data_end import report_end_of_data
from hvdkit.training.losses import check_loss
from hvdkit.training.metric_checks import MetricChecks
from hvdkit.training.metric_combiner import MetricCombiner
from hvdkit.training.model_optimizers import compare_optimizers, distribute_optimizers, optimizers_of
from hvdkit.training.rank_seeds import global_generator, rank_seeds, spread_seeds
from hvdkit.training.shares import Shares
from hvdkit.training.train_steps import ShareSteps, Step
from hvdkit.watchdog.reporter import reporter

_FUNCTIONS = ("train_function", "test_function", "predict_function")
# Attributes that the traced steps depend on.
_COMPILED_ATTRIBUTES = ("_loss_tracker", "optimizer", "steps_per_execution", "run_eagerly", "_jit_compile")
_STEP_METHODS = ("train_step", "test_step", "predict_step")


def check_model(model: Any) -> None:
    """Raise if ``model`` is not a compiled Keras model that ``hk.fit`` can train."""
    if not isinstance(model, keras.Model):
        remedy = "pass the model first: hk.fit(model, x)"
        raise TypeError(describe("model", type(model).__name__, "a Keras model", remedy))
    if not model.compiled:
        raise ValueError(describe("model", "one that is not compiled", "a compiled model", "call model.compile first"))
    for loss in tree.flatten(model.loss):
        if isinstance(loss, keras.losses.Loss):
            check_loss(loss)


class FitSession:
    """A model whose steps run on shares. Keeps the traced graphs between calls.

    Args:
        model: a Keras model with distributed optimizers.
        may_be_empty: whether a rank may get an empty share of a batch.

    Attributes:
        steps: the model's steps.
        metric_combiner: combines the logs of the ranks.
        metric_checks: checks that metrics can be combined.
        may_end_anywhere: whether the current data may end at different steps on different ranks.
    """

    may_end_anywhere = False

    def __init__(self, model: Any, *, may_be_empty: bool) -> None:
        self.model = model
        self._variables = VariableBroadcaster(model)
        self.steps = ShareSteps(model, self._variables.broadcast_new, may_be_empty=may_be_empty)
        self._functions: dict[str, Any] = dict.fromkeys(_FUNCTIONS)
        self._dependencies = _dependencies(model)
        self.metric_combiner = MetricCombiner(model, lambda: float(self.steps.last_factor.numpy()))
        self.metric_checks = MetricChecks(model)
        self._is_running = False
        self._is_compared = False

    @classmethod
    def of(cls, model: Any, *, may_be_empty: bool) -> FitSession:
        """Return a model's session; reuse the previous one unless its dependencies have changed."""
        session = _SESSIONS.get(model)
        if session is not None and session._is_running:  # called by a callback
            if may_be_empty and not session.steps.may_be_empty:
                session.steps.may_be_empty = True
                object.__setattr__(model, "test_function", None)  # was traced without support for empty shares
            return session
        distribute_optimizers(model)
        synchronize_batch_normalization(model)
        make_saving_atomic(model)
        if (
            session is None
            or (may_be_empty and not session.steps.may_be_empty)
            or not all(old is new for old, new in zip(session._dependencies, _dependencies(model), strict=True))
        ):
            session = cls(model, may_be_empty=may_be_empty)
            _SESSIONS.set(model, session)
        return session

    @contextlib.contextmanager
    def running(self, *data: Shares | None) -> Iterator[None]:
        """Broadcast the chief's variables, and run the model's methods on shares. Every rank must call it.

        Args:
            data: the data that are read inside.
        """
        with contextlib.ExitStack() as stack:
            for shares in data:
                if shares is not None:
                    stack.enter_context(shares.explained())
            stack.enter_context(self._running())
            yield

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        if self._is_running:
            before = self.may_end_anywhere
            yield
            self.may_end_anywhere = before
            return
        compare_optimizers(self.model)
        if not self._is_compared and cluster.size() > 1:
            compare_constants(self.model)
        self._is_compared = True
        self._variables.broadcast_all()
        model, steps = self.model, self.steps
        steps.digests.assign(0)
        attributes = {
            "train_step": steps.wrap("train", self._wrap_step(model.train_step)),
            "test_step": steps.wrap("test", self._wrap_step(model.test_step)),
            "predict_step": steps.wrap_predict(self._wrap_step(model.predict_step)),
            "_get_metrics_result_or_logs": self._metrics_at_end,
            **self._functions,
        }
        if cluster.size() > 1 and model.jit_compile:
            attributes["_jit_compile"] = False
            if cluster.is_chief() and not any(self._functions.values()):
                get_logger().info("jit_compile: switched off for the model's steps: Horovod has no XLA kernels")
        with swap_attributes(model, **attributes):
            self._is_running = True
            try:
                yield
            except Exception as error:
                explained = reporter().explained(error)
                if explained is error:
                    raise
                raise explained from (error if isinstance(explained, ClusterError) else error.__cause__)
            finally:
                self._is_running = False
                self._functions = {name: vars(model).get(name) for name in _FUNCTIONS}

    def _wrap_step(self, step: Step) -> Step:
        """Wrap a step of the model so that it uses this rank's random seeds and tests metrics."""

        def wrapped_step(data: Any) -> Any:
            with rank_seeds(), self.metric_checks.testing_updates():
                return step(data)

        return wrapped_step

    def _metrics_at_end(self, logs: Any) -> Any:
        """Replace ``_get_metrics_result_or_logs``, which Keras calls after an epoch or an evaluation."""
        if self.may_end_anywhere:
            report_end_of_data()
        average_moving_statistics(self.model)  # before they are evaluated, saved or exported
        self._compare_state()
        self.steps.row_means.report()
        return self.metric_combiner.combine(logs)

    def _compare_state(self) -> None:
        """Compare the variables that layers and steps update without a gradient."""
        state = state_of(self.model)
        if not state:
            return
        exchange = cluster.exchange()
        ranks = gather(exchange, "the model's state at the end of an epoch", lambda: digests_of(state))
        compare_state(ranks, exchange.ranks)

    def broadcast_again(self) -> None:
        """Broadcast the chief's variables again, as a callback may have restored them."""
        optimizer = self.model.optimizer
        if broadcast_object(optimizer is not None and optimizer.built) and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self._variables.broadcast_all()


class VariableBroadcaster:
    """Gives the variables of a model and its optimizers the chief's values."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[int, Any] = {}

    def broadcast_all(self) -> None:
        """Broadcast the chief's values of all existing variables, and seed each rank differently."""
        self._known = {}
        self._broadcast(self._all(), global_generator().state)

    def broadcast_new(self) -> None:
        """Broadcast variables created since the last call."""
        self._broadcast([v for v in self._all() if id(v) not in self._known])

    def _broadcast(self, variables: list[Any], *replicated_states: Any) -> None:
        self._known |= {id(v): v for v in variables}
        broadcast_variables(variables)
        spread_seeds([v for v in variables if is_seed_state(v)], *replicated_states)

    def _all(self) -> list[Any]:
        optimizer_variables = [v for each in optimizers_of(self._model) for v in each.variables]
        untracked = [each.variable for each in state_of(self._model)]
        variables = [*self._model.variables, *untracked, *optimizer_variables]
        return [v for v in {id(v): v for v in variables}.values() if holding_of(v) is None]


# Stored on the model, which the session's compiled steps reference.
_SESSIONS: Attached[FitSession] = Attached("_hvdkit_session")


def _dependencies(model: Any) -> tuple[Any, ...]:
    compiled = (getattr(model, name, None) for name in _COMPILED_ATTRIBUTES)
    return (*compiled, *(vars(model).get(name) for name in _STEP_METHODS))


def warn_of_local_statistics(model: Any) -> None:
    """Warn on the chief, once for the same layers, that their statistics are local, unlike those of one process."""
    layers = [x for x in model._flatten_layers() if isinstance(x, keras.layers.BatchNormalization)]
    local = [x.name for x in layers if x.trainable and not x.synchronized]
    if local and cluster.is_chief() and cluster.group(cluster.DATA).size > 1:
        names = ", ".join(local[:3]) + (", ..." if len(local) > 3 else "")
        warn_once(
            f"BatchNormalization ({names}): normalizes by each rank's rows, not by the global batch; use "
            "synchronized=True for the results of one process"
        )
