"""Marks on objects of other libraries: by identity, for the object's lifetime, and not on copies."""

from __future__ import annotations

import copy
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cases import case

import hvdkit as hk
from hvdkit.collectives.weak_registry import Attached, WeakRegistry
from hvdkit.sharding.shards import Local, is_local, set_holding

MAKERS = {
    "tf.Variable": lambda: tf.Variable([1.0, 2.0]),
    "keras.Variable": lambda: keras.Variable([1.0, 2.0]),
    "Dataset": lambda: tf.data.Dataset.range(3),
    "Model": lambda: keras.Sequential([keras.layers.Dense(1)]),
    "Optimizer": lambda: keras.optimizers.SGD(0.1),
    "Callback": keras.callbacks.Callback,
}


def test_a_value_belongs_to_one_object_and_goes_with_it():
    for name, make in MAKERS.items():
        with case(name=name):
            registry: WeakRegistry[str] = WeakRegistry()
            first, second = make(), make()  # variables overload ==, and are not hashable
            registry.set(first, "a")
            registry.set(first, "b")
            assert registry.get(first) == "b" and first in registry
            assert registry.get(second) is None and second not in registry
            registry.discard(second)
            assert len(registry) == 1
            del first
            gc.collect()
            assert len(registry) == 0
            registry.set(second, "c")
            registry.discard(second)
            assert second not in registry


def test_a_new_object_has_no_value_of_a_dead_one_with_its_id():
    registry: WeakRegistry[int] = WeakRegistry()
    for number in range(200):  # CPython soon reuses ids
        owner = keras.callbacks.Callback()
        assert registry.get(owner) is None
        registry.set(owner, number)
    assert len(registry) == 1


def test_objects_without_weak_references_have_no_value_and_take_none():
    registry: WeakRegistry[int] = WeakRegistry()
    assert registry.get(3) is None and None not in registry
    with pytest.raises(TypeError, match="weak reference"):
        registry.set(3, 1)


def test_copies_have_no_marks():
    variable = keras.Variable([1.0])
    set_holding(variable, Local())
    assert is_local(variable) and is_local(variable.value) and not is_local(copy.deepcopy(variable))
    assert not any("hvdkit" in name for name in (*vars(variable), *vars(variable.value)))
    set_holding(variable, None)
    assert not is_local(variable) and not is_local(variable.value)


def test_a_value_that_refers_to_its_object_is_freed_with_it():
    attached: Attached[tuple] = Attached("_hvdkit_test")
    model = keras.Sequential([keras.layers.Dense(1)])
    assert attached.get(model) is None
    attached.set(model, (model, "steps"))
    assert attached.get(model) == (model, "steps")
    assert attached.get(keras.models.clone_model(model)) is None
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_models_that_hk_fit_trained_are_freed():
    """A session refers to its model, but must not keep it alive."""
    hk.init()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    hk.fit(model, np.ones((4, 3)), np.ones((4, 1)), batch_size=4, verbose=0)
    gone, weight = weakref.ref(model), weakref.ref(model.trainable_variables[0])
    keras.backend.clear_session()
    del model
    gc.collect()
    assert gone() is None and weight() is None
