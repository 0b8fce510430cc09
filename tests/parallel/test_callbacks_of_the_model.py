"""Callbacks that call their own model while it trains, as Keras's recipes do."""

from __future__ import annotations

from functools import partial

import keras
import numpy as np
import pytest
from helpers.as_one import line, plain, ported, raises_on_several, same_logs, same_weights

import hvdkit as hk

layers = keras.layers

HOOKS = (
    *("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end"),
    *("on_train_batch_begin", "on_train_batch_end", "on_test_begin", "on_test_end"),
    *("on_test_batch_begin", "on_test_batch_end"),
)


def dense(metrics=("mae",), **options):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=list(metrics), **options)
    return model


class Calls(keras.callbacks.Callback):
    """Calls methods of the model at some hooks, and keeps what they return."""

    def __init__(self, hooks, methods, x, y):
        super().__init__()
        self.methods, self.x, self.y = methods, x, y
        self.results = []
        for hook in hooks:
            setattr(self, hook, partial(self.call, hook))

    def call(self, hook, *args, **kwargs):
        for method in self.methods:
            of_labels = method in ("evaluate", "test_on_batch", "train_on_batch")
            function = self.model if method == "__call__" else getattr(self.model, method)
            options = {"verbose": 0} if method in ("evaluate", "predict") else {}
            self.results.append((f"{method} in {hook}", np.asarray(function(self.x, *[self.y] * of_labels, **options))))


@pytest.mark.nightly(1)
@pytest.mark.ranks(1, 2)
def test_every_method_works_at_every_hook_as_in_keras(rng):
    x, y = line(rng, 21)
    methods = ("predict", "evaluate", "predict_on_batch", "test_on_batch", "__call__")
    calls = [Calls(HOOKS, methods, x[:5] + 1, y[:5]) for _ in range(2)]
    options = {"batch_size": 8, "epochs": 2, "validation_data": (x[:11], y[:11]), "shuffle": False}
    one, expected = plain(dense, x, y, callbacks=calls[:1], **options)
    many, found = ported(dense, x, y, callbacks=calls[1:], **options)
    assert {name for name, _ in calls[0].results} == {f"{method} in {hook}" for method in methods for hook in HOOKS}
    for (name, theirs), (_, mine) in zip(*(each.results for each in calls), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-5, err_msg=name)
    same_logs(found, expected)
    same_weights(many, one)


@pytest.mark.nightly(1)
@pytest.mark.ranks(1, 2)
def test_a_callback_may_train_on_a_batch_and_change_what_is_trained(rng):
    x, y = line(rng, 16)

    class Unfreezes(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.layers[0].trainable = epoch % 2 == 0
            self.model.make_train_function(force=True)

    def build():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def callbacks():
        return [Calls(["on_epoch_end"], ["train_on_batch"], x[:4], y[:4]), Unfreezes()]

    options = {"batch_size": 8, "epochs": 3, "shuffle": False}
    one, expected = plain(build, x, y, callbacks=callbacks(), **options)
    many, found = ported(build, x, y, callbacks=callbacks(), **options)
    same_logs(found, expected)
    same_weights(many, one)


@pytest.mark.core(2)
@pytest.mark.ranks(1, 2)
def test_history_and_early_stopping_read_what_callbacks_add_to_the_logs(rng):
    x, y = line(rng, 16)

    class Scores(keras.callbacks.Callback):
        """Compute a metric of another library on held-out rows."""

        def on_epoch_end(self, epoch, logs=None):
            errors = np.abs(self.model.predict(x[:6], verbose=0) - y[:6])
            logs["worst"] = float(errors.max())
            logs["rising"] = float(epoch)

    def stop():
        return keras.callbacks.EarlyStopping("rising", mode="min", patience=2, restore_best_weights=True)

    options = {"batch_size": 8, "epochs": 5, "shuffle": False}
    one, expected = plain(dense, x, y, callbacks=[Scores(), stop()], **options)
    many, found = ported(dense, x, y, callbacks=[Scores(), stop()], **options)
    assert len(found["worst"]) == 3
    same_logs(found, expected)
    same_weights(many, one)


@pytest.mark.ranks(1, 2)
def test_a_rate_set_on_the_optimizer_that_was_compiled_is_used(rng):
    x, y = line(rng, 16)
    found = []
    for call in (plain, ported):
        optimizer = keras.optimizers.SGD(0.1)
        rates = iter(0.01 * np.arange(1, 100))

        def build(optimizer=optimizer):
            model = dense()
            model.compile(optimizer, "mse")
            return model

        def change(*_, optimizer=optimizer, rates=rates, **__):
            optimizer.learning_rate = next(rates)

        hooks = dict.fromkeys(("on_epoch_begin", "on_train_batch_end", "on_epoch_end"), change)
        callbacks = [keras.callbacks.LambdaCallback(**hooks)]
        found.append(call(build, x, y, batch_size=4, epochs=2, shuffle=False, callbacks=callbacks))
    (one, expected), (many, logs) = found
    same_logs(logs, expected)
    same_weights(many, one)
    assert float(many.optimizer.learning_rate) == pytest.approx(0.12)


def test_the_chief_alone_may_predict_with_replicated_weights_only(rng, capfd):
    x, y = line(rng, 16)
    alone = hk.callbacks.on_chief(Calls(["on_train_batch_end"], ["predict", "evaluate"], x, y))
    one, expected = plain(dense, x, y, batch_size=8, epochs=2, shuffle=False)
    many, found = ported(dense, x, y, batch_size=8, epochs=2, shuffle=False, callbacks=[alone])
    if hk.size() > 1:  # one process has the metrics of the callback's evaluation
        same_logs(found, expected)
    same_weights(many, one)
    with raises_on_several(hk.HvdkitError, r"Calls, which runs on the chief only, and calls sequential.*\.fit"):
        hk.fit(many, x, y, verbose=0, callbacks=[hk.callbacks.on_chief(Calls(["on_epoch_begin"], ["fit"], x, y))])


def test_a_callback_of_the_chief_alone_cannot_use_sharded_tables(rng):
    ids, y = rng.integers(0, 12, size=(16, 3)), np.zeros((16, 1), "float32")
    model = keras.Sequential([hk.layers.ShardedEmbedding(12, 2), layers.Flatten(), layers.Dense(1)])
    model.compile("sgd", "mse")
    every = Calls(["on_epoch_begin", "on_epoch_end"], ["predict"], ids, y)
    hk.fit(model, ids, y, batch_size=8, verbose=0, callbacks=[every])
    assert [result.shape for _, result in every.results] == [(16, 1)] * 2

    methods = ("predict", "evaluate", "predict_on_batch", "test_on_batch", "__call__", "train_on_batch")
    hooks = ("on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_end", "on_test_begin", "on_test_end")
    for hook, method in zip(hooks, methods, strict=True):
        alone = hk.callbacks.on_chief(Calls([hook], [method], ids, y))
        with raises_on_several(hk.HvdkitError, rf"Calls, which runs on the chief only, and calls .*\.{method}"):
            hk.fit(model, ids, y, batch_size=8, verbose=0, callbacks=[alone], validation_data=(ids, y))

    class Gathers(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            hk.predict(self.model, ids, verbose=0)

    with raises_on_several(hk.HvdkitError, r"Gathers, which runs on the chief only, and calls hk\.predict"):
        hk.fit(model, ids, y, batch_size=8, verbose=0, callbacks=[hk.callbacks.on_chief(Gathers())])


class OfSubmodels(keras.callbacks.Callback):
    """Looks at a submodel, and at a model of the first layers, as monitors of autoencoders do."""

    def __init__(self, x):
        super().__init__()
        self.x = x
        self.results = []

    def on_train_begin(self, logs=None):
        self.features = keras.Model(self.model.inputs, self.model.layers[-1].input)

    def on_epoch_end(self, epoch, logs=None):
        encoder = next(each for each in self.model.layers if isinstance(each, keras.Model))
        self.results += [encoder.predict(self.x, verbose=0), encoder.predict_on_batch(self.x), encoder(self.x)]
        self.results += [self.features.predict(self.x, verbose=0), self.features(self.x)]

    on_train_batch_end = on_epoch_end


@pytest.mark.nightly(1)
@pytest.mark.ranks(1, 2)
def test_callbacks_may_use_submodels(rng):
    x, y = line(rng, 16)

    def build():
        encoder = keras.Sequential([keras.Input((3,)), layers.Dense(2, "tanh")])
        inputs = keras.Input((3,))
        model = keras.Model(inputs, layers.Dense(1)(encoder(inputs)))
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        return model

    options = {"batch_size": 8, "epochs": 2, "shuffle": False}
    of_one = OfSubmodels(x[:5])
    one, expected = plain(build, x, y, callbacks=[of_one], **options)
    for wrap in (lambda callback: callback, hk.callbacks.on_chief):
        of_many = OfSubmodels(x[:5])
        many, found = ported(build, x, y, callbacks=[wrap(of_many)], **options)
        same_logs(found, expected)
        same_weights(many, one)
        for mine, theirs in zip(of_many.results, of_one.results, strict=bool(of_many.results)):
            np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-5)
        assert len(of_many.results) == (30 if wrap is not hk.callbacks.on_chief or hk.is_chief() else 0)


@pytest.mark.nightly
def test_a_callback_of_the_chief_alone_cannot_use_submodels_with_sharded_tables(rng):
    ids, y = rng.integers(0, 12, size=(16, 3)), np.zeros((16, 1), "float32")
    tower = keras.Sequential([hk.layers.ShardedEmbedding(12, 2), layers.Flatten()], name="tower")
    model = keras.Sequential([tower, layers.Dense(1)])
    model.compile("sgd", "mse")

    class Looks(keras.callbacks.Callback):
        def __init__(self, method):
            super().__init__()
            self.method = method

        def on_epoch_end(self, epoch, logs=None):
            function = tower if self.method == "__call__" else getattr(tower, self.method)
            assert function(ids).shape == (16, 6)

    for method in ("predict", "predict_on_batch", "__call__"):
        hk.fit(model, ids, y, batch_size=8, verbose=0, callbacks=[Looks(method)])
        with raises_on_several(hk.HvdkitError, rf"Looks, which runs on the chief only, and calls tower\.{method}"):
            hk.fit(model, ids, y, batch_size=8, verbose=0, callbacks=[hk.callbacks.on_chief(Looks(method))])

    class LooksAtTable(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            tower.layers[0](ids)

    with raises_on_several(hk.HvdkitError, r"LooksAtTable, which runs on the chief only, and calls .*\.__call__"):
        hk.fit(model, ids, y, batch_size=8, verbose=0, callbacks=[hk.callbacks.on_chief(LooksAtTable())])
