"""Changes that ``hk.fit`` makes to a model: attributes of that instance, most of which are restored afterwards."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NoReturn

import keras
import tensorflow as tf
from keras import tree

from hvdkit import cluster
from hvdkit.cluster.agreement import gather
from hvdkit.collectives.weak_registry import Attached
from hvdkit.errors import ClusterError, HvdkitError, describe
from hvdkit.keras.atomic_saving import make_saving_atomic
from hvdkit.keras.attribute_swap import exchange_attributes, swap_attributes
from hvdkit.keras.chief_variables import VariableBroadcaster, build_before_tracing
from hvdkit.keras.compiled_functions import jit_mode, makers_of, uses_whole_step
from hvdkit.keras.data_end import report_end_of_data
from hvdkit.keras.losses import check_loss
from hvdkit.keras.metric_checks import MetricChecks
from hvdkit.keras.metric_combiner import MetricCombiner
from hvdkit.keras.model_optimizers import (
    compare_optimizers,
    distribute_optimizers,
    following_originals,
    optimizers_of,
    plain_optimizers_of,
)
from hvdkit.keras.own_methods import as_plain
from hvdkit.keras.rank_functions import FunctionComparison
from hvdkit.keras.rank_seeds import rank_seeds
from hvdkit.keras.rank_state import compare_constants, compare_state, digests_of, state_of
from hvdkit.keras.shares import Shares
from hvdkit.keras.strategies import leave_strategy
from hvdkit.keras.supervised_fit import end_supervision
from hvdkit.keras.train_steps import ShareSteps, Step
from hvdkit.layers import average_moving_statistics, synchronize_batch_normalization
from hvdkit.optimizer.equal_ranks import checked
from hvdkit.sharding.shards import AnyVariable, shard_of
from hvdkit.sharding.vocabulary import warn_of_full_buckets
from hvdkit.watchdog.ending import ending
from hvdkit.watchdog.reporter import reporter

if TYPE_CHECKING:
    import numpy as np

    from hvdkit.keras.data_types import Tensors

_FUNCTIONS = ("train_function", "test_function", "predict_function")
# Attributes that the traced steps depend on.
_COMPILED_ATTRIBUTES = ("_loss_tracker", "optimizer", "steps_per_execution", "run_eagerly", "_jit_compile")
_STEP_METHODS = ("train_step", "test_step", "predict_step")
# Methods that train, whose gradients every rank has to send; and those that look up rows of sharded tables.
_TRAINING_METHODS = ("fit", "train_on_batch")
_LOOKUP_METHODS = ("evaluate", "predict", "test_on_batch", "predict_on_batch")
# The name of a callback that runs on the chief only, while it runs.
_ALONE: contextvars.ContextVar[str | None] = contextvars.ContextVar("alone", default=None)


def check_all_ranks_call(call: str) -> None:
    """Raise if not all ranks will make a ``call`` that every rank has to make.

    Raises:
        ClusterError: ``hk.init()`` was not called; or a rank has failed, which the program has caught on this rank; the
            message names it.
        HvdkitError: a callback that runs on the chief only makes the call; the message names it.
    """
    cluster.size()  # raises without hk.init()
    if ending().line:
        raise ClusterError(ending().line)
    if (callback := _ALONE.get()) is not None:
        got = f"{callback}, which runs on the chief only, and calls {call}"
        remedy = "pass it on every rank, without hk.callbacks.on_chief"
        raise HvdkitError(describe("callbacks", got, "a callback on every rank", remedy))


def check_model(model: object) -> None:
    """Raise if ``model`` is not a compiled Keras model that ``hk.fit`` can train."""
    if not isinstance(model, keras.Model):
        remedy = "pass the model first: hk.fit(model, x)"
        raise TypeError(describe("model", type(model).__name__, "a Keras model", remedy))
    if not model.compiled:
        raise ValueError(describe("model", "one that is not compiled", "a compiled model", "call model.compile first"))
    for loss in tree.flatten(model.loss) if cluster.size() > 1 else ():
        if isinstance(loss, keras.losses.Loss):
            check_loss(loss)


class FitSession:
    """A model, with distributed optimizers, whose steps run on shares. Keeps the traced graphs between calls.

    Args:
        may_be_empty: whether a rank may get an empty share of a batch.
        may_gather: False if batches have tensors that every rank gets whole.

    Attributes:
        may_end_anywhere: whether the current data may end at different steps on different ranks.
    """

    may_end_anywhere = False
    _is_running = False
    _is_active = False  # whether the model has the methods that run on shares

    def __init__(self, model: keras.Model, *, may_be_empty: bool, loss_scope: str, may_gather: bool) -> None:
        self.model = model
        self._variables = VariableBroadcaster(model)
        self.loss_scope = loss_scope
        self.steps = ShareSteps(
            model,
            self._variables.broadcast_new,
            may_be_empty=may_be_empty,
            loss_scope=loss_scope,
            may_gather=may_gather,
        )
        self._functions: dict[str, Callable[..., object] | None] = dict.fromkeys(_FUNCTIONS)
        # The functions when a callback last called the model.
        self._built: dict[str, Callable[..., object] | None] = dict.fromkeys(_FUNCTIONS)
        self._dependencies = _dependencies(model)
        self._jit_mode = jit_mode(model)
        self.metric_combiner = MetricCombiner(model, lambda: float(self.steps.last_factor.numpy()))
        self.metric_checks = MetricChecks(model, self.steps.loss_scopes)
        self._is_compared = False
        self.functions = FunctionComparison(model, self.steps.has_checked_steps)
        self._inactive: dict[str, object] = {}  # the attributes that the model does not have now

    @classmethod
    def of(
        cls, model: keras.Model, *, may_be_empty: bool, loss_scope: str | None = None, may_gather: bool = True
    ) -> FitSession:
        """Return a model's session; reuse the previous one unless its dependencies have changed.

        The arguments are those of the class; ``loss_scope`` is None for that of the previous session.
        """
        session = _SESSIONS.get(model)
        loss_scope = loss_scope or ("auto" if session is None else session.loss_scope)
        if session is not None and session._is_running:  # called by a callback
            if may_be_empty and not session.steps.may_be_empty:
                session.steps.may_be_empty = True
                object.__setattr__(model, "test_function", None)  # was traced without support for empty shares
            return session
        leave_strategy(model, plain_optimizers_of(model))
        distribute_optimizers(model)
        synchronize_batch_normalization(model)
        make_saving_atomic(model)
        if (
            session is None
            or (may_be_empty and not session.steps.may_be_empty)
            or loss_scope != session.loss_scope
            or may_gather != session.steps.loss_scopes.may_gather
            or jit_mode(model) != session._jit_mode
            or not all(old is new for old, new in zip(session._dependencies, _dependencies(model), strict=True))
        ):
            session = cls(model, may_be_empty=may_be_empty, loss_scope=loss_scope, may_gather=may_gather)
            _SESSIONS.set(model, session)
        return session

    @contextlib.contextmanager
    def running(self, *data: Shares) -> Iterator[None]:
        """Broadcast the chief's variables, and run the model's methods on ``data``. Every rank must call it."""
        with contextlib.ExitStack() as stack:
            for shares in data:
                stack.enter_context(shares.explained())
            stack.enter_context(self._called_by_callback(data) if self._is_running else self._running())
            yield

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        if (release := end_of_plain_fit.get(self.model)) is not None:
            release()
        end_supervision(self.model)
        compare_optimizers(self.model)
        if not self._is_compared and cluster.size() > 1:
            compare_constants(self.model)
        self._is_compared = True
        self._variables.broadcast_all()
        model = self.model
        steps = self.steps
        steps.digests.assign(0)
        self._inactive = {
            "train_step": steps.wrap("train", self._wrap_step(model.train_step), model.train_step),
            "test_step": steps.wrap("test", self._wrap_step(model.test_step), model.test_step),
            "predict_step": steps.wrap_predict(self._wrap_step(model.predict_step)),
            "reset_metrics": self._reset_metrics(model.reset_metrics),
            "_get_metrics_result_or_logs": self._metrics_at_end,
            **makers_of(model),
            **self._functions,
        }
        attributes: dict[str, object] = {name: self._plain(name) for name in (*_TRAINING_METHODS, *_LOOKUP_METHODS)}
        if model.jit_compile and not uses_whole_step(model):
            attributes["_jit_compile"] = False  # of a whole step, which has no exchanges
        optimizers = optimizers_of(model)
        with swap_attributes(model, **attributes), following_originals(model), checked(optimizers), self._active():
            self._is_running = True
            try:
                yield
            except Exception as error:
                explained = reporter().explained(error)
                if explained is error:
                    raise
                raise explained from (error if isinstance(explained, ClusterError) else error.__cause__)
            finally:
                end_supervision(model)
                self._is_running = False
                self._functions = {name: vars(model).get(name) for name in _FUNCTIONS}

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """Give the model the methods that run on shares."""
        self._exchange_methods(is_active=True)
        try:
            yield
        finally:
            self._exchange_methods(is_active=False)

    def _exchange_methods(self, *, is_active: bool) -> None:
        self._inactive = exchange_attributes(self.model, self._inactive)
        self._is_active = is_active

    @contextlib.contextmanager
    def _called_by_callback(self, data: Iterable[Shares]) -> Iterator[None]:
        """Run a call of ``hk.evaluate`` or ``hk.predict`` by a callback."""
        before = self.may_end_anywhere
        scopes = self.steps.loss_scopes
        may_gather = not any(shares.has_whole_tensors for shares in data)
        with contextlib.ExitStack() as stack:
            if not self._is_active:
                stack.enter_context(self._active())
            if may_gather != scopes.may_gather:  # the graph of the validation has other exchanges
                stack.enter_context(swap_attributes(scopes, may_gather=may_gather))
                stack.enter_context(swap_attributes(self.model, test_function=None))
            yield
        self.may_end_anywhere = before
        self.metric_combiner.keep_on_first_rank()  # the metrics of the epoch go on from here, as in Keras

    def _plain(self, name: str) -> Callable[..., object]:
        """Return a replacement of a method that callbacks call, and that then runs as in plain Keras."""
        method = getattr(self.model, name)

        def plain(*args: object, **kwargs: object) -> object:
            if not self._is_active or kwargs.get("_use_cached_eval_dataset"):  # Keras's validation
                return method(*args, **kwargs)
            with self._as_in_keras(name):
                return method(*args, **kwargs)

        return as_plain(plain)

    @contextlib.contextmanager
    def _as_in_keras(self, name: str) -> Iterator[None]:
        """Give the model its own steps back while a callback calls the method ``name``."""
        model = self.model
        combiner = self.metric_combiner
        alone = _ALONE.get()
        if alone is not None and (name in _TRAINING_METHODS or any(map(shard_of, model.variables))):
            _refuse(name, alone, model.name)
        states: list[list[tuple[keras.Variable, np.ndarray]]] = []  # of the metrics, before the method resets them
        for function in _FUNCTIONS:
            built = vars(model).get(function)
            if built is not self._built[function]:  # again by a callback, which may have frozen layers
                self._inactive[function] = None
            self._built[function] = built
        self._exchange_methods(is_active=False)
        reset = model.reset_metrics

        def reset_metrics() -> None:
            states.append(combiner.states())
            reset()

        try:
            with swap_attributes(model, reset_metrics=reset_metrics):
                yield
        finally:
            self._exchange_methods(is_active=True)
        if states and alone is not None:
            combiner.restore(states[0])
        elif states:
            combiner.keep_on_first_rank()

    @contextlib.contextmanager
    def running_alone(self, callback: str) -> Iterator[None]:
        """Run a callback that runs on the chief only: refuse what needs every rank."""
        token = _ALONE.set(callback)
        try:
            with contextlib.ExitStack() as stack:
                for layer in self.model._flatten_layers():
                    if any(map(shard_of, layer.variables)):
                        methods = {"call": functools.partial(_refuse, "__call__", callback, layer.name)}
                        if isinstance(layer, keras.Model) and layer is not self.model:  # which _as_in_keras refuses
                            for name in (*_TRAINING_METHODS, *_LOOKUP_METHODS):
                                methods[name] = functools.partial(_refuse, name, callback, layer.name)
                        stack.enter_context(swap_attributes(layer, **methods))
                yield
        finally:
            _ALONE.reset(token)

    def _reset_metrics(self, reset: Callable[[], None]) -> Callable[[], None]:
        """Wrap ``reset_metrics``: a metric that keeps its state has it on one rank, as states are summed over ranks."""

        def reset_metrics() -> None:
            reset()
            self.metric_combiner.keep_on_first_rank()

        return reset_metrics

    def _wrap_step(self, step: Step) -> Step:
        """Wrap a step of the model so that it uses this rank's random seeds and tests metrics."""
        if isinstance(step, tf.types.experimental.PolymorphicFunction):
            step = step._clone(None)  # without the graph that plain fit has traced, which averages no gradients

        def wrapped_step(data: Tensors) -> object:
            self.functions.observe(data)
            with rank_seeds(), self.metric_checks.testing_updates():
                return step(data)

        return wrapped_step

    def _metrics_at_end(self, logs: object) -> object:
        """Replace ``_get_metrics_result_or_logs``, which Keras calls after an epoch or an evaluation."""
        if self.may_end_anywhere:
            report_end_of_data()
        average_moving_statistics(self.model)  # before they are evaluated, saved or exported
        if state := state_of(self.model):
            exchange = cluster.exchange()
            ranks = gather(exchange, "the model's state at the end of an epoch", lambda: digests_of(state))
            compare_state(ranks, exchange.ranks)
        warn_of_full_buckets(self.model.trainable_variables)
        return self.metric_combiner.combine(logs, keeps_totals=True)

    def broadcast_again(self, data: Shares, *, has_built_optimizer: bool, restored: Iterable[AnyVariable] = ()) -> None:
        """Broadcast the chief's variables again, as a callback may have restored them.

        ``has_built_optimizer`` is the chief's; ``restored`` are variables of which each rank has its own value.
        """
        optimizer = self.model.optimizer
        if has_built_optimizer and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        build_before_tracing(self.model, data)
        self._variables.broadcast_all(restored=restored)

    def broadcast_built(self, data: Shares) -> None:
        """Broadcast the variables that have been built on all ranks since the session runs."""
        build_before_tracing(self.model, data)
        if self._variables.new():
            self._variables.broadcast_new()


# Stored on the model, which the session's compiled steps reference.
_SESSIONS: Attached[FitSession] = Attached("_hvdkit_session")
# Undoes what the last plain fit of a model has changed, which may have raised.
end_of_plain_fit: Attached[Callable[[], None]] = Attached("_hvdkit_end_of_plain_fit")


def forget_session(model: keras.Model) -> None:
    """Have the next call of ``hk.fit`` trace the model's steps again."""
    _SESSIONS.remove(model)


def is_running(model: keras.Model) -> bool:
    """Return True while ``hk.fit``, ``hk.evaluate`` or ``hk.predict`` runs a model."""
    session = _SESSIONS.get(model)
    return session is not None and session._is_running


def _dependencies(model: keras.Model) -> tuple[object, ...]:
    compiled = (getattr(model, name, None) for name in _COMPILED_ATTRIBUTES)
    return (*compiled, *(vars(model).get(name) for name in _STEP_METHODS))


def _refuse(method: str, callback: str, model: str, /, *_: object, **__: object) -> NoReturn:
    """Raise for a call of a method on the chief only, with any arguments."""
    got = f"{callback}, which runs on the chief only, and calls {model}.{method}"
    what = "gradients are averaged" if method in _TRAINING_METHODS else "rows of sharded tables are looked up"
    expected = f"a callback on every rank: {what} over all ranks"
    raise HvdkitError(describe("callbacks", got, expected, "pass it on every rank, without hk.callbacks.on_chief"))
