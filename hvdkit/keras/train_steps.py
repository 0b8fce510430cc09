"""Run the model's own step on this rank's share of a global batch.

``ShareSteps`` provides replacements for ``model.train_step``, ``model.test_step`` and ``model.predict_step``. Each
takes an element ``(data, info)`` of :mod:`hvdkit.keras.shares` and calls the model's original step on ``data``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import keras
import tensorflow as tf
from keras import tree

from hvdkit import cluster
from hvdkit.cluster.logs import warn_once
from hvdkit.collectives.batch_share import current_factor, share_of_batch
from hvdkit.collectives.conversion import TensorLike, graph_safe
from hvdkit.collectives.weak_registry import Attached
from hvdkit.errors import describe, see
from hvdkit.internals import get_keras_mask
from hvdkit.keras.attribute_swap import swap_attributes
from hvdkit.keras.data_end import require_batch_on_every_rank
from hvdkit.keras.loss_scopes import LossScopes
from hvdkit.keras.losses import divided_by_all_rows, on_gathered_rows, rescaled, rescaled_vector
from hvdkit.keras.moved_weights import warn_of_reads_after_update, watching_assignments
from hvdkit.keras.rank_state import StateCombiner, state_of
from hvdkit.keras.row_numbers import refusing_rows_by_number
from hvdkit.keras.shares import AnyTensor, Element, number_of_rows, slice_tensor
from hvdkit.keras.source_checks import is_of_keras, is_of_library, warn_of_sums
from hvdkit.keras.step_scopes import UNKNOWN, StepScope, has_own_activity_regularizer, has_own_step
from hvdkit.keras.unchanged_models import is_complete
from hvdkit.layers.batch_norm import synchronized_statistics
from hvdkit.sharding.shards import AnyVariable, differs_by_rank, shard_of

if TYPE_CHECKING:
    from hvdkit.keras.data_types import Tensors

Step: TypeAlias = "Callable[[Tensors], object]"
_COMPILED_LOSSES = ("loss", "_compile_loss")
OUTPUTS_REMEDY = "return tensors [rows, ...] from the model: hk.predict gathers the rows of all ranks"


# All scopes that a model has had: graphs of its own functions, which it keeps, read their variables.
_SCOPES: Attached[list[object]] = Attached("_hvdkit_scopes")


class ShareSteps:
    """The steps of one model.

    Args:
        model: a compiled Keras model.
        on_new_variables: called before a step runs, if the model's variables had to be created for it.
        may_be_empty: whether a rank may get an empty share of a batch.
        loss_scope: as for ``hk.fit``.
        may_gather: False if batches have tensors that every rank gets whole.

    Attributes:
        last_factor: the factor of the last step; 1 before the first step.
        loss_scopes: where losses and metric functions are computed.
        digests: the sum of the digests of all global batches since the session began; 0 for batches without digest.
    """

    def __init__(
        self,
        model: keras.Model,
        on_new_variables: Callable[[], None],
        *,
        may_be_empty: bool,
        loss_scope: str,
        may_gather: bool,
    ) -> None:
        self._model = model
        self._on_new_variables = on_new_variables
        self.may_be_empty = may_be_empty
        self._traced: set[str] = set()
        self._independent: dict[int, bool] = {}  # for the ids of state variables
        self._step_scopes: dict[str, StepScope] = {}  # of the model's own train_step and test_step
        self._has_warned = False
        self.loss_scopes = LossScopes(loss_scope, may_gather=may_gather)
        kept = [*(_SCOPES.get(model) or ()), self._step_scopes, self.loss_scopes]
        _SCOPES.set(model, kept)
        # Create variables here: a step that creates variables is traced twice.
        self.last_factor = tf.Variable(1.0, trainable=False, dtype=tf.float64, name="hvdkit_last_factor")
        self.digests = tf.Variable(0, trainable=False, dtype=tf.int64, name="hvdkit_digests")

    def wrap(self, name: str, step: Step, own_step: Step) -> Callable[[Element], object]:
        """Wrap ``step`` for elements ``(data, info)``; it calls ``own_step``, the model's own for "train" or "test"."""

        @graph_safe
        def on_share(element: Element) -> object:
            data, info = element
            data = require_batch_on_every_rank(data, info["rows"]) if "may_end_anywhere" in info else data
            factor = info.get("factor")
            self._create_variables(name, step, data, factor)
            scope = self._scope_of(name)
            tested = None if scope is None else scope.test(own_step, data, _mean_metrics(self._model))
            with tf.control_dependencies([] if tested is None else [tested]):
                return self._run(name, step, data, info)

        return on_share

    def _run(self, name: str, step: Step, data: Tensors, info: dict[str, tf.Tensor]) -> object:
        """Run a step on this rank's share."""
        factor = info.get("factor")
        scope = self._scope_of(name)
        state = StateCombiner(self._model, cluster.group(cluster.DATA)) if name == "train" else None
        with self._restored_if_empty(factor), self._share(factor, scope), self._global_losses(data, scope):
            with self._watching(name, data), self._refusing_rows_by_number(name, data):
                logs = step(data)
            if scope is not None:
                logs = scope.scaled_logs(logs)
        if state is not None:
            warn_of_reads_after_update(state.variables, data)
            state.combine(factor)
        if info:
            self.last_factor.assign(info.get("factor", 1.0))
            if "digest" in info:
                self.digests.assign_add(info["digest"])
        return logs

    def _share(self, factor: tf.Tensor | None, scope: StepScope | None) -> contextlib.AbstractContextManager[None]:
        return share_of_batch(factor, None if scope is None else scope.is_sum)

    def _watching(self, name: str, data: Tensors) -> contextlib.AbstractContextManager[None]:
        if name != "train":
            return contextlib.nullcontext()
        refuses = self.loss_scopes.loss_scope != "rows"
        return watching_assignments(self._model, data, self._independent, refuses=refuses)

    def has_checked_steps(self) -> bool:
        """Return True if ranks have different rows, and each rank's are all that a step may use of the batch."""
        scopes = self.loss_scopes
        return cluster.group(cluster.DATA).size > 1 and scopes.loss_scope != "rows" and scopes.may_gather

    def _refusing_rows_by_number(self, name: str, data: Tensors) -> contextlib.AbstractContextManager[None]:
        if not self.has_checked_steps():
            return contextlib.nullcontext()
        return refusing_rows_by_number(f"{name}_step of {type(self._model).__name__}", data)

    def _scope_of(self, name: str) -> StepScope | None:
        """Return how the gradients and numbers of the model's own step combine; None without one, or on one rank."""
        if not self.has_checked_steps():
            return None
        if name not in self._step_scopes and has_own_step(self._model, name):
            self._step_scopes[name] = StepScope(self._model, self._rescaled)
        return self._step_scopes.get(name)

    @contextlib.contextmanager
    def _rescaled(self, data: Tensors, factor: tf.Tensor) -> Iterator[None]:
        with share_of_batch(factor), self.loss_scopes.standing_in(), self._global_losses(data, None):
            yield

    def check_step(self) -> None:
        """Raise if the gradients of the first step do not combine; warn on the chief, once, of what is not tested."""
        self.check_earlier_step()
        scope = self._step_scopes.get("train")
        is_tested = scope is not None and scope.gradient != UNKNOWN
        if not (self._has_warned or is_tested or self.loss_scopes.loss_scope == "rows"):
            warn_of_sums(self._model)
            self._warn_of_added_losses()
        self._has_warned = True

    def check_earlier_step(self) -> None:
        """Raise HvdkitError, on every rank, if the first step has shown that its gradients do not combine."""
        if "train" in self._step_scopes:
            self._step_scopes["train"].check()

    def wrap_predict(self, step: Step) -> Callable[[Element], tuple[object, tf.Tensor]]:
        """Wrap ``model.predict_step`` for elements ``(data, info)``; returns outputs and rows of the global batch."""

        @graph_safe
        def on_share(element: Element) -> tuple[object, tf.Tensor]:
            data, info = element
            data = require_batch_on_every_rank(data, info["rows"]) if "may_end_anywhere" in info else data
            self._create_variables("predict", step, data, None)
            outputs = step(data)
            if cluster.size() > 1:
                tree.map_structure(_check_output, outputs)
            if (factor := info.get("factor")) is not None:
                has_rows = factor > 0
                outputs = tree.map_structure(
                    lambda x: slice_tensor(x, 0, tf.where(has_rows, number_of_rows(x), 0)), outputs
                )
            rows = info["rows"] if info else tf.zeros([], tf.int32)  # not needed on one rank
            return outputs, rows[None]

        return on_share

    # ---- shares without rows ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _restored_if_empty(self, factor: tf.Tensor | None) -> Iterator[None]:
        """Restore the variables that the step inside changes, if this rank's share is empty."""
        variables = [] if factor is None or not self.may_be_empty else self._batch_dependent_variables()
        if not variables:
            yield
            return
        is_empty = tf.equal(factor, 0)
        values = tf.cond(
            is_empty,
            lambda: [tf.identity(v) for v in variables],
            lambda: [tf.zeros([0] * len(v.shape), v.dtype) for v in variables],
        )

        def assign() -> tf.Tensor:
            for variable, value in zip(variables, values, strict=True):
                if not self._independent.get(id(variable)):  # e.g. the number of the step
                    variable.assign(tf.ensure_shape(value, variable.shape))
            return tf.constant(True)

        yield
        tf.cond(is_empty, assign, lambda: tf.constant(False))

    def _batch_dependent_variables(self) -> list[AnyVariable]:
        """Return the variables that examples change without a gradient: statistics and metric states."""
        untracked = [each.variable for each in state_of(self._model)]
        candidates = [*self._model.non_trainable_variables, *untracked, *self._model.metrics_variables]
        synchronized = set(map(id, synchronized_statistics(self._model)))
        unique = {id(v): v for v in candidates if id(v) not in synchronized}.values()
        kept = [v for v in unique if not differs_by_rank(v) and tf.as_dtype(v.dtype) != tf.string]
        shards = [shard for v in self._model.variables if (shard := shard_of(v)) is not None]
        clocks = {id(shard.usage.clock) for shard in shards if shard.usage is not None}  # count steps, on all ranks
        return [v for v in kept if id(getattr(v, "_value", v)) not in clocks]

    def _create_variables(self, name: str, step: Step, data: Tensors, factor: tf.Tensor | None) -> None:
        """Trace ``step`` once and discard the graph, if the variables that it creates are needed before it runs.

        New weights must get the chief's values, and empty shares must restore the variables that steps change.
        """
        if name in self._traced:
            return
        self._traced.add(name)
        is_built = is_complete(self._model)
        if is_built and (factor is None or not self.may_be_empty):
            return

        @tf.function(autograph=False)  # no tape records inside init_scope
        def on_share(data: Tensors, factor: tf.Tensor | None) -> None:
            scope = None if name == "predict" else self._scope_of(name)
            losses = contextlib.nullcontext() if name == "predict" else self._global_losses(data, scope)
            watching = self._watching(name, data)  # functions that the step calls are traced here only
            with self._share(factor, scope), losses, watching:
                step(data)

        specs = tree.map_structure(lambda x: None if x is None else tf.type_spec_from_value(x), (data, factor))
        on_share.get_concrete_function(*specs)
        if not is_built:
            with tf.init_scope():
                self._on_new_variables()

    # ---- metrics ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _global_losses(self, data: Tensors, scope: StepScope | None) -> Iterator[None]:
        """Rescale losses to parts of the global loss, and weight means of scalars (loss trackers) by rows.

        ``scope`` is None if the model has no own step, or while it is tested.
        """
        if cluster.group(cluster.DATA).size == 1:
            yield
            return
        with contextlib.ExitStack() as stack:
            weighed: set[int] = set()
            metrics = self._model._compile_metrics
            losses = self._model._compile_loss

            def weigh(means: list[keras.Metric]) -> None:
                for metric in means:
                    if id(metric) in weighed:
                        continue
                    weighed.add(id(metric))
                    is_function = isinstance(metric, keras.metrics.MeanMetricWrapper)
                    compiled = () if metrics is None else metrics.metrics  # created by Keras
                    if type(metric) is keras.metrics.MeanMetricWrapper and any(metric is each for each in compiled):
                        decided = self.loss_scopes.of_metric(metric, on_gathered_rows)
                        stack.enter_context(swap_attributes(metric, _fn=decided))
                    update = _weighted_function(metric) if is_function else _weighted_update(metric, scope)
                    stack.enter_context(swap_attributes(metric, update_state=update))

            def rescale() -> None:
                flat = [each._replace(loss=rescaled(each.loss, self.loss_scopes, data)) for each in losses._flat_losses]
                stack.enter_context(swap_attributes(losses, _flat_losses=flat))

            def weigh_losses() -> None:
                weigh(losses.metrics)
                rescale()

            def weigh_metrics() -> None:
                weigh(_mean_metrics(self._model))

            if metrics is not None and not metrics.built:  # its build wraps each function in a Mean
                stack.enter_context(swap_attributes(metrics, build=_followed_by(metrics.build, weigh_metrics)))
            weigh_metrics()
            for layer in self._model._flatten_layers():
                stack.enter_context(swap_attributes(layer, **self._rescaled_attributes(layer, data)))
                if has_own_activity_regularizer(layer):
                    regularizer = divided_by_all_rows(layer.activity_regularizer, data)
                    stack.enter_context(swap_attributes(layer, activity_regularizer=regularizer))
            aggregate = getattr(self._model, "_aggregate_additional_loss", None)  # Keras 3.6 and later
            rows = number_of_rows(data)
            if aggregate is not None:

                def aggregate_rescaled(loss: TensorLike) -> tf.Tensor:
                    return rescaled_vector(loss, aggregate(loss), rows)

                stack.enter_context(swap_attributes(self._model, _aggregate_additional_loss=aggregate_rescaled))
            if losses is not None and losses.built:
                rescale()
            elif losses is not None:  # its build creates a Mean for each of several losses
                stack.enter_context(swap_attributes(losses, build=_followed_by(losses.build, weigh_losses)))
            yield

    def _rescaled_attributes(self, layer: keras.layers.Layer, data: Tensors) -> dict[str, object]:
        """Return the rescaled losses in attributes of ``layer``.

        Those with a value for each row are left: the step or layer reduces them itself.
        """
        found: dict[str, object] = {}
        for name, value in vars(layer).items():
            is_compiled = layer is self._model and name in _COMPILED_LOSSES
            if isinstance(value, keras.losses.Loss) and not is_compiled and value.reduction not in (None, "none"):
                found[name] = rescaled(value, self.loss_scopes, data)
        return found

    def _warn_of_added_losses(self) -> None:
        """Say on the chief, once for each layer, how numbers in ``add_loss`` are understood."""
        for layer in self._model._flatten_layers() if cluster.is_chief() else ():
            added = [loss for loss in getattr(layer, "_losses", ()) if len(getattr(loss, "shape", ())) == 0]
            if added and not is_of_library(type(layer)) and layer.activity_regularizer is None:
                page = see("pitfalls#losses-layers-and-random-numbers")
                warn_once(
                    f"add_loss of {layer.name!r}: taken as a mean over the rows of a step, so that N ranks "
                    "minimize the mean over all; if it is a sum over rows, pass the vector of the rows' losses; if it "
                    f"compares rows, compute it from hk.gather_rows of its inputs; {page}"
                )


def _check_output(output: AnyTensor) -> None:
    """Raise TypeError for an output of ``predict_step`` that is not rows."""
    if output.shape.rank == 0:
        got = f"a {output.dtype.name} scalar for each batch"
        raise TypeError(describe("model's outputs", got, "a row for each example", OUTPUTS_REMEDY))


def _mean_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics that average their inputs unchanged, such as loss trackers, or a function of the user."""
    means: dict[int, keras.Metric] = {}
    pending = list(model.metrics)
    while pending:
        metric = pending.pop()
        update = type(metric).update_state
        is_wrapper = update is keras.metrics.MeanMetricWrapper.update_state
        if update is keras.metrics.Mean.update_state or (is_wrapper and not is_of_keras(metric._fn)):
            means[id(metric)] = metric
        pending.extend(getattr(metric, "_metrics", ()))
    return list(means.values())


def _followed_by(build: Callable[..., None], action: Callable[[], None]) -> Callable[..., None]:
    """Return a function that calls ``build`` with its arguments, and then ``action``."""

    def both(*args: object, **kwargs: object) -> None:
        build(*args, **kwargs)
        action()

    return both


def _weighted_function(metric: keras.Metric) -> Callable[..., None]:
    """Return an update that weights a function's result by rows, if it is one number for the batch."""
    update = metric.update_state

    def update_state(y_true: Tensors, y_pred: Tensors, sample_weight: Tensors = None) -> None:
        factor = current_factor()
        value = None
        if factor is not None and sample_weight is None and get_keras_mask(y_pred) is None:
            value = metric._fn(y_true, y_pred, **metric._fn_kwargs)
        if value is None or len(getattr(value, "shape", ())):  # a Python number has no shape
            update(y_true, y_pred, sample_weight=sample_weight)
        else:
            keras.metrics.Mean.update_state(metric, value, sample_weight=factor)

    return update_state


def _weighted_update(metric: keras.Metric, scope: StepScope | None) -> Callable[..., None]:
    """Return an update that weights a number by rows; of a sum, it adds up the ranks' numbers."""
    update = metric.update_state

    def update_state(values: TensorLike, sample_weight: TensorLike | None = None) -> None:
        values = tf.convert_to_tensor(values)
        # Keras's train_step passes the number of rows as the weight of the loss.
        has_one_weight = sample_weight is None or tf.convert_to_tensor(sample_weight).shape.rank == 0
        if scope is not None and has_one_weight and values.shape.rank == 0:
            values = scope.scaled(id(metric), values)
        if sample_weight is None and values.shape.rank == 0:
            sample_weight = current_factor()
        update(values, sample_weight=sample_weight)

    return update_state
