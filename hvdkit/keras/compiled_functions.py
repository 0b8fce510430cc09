"""The functions with which Keras runs the steps of a model, with XLA around the computation of each rank.

Keras compiles a whole step, which cannot contain an exchange between ranks. Here the step is compiled by
:mod:`hvdkit.compiling`, which leaves exchanges outside, on one rank as on several.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import tensorflow as tf
from keras import tree

from hvdkit import cluster
from hvdkit.cluster.logs import get_logger
from hvdkit.collectives.batch_share import current_factor
from hvdkit.compiling.compiled_step import CompiledStep
from hvdkit.compiling.settings import mode
from hvdkit.internals import TensorFlowTrainer
from hvdkit.keras.attribute_swap import swap_attributes
from hvdkit.keras.measured_function import Function, MeasuredFunction

if TYPE_CHECKING:
    import keras

    from hvdkit.keras.data_types import Tensors

_MAKERS = {"train": "make_train_function", "test": "make_test_function", "predict": "make_predict_function"}


def jit_mode(model: keras.Model) -> str:
    """Return how the steps of a model run: "on" with XLA, "off" without, "auto" in the way that is faster.

    With GPUs, Keras's default is True, and cannot be told from the program's own: there, only the environment variable
    switches XLA on.
    """
    if getattr(model, "run_eagerly", False):
        return "off"
    return mode() or ("on" if getattr(model, "jit_compile", False) and not _has_gpus() else "off")


def uses_whole_step(model: keras.Model) -> bool:
    """Return True if Keras compiles the whole step as it does without hvdkit: on one rank with GPUs."""
    return cluster.size() == 1 and not mode() and _has_gpus()


def _has_gpus() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))


def makers_of(model: keras.Model) -> dict[str, Callable[..., object]]:
    """Return replacements, by name, of the methods that make a model's functions; none if XLA compiles no step."""
    how = jit_mode(model)
    if how == "off":
        if getattr(model, "jit_compile", False) and not mode() and cluster.size() > 1 and cluster.is_chief():
            get_logger().info("jit_compile: steps run without XLA by default on GPUs; HVDKIT_JIT_COMPILE=on uses it")
        return {}
    makers: dict[str, Callable[..., object]] = {}
    for name, maker in _MAKERS.items():
        if getattr(type(model), maker) is not getattr(TensorFlowTrainer, maker):
            if cluster.is_chief():
                get_logger().info("jit_compile: %s is the model's own: its function runs without XLA", maker)
        elif how == "on":
            makers[maker] = _maker(model, name, _compiled_function)
        elif name == "train":
            makers[maker] = _maker(model, name, _measured_function)
    return makers


def _maker(
    model: keras.Model, name: str, create: Callable[[keras.Model, str], Callable[..., object]]
) -> Callable[..., object]:
    attribute = f"{name}_function"

    def make(force: bool = False) -> object:
        if force or getattr(model, attribute) is None:
            object.__setattr__(model, attribute, create(model, name))  # bypass Keras's tracking
        return getattr(model, attribute)

    return make


def _compiled_function(model: keras.Model, name: str) -> Callable[..., object]:
    own = model._autoconvert_optionals(getattr(model, f"{name}_step"))
    label = f"{name}_step of {type(model).__name__} {model.name!r}"
    if name == "predict":
        return _on_batches(CompiledStep(own, autograph=False, label=label))

    @functools.wraps(own)
    def step(data: Tensors, has_fixed_rows: bool) -> object:
        with contextlib.nullcontext() if has_fixed_rows else _means_of_batches(model):
            return own(data)

    return _on_iterator(model, CompiledStep(step, autograph=False, label=label))


def _measured_function(model: keras.Model, name: str) -> Function:
    return MeasuredFunction(model, model._make_function(model.train_step), _compiled_function(model, name))


def _on_iterator(model: keras.Model, step: CompiledStep) -> Function:
    """Return a function that runs a training or test step on the next batches of an iterator."""

    def function(iterator: Iterator[object]) -> object:
        has_fixed_rows = _has_fixed_rows(getattr(iterator, "element_spec", None))
        logs = step(next(iterator), has_fixed_rows)
        for _ in range(1, model.steps_per_execution):
            data = next(iterator, None)
            if data is None:
                break
            logs = step(data, has_fixed_rows)
        return logs

    return function


def _on_batches(step: CompiledStep) -> Callable[[list[Tensors]], Tensors]:
    """Return a function that predicts the rows of some batches."""

    def function(batches: list[Tensors]) -> Tensors:
        outputs = [step(data) for data in batches]
        if len(outputs) == 1:
            return outputs[0]
        return tree.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

    return function


def _has_fixed_rows(spec: object) -> bool:
    """Return True if data declare the number of rows of all their batches, whose ``spec`` may be unknown: None."""
    shapes = [leaf.shape for leaf in tf.nest.flatten(spec, expand_composites=True) if isinstance(leaf, tf.TensorSpec)]
    return bool(shapes) and all(shape.rank is not None and None not in shape[:1].as_list() for shape in shapes)


@contextlib.contextmanager
def _means_of_batches(model: keras.Model) -> Iterator[None]:
    """Have a model average the losses of its outputs over batches, as it does without XLA.

    Keras weights the loss of each output by the rows of the batch if the shapes of the step declare them. For XLA they
    always do, without XLA only if those of the data do.
    """
    losses = model._compile_loss
    with contextlib.ExitStack() as stack:

        def ignore_rows() -> None:
            for metric in losses.metrics:
                stack.enter_context(swap_attributes(metric, update_state=_update_without_rows(metric.update_state)))

        def build(*args: object, **kwargs: object) -> None:
            original_build(*args, **kwargs)
            ignore_rows()

        if losses is not None and losses.built:
            ignore_rows()
        elif losses is not None:
            original_build = losses.build  # creates the metrics
            stack.enter_context(swap_attributes(losses, build=build))
        yield


def _update_without_rows(update: Callable[..., object]) -> Callable[..., object]:
    def update_state(values: tf.Tensor, sample_weight: tf.Tensor | int | None = None) -> object:
        weight = current_factor() if isinstance(sample_weight, int) else sample_weight
        return update(values, sample_weight=weight)

    return update_state
