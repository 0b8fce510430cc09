"""What Keras's own tests of fit, evaluate and predict expect, through hk.fit, hk.evaluate and hk.predict."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from helpers.as_one import SEED, compare, line, plain, ported, raises_on_several, same_logs, same_weights

import hvdkit as hk

layers = keras.layers
pytestmark = pytest.mark.ranks(1, 2)


def dense(units=1, metrics=("mae",), **options):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(units)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=list(metrics), **options)
    return model


# ---- predictions -----------------------------------------------------------------------------------------------------


class Of(keras.Model):
    """A model that is not built: its outputs are ``function`` of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def ragged_from(x):
    return tf.RaggedTensor.from_tensor(x, lengths=tf.cast(tf.abs(x[:, 0]) * 10, tf.int32) % 4)


def dense_of(value):
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.to_dense(value).numpy().tolist()
    return np.asarray(value).tolist()


@pytest.mark.nightly(1)
def test_predictions_of_every_kind_are_those_of_keras(rng):
    x = rng.normal(size=(11, 3)).astype("float32")  # a last batch of one row
    cases = {
        "strings": lambda x: tf.strings.as_string(x),
        "dict": lambda x: {"a": x * 2, "b": [tf.argmax(x, 1), tf.strings.as_string(x[:, 0])]},
        "ragged": ragged_from,
        "sparse": lambda x: tf.sparse.from_dense(tf.nn.relu(x)),
        "bool": lambda x: x > 0,
        "half": lambda x: tf.cast(x, tf.bfloat16),
    }
    for name, function in cases.items():
        expected = Of(function).predict(x, batch_size=5, verbose=0)
        found = hk.predict(Of(function), x, batch_size=5, verbose=0)
        tf.nest.assert_same_structure(found, expected)
        for mine, theirs in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
            assert type(mine) is type(theirs), name
            assert mine.dtype == theirs.dtype, name
            assert dense_of(mine) == dense_of(theirs), name


def test_predictions_that_are_no_rows_are_those_of_keras_on_one_rank_and_refused_on_several(rng):
    x = rng.normal(size=(8, 3)).astype("float32")
    for function, words in (
        (tf.reduce_mean, r"^model's outputs: got a float32 scalar for each batch, expected a row for each example"),
        (
            lambda x: tf.reduce_mean(x, 0),
            rf"^model's outputs: got ndarray of shape \(6,\) on rank [0-{hk.size() - 1}], expected [1-4] rows",
        ),
    ):
        for rows in (8, 7):  # with 7 rows, a batch cannot be divided evenly
            expected = Of(function).predict(x[:rows], batch_size=4, verbose=0)
            with raises_on_several(TypeError, words if rows == 8 else "^model's outputs: got"):
                np.testing.assert_array_equal(hk.predict(Of(function), x[:rows], batch_size=4, verbose=0), expected)


def test_callbacks_of_a_prediction_get_the_outputs_of_the_global_batch(rng):
    x = rng.normal(size=(11, 3)).astype("float32")

    class Keeps(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.outputs = []

        def on_predict_batch_end(self, batch, logs=None):
            self.outputs.append(dense_of(logs["outputs"]))

    for function in (lambda x: x * 2, ragged_from):
        keeps = [Keeps(), Keeps()]
        Of(function).predict(x, batch_size=5, verbose=0, callbacks=keeps[:1])
        hk.predict(Of(function), x, batch_size=5, verbose=0, callbacks=keeps[1:])
        assert keeps[1].outputs == keeps[0].outputs
        assert [len(rows) for rows in keeps[1].outputs] == [5, 5, 1]


# ---- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_sparse_inputs_of_a_model_that_is_not_built(rng):
    x, y = line(rng, 10)
    x = x * (x > 0)
    sparse = tf.sparse.from_dense(x)

    def build(eager):
        model = keras.Sequential([layers.Dense(2, activation="relu"), layers.Dense(1)])
        model.compile(keras.optimizers.Adagrad(0.01), "mse", metrics=["mae"], run_eagerly=eager, jit_compile=False)
        return model

    def make_dataset():
        return tf.data.Dataset.from_tensor_slices((sparse, y)).batch(4)

    def make_generator():
        return ((tf.sparse.from_dense(x[i : i + 4]), y[i : i + 4]) for i in (0, 4))

    def make_scipy_generator():
        return ((scipy.sparse.coo_matrix(x[i : i + 4]), y[i : i + 4]) for i in (0, 4))

    cases = [
        (False, make_generator),
        (False, make_scipy_generator),
        (True, make_scipy_generator),
        (False, make_dataset),
    ]
    for eager, data in cases:
        one, many = compare(lambda eager=eager: build(eager), data)
    np.testing.assert_allclose(
        hk.evaluate(many, make_dataset(), verbose=0), one.evaluate(make_dataset(), verbose=0), rtol=2e-4
    )
    found = hk.predict(many, sparse, batch_size=4, verbose=0)
    np.testing.assert_allclose(found, one.predict(sparse, verbose=0), rtol=1e-3, atol=1e-5)
    compare(lambda: build(False), sparse, y, shuffle=False, batch_size=4)


# ---- metrics ---------------------------------------------------------------------------------------------------------


class Kept(keras.metrics.MeanSquaredError):
    """A metric over all epochs."""

    def __init__(self):
        super().__init__(name="kept")

    def reset_state(self):
        pass


class CountFromOne(keras.metrics.Metric):
    """A user's metric that keeps its state, which does not begin with 0."""

    def __init__(self):
        super().__init__(name="count")
        self.total = self.add_variable((), "ones", name="total")

    def reset_state(self):
        pass

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(y_true * y_true))

    def result(self):
        return self.total * 1.0


@pytest.mark.nightly
def test_metrics_that_keep_their_state_over_epochs(rng):
    x, y = line(rng, 22)

    def build():
        return dense(metrics=[Kept(), CountFromOne(), "mae"])

    options = {"batch_size": 8, "epochs": 3, "validation_data": (x[:5], y[:5])}
    one, many = compare(build, x, y, on_each_rank=True, **options)
    for _ in range(2):  # they go on in the next call
        expected = one.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        same_logs(hk.fit(many, x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history, expected)
        expected = one.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
        same_logs(hk.evaluate(many, x, y, batch_size=8, verbose=0, return_dict=True), expected)


class OfBatches(keras.metrics.Metric):
    """A mean over batches of their mean error, with a counter of ``dtype``, and a sum over rows."""

    def __init__(self, dtype):
        super().__init__(name=f"of_batches_{dtype}")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros", dtype=dtype)
        self.rows = self.add_weight(name="rows", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.mean(keras.ops.abs(y_true - y_pred)))
        self.count.assign_add(keras.ops.ones((), self.count.dtype))
        self.rows.assign_add(keras.ops.sum(keras.ops.cast(y_true > 0, "float32")))

    def result(self):
        mean = self.total / keras.ops.maximum(keras.ops.cast(self.count, "float32"), 1.0)
        return {f"{self.name}_mean": mean, f"{self.name}_count": self.count * 1, f"{self.name}_rows": self.rows * 1.0}


class F1OfBatches(keras.metrics.Metric):
    """A mean over batches of their F1, which does not follow from that of their rows."""

    def __init__(self):
        super().__init__(name="f1_of_batches")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        found = keras.ops.cast(y_pred > 0, "float32")
        wanted = keras.ops.cast(y_true > 0, "float32")
        f1 = 2 * keras.ops.sum(found * wanted) / (keras.ops.sum(found) + keras.ops.sum(wanted) + 1e-7)
        self.total.assign_add(f1)
        self.count.assign_add(1.0)

    def result(self):
        return self.total / keras.ops.maximum(self.count, 1.0)


def mean_error(y_true, y_pred):
    """Return one number for the batch."""
    return keras.ops.mean(keras.ops.abs(y_true - y_pred))


def constant(y_true, y_pred):
    """Return a Python number."""
    return 0.25


@pytest.mark.nightly
def test_metrics_that_count_batches(rng):
    x, y = line(rng, 22)  # with batches of 7 rows, the last one has a single row
    for eager in (False, True):

        def build(eager=eager):
            model = dense(
                metrics=[OfBatches("float32"), OfBatches("int32"), F1OfBatches(), mean_error, constant, "mae"],
                run_eagerly=eager,
            )
            return model

        for rows in (7, 8):
            one, many = compare(build, x, y, batch_size=rows, epochs=2, shuffle=False, validation_data=(x[:9], y[:9]))
        expected = one.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)
        same_logs(hk.evaluate(many, x, y, batch_size=7, verbose=0, return_dict=True), expected)


class OwnUpdates(keras.Model):
    """Updates a metric in a branch that some ranks do not take, and another one only in training with weights."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.seen = OfBatches("float32")
        self.weighted = F1OfBatches()

    def call(self, x):
        return self.dense(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        def update():
            self.seen.update_state(y, y_pred)
            return True

        tf.cond(tf.reduce_sum(x) > 0, update, lambda: False)
        if sample_weight is None:
            self.weighted.update_state(y, y_pred)
        else:
            self.weighted.update_state(y, y_pred, sample_weight)
        return super().compute_metrics(x, y, y_pred, sample_weight)


@pytest.mark.nightly
@pytest.mark.ranks(2)
def test_metrics_with_other_arguments_in_validation_and_in_branches(rng):
    x, y = line(rng, 22)

    def build():
        model = OwnUpdates()
        model.build((None, x.shape[1]))
        model.compile("sgd", "mse")
        return model

    x[:11] = abs(x[:11])
    x[11:] = -abs(x[11:])
    weights = rng.uniform(1, 2, len(x)).astype("float32")
    options = {"sample_weight": weights, "epochs": 3, "shuffle": False, "verbose": 0, "validation_data": (x[:9], y[:9])}
    expected = build().fit(x, y, batch_size=8, **options).history
    got = hk.fit(build(), x, y, batch_size=8, **options).history
    for name in ("f1_of_batches", "val_f1_of_batches", "loss", "val_loss"):
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5)


@pytest.mark.ranks(1)
def test_on_one_rank_nothing_is_refused(rng):
    x, y = line(rng, 12)
    if hk.size() > 1:
        return

    class Smallest(keras.metrics.Metric):
        """A minimum, which cannot be combined over ranks."""

        def __init__(self):
            super().__init__(name="smallest")
            self.value = self.add_variable((), "ones", name="value", aggregation="none")

        def reset_state(self):
            self.value.assign(1e9)

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(keras.ops.minimum(self.value, keras.ops.min(y_pred)))

        def result(self):
            return self.value * 1.0

    compare(lambda: dense(metrics=[Smallest()]), x, y, batch_size=5, epochs=2)

    def vector_loss():
        model = dense()
        model.compile("sgd", keras.losses.MeanSquaredError(reduction=None))
        return model

    compare(vector_loss, x, y, batch_size=5, epochs=2)

    class Counts(keras.Model):
        """A model whose data are numbers, not rows."""

        def __init__(self):
            super().__init__()
            self.total = self.add_weight(shape=(), initializer="zeros", name="total")

        def train_step(self, data):
            self.total.assign_add(data)
            return {"total": self.total}

        def call(self, x):
            return x

    def counts():
        model = Counts()
        model.compile()
        return model

    compare(counts, tf.data.Dataset.range(4).map(lambda n: tf.cast(n, tf.float32)))


# ---- training --------------------------------------------------------------------------------------------------------


class Steps(keras.callbacks.Callback):
    """Keeps the numbers that hooks get."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(("epoch", epoch))

    def on_batch_begin(self, batch, logs=None):
        self.seen.append(("begin", batch, sorted(logs)))

    def on_batch_end(self, batch, logs=None):
        self.seen.append(("end", batch, sorted(logs)))

    def on_test_batch_end(self, batch, logs=None):
        self.seen.append(("test", batch, sorted(logs)))

    def on_epoch_end(self, epoch, log):
        """The argument has another name, as in many programs: Keras passes it by position."""
        self.seen.append(("epoch end", epoch, sorted(log)))

    def on_train_begin(self, _):
        self.seen.append(("train",))

    def on_test_end(self, results):
        self.seen.append(("test end", sorted(results)))


@pytest.mark.nightly(1)
def test_steps_and_logs_of_hooks_are_those_of_keras(rng):
    x, y = line(rng, 22)
    for steps, options in ((1, {}), (3, {}), (2, {"steps_per_epoch": 3}), (3, {"make_data": True})):
        keeps = [Steps(), Steps()]

        def build(steps=steps):
            return dense(steps_per_execution=steps)

        def make_data():
            return tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda *_: True).batch(4)

        data = (make_data,) if options.pop("make_data", False) else (x, y)
        if len(data) == 2:
            options |= {"batch_size": 4, "shuffle": False}
        options |= {"epochs": 2, "validation_data": (x[:9], y[:9])}
        one, expected = plain(build, *data, callbacks=keeps[:1], **options)
        many, found = ported(build, *data, callbacks=keeps[1:], **options)
        assert keeps[1].seen == keeps[0].seen, (steps, options)
        same_logs(found, expected)
        same_weights(many, one)


def test_stopping_within_training_evaluation_and_prediction(rng):
    x, y = line(rng, 40)

    class Stops(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.batches = 0

        def stop(self, batch, name):
            self.batches += 1
            if batch == 2:
                setattr(self.model, name, True)

        def on_train_batch_end(self, batch, logs=None):
            self.stop(batch, "stop_training")

        def on_test_batch_end(self, batch, logs=None):
            self.stop(batch, "stop_evaluating")

        def on_predict_batch_end(self, batch, logs=None):
            self.stop(batch, "stop_predicting")

    stops = [Stops(), Stops()]
    options = {"batch_size": 4, "shuffle": False, "epochs": 2}
    one, expected = plain(dense, x, y, callbacks=stops[:1], **options)
    many, found = ported(dense, x, y, callbacks=stops[1:], **options)
    same_logs(found, expected)
    same_weights(many, one)
    wanted = one.evaluate(x, y, batch_size=4, verbose=0, callbacks=stops[:1])
    np.testing.assert_allclose(hk.evaluate(many, x, y, batch_size=4, verbose=0, callbacks=stops[1:]), wanted, rtol=2e-4)
    wanted = one.predict(x, batch_size=4, verbose=0, callbacks=stops[:1])
    found = hk.predict(many, x, batch_size=4, verbose=0, callbacks=stops[1:])
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)
    assert len(found) == 12
    assert stops[1].batches == stops[0].batches == 9


class Normalized(keras.Model):
    """A model without shapes: the first step creates its variables."""

    def __init__(self):
        super().__init__()
        self.norm, self.dense = layers.BatchNormalization(synchronized=True), layers.Dense(1)

    def call(self, x, training=False):
        return self.dense(self.norm(x, training=training))


@pytest.mark.nightly
def test_a_strategy_that_was_left_in_the_program(rng):
    """One rank ignores it, wherever it is. Several do if only the model was built in it."""
    x, y = line(rng, 22)
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}

    def build():
        keras.utils.set_random_seed(SEED)
        return Normalized()

    def compiled(model):
        model.compile("adam", "mse", metrics=["mae"])
        return model

    one = compiled(build())
    expected = [one.fit(x, y, **options).history for _ in range(2)]
    # Where the scope is: around the model, compile, the calls of hk.fit, hk.evaluate and hk.predict.
    for places in ((1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)):
        strategy = tf.distribute.MirroredStrategy()
        around = [strategy.scope if place else contextlib.nullcontext for place in places]
        with around[0]():
            many = build()
        with around[1]():
            compiled(many)
        with around[2]():
            calls = (hk.fit, hk.evaluate, lambda *args, **options: hk.predict(args[0], args[1], **options))
            for call in calls if places[2] and hk.size() > 1 else ():
                words = r"scope of MirroredStrategy, .*remove strategy\.scope\(\): hvdkit's ranks replace the strategy"
                with pytest.raises(hk.HvdkitError, match=words):
                    call(many, x, y, verbose=0)
            if places[2] and hk.size() > 1:
                continue
            for wanted in expected:
                same_logs(hk.fit(many, x, y, **options).history, wanted)
            same_weights(many, one, rtol=1e-3, atol=1e-4)
            hk.compare_variables(many.variables)
            found = hk.predict(many, x, verbose=0)
            np.testing.assert_allclose(found, one.predict(x, verbose=0), rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(many.evaluate(x, y, verbose=0), hk.evaluate(many, x, y, verbose=0), rtol=1e-4)


def test_data_that_a_strategy_has_distributed(rng):
    x, y = line(rng, 22)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    strategy = tf.distribute.MirroredStrategy()
    for data in (
        strategy.experimental_distribute_dataset(dataset),
        strategy.distribute_datasets_from_function(lambda _: dataset),
    ):
        with raises_on_several(hk.HvdkitError, r"x: got a Distributed.*, expected a tf\.data\.Dataset; pass the data"):
            one, expected = plain(dense, dataset)
            many, found = ported(dense, data)
            same_logs(found, expected)
            same_weights(many, one)


@pytest.mark.nightly(1)
def test_an_optimizer_that_is_compiled_again_continues(rng):
    """With its slots and steps, as in Keras; also one with a function as learning rate."""
    x, y = line(rng, 22)
    for make in (lambda: keras.optimizers.Adam(0.1), lambda: keras.optimizers.Adam(lambda: 0.1)):
        results = []
        for fit in (keras.Model.fit, hk.fit):
            keras.utils.set_random_seed(SEED)
            model, optimizer = dense(), make()
            for _ in range(2):
                model.compile(optimizer, "mse")
                history = fit(model, x, y, batch_size=8, shuffle=False, verbose=0).history
            results.append((history, model))
        same_logs(results[1][0], results[0][0])
        same_weights(results[1][1], results[0][1])
        assert int(results[1][1].optimizer.iterations) == int(results[0][1].optimizer.iterations) == 6


class Example(NamedTuple):
    """The elements of a dataset."""

    x: tf.Tensor
    y: tf.Tensor


class OfExamples(keras.Sequential):
    """A model whose batches are ``Example``s."""

    def train_step(self, data):
        return super().train_step((data.x, data.y))


def test_batches_may_be_named_tuples(rng):
    dataset = tf.data.Dataset.from_tensor_slices(Example(*line(rng, 22))).batch(8)

    def build():
        model = OfExamples([keras.Input((3,)), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    compare(build, dataset, epochs=2)


# ---- models with their own methods -----------------------------------------------------------------------------------


class Doubles(keras.Sequential):
    """A model that overrides methods, which change data, arguments and results."""

    def fit(self, *args, **kwargs):
        x, *others = args
        self.own = getattr(self, "own", 0) + 1
        super().fit(2.0 * x, *others, **kwargs)
        kwargs["epochs"] = 1
        return super().fit(x, *others, **kwargs)

    def evaluate(self, x, y=None, **kwargs):
        logs = super().evaluate(2.0 * x, y, **kwargs)
        return logs | {"rows": float(len(x))} if isinstance(logs, dict) else logs

    def predict(self, x, **kwargs):
        return 3.0 * super().predict(2.0 * x, **kwargs)


@pytest.mark.nightly
def test_a_model_may_have_its_own_methods(rng):
    x, y = line(rng, 22)

    def build():
        model = Doubles([keras.Input((3,)), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        return model

    options = {"batch_size": 8, "shuffle": False, "epochs": 3, "validation_data": (x[:5], y[:5])}
    one, many = compare(build, x, y, on_each_rank=True, **options)
    assert type(many) is Doubles
    assert many.own == 1
    assert len(hk.fit(many, x, y, verbose=0).history["loss"]) == 1
    one.fit(x, y, verbose=0)
    expected = one.evaluate(x, y, verbose=0, return_dict=True)
    same_logs(hk.evaluate(many, x, y, verbose=0, return_dict=True), expected, rtol=1e-3)
    expected = one.predict(x, verbose=0)
    np.testing.assert_allclose(hk.predict(many, x, verbose=0), expected, rtol=1e-2, atol=1e-4)
    if not hk.is_chief():
        assert hk.predict(many, x, verbose=0, gather="chief") is None
    else:
        assert len(hk.predict(many, x, verbose=0, gather="chief")) == 22

    class Kept(keras.Sequential):
        """Calls a function that it took from Keras's class."""

        def fit(self, *args, **kwargs):
            return keras.Model.fit(self, *args, **kwargs)

    def build_kept():
        model = Kept([keras.Input((3,)), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    compare(build_kept, x, y, **options)


class Named(keras.Sequential):
    """A model whose own ``fit`` has the arguments that its author uses."""

    def fit(self, x, y, rounds=2, **options):
        for _ in range(rounds):
            history = super().fit(x=2.0 * x, y=y, **options)
        return history


@pytest.mark.nightly(1)
def test_an_own_fit_may_have_other_arguments(rng):
    x, y = line(rng, 22)

    def build():
        model = Named([keras.Input((3,)), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    options = {"batch_size": 8, "shuffle": False, "epochs": 2}
    one, expected = plain(build, x, y, **options)
    assert len(expected["loss"]) == 2
    for arguments in ((x, y), ()):
        many, found = ported(build, *arguments, **options | ({} if arguments else {"x": x, "y": y}))
        same_logs(found, expected)
        same_weights(many, one)


def test_a_stateful_rnn_is_built_for_the_rows_of_a_rank(rng):
    batch = 4 * hk.size()
    x, y = rng.normal(size=(2 * batch, 4, 2)).astype("float32"), np.zeros((2 * batch, 1), "float32")

    def build(rows):
        keras.utils.set_random_seed(SEED)
        inputs = keras.Input((4, 2), batch_size=rows)
        model = keras.Model(inputs, layers.Dense(1)(layers.SimpleRNN(3, stateful=True)(inputs)))
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    if hk.size() > 1:
        words = rf"^model: got stateful layers with the fixed batch size {batch}, and global batches of {batch} rows"
        for call in (hk.fit, lambda model, x, y, **options: hk.predict(model, x, **options)):
            with pytest.raises(ValueError, match=rf"{words}, .*hk\.size"):
                call(build(batch), x, y, batch_size=batch, verbose=0)
    options = {"batch_size": batch, "shuffle": False, "verbose": 0}
    expected = build(batch).fit(x, y, **options).history
    same_logs(hk.fit(build(4), x, y, **options).history, expected)
