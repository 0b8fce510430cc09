"""hk.fit, hk.evaluate and hk.predict on N ranks give the results of plain Keras in one process on the same data."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import compare, plain, ported, raises_on_several, same_logs, same_weights
from helpers.tiers import at_night

import hvdkit as hk
from hvdkit.watchdog.flight_recorder import FlightReader, recorder

layers = keras.layers


def regression(rows, rng):
    x = rng.normal(size=(rows, 5)).astype("float32")
    y = (x @ rng.normal(size=(5, 1)) + 0.1 * rng.normal(size=(rows, 1))).astype("float32")
    return x, y


def mlp(optimizer="adam", metrics=("mae",), **options):
    def build():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(8, "relu"), layers.Dense(1)])
        model.compile(optimizer, "mse", metrics=list(metrics), **options)
        return model

    return build


@pytest.mark.parametrize(
    ("rows", "batch_size", "shuffle"),
    [
        pytest.param(50, 16, True, marks=pytest.mark.ranks(1, 2, 3)),
        pytest.param(48, 12, True, marks=pytest.mark.nightly),
        (49, 16, False),
        pytest.param(37, 9, "batch", marks=pytest.mark.nightly),
        (5, 32, True),
    ],
)
def test_arrays_train_as_in_one_process(rng, rows, batch_size, shuffle):
    """Batches that divide evenly, unevenly, and a last one with fewer rows than ranks."""
    x, y = regression(rows, rng)
    compare(mlp(), x, y, batch_size=batch_size, epochs=3, shuffle=shuffle)


@pytest.mark.nightly(1, 3)
@pytest.mark.core(2)
@pytest.mark.ranks(1, 2, 3)
def test_evaluate_and_predict(rng):
    x, y = regression(29, rng)
    one, _ = plain(mlp(), x, y, batch_size=8)
    many, _ = ported(mlp(), x, y, batch_size=8)
    expected = one.evaluate(x, y, batch_size=6, verbose=0)
    np.testing.assert_allclose(hk.evaluate(many, x, y, batch_size=6, verbose=0), expected, rtol=1e-4)
    found = hk.evaluate(many, x, y, batch_size=6, verbose=0, return_dict=True)
    same_logs(found, one.evaluate(x, y, batch_size=6, verbose=0, return_dict=True))
    wanted = one.predict(x, batch_size=6, verbose=0)
    np.testing.assert_allclose(hk.predict(many, x, batch_size=6, verbose=0), wanted, rtol=1e-4, atol=1e-5)
    data = tf.data.Dataset.from_tensor_slices(x).batch(7)
    np.testing.assert_allclose(hk.predict(many, data, verbose=0), wanted, rtol=1e-4, atol=1e-5)
    chief = hk.predict(many, x, batch_size=6, verbose=0, gather="chief")
    assert (chief is not None) == hk.is_chief()


def test_plain_keras_works_on_the_model_afterwards(rng):
    """Only the distributed optimizer of hk.fit stays in the model."""
    x, y = regression(24, rng)
    model, _ = ported(mlp("sgd"), x, y, batch_size=8)
    before = model.get_weights()
    assert not {"train_step", "test_step", "_get_metrics_result_or_logs"} & set(vars(model))
    assert isinstance(model.optimizer, keras.optimizers.SGD)
    model.fit(x, y, batch_size=24, verbose=0)
    assert not np.allclose(before[0], model.get_weights()[0])
    assert hk.compare_variables(model.trainable_variables)


def test_ranks_without_a_seed_shuffle_as_the_chief_does(rng):
    """Every row occurs once per epoch, whatever each rank's random state."""
    import tensorflow.python.eager.context as context

    before = context.global_seed()
    tf.random.set_seed(100 + hk.rank())
    try:
        x = np.eye(6, dtype="float32")
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(1.0), lambda y, p: keras.ops.mean(p, -1))
        hk.fit(model, x, np.zeros((6, 1)), batch_size=3, epochs=2, verbose=0)
        np.testing.assert_allclose(model.get_weights()[0], np.full((6, 1), -2 / 3), rtol=1e-5)
    finally:
        tf.random.set_seed(20 if before is None else before)


def test_sharded_tables_are_weighed_by_rows_once(rng):
    """Lookups weight the rows' gradients, whatever the optimizer does to replicated ones."""
    ids, y = rng.integers(0, 20, size=(33, 3)), rng.normal(size=(33, 1)).astype("float32")
    table = rng.normal(size=(20, 4)).astype("float32")

    def build(sharded):
        made = hk.layers.ShardedEmbedding if sharded else layers.Embedding
        inputs = keras.Input((3,), dtype="int32")
        rows = made(20, 4, embeddings_initializer=keras.initializers.Constant(table), name="table")(inputs)
        outputs = layers.Dense(1, name="out")(layers.Flatten()(rows))
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.5), "mse")
        return model

    _, expected = plain(lambda: build(False), ids, y, batch_size=8, epochs=2, shuffle=False)
    _, found = ported(lambda: build(True), ids, y, batch_size=8, epochs=2, shuffle=False)
    same_logs(found, expected)


def test_a_dataset_that_is_shuffled_unlike_is_an_error(rng):
    x, y = regression(16, rng)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(16, seed=hk.rank()).batch(8)
    with raises_on_several(
        hk.CollectiveMismatchError,
        r"^x: got a different first batch on rank 1\b[^;]*; call keras.utils.set_random_seed\(1\) first",
    ):
        hk.fit(mlp()(), data, verbose=0)


@pytest.mark.parametrize("alike", at_night([0, 2], but=[2]))
def test_later_batches_are_compared_if_an_epoch_begins_with_them(rng, alike):
    """With steps_per_epoch the second epoch continues in the data; steps_per_execution=2 runs two batches at once."""
    x, y = regression(64, rng)
    order = np.concatenate([np.arange(16 * alike), 16 * alike + np.arange(64 - 16 * alike) * (1 + 2 * hk.rank()) % 16])
    data = tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(16)

    model = mlp()()
    model.compile("sgd", "mse", steps_per_execution=2, jit_compile=False)
    with raises_on_several(hk.CollectiveMismatchError, r"^x: got a different first batch on rank 1\b"):
        hk.fit(model, data, verbose=0, epochs=2, steps_per_epoch=2)


def test_arrays_and_arguments_that_differ_are_errors_on_every_rank(rng):
    x, y = regression(16, rng)
    with pytest.raises(hk.CollectiveMismatchError, match=r"^x, y: got other data on rank 1\b.*as on rank 0;"):
        hk.fit(mlp()(), x + hk.rank(), y, verbose=0)
    rows = slice(hk.rank(), None, hk.size())
    with pytest.raises(hk.CollectiveMismatchError, match=r"^x(, y)?: got .* remove what divides .* x\[rank::size\]"):
        hk.fit(mlp()(), x[rows], y[rows], verbose=0)
    with pytest.raises(
        hk.CollectiveMismatchError, match=r"^collective: got .*epochs=[12].* on rank [01], expected .*epochs=[12]"
    ):
        hk.fit(mlp()(), x, y, epochs=1 + (hk.rank() > 0), verbose=0)
    with pytest.raises(ValueError, match=rf"^batch_size: got {hk.size() - 1}, expected .* {hk.size()} ranks"):
        hk.fit(mlp()(), x, y, batch_size=hk.size() - 1, verbose=0)


@pytest.mark.parametrize("what", at_night(["x", "validation_data"], but=["x"]))
def test_data_that_end_early_on_one_rank_are_an_error_on_all(rng, what):
    x, y = regression(24, rng)
    rows = 24 - 8 * (hk.rank() == hk.size() - 1 and hk.size() > 1)
    data = tf.data.Dataset.from_tensor_slices((x, y)).take(rows).filter(lambda a, b: True).batch(8)
    given = {"x": data} if what == "x" else {"x": x, "y": y, "validation_data": data}
    errors, match = (hk.CollectiveMismatchError, tf.errors.InvalidArgumentError), "x: got data that ended"
    before = FlightReader(recorder().file).state().number
    with raises_on_several(errors, match):
        hk.fit(mlp()(), **given, verbose=0)
    if hk.size() > 1:  # the watchdog knows where ranks wait for one whose data do not arrive
        recorder().sampler()
        keys = [record.key for record in FlightReader(recorder().file).records(before)]
        assert "hvdkit.ranks_with_a_batch" in keys, keys
    with raises_on_several(errors, match):
        hk.predict(mlp()(), data, verbose=0)


class Rows(keras.metrics.Metric):
    """Counts rows; its result is its variable."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y, y_pred, sample_weight=None):
        self.rows.assign_add(tf.cast(tf.shape(y)[0], tf.float32))

    def result(self):
        return self.rows


def test_a_metric_whose_result_is_its_variable(rng):
    x, y = regression(23, rng)
    model = mlp(metrics=[Rows(name="rows")])()
    history = hk.fit(model, x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x[:9], y[:9])).history
    assert history["rows"] == [23, 23] and history["val_rows"] == [9, 9]


def by_function(biases, others):
    return keras.optimizers.MultiOptimizer(lambda variable: biases if "bias" in variable.path else others)


def by_map(biases, others):
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(others, {".*/bias": biases}))


def scaled(biases, others):
    return keras.optimizers.LossScaleOptimizer(by_map(biases, others), initial_scale=4.0)


@pytest.mark.parametrize("combine", at_night([by_function, by_map, scaled], but=[scaled]))
def test_a_multi_optimizer_trains_as_in_one_process(combine, rng):
    """A callback lowers the rate of one of its optimizers, which the user has created."""
    biases = []

    def build():
        biases.append(keras.optimizers.Adam(0.01))
        return mlp(combine(biases[-1], keras.optimizers.SGD(0.05)))()

    class Lower(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            biases[-1].learning_rate = 0.01 / (1 + epoch)

    x, y = regression(48, rng)
    compare(build, x, y, epochs=3, batch_size=16, shuffle=False, callbacks=[Lower()])


def test_slots_that_start_at_the_weights_do_so_if_a_step_is_traced(rng):
    """Plain Keras assigns them in the graph of a step, but not if the optimizer is built before."""
    x, y = regression(48, rng)

    def build():
        return mlp(keras.optimizers.ScheduleFreeAdamW(0.01))()

    def built():
        model = build()
        model.optimizer.build(model.trainable_variables)
        return model

    options = {"epochs": 2, "batch_size": 16, "shuffle": False}
    one, _ = plain(built, x, y, **options)
    many, _ = ported(build, x, y, **options)
    same_weights(many, one)
