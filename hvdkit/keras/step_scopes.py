"""Find out how the gradients of a model's own step combine over ranks: as means of rows, as sums, or not at all.

A ``train_step`` may reduce its loss in any way, and so may layers that call ``add_loss``. With g(S) the gradient of a
step on rows S, and a batch of parts A and B with a and b rows,

    mean      g(A and B) = (a g(A) + b g(B)) / (a + b)       the ranks' gradients are averaged by rows
    sum       g(A and B) = g(A) + g(B)                       they are summed
    neither   rows are compared with each other, or a gradient is used in a way that is not linear

In the first step, before its update, each rank runs the step eagerly on parts of its rows. Optimizers and metrics only
record what they get, layers with random numbers and BatchNormalization run as in inference, losses that are computed on
gathered rows are replaced by a mean, lookups read rows of this rank's part of a table, and all variables and seeds are
restored. The same test is done for the numbers that the step passes to metrics or returns.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
import tensorflow as tf
from keras import tree

from hvdkit import cluster
from hvdkit.cluster.logs import get_logger
from hvdkit.collectives.batch_share import row_ratio
from hvdkit.collectives.conversion import untracked_variable
from hvdkit.collectives.ops import ReduceOp
from hvdkit.collectives.tensors import grouped_allreduce
from hvdkit.errors import HvdkitError, describe, see
from hvdkit.keras.attribute_swap import swap_attributes
from hvdkit.keras.model_optimizers import optimizers_of
from hvdkit.keras.rank_functions import projections_of
from hvdkit.keras.rank_state import recurrent_states, state_of
from hvdkit.keras.source_checks import has_own_method, is_of_library
from hvdkit.keras.unchanged_models import random_layers_in_inference, unchanged, values_of
from hvdkit.sharding.routing import reading_own_rows
from hvdkit.sharding.shards import AnyVariable, differs_by_rank

if TYPE_CHECKING:
    import keras

    from hvdkit.keras.data_types import Arrays, Tensors
    from hvdkit.optimizer.gradients import Gradient

Step: TypeAlias = "Callable[[Tensors], object]"
UNKNOWN = 0
MEAN = 1
SUM = 2
COUPLED = 3
_NUMBERS = 64  # of metrics, and returned numbers, that are tested
_SAMPLES = 256  # values of a gradient that are compared; projections cover the others
_TOLERANCE = 1e-4  # relative, of float32 on CPUs
_GPU_TOLERANCE = 5e-3  # of TensorFloat-32
_HALF_TOLERANCE = 5e-2


@dataclass
class _Run:
    """What a step has computed from some rows: gradients, and sums of the numbers by metric or name."""

    gradients: list[np.ndarray] = field(default_factory=list)
    numbers: dict[int | str, float] = field(default_factory=dict)


class StepScope:
    """The way in which the gradients of a model's ``train_step`` combine.

    Args:
        model: a Keras model.
        rescaling: returns the context in which hvdkit runs a step on ``(data, factor)``.

    Attributes:
        is_sum: whether the gradients are those of a sum: a bool variable.
    """

    def __init__(
        self, model: keras.Model, rescaling: Callable[[Tensors, tf.Tensor], contextlib.AbstractContextManager[None]]
    ) -> None:
        self.is_sum = untracked_variable(False, tf.bool, "hvdkit_step_is_sum")
        self._model = model
        self._tolerance = _tolerance_of(model)
        self._rescaling = rescaling
        self._scopes = untracked_variable(np.zeros(1 + _NUMBERS, np.int32), tf.int32, "hvdkit_step_scopes")
        self._is_tested = untracked_variable(False, tf.bool, "hvdkit_step_is_tested")
        self._metrics: list[keras.Metric] = []
        self._places: dict[int | str, int] = {}  # of metrics and names of returned numbers in the scopes
        self._step: Step | None = None

    @property
    def gradient(self) -> int:
        """How the gradients combine, after the first step."""
        return int(self._scopes[0])

    def check(self) -> None:
        """Raise HvdkitError, on every rank, if the gradients of the first step do not combine."""
        if self.gradient != COUPLED:
            return
        name = type(self._model).__name__
        layers = self._model._flatten_layers(include_self=False)
        added = [layer.name for layer in layers if _calls_add_loss(layer)]
        regularized = [layer.name for layer in layers if has_own_activity_regularizer(layer)]
        got = f"train_step of {name}" + (f", with add_loss of {', '.join(added)}" if added else "")
        got += f", with the activity regularizer of {', '.join(regularized)}" if regularized else ""
        message = describe(
            "model",
            f"{got}, whose gradient is neither the mean nor the sum of the gradients of its rows",
            "a loss of each row, or of all rows of the global batch",
            "gather what is compared between rows with hk.gather_rows, average gradients with hk.average_gradients "
            "before clipping, make an activity regularizer a sum over rows, and next to a regularizer use the mean of "
            "the rows' losses, not their sum; or pass loss_scope='rows' to train with the mean of the ranks' losses",
        )
        raise HvdkitError(f"{message}; {see('pitfalls#losses-layers-and-random-numbers')}")

    def test(self, step: Step, data: Tensors, metrics: list[keras.Metric]) -> tf.Tensor:
        """Test the model's own step and its ``metrics`` of numbers, on this rank's rows, before the first update.

        What the step does must depend on the returned tensor.
        """
        leaves = tree.flatten(data)
        values = [leaf for leaf in leaves if leaf is not None]
        if not all(isinstance(value, tf.Tensor) and value.shape.rank != 0 for value in values):
            return tf.constant(False)
        self._metrics += [metric for metric in metrics if all(metric is not each for each in self._metrics)]
        for metric in metrics:
            self._place(id(metric))
        self._step = step
        reference = weakref.ref(self)  # TensorFlow never frees a numpy_function
        structure = tree.map_structure(lambda leaf: None, data)
        has_value = [leaf is not None for leaf in leaves]

        def test(*arrays: np.ndarray) -> np.ndarray:
            scope = reference()
            assert scope is not None
            given = iter(arrays)
            return scope._test(tree.pack_sequence_as(structure, [next(given) if each else None for each in has_value]))

        def decide() -> tf.Tensor:
            if tf.executing_eagerly():
                found = tf.constant(test(*(value.numpy() for value in values)))
            else:
                found = tf.ensure_shape(tf.numpy_function(test, values, tf.int32), self._scopes.shape)
            scopes = grouped_allreduce([found], ReduceOp.Max, "hvdkit.step_scopes", cluster.data_group())[0]
            self._scopes.assign(scopes)
            self._is_tested.assign(True)
            is_sum = tf.equal(scopes[0], SUM)
            self.is_sum.assign(is_sum)
            return is_sum

        return tf.cond(self._is_tested, self.is_sum.read_value, decide, name="hvdkit_test_step")

    def scaled(self, key: int | str, value: tf.Tensor) -> tf.Tensor:
        """Return a number that is then weighted by rows; if it is a sum over rows, times the ratio b / n_r.

        ``key`` is the id of the metric that gets it, or its name in the logs.
        """
        place = self._places.get(key)
        if place is None or not value.dtype.is_floating:
            return value
        is_sum = tf.equal(self._scopes.read_value()[place], SUM)
        return tf.where(is_sum, value * tf.cast(row_ratio(), value.dtype), value)

    def _place(self, key: int | str) -> int | None:
        """Return the place of a metric, by its id, or of a returned number, by its name; None if there is no room."""
        if key not in self._places and len(self._places) < _NUMBERS:
            self._places[key] = 1 + len(self._places)
        return self._places.get(key)

    def scaled_logs(self, logs: object) -> object:
        """Multiply the returned numbers that are sums over rows by b / n_r: their mean by rows is then their sum."""
        if not isinstance(logs, dict):
            return logs
        scaled = dict(logs)
        for name, value in logs.items():
            if _is_number(value):
                self._place(name)
                scaled[name] = self.scaled(name, tf.convert_to_tensor(value))
        return scaled

    # ---- the test -----------------------------------------------------------------------------------------------

    def _test(self, data: Arrays) -> np.ndarray:
        """Return the scopes that this rank's rows show."""
        scopes = np.zeros(self._scopes.shape, np.int32)
        rows = {len(leaf) for leaf in tree.flatten(data) if leaf is not None}
        number = min(rows)
        if len(rows) != 1 or number < 2:
            return scopes
        half = number // 2
        try:
            with unchanged(self._model, generators=False), _functions_run_eagerly():
                before = values_of(self._variables())
                bounds = [(0, number), (0, half), (half, number), (0, number)]
                runs = [self._run(data, start, stop, number, before) for start, stop in bounds]
        except Exception as error:  # e.g. a collective, a fixed batch size, or something that is not possible eagerly
            get_logger().debug("the step cannot be tested: %s: %s", type(error).__name__, error)
            return scopes
        share = half / number
        gradients = [_joined(run.gradients) for run in runs]
        if gradients[0].size:
            scopes[0] = _scope(gradients, share, self._tolerance)
        for key in runs[0].numbers:
            numbers = [np.array([run.numbers.get(key, np.nan)]) for run in runs]
            place = self._place(key)
            if place is not None:
                scopes[place] = _scope(numbers, share, self._tolerance)
        return scopes

    def _run(
        self, data: Arrays, start: int, stop: int, number: int, before: list[tuple[AnyVariable, tf.Tensor]]
    ) -> _Run:
        """Run the step on some rows, as a rank with these rows of a batch of ``number`` rows; restore ``before``."""
        assert self._step is not None
        run = _Run()
        factor = tf.constant((stop - start) * cluster.group(cluster.DATA).size / number, tf.float64)
        rows = tree.map_structure(lambda leaf: None if leaf is None else tf.constant(leaf[start:stop]), data)
        with contextlib.ExitStack() as stack:
            stack.enter_context(reading_own_rows())
            stack.enter_context(self._rescaling(rows, factor))
            self._record(stack, run)
            try:
                logs = self._step(rows)
            finally:
                for variable, value in before:
                    variable.assign(value)
        if isinstance(logs, dict):
            run.numbers |= {name: float(value) for name, value in logs.items() if _is_number(value)}
        return run

    def _record(self, stack: contextlib.ExitStack, run: _Run) -> None:
        """Make optimizers and metrics record what they get, and layers run as in inference."""
        model = self._model

        def apply(gradients: Iterable[Gradient], *_: object, **__: object) -> None:
            run.gradients += [_summary_of(gradient) for gradient in gradients if gradient is not None]

        def apply_gradients(pairs: Iterable[tuple[Gradient, AnyVariable]], *_: object, **__: object) -> None:
            apply([gradient for gradient, _ in pairs])

        def updated(metric: keras.Metric) -> Callable[..., None]:
            key = id(metric)

            def update_state(values: object, *_: object, **__: object) -> None:
                if key in self._places and _is_number(values):
                    run.numbers[key] = run.numbers.get(key, 0.0) + float(values)

            return update_state

        for optimizer in optimizers_of(model):
            stack.enter_context(swap_attributes(optimizer, apply=apply, apply_gradients=apply_gradients))
        for metric in {id(each): each for each in [*model.metrics, *self._metrics]}.values():
            stack.enter_context(swap_attributes(metric, update_state=updated(metric)))
        stack.enter_context(swap_attributes(model, compute_metrics=lambda *_, **__: {}))
        stack.enter_context(random_layers_in_inference(model._flatten_layers(include_self=False)))

    def _variables(self) -> list[AnyVariable]:
        model = self._model
        untracked = [each.variable for each in state_of(model)]
        recurrent = [v for layer in model._flatten_layers() for v in recurrent_states(layer)]
        unique = {id(v): v for v in [*model.variables, *untracked, *model.metrics_variables, *recurrent]}.values()
        return [v for v in unique if not differs_by_rank(v)]


@contextlib.contextmanager
def _functions_run_eagerly() -> Iterator[None]:
    """Run tf.functions eagerly: TensorFlow may have no other thread for them while the step waits for its test."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def has_own_step(model: keras.Model, name: str) -> bool:
    """Return True if a model's class has its own step or loss, or in training a layer adds a loss of the user's.

    Such losses come from ``add_loss`` and activity regularizers; ``name`` is "train" or "test".
    """
    if has_own_method(model, f"{name}_step") or has_own_method(model, "compute_loss"):
        return True
    layers = model._flatten_layers() if name == "train" else ()
    return any(_calls_add_loss(layer) or has_own_activity_regularizer(layer) for layer in layers)


def _calls_add_loss(layer: keras.layers.Layer) -> bool:
    """Return True if the ``call`` of a user's layer calls ``add_loss``."""
    code = getattr(type(layer).call, "__code__", None)
    return not is_of_library(type(layer)) and code is not None and "add_loss" in code.co_names


def has_own_activity_regularizer(layer: keras.layers.Layer) -> bool:
    """Return True if a layer has an activity regularizer that is not Keras's."""
    regularizer = getattr(layer, "activity_regularizer", None)  # an object of a class, or a function
    return regularizer is not None and not str(regularizer.__module__).startswith(("keras.", "hvdkit."))


def _scope(values: list[np.ndarray], share: float, tolerance: float) -> int:
    """Return the scope of a value, given those of all rows, of both parts of them, and of all rows in another run.

    ``share`` of the rows are in the first part. The scope of a random value is UNKNOWN.
    """
    whole, first, second, again = values
    if any(each.shape != whole.shape for each in values) or not np.isfinite(np.concatenate(values)).all():
        return UNKNOWN
    if np.linalg.norm(whole - again) > tolerance * max(float(np.linalg.norm(whole)), 1e-30):
        return UNKNOWN
    largest = max(float(np.linalg.norm(each)) for each in (whole, first, second))
    if largest == 0:
        return UNKNOWN
    is_mean = np.linalg.norm(whole - share * first - (1 - share) * second) <= tolerance * largest
    is_sum = np.linalg.norm(whole - first - second) <= tolerance * largest
    if is_mean and is_sum:
        return UNKNOWN
    return MEAN if is_mean else SUM if is_sum else COUPLED


def _tolerance_of(model: keras.Model) -> float:
    if any(layer.compute_dtype in ("float16", "bfloat16") for layer in model._flatten_layers()):
        return _HALF_TOLERANCE
    return _GPU_TOLERANCE if tf.config.list_logical_devices("GPU") else _TOLERANCE


def _joined(gradients: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(gradient.ravel().astype(np.float64) for gradient in gradients)])


def _summary_of(gradient: tf.Tensor | tf.IndexedSlices) -> np.ndarray:
    """Return samples and projections of a gradient, float64: linear in it, and small."""
    if isinstance(gradient, tf.IndexedSlices):
        rows = gradient.values.numpy().astype(np.float64).reshape(len(gradient.indices), -1)
        weights = np.cos(0.7 * np.outer(np.arange(1, 5), gradient.indices.numpy() + 1.0))
        return projections_of(np.ravel(weights @ rows))
    values = np.ravel(tf.convert_to_tensor(gradient).numpy()).astype(np.float64)
    return np.concatenate([values[:: max(1, len(values) // _SAMPLES)][:_SAMPLES], projections_of(values)])


def _is_number(value: Any) -> TypeGuard[float | tf.Tensor]:
    if isinstance(value, int | float):
        return True
    dtype = getattr(value, "dtype", None)
    return dtype is not None and value.shape == () and tf.as_dtype(dtype) != tf.string
