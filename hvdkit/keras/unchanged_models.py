"""Call a model, or run its steps, as in inference or without a trace: in variables, losses and random generators."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from hvdkit.collectives.refusal import refusing_collectives
from hvdkit.internals import context
from hvdkit.keras.attribute_swap import swap_attributes
from hvdkit.keras.rank_seeds import global_generator
from hvdkit.keras.rank_state import recurrent_states, untracked_variables
from hvdkit.sharding.shards import AnyVariable

# Layers that compute something else in training: with random numbers, or from the whole batch.
_RANDOM = ("keras.src.layers.regularization.", "keras.src.layers.preprocessing.", "keras.src.layers.rnn.")
_OF_BATCH = (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)


@contextlib.contextmanager
def unchanged(model: keras.Model, *, attributes: bool = True, generators: bool = True) -> Iterator[None]:
    """Restore the state of layers, losses and all random generators, which calls of a model may change.

    Args:
        model: a Keras model.
        attributes: restore attributes of layers, too.
        generators: restore Python's and NumPy's global generators, which no other thread may use meanwhile.
    """
    layers = list(model._flatten_layers())
    before = [dict(vars(layer)) for layer in layers]
    losses = [list(getattr(layer, "_losses", ())) for layer in layers]
    values = values_of({id(v): v for v in _state(model, layers)}.values())
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    generator = getattr(context.context(), "_rng", None)
    state = None if generator is None else generator.getstate()
    try:
        yield
    finally:
        for layer, known, added in zip(layers, before, losses, strict=True):
            if attributes:
                for name, value in list(vars(layer).items()):
                    if name not in known:
                        object.__delattr__(layer, name)
                    elif value is not known[name]:
                        object.__setattr__(layer, name, known[name])
            if hasattr(layer, "_losses"):
                layer._losses[:] = added
        for variable, value in values:
            variable.assign(value)
        if generators:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
        if generator is not None:
            generator.setstate(state)


@contextlib.contextmanager
def trying_calls(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Call layers on some rows, as far as they can be: an exception ends this context, and is no error.

    They may not call collectives, since other ranks may not. Warnings are hidden, and recurrent layers run in a graph,
    in which a loop over time steps is much faster than in eager mode.
    """
    with contextlib.ExitStack() as stack, contextlib.suppress(Exception):
        for layer in layers:
            if isinstance(layer, keras.layers.RNN):
                stack.enter_context(swap_attributes(layer, call=_in_graph(layer.call)))
        stack.enter_context(refusing_collectives())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def _in_graph(call: Callable[..., object]) -> Callable[..., object]:
    return lambda *args, **kwargs: tf.function(lambda: call(*args, **kwargs), autograph=False)()


def is_complete(model: keras.Model) -> bool:
    """Return True if all inner layers are built, and the model itself is built or (without ``call``) has variables."""
    inner = list(model._flatten_layers(include_self=False))
    return all(layer.built for layer in inner) and bool(model.built or model.variables)


def replicated_state(layers: Iterable[keras.layers.Layer]) -> list[AnyVariable]:
    """Return the variables of layers, apart from weights, that their calls may change, e.g. moving statistics.

    Seeds, metrics and states of recurrent layers, which belong to the rows of a rank, are not among them.
    """
    found: dict[int, AnyVariable] = {}
    for layer in layers:
        recurrent = {id(v) for v in recurrent_states(layer)}
        tracked = [v for v in getattr(layer, "_non_trainable_variables", ()) if id(v) not in recurrent]
        untracked = [each.variable for each in untracked_variables(layer) if each.variable.dtype != tf.string]
        found |= {id(getattr(v, "_value", v)): v for v in (*tracked, *untracked)}
    return list(found.values())


def values_of(variables: Iterable[AnyVariable]) -> list[tuple[AnyVariable, tf.Tensor]]:
    """Return variables with their values, without those that a first step has created and not initialized yet."""
    found: list[tuple[AnyVariable, tf.Tensor]] = []
    for variable in variables:
        try:
            value = tf.identity(variable)
        except tf.errors.FailedPreconditionError:
            continue
        if value.shape == variable.shape:
            found.append((variable, value))
    return found


def _state(model: keras.Model, layers: Sequence[keras.layers.Layer]) -> Iterator[AnyVariable]:
    """Yield the variables that a call may change: not weights, also if they are frozen."""
    yield from replicated_state(layers)
    for layer in layers:
        yield from (generator.state for generator in getattr(layer, "_seed_generators", ()))
        yield from recurrent_states(layer)
        yield from (v for metric in getattr(layer, "_metrics", ()) for v in metric.variables)
    yield from model.metrics_variables
    yield global_generator().state


@contextlib.contextmanager
def random_layers_in_inference(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Let Keras's random layers, recurrent dropout and normalizations of batches compute as in inference."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            if type(layer).__module__.startswith(_RANDOM) or isinstance(layer, _OF_BATCH):
                stack.enter_context(in_inference(layer))
        yield


def in_inference(layer: keras.layers.Layer) -> contextlib.AbstractContextManager[None]:
    """Let a layer compute as in inference in this context."""
    call = layer.call

    def infer(*args: object, **kwargs: object) -> object:
        return call(*args, **{**kwargs, "training": False} if "training" in kwargs else kwargs)

    return swap_attributes(layer, call=infer)


def is_augmentation(layer: keras.layers.Layer) -> bool:
    """Return True for Keras's layers that change their inputs at random in training, such as RandomFlip."""
    has_generator = isinstance(getattr(layer, "generator", None), keras.random.SeedGenerator)
    return has_generator and type(layer).__module__.startswith("keras.src.layers.preprocessing.")
