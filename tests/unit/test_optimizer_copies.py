"""A distributed optimizer is a copy of the original optimizer: options, state, config, files, and errors."""

from __future__ import annotations

import json
import pickle
import zipfile
from itertools import product

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import same_values
from helpers.cases import case
from helpers.tiers import after_core

import hvdkit as hk

hk.init()
opts = keras.optimizers

# Each class with options that differ from its defaults.
MAKERS = {
    "Adadelta": lambda: opts.Adadelta(0.5, rho=0.9, epsilon=1e-6, weight_decay=0.1),
    "Adafactor": lambda: opts.Adafactor(0.5, beta_2_decay=-0.7, clip_threshold=0.9, relative_step=False),
    "Adagrad": lambda: opts.Adagrad(0.5, initial_accumulator_value=0.2, clipvalue=2.0),
    "Adam": lambda: opts.Adam(0.5, beta_1=0.8, amsgrad=True, clipnorm=0.5),
    "AdamW": lambda: opts.AdamW(0.5, weight_decay=0.3, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "Adamax": lambda: opts.Adamax(0.5, beta_2=0.9, global_clipnorm=1.0),
    "Ftrl": lambda: opts.Ftrl(0.5, learning_rate_power=-0.3, l1_regularization_strength=0.1, beta=0.2),
    "Lamb": lambda: opts.Lamb(0.5, beta_1=0.8, name="the_lamb"),
    "Lion": lambda: opts.Lion(0.5, beta_2=0.9, loss_scale_factor=4.0),
    "LossScaleOptimizer": lambda: opts.LossScaleOptimizer(opts.SGD(0.5, momentum=0.1), initial_scale=8.0),
    "MultiOptimizer": lambda: opts.MultiOptimizer(
        opts.OptimizerMap(opts.SGD(0.5), {"kernel": opts.Adam(0.1)}), loss_scale_factor=2.0
    ),
    "Muon": lambda: opts.Muon(0.5, exclude_layers=["last"], rms_rate=None, ns_steps=3),
    "Nadam": lambda: opts.Nadam(opts.schedules.ExponentialDecay(0.5, 2, 0.9), beta_1=0.8),
    "RMSprop": lambda: opts.RMSprop(0.5, rho=0.8, momentum=0.1, centered=True),
    "SGD": lambda: opts.SGD(0.5, momentum=0.06, nesterov=True, gradient_accumulation_steps=2),
    "ScheduleFreeAdamW": lambda: opts.ScheduleFreeAdamW(0.5, warmup_steps=4),
}


def variables():
    return [keras.Variable([[1.0, 2.0], [3.0, 4.0]], name="kernel"), keras.Variable([1.0, 2.0], name="bias")]


def gradients(step=0):
    return [tf.constant([[0.5, -1.0], [2.0, 0.25]]) * (1.0 + step), tf.constant([1.0, -2.0])]


def stepped(optimizer, weights=None, steps=3):
    weights = weights or variables()
    for step in range(steps):
        optimizer.apply(gradients(step), weights)
    return weights


def assert_equal(ours, theirs):
    same_values(ours, theirs, rtol=1e-6)


def without_registered_names(config):
    """Return a config without the entry that Keras sets to None for its own classes."""
    if isinstance(config, dict):
        return {key: without_registered_names(item) for key, item in config.items() if key != "registered_name"}
    return config


def test_every_class_is_covered():
    names = [
        n for n in dir(opts) if isinstance(getattr(opts, n), type) and issubclass(getattr(opts, n), opts.Optimizer)
    ]
    assert {*names} - {"Optimizer"} <= {*MAKERS}


# ---- config, names and files ----------------------------------------------------------------------------------


def test_the_config_is_that_of_keras_and_makes_a_plain_optimizer():
    for name, make in MAKERS.items():
        with case(name=name):
            check_config(make())
    copy = pickle.loads(pickle.dumps(hk.DistributedOptimizer(MAKERS["SGD"](), clip_global_norm=0.01)))
    assert (copy._hvdkit.clip_global_norm, copy._hvdkit.accumulate_steps) == (0.01, 2)


def check_config(plain):
    optimizer = hk.DistributedOptimizer(plain)
    config = keras.saving.serialize_keras_object(optimizer)
    assert without_registered_names(config) == without_registered_names(opts.serialize(plain))
    assert optimizer.name == plain.name and opts.get(optimizer) is optimizer
    made = keras.saving.deserialize_keras_object(config)
    assert type(made) is type(plain) and made.get_config() == plain.get_config()
    again = type(optimizer).from_config(plain.get_config())
    assert again.get_config() == plain.get_config()
    copy = pickle.loads(pickle.dumps(hk.DistributedOptimizer(plain, clip_global_norm=0.01)))
    assert without_registered_names(copy.get_config()) == without_registered_names(plain.get_config())
    with pytest.raises(TypeError, match="a DistributedOptimizer"):
        hk.DistributedOptimizer(copy)


def test_a_copy_goes_on_as_the_original_does():
    for (name, make), steps_before in product(MAKERS.items(), (0, 2)):
        with case(name=name, steps_before=steps_before):
            check_copy(make(), steps_before)


def check_copy(plain, steps_before):
    weights = variables()
    stepped(plain, weights, steps_before)
    optimizer = hk.DistributedOptimizer(plain)
    assert_equal(optimizer.variables, plain.variables)
    before, start = ([v.numpy() for v in some] for some in (plain.variables, weights))
    ours = [v.numpy() for v in stepped(optimizer, weights)]
    same_values(plain.variables, before)
    assert plain.built == bool(steps_before)
    for weight, was in zip(weights, start, strict=True):
        weight.assign(was)
    assert_equal(ours, stepped(plain, weights))
    assert_equal(optimizer.variables, plain.variables)
    named, expected = ([v.path for v in each.variables] for each in (optimizer, plain))
    if not steps_before:  # Keras numbers variables without a name
        named, expected = ([path.rstrip("_0123456789") for path in some] for some in (named, expected))
    assert named == expected


@pytest.mark.full
def test_weights_move_between_plain_and_distributed_optimizers():
    for name, make in MAKERS.items():
        with case(name=name):
            check_weights_move(make)


def check_weights_move(make):
    plain = make()
    stepped(plain)
    by_list, by_store, back = (hk.DistributedOptimizer(make()) for _ in range(3))
    with pytest.raises(ValueError, match="set_weights"):
        by_list.set_weights(plain.variables)
    store = {}
    plain.save_own_variables(store)
    weights = variables()
    for optimizer in (by_list, by_store, back):
        optimizer.build(weights)
    by_store.load_own_variables(store)
    assert_equal(by_store.variables, plain.variables)
    if not isinstance(plain, opts.LossScaleOptimizer):  # Keras's sets only the outer variables
        by_list.set_weights([v.numpy() for v in plain.variables])
        assert_equal(by_list.variables, plain.variables)
    store = {}
    by_store.save_own_variables(store)
    back.load_own_variables(store)
    assert_equal(back.variables, plain.variables)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        back.load_own_variables({})


@pytest.mark.parametrize("shard_states", after_core([False, True], but=[False]))
def test_models_are_saved_with_their_optimizer(shard_states, tmp_path):
    def model_of(optimizer):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")])
        model.compile(optimizer, "mse", jit_compile=False)
        return model

    x, y = np.ones((4, 3), "f4"), np.zeros((4, 2), "f4")
    model = model_of(hk.DistributedOptimizer(opts.AdamW(0.1, weight_decay=0.2), shard_states=shard_states))
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        text = archive.read("config.json").decode()
    saved = json.loads(text)["compile_config"]["optimizer"]  # by Keras's module: a process without hvdkit can load it
    assert (saved["module"], saved["class_name"]) == ("keras.optimizers", "AdamW")
    assert keras.saving.get_registered_object(saved["registered_name"]) is None  # or else Keras would use that class
    assert "hvdkit" not in text and "horovod" not in text
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    other = model_of(hk.DistributedOptimizer(opts.AdamW(0.1, weight_decay=0.2), shard_states=shard_states))
    other.load_weights(tmp_path / "model.weights.h5")
    assert_equal(other.variables, model.variables)
    assert type(loaded.optimizer) is opts.AdamW
    assert_equal(loaded.optimizer.variables, model.optimizer.variables)
    for each in (model, loaded):
        each.fit(x, y, verbose=0)
    assert_equal(loaded.variables, model.variables)


def test_tensorflow_checkpoints_hold_the_slots(tmp_path):
    optimizer, weights = hk.DistributedOptimizer(opts.Adam(0.1)), variables()
    stepped(optimizer, weights, 1)
    saved = [v.numpy() for v in optimizer.variables]
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "checkpoint"))
    stepped(optimizer, weights, 1)
    tf.train.Checkpoint(optimizer=optimizer).restore(path)
    same_values(optimizer.variables, saved)


# ---- learning rates -------------------------------------------------------------------------------------------


def test_a_function_gives_the_learning_rate():
    optimizer = hk.DistributedOptimizer(opts.SGD(lambda: 0.1))
    weights = stepped(optimizer, steps=1)
    np.testing.assert_allclose(weights[1], [0.9, 2.2], rtol=1e-6)
    assert len(optimizer.variables) == 1 and float(optimizer.learning_rate) == pytest.approx(0.1)


def test_a_function_may_read_the_iterations_of_the_original():
    plain = opts.SGD(0.1)
    plain.learning_rate = lambda: 1.0 / (1.0 + tf.cast(plain.iterations, tf.float32))
    optimizer, variable = hk.DistributedOptimizer(plain), keras.Variable([0.0])
    for _ in range(3):
        optimizer.apply([tf.ones([1])], [variable])
    np.testing.assert_allclose(variable, [-(1 + 1 / 2 + 1 / 3)], rtol=1e-6)
    with pytest.raises(ValueError, match="optimizer: got an optimizer that is already wrapped, with a function"):
        hk.DistributedOptimizer(plain)


def test_a_method_that_gives_the_learning_rate_belongs_to_the_copy():
    class Halves(opts.SGD):
        def __init__(self, first):
            super().__init__(self._rate)
            self.first = first

        def _rate(self):
            return self.first * 0.5 ** tf.cast(self.iterations, tf.float32)

    plain = Halves(1.0)
    optimizer, variable = hk.DistributedOptimizer(plain), keras.Variable([0.0])
    optimizer.first = 2.0
    for _ in range(3):
        optimizer.apply([tf.ones([1])], [variable])
    np.testing.assert_allclose(variable, [-3.5])


def test_rates_are_set_on_the_copy():
    optimizer = hk.DistributedOptimizer(opts.Adam(0.1))
    optimizer.learning_rate = 0.025
    assert float(optimizer.learning_rate) == pytest.approx(0.025) and len(optimizer.variables) == 2
    optimizer.learning_rate = opts.schedules.PolynomialDecay(0.1, 4)
    assert len(optimizer.variables) == 1
    with pytest.raises(TypeError, match="not settable"):
        optimizer.learning_rate = 0.1
    plain = opts.SGD(0.1)
    plain.learning_rate = 0.5
    assert float(hk.DistributedOptimizer(plain).learning_rate) == 0.5


# ---- user-defined optimizers ----------------------------------------------------------------------------------


class Tempered(opts.Optimizer):
    """w -= lr temper f(g), with constructor arguments missing from its config."""

    def __init__(self, temper, transform, *, given=()):
        super().__init__(learning_rate=0.5, weight_decay=0.1)
        self.temper, self.transform, self.given = temper, transform, list(given)
        self.names = {"first": temper}

    def update_step(self, gradient, variable, learning_rate):
        rate = tf.cast(learning_rate, variable.dtype)
        known = any(v is variable or v.value is variable for v in self.given)
        self.assign_sub(variable, rate * self.temper * self.transform(gradient) * (10.0 if known else 1.0))


def test_a_config_that_lacks_options_does_not_lose_them():
    for steps_before in (0, 2):
        weights = variables()
        plain = Tempered(0.25, lambda g: g * 2, given=weights[1:])
        stepped(plain, weights, steps_before)
        start = [v.numpy() for v in weights]
        optimizer = hk.DistributedOptimizer(plain)
        assert (optimizer.temper, optimizer.names) == (0.25, {"first": 0.25})
        assert optimizer.transform is plain.transform and optimizer.given[0] is weights[1]
        stepped(optimizer, weights)
        ours = [v.numpy() for v in weights]
        for weight, was in zip(weights, start, strict=True):
            weight.assign(was)
        stepped(plain, weights)
        with case(steps_before=steps_before):
            same_values(ours, weights, rtol=1e-6)


class Appending(opts.Optimizer):
    """An optimizer with its slots in a list that the constructor creates."""

    def __init__(self, learning_rate=0.5):
        super().__init__(learning_rate)
        self.sums = []

    def build(self, variables):
        super().build(variables)
        for variable in variables:
            self.sums.append(self.add_variable_from_reference(variable, "sum"))

    def update_step(self, gradient, variable, learning_rate):
        total = self.sums[self._get_variable_index(variable)]
        self.assign_add(total, tf.convert_to_tensor(gradient))
        self.assign_sub(variable, total * tf.cast(learning_rate, variable.dtype))


def test_slots_in_a_list_that_the_constructor_made():
    for steps_before in (0, 1):
        plain, weights = Appending(), variables()
        stepped(plain, weights, steps_before)
        optimizer = hk.DistributedOptimizer(plain)
        stepped(optimizer, weights if steps_before else [keras.Variable(v.value, name=v.name) for v in weights])
        with case(steps_before=steps_before):
            assert len(optimizer.sums) == 2 and len(plain.sums) == 2 * steps_before
            given = [gradients(step) for step in (*range(steps_before), *range(3))]
            same_values(optimizer.sums, [sum(grads) for grads in zip(*given, strict=True)], rtol=1e-6)


def test_slots_that_build_cannot_make_again_stand_in_the_way():
    for options in ({"shard_states": True}, {"accumulate_steps": 2}):
        hk.DistributedOptimizer(Appending(), **options)
        plain = Appending()
        plain.build(variables())
        expected = r"optimizer: got Appending, which is built.*'sums'.*before it is built"
        with case(options=options), pytest.raises(TypeError, match=expected):
            hk.DistributedOptimizer(plain, **options)


class Lookahead(opts.Optimizer):
    """An optimizer that wraps another one."""

    def __init__(self, inner):
        super().__init__(0.0)
        self.inner = inner

    def build(self, variables):
        super().build(variables)
        self.inner.build(variables)

    def update_step(self, gradient, variable, learning_rate):
        self.inner.update_step(gradient, variable, self.inner.learning_rate)


def test_an_optimizer_inside_another_one_is_copied():
    for steps_before in (0, 1):
        plain, weights = Lookahead(opts.SGD(0.5, momentum=0.5)), variables()
        stepped(plain, weights, steps_before)
        optimizer = hk.DistributedOptimizer(plain)
        slots = [v.numpy() for v in plain.inner.variables]
        stepped(optimizer, weights, 1)
        with case(steps_before=steps_before):
            assert optimizer.inner is not plain.inner
            same_values(plain.inner.variables, slots)
    with pytest.raises(TypeError, match=r"optimizer\.inner: got a SGD.*built optimizer inside another"):
        hk.DistributedOptimizer(plain, accumulate_steps=2)


def test_a_registered_class_is_saved_under_its_name():
    @keras.saving.register_keras_serializable("hvdkit_tests")
    class Own(opts.SGD):
        pass

    optimizer = hk.DistributedOptimizer(Own(0.5))
    assert opts.serialize(optimizer)["registered_name"] == "hvdkit_tests>Own"
    assert type(opts.deserialize(opts.serialize(optimizer))) is Own
    assert keras.saving.get_registered_object("hvdkit_tests>Own") is Own


def test_a_loss_scale_around_an_optimizer_without_config():
    weights = variables()
    optimizer = hk.DistributedOptimizer(opts.LossScaleOptimizer(Tempered(0.25, lambda g: g), initial_scale=4.0))
    optimizer.apply([g * 4.0 for g in gradients()], weights)
    theirs = stepped(Tempered(0.25, lambda g: g), steps=1)
    assert_equal(weights, theirs)


def test_an_optimizer_for_each_variable_by_a_function():
    adam, sgd = opts.Adam(0.1), opts.SGD(0.5)

    def choose(variable):
        return adam if variable.path == "kernel" else sgd

    optimizer = hk.DistributedOptimizer(opts.MultiOptimizer(choose))
    weights = stepped(optimizer)
    assert optimizer.optimizers == [adam, sgd]  # the ones that the function returns
    other = {"kernel": opts.Adam(0.1), "bias": opts.SGD(0.5)}
    theirs = stepped(opts.MultiOptimizer(lambda v: other[v.name]))
    assert_equal(weights, theirs)
    again = hk.DistributedOptimizer(opts.MultiOptimizer(lambda v: hk.DistributedOptimizer(opts.SGD(0.1))))
    with pytest.raises(TypeError, match="plain Keras optimizers inside"):
        again.build(variables())


def test_an_optimizer_is_distributed_once():
    inner = hk.DistributedOptimizer(opts.SGD(0.1))
    choice = opts.MultiOptimizer(opts.OptimizerMap(opts.SGD(0.1), {"kernel": inner}))
    words = r"optimizer: got .*DistributedOptimizer.*wrap (it once|only the outermost optimizer), so that"
    for optimizer in (inner, opts.LossScaleOptimizer(inner), choice):
        with case(optimizer=optimizer), pytest.raises(TypeError, match=words):
            hk.DistributedOptimizer(optimizer)


def test_what_is_not_an_optimizer():
    words = r"optimizer: got .*a Keras 3 optimizer, e\.g\. keras\.optimizers\.SGD"
    for wrong in ("adam", None, opts.SGD, tf.Module(), tf.compat.v1.train.GradientDescentOptimizer(0.1)):
        with case(wrong=wrong), pytest.raises(TypeError, match=words):
            hk.DistributedOptimizer(wrong)


# ---- steps ----------------------------------------------------------------------------------------------------


def test_iterations_count_updates():
    optimizer, variable = hk.DistributedOptimizer(opts.Adam(1.0)), keras.Variable([[1.0, 2.0]])
    for count in range(3):
        assert int(optimizer.iterations) == count
        assert int(optimizer.apply_gradients([(tf.ones([1, 2]), variable)])) == count + 1


def test_accumulation_adds_up_and_begins_again():
    optimizer, variable = hk.DistributedOptimizer(opts.SGD(1.0), accumulate_steps=3), keras.Variable([1.0, 2.0])
    optimizer.build([variable])
    (total,) = optimizer._accumulated_gradients
    expected = [([1, 2], 1), ([1, 2], 2), ([0, 1], 0), ([0, 1], 1)]
    for step, (values, sums) in enumerate(expected):
        optimizer.apply([tf.ones([2])])
        np.testing.assert_allclose(variable, values)
        np.testing.assert_allclose(total, [sums, sums])
        assert int(optimizer.iterations) == (step + 1) // 3


def test_steps_without_gradients():
    for shard_states in (False, True):
        with case(shard_states=shard_states):
            check_steps_without_gradients(hk.DistributedOptimizer(opts.SGD(1.0), shard_states=shard_states))


def check_steps_without_gradients(optimizer):
    weights = variables()
    with pytest.raises(ValueError, match="trainable_variables: got None"):
        optimizer.apply(gradients())
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply([None, None], weights)
    with pytest.warns(UserWarning, match=r"Gradients do not exist for variables \['bias'\]"):
        optimizer.apply([gradients()[0], None], weights)
    np.testing.assert_allclose(weights[1], [1.0, 2.0])
    assert optimizer.apply([], []) is None and int(optimizer.iterations) == 1
    with pytest.raises(ValueError, match=r"variables: got 1 of them, expected 2"):
        optimizer.apply(gradients(), weights[:1])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply(gradients(), [weights[0], keras.Variable([1.0, 2.0])])
    with pytest.raises(ValueError, match="grads_and_vars: got no pair"):
        optimizer.apply_gradients([])


def test_a_stateless_step_is_refused():
    for name in ("SGD", "LossScaleOptimizer"):
        optimizer = hk.DistributedOptimizer(MAKERS[name]())
        optimizer.build(variables())
        values, weights = ([v.value for v in some] for some in (optimizer.variables, variables()))
        with case(name=name), pytest.raises(ValueError, match="stateless_apply"):
            optimizer.stateless_apply(values, gradients(), weights)


def test_dynamic_loss_scales_grow_and_shrink():
    growing = opts.LossScaleOptimizer(opts.SGD(0.5), initial_scale=2.0, dynamic_growth_steps=2)
    optimizer, variable = hk.DistributedOptimizer(growing), keras.Variable([1.0, 2.0])
    for _ in range(8):
        optimizer.apply([tf.ones([2])], [variable])
    assert float(optimizer.scale_loss(1.0)) == 32.0 and int(optimizer.iterations) == 8
    for _ in range(3):
        optimizer.apply([tf.constant([np.inf, 1.0])], [variable])
    assert float(optimizer.scale_loss(1.0)) == 4.0 and int(optimizer.iterations) == 8
    assert optimizer.apply([], []) is None


def test_a_static_loss_scale():
    optimizer = hk.DistributedOptimizer(opts.SGD(1.0, loss_scale_factor=1024.0), clip_global_norm=1e3)
    variable = keras.Variable([1.0, 2.0])
    assert optimizer.scale_loss(1.0) == 1024.0
    optimizer.apply([tf.constant([1.0, 2.0]) * 1024.0], [variable])
    np.testing.assert_allclose(variable, [0.0, 0.0])


def test_tensorflow_and_keras_variables_together():
    optimizer, variable, other = hk.DistributedOptimizer(opts.Adam(1.0)), keras.Variable([1.0]), tf.Variable([1.0])
    optimizer.apply([tf.ones([1]), tf.ones([1])], [variable, other])
    np.testing.assert_allclose(variable.numpy(), other.numpy())


@pytest.mark.full
def test_weights_are_swapped_with_their_averages():
    """As with Keras's own optimizer, validation uses the averages, and training continues with the weights."""
    x, y = np.ones((4, 2), "f4"), np.zeros((4, 1), "f4")
    found = []
    for wrapped in (lambda optimizer: optimizer, hk.DistributedOptimizer):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(wrapped(opts.SGD(0.1, use_ema=True, ema_momentum=0.5)), "mse", jit_compile=False)
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=False)
        history = model.fit(x, y, validation_data=(x, y), callbacks=[swap], epochs=2, verbose=0).history
        found.append(
            [*history["loss"], *history["val_loss"], *np.concatenate([w.ravel() for w in model.get_weights()])]
        )
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


# ---- gradients of every kind ----------------------------------------------------------------------------------

NUMBERS = [[0.5, -1.0], [2.0, 0.25]]


ROWS = tf.IndexedSlices
WRONG_GRADIENTS = {
    "a word": (["abc"], TypeError, r"grads\[0\]: got str"),
    "a bool": ([True], TypeError, r"grads\[0\]: got bool"),
    "an object": ([object()], TypeError, r"grads\[0\]: got object"),
    "words in an array": ([np.array(["a"])], TypeError, r"grads\[0\]: got dtype <U1"),
    "ragged": ([[1.0, [2.0]]], TypeError, r"grads\[0\]: got a list that is not a tensor"),
    "a variable of whole numbers": ([tf.Variable(1)], TypeError, r"grads\[0\]: got int32"),
    "whole numbers": ([np.array([1])], TypeError, r"grads\[0\]: got int64"),
    "complex": ([np.array([1j])], TypeError, r"grads\[0\]: got dtype complex128"),
    "a dict": ({"w": tf.ones([2])}, TypeError, "grads: got dict"),
    "a tensor": (tf.ones([2, 2]), TypeError, "grads: got EagerTensor"),
    "an array": (np.ones([2, 2]), TypeError, "grads: got ndarray"),
    "nothing": (None, TypeError, "grads: got NoneType"),
    "fractional rows": ([ROWS(NUMBERS, [0.5, 1.0])], TypeError, r"grads\[0\]\.indices: got float64"),
    "rows in two axes": ([ROWS(NUMBERS, [[0], [1]])], ValueError, r"grads\[0\]\.indices: got shape \[2, 1\]"),
    "too few rows": ([ROWS(NUMBERS, [0, 1, 1])], ValueError, r"grads\[0\]\.values: got shape \[2, 2\]"),
    "other rows": ([ROWS(NUMBERS, [0, 1], [5, 3])], ValueError, r"grads\[0\]\.dense_shape: got \[5, 3\]"),
    "rows beyond the table": ([ROWS(NUMBERS, [0, 5], [5, 2])], ValueError, r"indices: got 5, expected rows 0 to 4"),
    "negative rows": ([ROWS(NUMBERS, [-1, 1], [5, 2])], ValueError, r"indices: got -1, expected rows 0 to 4"),
}


def test_wrong_gradients():
    for name, (grads, kind, words) in WRONG_GRADIENTS.items():
        with case(name=name):
            with pytest.raises(kind, match=words):
                hk.average_gradients(grads)
            weight = [keras.Variable(np.zeros((5, 2), "f4"))]
            if name != "whole numbers":  # these are cast to the variable's dtype
                with pytest.raises(kind, match=words):
                    hk.DistributedOptimizer(opts.SGD(0.1)).apply(grads, weight)
