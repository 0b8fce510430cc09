"""Losses and metric functions that are no mean of their rows have the values of one process."""

from __future__ import annotations

import functools
import gc
import random
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import compare, line, plain, ported, raises_on_several, same_logs, same_weights
from helpers.cases import case
from helpers.tiers import at_night

import hvdkit as hk

layers, losses, ops = keras.layers, keras.losses, keras.ops
SUMMED = losses.MeanSquaredError(reduction="sum")


def model_with(loss, optimizer=None, **options):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, "sigmoid")])
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, **options)
    return model


def f1(y_true, y_pred):
    return 2 * ops.sum(y_true * y_pred) / (ops.sum(y_true) + ops.sum(y_pred))


def rmse(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def scalar_mean(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred))


def gathered_dice(y_true, y_pred):
    y_true, y_pred = hk.allgather(y_true), hk.allgather(y_pred)
    return 1 - f1(y_true, y_pred)


def bce_and_dice(y_true, y_pred):
    return losses.binary_crossentropy(y_true, y_pred) + losses.Dice()(y_true, y_pred)


def masked_mean(y_true, y_pred):
    """The loss of all tokens by their number; 0 is padding."""
    mask = ops.cast(ops.not_equal(y_true, 0), "float32")
    return ops.sum(ops.square(y_true - y_pred) * mask) / ops.sum(mask)


def contrastive(_, y_pred):
    """NT-Xent: a number for each row, which depends on all rows."""
    rows = ops.normalize(y_pred, axis=1)
    logits = ops.matmul(rows, ops.transpose(rows)) / 0.5
    return ops.logsumexp(logits, axis=1) - ops.diagonal(logits)


def hardest_negative(y_true, y_pred):
    distances = ops.sum(ops.square(y_pred[:, None] - y_pred[None]), axis=-1)
    return ops.mean(ops.relu(1 - ops.min(distances + 10 * ops.eye(ops.shape(y_pred)[0]), axis=1)))


class Centered(losses.Loss):
    """Keeps a running center of the predictions, as DINO does."""

    def __init__(self):
        super().__init__()
        self.center = tf.Variable(tf.zeros([2]), trainable=False)

    def call(self, y_true, y_pred):
        self.center.assign(0.9 * self.center + 0.1 * tf.reduce_mean(y_pred, axis=0))
        return tf.reduce_mean(tf.square(y_true - y_pred + self.center), axis=1)


class OverBatch(losses.MeanSquaredError):
    """A subclass of a loss of Keras with another formula."""

    def call(self, y_true, y_pred):
        errors = super().call(y_true, y_pred)
        return errors * ops.softmax(errors, axis=0)


class OwnCall(losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return 1 - f1(y_true, y_pred)


NOT_MEANS = {
    "dice": losses.Dice(),
    "tversky": losses.Tversky(),
    "sum of dice": losses.Dice(reduction="sum"),
    "circle": losses.Circle(),
    "bce and dice": bce_and_dice,
    "masked mean": masked_mean,
    "contrastive": contrastive,
    "hardest negative": hardest_negative,
    "own call": OwnCall(),
    "centered": Centered,
    "subclass": OverBatch(),
}
IN_CORE = ("dice",)
AT_NIGHT = ("tversky", "sum of dice", "masked mean", "bce and dice", "hardest negative", "centered", "subclass")
OTHERS = [
    pytest.param(name, marks=[pytest.mark.nightly] * (name in AT_NIGHT)) for name in sorted(NOT_MEANS.keys() - IN_CORE)
]


@pytest.mark.nightly(3)
@pytest.mark.core(2)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", IN_CORE)
def test_any_loss_and_metric_function_is_that_of_one_process(rng, capfd, name):
    check_loss(NOT_MEANS[name], name, rng, capfd)


@pytest.mark.nightly
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_are_those_of_one_process(rng, capfd, name):
    check_loss(NOT_MEANS[name], name, rng, capfd)


def check_loss(loss, name, rng, capfd):
    x = rng.normal(size=(22, 3)).astype("float32")
    y = (x[:, :2] > 0.5).astype("float32")
    labels = (x[:, 0] > 0).astype("int32") if name == "circle" else y
    metrics = [] if name == "circle" else [f1, rmse, scalar_mean, "mae"]
    data = {"batch_size": 7, "epochs": 2, "validation_data": (x[:9], labels[:9]), "validation_batch_size": 4}
    data |= {"rtol": 1e-5, "atol": 1e-5 if name == "circle" else 1e-6}  # Circle multiplies rounding by its gamma, 80
    make_loss = loss if isinstance(loss, type) else lambda: loss
    has_state = name == "centered"
    one, many = compare(lambda: model_with(make_loss(), metrics=metrics), x, labels, on_each_rank=has_state, **data)
    output = capfd.readouterr().err
    logged = [line for line in output.splitlines() if "its value for a batch is not the mean" in line]
    is_named = not has_state  # it needs all rows for what it assigns
    assert len(logged) == (len(metrics) // 2 + is_named) * hk.is_chief(), output
    assert not any("scalar_mean" in line or "mae" in line for line in logged)
    np.testing.assert_allclose(
        hk.evaluate(many, x, labels, batch_size=5, verbose=0), one.evaluate(x, labels, batch_size=5, verbose=0), 1e-5
    )


@pytest.mark.nightly
def test_a_gathered_loss_with_weights_outputs_and_other_kinds_of_steps(rng):
    x = rng.normal(size=(23, 3)).astype("float32")
    y = (x[:, :2] > 0.5).astype("float32")
    weight = rng.uniform(0.5, 2, 23).astype("float32")
    data = {"batch_size": 6, "epochs": 2, "rtol": 1e-5, "atol": 1e-6}

    def two_outputs():
        inputs = keras.Input((3,))
        first = layers.Dense(2, "sigmoid", name="first")(inputs)
        second = layers.BatchNormalization(name="second", synchronized=True)(layers.Dense(2)(first))
        model = keras.Model(inputs, {"first": first, "second": second})
        model.compile("sgd", {"first": losses.Dice(), "second": "mse"}, loss_weights={"first": 2.0, "second": 1.0})
        return model

    def with_optimizer(optimizer, **options):
        return lambda: model_with(bce_and_dice, optimizer=optimizer(), metrics=[rmse], **options)

    sgd = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
    compare(with_optimizer(sgd), x, y, sample_weight=weight, **data)
    compare(with_optimizer(sgd, run_eagerly=True), x, y, **data)
    compare(with_optimizer(sgd, steps_per_execution=3), x, y, **data)
    compare(with_optimizer(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)), x, y, **data)
    compare(with_optimizer(lambda: keras.optimizers.LossScaleOptimizer(sgd())), x, y, **data)
    compare(two_outputs, x, {"first": y, "second": y}, **data)
    masked = lambda: keras.Sequential(  # noqa: E731
        [layers.Input((4,)), layers.Embedding(9, 4, mask_zero=True), layers.LSTM(3, return_sequences=True)]
    )

    def masked_sequences():
        model = masked()
        model.compile("sgd", losses.Dice())
        return model

    ids = rng.integers(0, 3, (23, 4))
    compare(masked_sequences, ids, rng.uniform(size=(23, 4, 3)).astype("float32"), **data)


def test_a_loss_of_the_global_batch_size_and_one_that_gathers(rng, capfd):
    x = rng.normal(size=(24, 3)).astype("float32")
    y = (x[:, :2] > 0.5).astype("float32")

    def of_eight_rows(y_true, y_pred):  # as published with a constant batch size
        return ops.mean(ops.abs(ops.reshape(y_true - y_pred, (8, 2)))) + ops.sum(ops.eye(8) * ops.ones((8, 8))) / 8

    def make_dataset():
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)

    compare(lambda: model_with(of_eight_rows), make_dataset, epochs=2)
    capfd.readouterr()
    compare(lambda: model_with(gathered_dice), x, y, on_each_rank=True, batch_size=8, epochs=2)
    assert "not the mean" not in capfd.readouterr().err


def test_the_scope_can_be_chosen(rng, size):
    x = rng.normal(size=(24, 3)).astype("float32")
    y = (x[:, :2] > 0.5).astype("float32")
    fit = lambda loss, **options: hk.fit(model_with(loss), x, y, batch_size=8, shuffle=False, verbose=0, **options)  # noqa: E731

    def loss_of(loss, **options):
        keras.utils.set_random_seed(3)
        return fit(loss, **options).history["loss"][0]

    exact = loss_of(losses.Dice())
    assert loss_of(losses.Dice(), loss_scope="batch") == pytest.approx(exact, rel=1e-6)
    assert size == 1 or loss_of(losses.Dice(), loss_scope="rows") != pytest.approx(exact, rel=1e-4)
    assert loss_of("mse", loss_scope="batch") == pytest.approx(loss_of("mse"), rel=1e-6)
    with pytest.raises(ValueError, match=r"loss_scope: got 'row', expected 'auto', 'rows' or 'batch'"):
        fit("mse", loss_scope="row")
    if size > 1:
        with pytest.raises(hk.CollectiveMismatchError, match="loss_scope"):
            fit("mse", loss_scope="rows" if hk.is_chief() else "batch")


def test_vectors_in_add_loss_and_sums_held_by_layers_are_exact(rng):
    class Endpoint(layers.Layer):
        """As a CTC layer: it adds the loss of each row."""

        def call(self, y_true, y_pred):
            self.add_loss(0.01 * ops.square(y_true - y_pred))
            return y_pred

    class Task(layers.Layer):
        """As a ranking task, with its own loss object."""

        def __init__(self):
            super().__init__()
            self.own_loss = losses.MeanSquaredError(reduction="sum")

        def call(self, y_true, y_pred):
            self.add_loss(0.01 * self.own_loss(y_true, y_pred))
            return y_pred

    x, y = line(rng, 21)
    for layer in (Endpoint, Task):

        def build(layer=layer):
            inputs, labels = keras.Input((3,)), keras.Input((1,))
            model = keras.Model([inputs, labels], layer()(labels, layers.Dense(1)(inputs)))
            model.compile(keras.optimizers.SGD(0.1))
            return model

        compare(build, [x, y], batch_size=8, epochs=2)


class Entropy(layers.Layer):
    """Adds a loss that compares rows: the entropy of the batch's mean."""

    def call(self, x):
        mean = ops.mean(ops.softmax(3 * x), axis=0)
        self.add_loss(ops.sum(mean * ops.log(mean)))
        return x


class Shrinkage(layers.Layer):
    """Adds a mean over rows."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


@pytest.mark.core
def test_numbers_in_add_loss_are_means_of_rows_or_refused(rng, size, capfd):
    x, y = line(rng, 23)

    def build(layer):
        return lambda: compiled(keras.Sequential([keras.Input((3,)), layers.Dense(4), layer(), layers.Dense(1)]))

    def compiled(model):
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    compare(build(Shrinkage), x, y, batch_size=8, epochs=2, rtol=1e-5, atol=1e-6)
    assert "add_loss" not in capfd.readouterr().err
    with raises_on_several(hk.HvdkitError, r"add_loss of entropy.* neither the mean nor the sum.*hk\.gather_rows"):
        hk.fit(build(Entropy)(), x, y, batch_size=8, verbose=0)
    hk.fit(build(Entropy)(), x, y, batch_size=8, verbose=0, loss_scope="rows")


ROW_LOSS = losses.MeanSquaredError(reduction=None)


def summed(y, predicted):
    return tf.reduce_sum(tf.square(y - predicted))


def by_global_batch_size(y, predicted):
    return tf.nn.compute_average_loss(ROW_LOSS(y, predicted), global_batch_size=8)


def of_each_row(y, predicted):
    return ROW_LOSS(y, predicted)  # a tape sums a vector


def mean(y, predicted):
    return tf.reduce_mean(tf.square(y - predicted))


class OwnStep(keras.Model):
    """A training step as many programs have it: the loss in a tracker, and another number returned as it is."""

    loss_of_step = staticmethod(mean)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of_step(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(tf.reduce_sum(loss))
        return {"loss": self.tracker.result(), "last": tf.reduce_sum(loss), "largest": 1.0}

    @property
    def metrics(self):
        return [self.tracker]


def own_step(loss, *hidden):
    inputs = keras.Input((3,))
    outputs = inputs
    for layer in (layers.Dense(4, "tanh"), *hidden, layers.Dense(1)):
        outputs = layer(outputs)
    model = OwnStep(inputs, outputs)
    model.loss_of_step = loss
    model.tracker = keras.metrics.Mean(name="loss")
    model.compile(keras.optimizers.SGD(0.01))
    return model


@pytest.mark.nightly(3)
@pytest.mark.ranks(2, 3)
def test_sums_in_a_train_step_are_exact(rng, size, capfd):
    x, y = line(rng, 25)  # batches of 8, and one of 1
    for loss in (summed, by_global_batch_size, of_each_row, mean):
        with case(loss=loss.__name__):
            compare(lambda loss=loss: own_step(loss), x, y, batch_size=8, epochs=2, rtol=1e-5, atol=1e-6)
    assert "train_step" not in capfd.readouterr().err
    normalized = lambda: own_step(summed, layers.BatchNormalization(synchronized=True))  # noqa: E731
    compare(normalized, x[:23], y[:23], batch_size=8, epochs=2, rtol=1e-4, atol=1e-5)  # the last share has 3 or 4 rows
    noisy = own_step(summed, layers.BatchNormalization(synchronized=True), layers.Dropout(0.5))
    hk.fit(noisy, x, y, batch_size=8, verbose=0, shuffle=False)  # sums are found under random layers, too
    assert size == 1 or "reduce_sum" not in capfd.readouterr().err


def test_the_test_of_a_step_leaves_nothing(rng):
    x, y = line(rng, 16)
    after = []
    for loss_scope in ("auto", "rows"):
        keras.utils.set_random_seed(5)
        model = own_step(mean, layers.BatchNormalization(synchronized=True), layers.Dropout(0.0))
        hk.fit(model, x, y, batch_size=8, verbose=0, shuffle=False, loss_scope=loss_scope)
        noise = keras.random.uniform([2]), tf.random.uniform([2])
        weights = [value.tolist() for value in model.get_weights()]
        after.append((random.random(), np.random.random(), weights, *(each.numpy().tolist() for each in noise)))
    assert after[0] == after[1]


def clipped(y, predicted):
    return tf.sqrt(summed(y, predicted))


@pytest.mark.core
def test_a_train_step_that_compares_rows_is_refused(rng, size):
    x, y = line(rng, 24)
    with raises_on_several(hk.HvdkitError, "model: got train_step of OwnStep, whose gradient is neither the mean nor"):
        hk.fit(own_step(clipped), x, y, batch_size=8, verbose=0)
    model = own_step(clipped)
    for _ in range(2):  # the same model again
        with raises_on_several(hk.HvdkitError, "model: got train_step of OwnStep"):
            hk.fit(model, x, y, batch_size=8, verbose=0)
    hk.fit(model, x, y, batch_size=8, verbose=0, loss_scope="rows")

    class Noise(layers.Layer):
        def __init__(self):
            super().__init__()
            self.generator = keras.random.SeedGenerator(1)

        def call(self, x):
            return x + 0.1 * keras.random.normal(ops.shape(x), seed=self.generator)

    hk.fit(own_step(mean, Noise()), x, y, batch_size=8, verbose=0)  # nothing can be said of it


class Summing(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss((y - self(x)) ** 2, global_batch_size=8) + 0.0 * SUMMED(y, self(x))
            loss += tf.reduce_mean(tf.reduce_sum(y - self(x), axis=1)) + 0.0 * tf.random.normal([])
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_sums_in_a_step_that_cannot_be_tested_are_named(rng, size, capfd):
    x, y = line(rng, 6)
    model = Summing([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd")
    hk.fit(model, x, y, batch_size=size, verbose=0)  # one row per rank
    lines = [each for each in capfd.readouterr().err.splitlines() if "train_step of Summing" in each]
    assert len(lines) == (hk.is_chief() and size > 1)
    assert all("compute_average_loss in line" in each and "SUMMED (reduction='sum')" in each for each in lines)
    assert not any("reduce_sum in line" in each for each in lines)


def test_tensors_that_every_rank_gets_whole_are_not_gathered(rng):
    x, y = line(rng, 24)
    labels = np.repeat(y, 2, axis=1)

    def make_dataset():
        table = tf.data.Dataset.from_tensors(np.ones((4, 2), "float32")).repeat()
        batches = tf.data.Dataset.from_tensor_slices((x, labels)).batch(8)
        both = tf.data.Dataset.zip(batches, table).map(
            lambda batch, scale: (batch[0], {"rows": batch[1], "scale": scale})
        )
        return hk.data.divide(both, ("rows", {"rows": "rows", "scale": "whole"}))

    def scaled(labels, predicted):
        return tf.reduce_mean(tf.square(labels["rows"] - predicted), axis=1) * tf.reduce_sum(labels["scale"]) / 8

    class Scaled(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return tf.reduce_mean(scaled(y, y_pred))

    def build():
        model = Scaled([keras.Input((3,)), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1))
        return model

    compare(build, make_dataset, epochs=2, rtol=1e-5, atol=1e-6)


class Weighted(keras.Model):
    """Needs the rows of its inputs, and their scale, which may be that of all rows."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs["rows"]) * ops.mean(inputs["scale"])


@pytest.mark.parametrize("evaluates_whole", at_night([True, False], but=[True]))
def test_a_callback_evaluates_other_data_than_those_of_the_fit(rng, evaluates_whole):
    x, y = line(rng, 22)
    scale = np.ones((22, 1), "float32")

    def divided():
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        scales = tf.data.Dataset.from_tensors(scale[:4]).repeat()
        data = tf.data.Dataset.zip(batches, scales).map(lambda xy, scale: ({"rows": xy[0], "scale": scale}, xy[1]))
        return {"x": hk.data.divide(data, ({"rows": "rows", "scale": "whole"}, "rows"))}

    def by_rows():
        return {"x": {"rows": x, "scale": scale}, "y": y, "batch_size": 8}

    make_data, make_others = (by_rows, divided) if evaluates_whole else (divided, by_rows)
    logs = []

    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, _=None):
            logs.append(hk.evaluate(self.model, **make_others(), verbose=0, return_dict=True))

    def train(*callbacks):
        keras.utils.set_random_seed(3)
        model = Weighted()
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[rmse])
        options = {"epochs": 3, "shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
        return model, hk.fit(model, **make_data(), validation_data=(by_rows()["x"], y), **options).history

    model, history = train(Evaluates())
    assert logs[-1] == hk.evaluate(model, **make_others(), verbose=0, return_dict=True)
    assert history == train()[1]


class OwnLoss(keras.Model):
    """Keras's own train_step, whose loss tracker weights by rows."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_sum(tf.square(y - y_pred))


def test_sums_in_compute_loss_are_exact(rng):
    x, y = line(rng, 25)

    def build():
        inputs = keras.Input((3,))
        model = OwnLoss(inputs, layers.Dense(1)(layers.Dense(4, "tanh")(inputs)))
        model.compile(keras.optimizers.SGD(0.01))
        return model

    compare(build, x, y, batch_size=8, epochs=2, validation_data=(x[:9], y[:9]), rtol=1e-5, atol=1e-6)


class OwnMetrics(keras.Model):
    """Returns compiled metrics, and its own numbers."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = tf.reduce_sum(tf.square(y - predicted))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"a_mean": tf.reduce_mean(y), **self.compute_metrics(x, y, predicted), "total": loss}


def test_returned_sums_and_means_are_told_apart(rng):
    x, y = line(rng, 24)
    for is_eager in (False, True):

        def build(is_eager=is_eager):
            inputs = keras.Input((3,))
            model = OwnMetrics(inputs, layers.Dense(1)(inputs))
            model.compile(keras.optimizers.SGD(0.01), metrics=["mae", "mse"], run_eagerly=is_eager)
            return model

        compare(build, x, y, batch_size=8, epochs=2, rtol=1e-5, atol=1e-6)


def test_a_step_that_returns_text_is_tested(rng):
    class Staged(OwnStep):
        def train_step(self, data):
            return {**super().train_step(data), "stage": tf.constant("first")}

    x, y = line(rng, 16)
    found = []
    for fit in (plain, ported):

        def build():
            inputs = keras.Input((3,))
            model = Staged(inputs, layers.Dense(1)(inputs))
            model.loss_of_step = summed
            model.tracker = keras.metrics.Mean(name="loss")
            model.compile(keras.optimizers.SGD(0.01))
            return model

        model, history = fit(build, x, y, batch_size=8, epochs=2)
        assert [np.asarray(each).item() for each in history.pop("stage")] == [b"first"] * 2
        found.append((model, history))
    same_logs(found[1][1], found[0][1])
    same_weights(found[1][0], found[0][0])


def test_labels_that_are_first_left_out_in_a_later_batch(rng):
    x = rng.normal(size=(24, 3)).astype("float32")
    for mark in (-100, np.nan):
        y = np.repeat(x[:, :1] > 0, 2, axis=1).astype("float32")
        y[8:12] = mark  # all of one rank's rows in the second batch
        y[17:20] = mark

        def known_mean(y_true, y_pred, mark=mark):
            known = ~(ops.isnan(y_true) if np.isnan(mark) else ops.equal(y_true, mark))
            errors = ops.where(known, ops.square(ops.where(known, y_true, 0.0) - y_pred), 0.0)
            return ops.sum(errors) / ops.sum(ops.cast(known, "float32"))

        build = functools.partial(model_with, known_mean, metrics=[known_mean])
        compare(build, x, y, batch_size=8, epochs=2, shuffle=False)


def test_variables_that_losses_and_metrics_assign_change_once_in_a_step(rng):
    x = rng.normal(size=(24, 3)).astype("float32")
    y = np.repeat(x[:, :1] > 0, 2, axis=1).astype("float32")
    steps = []

    def build(is_eager):
        step = tf.Variable(0.0, trainable=False)
        calls = keras.Variable(0.0, trainable=False)
        steps.append((step, calls))

        def annealed(y_true, y_pred):
            step.assign_add(1.0)
            return bce_and_dice(y_true, y_pred) * ops.minimum(step / 4, 1.0)

        def counted(y_true, y_pred):
            calls.assign_add(1.0)
            return rmse(y_true, y_pred) * calls

        return model_with(annealed, metrics=[counted], run_eagerly=is_eager)

    for is_eager in (False, True):
        compare(functools.partial(build, is_eager), x, y, on_each_rank=True, batch_size=8, epochs=2, shuffle=False)
        assert [float(variable) for each in steps for variable in each] == [6.0] * 4
        steps.clear()


def test_a_model_is_freed_after_its_tests(rng):
    x, y = line(rng, 16)

    def train(call):
        model = own_step(mean, layers.BatchNormalization(synchronized=True))
        call(model)
        return weakref.ref(model)

    for call in (
        lambda model: hk.fit(model, x, y, batch_size=8, verbose=0),
        lambda model: hk.fit(model, tf.data.Dataset.from_tensor_slices((x, y)).batch(8), verbose=0),
        lambda model: hk.check_step(model, x, y, batch_size=8),
    ):
        model = train(call)
        gc.collect()
        assert model() is None


class Factors(keras.Model):
    """Matrix factorization with a custom step."""

    def __init__(self, make_embedding, reduce, *, has_bias):
        super().__init__()
        self.users, self.items = make_embedding(9), make_embedding(7)
        self.bias = layers.Dense(1) if has_bias else None
        self.reduce = reduce

    def call(self, pairs):
        product = self.users(pairs[:, 0]) * self.items(pairs[:, 1])
        return tf.reduce_sum(product, axis=1, keepdims=True) if self.bias is None else self.bias(product)

    def train_step(self, data):
        pairs, y = data
        with tf.GradientTape() as tape:
            loss = self.reduce(tf.square(y - self(pairs, training=True))[:, 0])
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def values_at(ids, width):
    """Return initial rows that are no small random numbers, so that products of them are not."""
    return np.cos(np.arange(ids * width, dtype="float32")).reshape(ids, width)


@pytest.mark.nightly(3)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("reduce", "partition", "has_bias"),
    [
        (tf.reduce_sum, "mod", False),
        pytest.param(tf.reduce_sum, "column", False, marks=pytest.mark.nightly),
        pytest.param(tf.reduce_sum, "div", True, marks=pytest.mark.nightly),
        (tf.reduce_mean, "mod", False),
    ],
)
def test_steps_that_sum_over_rows_of_sharded_tables(rng, capfd, reduce, partition, has_bias):
    pairs = np.stack([rng.integers(0, 9, 22), rng.integers(0, 7, 22)], axis=1)
    y = rng.normal(size=(22, 1)).astype("float32")

    def build(embedding, **arguments):
        def make_embedding(ids):
            initializer = keras.initializers.Constant(values_at(ids, 4))
            return embedding(ids, 4, embeddings_initializer=initializer, **arguments)

        keras.utils.set_random_seed(3)
        model = Factors(make_embedding, reduce, has_bias=has_bias)
        model.compile(keras.optimizers.SGD(0.05), jit_compile=False)
        return model

    fit_options = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
    one = build(layers.Embedding)
    expected = one.fit(pairs, y, **fit_options).history
    many = build(hk.layers.ShardedEmbedding, partition=partition)
    found = hk.fit(many, pairs, y, **fit_options).history
    same_logs(found, expected)
    for ours, theirs in ((many.users, one.users), (many.items, one.items)):
        np.testing.assert_allclose(ours.gather(), theirs.get_weights()[0], rtol=2e-4, atol=2e-5)
    assert "1/N of the gradient" not in capfd.readouterr().err


@pytest.mark.nightly(1)
@pytest.mark.ranks(1, 2)
def test_a_step_that_compares_rows_of_a_sharded_table_is_an_error(rng):
    pairs = np.stack([rng.integers(0, 9, 22), rng.integers(0, 7, 22)], axis=1)
    model = Factors(lambda ids: hk.layers.ShardedEmbedding(ids, 4), tf.reduce_max, has_bias=True)
    model.compile("sgd", jit_compile=False)
    with raises_on_several(hk.HvdkitError, "neither the mean nor the sum"):
        hk.fit(model, pairs, np.ones((22, 1), "float32"), batch_size=8, verbose=0)
