"""Layers that compute something else in training: with random numbers, or from the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from hvdkit.keras.attribute_swap import swap_attributes

_RANDOM = ("keras.src.layers.regularization.", "keras.src.layers.preprocessing.", "keras.src.layers.rnn.")
_OF_BATCH = (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)


@contextlib.contextmanager
def random_layers_in_inference(layers: Iterable[Any]) -> Iterator[None]:
    """Let Keras's random layers, recurrent dropout and normalizations of batches compute as in inference."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            if type(layer).__module__.startswith(_RANDOM) or isinstance(layer, _OF_BATCH):
                stack.enter_context(in_inference(layer))
        yield


def in_inference(layer: Any) -> contextlib.AbstractContextManager[None]:
    """Let a layer compute as in inference in this context."""
    return swap_attributes(layer, call=_in_inference(layer.call))


def is_augmentation(layer: Any) -> bool:
    """Return True for Keras's layers that change their inputs at random in training, such as RandomFlip."""
    has_generator = isinstance(getattr(layer, "generator", None), keras.random.SeedGenerator)
    return has_generator and type(layer).__module__.startswith("keras.src.layers.preprocessing.")


def _in_inference(call: Callable[..., Any]) -> Callable[..., Any]:
    def infer(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **{**kwargs, "training": False} if "training" in kwargs else kwargs)

    return infer
