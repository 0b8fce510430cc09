"""The functions with which Keras runs the steps of a model, with XLA around the computation of each rank.

Keras compiles a whole step, which cannot contain an exchange between ranks. Here the step is compiled by
:mod:`hvdkit.compiling`, which leaves exchanges outside, on one rank as on several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras import tree

from hvdkit import cluster
from hvdkit.cluster.logs import get_logger
from hvdkit.compiling.compiled_step import CompiledStep
from hvdkit.internals import TensorFlowTrainer

_MAKERS = {"train": "make_train_function", "test": "make_test_function", "predict": "make_predict_function"}


def makers_of(model: Any) -> dict[str, Callable[..., Any]]:
    """Return replacements of the methods that make a model's functions, if its steps are to be compiled by XLA.

    Args:
        model: a Keras model.

    Returns:
        The replacements by name; none for a model that is not compiled by XLA.
    """
    if not model.jit_compile or model.run_eagerly:
        return {}
    makers: dict[str, Callable[..., Any]] = {}
    for name, maker in _MAKERS.items():
        if getattr(type(model), maker) is getattr(TensorFlowTrainer, maker):
            makers[maker] = _maker(model, name)
        elif cluster.is_chief():
            get_logger().info("jit_compile: %s is the model's own: its function runs without XLA", maker)
    return makers


def _maker(model: Any, name: str) -> Callable[..., Any]:
    attribute = f"{name}_function"

    def make(force: bool = False) -> Any:
        if force or getattr(model, attribute) is None:
            own = model._autoconvert_optionals(getattr(model, f"{name}_step"))
            step = CompiledStep(own, autograph=False, label=f"{name}_step of {type(model).__name__} {model.name!r}")
            function = _on_batches(step) if name == "predict" else _on_iterator(model, step)
            object.__setattr__(model, attribute, function)  # bypass Keras's tracking
        return getattr(model, attribute)

    return make


def _on_iterator(model: Any, step: CompiledStep) -> Callable[[Iterator[Any]], Any]:
    """Return a function that runs a training or test step on the next batches of an iterator."""

    def function(iterator: Iterator[Any]) -> Any:
        logs = step(next(iterator))
        for _ in range(1, model.steps_per_execution):
            data = next(iterator, None)
            if data is None:
                break
            logs = step(data)
        return logs

    return function


def _on_batches(step: CompiledStep) -> Callable[[list[Any]], Any]:
    """Return a function that predicts the rows of some batches."""

    def function(batches: list[Any]) -> Any:
        outputs = [step(data) for data in batches]
        if len(outputs) == 1:
            return outputs[0]
        return tree.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

    return function
