"""The real ranks of a world get the same batches as a single process, in parts."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import same_weights

import hvdkit as hk

hk.init()
RNG = np.random.default_rng(0)
X = RNG.normal(size=(45, 3)).astype(np.float32)
Y = (X @ [[1.0], [-2.0], [0.5]] + 0.1 * RNG.normal(size=(45, 1))).astype(np.float32)


def alone(*args, **options):
    """Return the same iterator as in a single process."""
    return hk.data.GlobalBatches(*args, rank=0, size=1, **options)


def sources(folder):
    X.tofile(folder / f"rows-{hk.rank()}")
    yield X
    yield np.memmap(folder / f"rows-{hk.rank()}", np.float32, "r", shape=X.shape)
    yield tf.data.Dataset.from_tensor_slices(X)


@pytest.mark.core(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("batch_size", "options"),
    [(8, {}), (64, {"shuffle_seed": 3}), (11, {"shuffle_seed": 3, "remainder": "drop"})],
)
def test_local_batches_make_the_global_batch(batch_size, options, tmp_path):
    with pytest.raises(ValueError, match="at least one batch"):
        hk.data.GlobalBatches(X, 64, remainder="drop")
    for source in sources(tmp_path):
        batches = hk.data.GlobalBatches(source, batch_size, epochs=2, **options)
        whole = alone(source, batch_size, epochs=2, **options)
        for expected in whole:
            local = next(batches)
            first, last = batches.local_rows
            assert len(local) == last - first
            np.testing.assert_array_equal(hk.allgather(np.asarray(local)), expected)
            np.testing.assert_array_equal(hk.allgather(batches.mask), whole.mask)
            assert hk.allreduce(np.int64(batches.count), op=hk.Sum) == batches.global_count == whole.count
        assert next(batches, None) is None
        assert batches.step == whole.step == 2 * whole.steps_per_epoch


def test_state_and_fingerprint_are_the_same_on_every_rank():
    batches = hk.data.GlobalBatches((X, Y), 11, shuffle_seed=1)
    for _ in range(7):
        next(batches)
    whole = alone((X, Y), 11, shuffle_seed=1)
    whole.restore(batches.state)
    assert all(state == whole.state for state in hk.allgather_object(batches.state))
    assert all(mark == whole.fingerprint() for mark in hk.allgather_object(batches.fingerprint()))
    resumed = hk.data.GlobalBatches((X, Y), 11, shuffle_seed=1)
    resumed.restore(hk.broadcast_object(whole.state))
    for _ in range(9):
        np.testing.assert_array_equal(hk.allgather(next(resumed)[0]), next(whole)[0])


def test_keras_passes_make_the_global_batches():
    local = hk.data.GlobalBatches((X, Y), 11, shuffle_seed=2).as_keras()
    whole = alone((X, Y), 11, shuffle_seed=2)
    for _ in range(2):
        for x, y, weight in local:
            expected, _ = next(whole)
            np.testing.assert_array_equal(hk.allgather(x), expected)
            mean = hk.allreduce(tf.reduce_mean(weight[:, None] * y))
            np.testing.assert_allclose(mean, targets_of(expected[whole.mask]).mean(), rtol=1e-4, atol=1e-6)


def targets_of(x):
    return np.concatenate([Y[(row == X).all(axis=1)] for row in x])


def two_outputs(optimizer):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4, 3))
    tokens = keras.layers.Dense(2, "softmax", name="tokens")(inputs)
    row = keras.layers.Dense(1, name="row")(keras.layers.Flatten()(inputs))
    model = keras.Model(inputs, {"tokens": tokens, "row": row})
    losses = {"tokens": "sparse_categorical_crossentropy", "row": "mse"}
    model.compile(optimizer, losses, weighted_metrics={"tokens": ["accuracy"], "row": ["mae"]})
    return model


def per_pixel(optimizer):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4, 4, 3)), keras.layers.Dense(2, "softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


@pytest.mark.nightly
def test_as_keras_weighs_labels_of_any_shape():
    """Weights of the wrong shape would broadcast if a rank has as many rows as tokens."""
    x, tokens, row = RNG.normal(size=(19, 4, 3)), RNG.integers(0, 2, (19, 4)), RNG.normal(size=19)
    images, masks = RNG.normal(size=(19, 4, 4, 3)), RNG.integers(0, 2, (19, 4, 4))
    weight, many = RNG.uniform(size=19), RNG.uniform(size=(19, 4)).astype("float32")
    begin = [hk.callbacks.BroadcastInitial()]
    for build, data in (
        (two_outputs, (x, {"tokens": tokens, "row": row})),
        (two_outputs, (x, {"tokens": tokens, "row": row}, {"tokens": many, "row": weight})),
        (per_pixel, (images, masks)),
        (per_pixel, (images, masks, RNG.uniform(size=(19, 4, 4)))),
    ):
        one = build(keras.optimizers.SGD(0.5))
        one.fit(*data[:2], sample_weight=(data + (None,))[2], batch_size=8, epochs=2, shuffle=False, verbose=0)
        spread = build(hk.DistributedOptimizer(keras.optimizers.SGD(0.5)))
        dataset = hk.data.GlobalBatches(data, 8).as_keras()
        spread.fit(dataset, epochs=2, shuffle=False, verbose=0, callbacks=begin)
        same_weights(spread, one)


def test_as_keras_of_unknown_length_and_without_labels():
    def unknown():
        return tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True)

    counted = list(hk.data.GlobalBatches((X, Y), 8).as_keras())
    dataset = hk.data.GlobalBatches(unknown(), 8).as_keras()
    assert dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY
    for _ in range(2):
        for found, expected in zip(list(dataset)[:-1], counted[:-1], strict=True):
            tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
    rows = 4 * hk.size()
    for data in ({"a": X, "b": Y}, X, (X,)):
        for found in hk.data.GlobalBatches(data, rows, remainder="drop").as_keras().take(1):
            tf.nest.map_structure(
                lambda x, whole: np.testing.assert_array_equal(hk.allgather(x), whole[:rows]), found, data
            )
        with pytest.raises(ValueError, match=r"data without labels.*hk\.fit\(model, batches\).*remainder='drop'"):
            hk.data.GlobalBatches(data, rows).as_keras()


def test_plain_fit_of_the_iterator_names_what_keras_takes():
    model = per_pixel("sgd")
    with pytest.raises(ValueError, match=r"hk\.fit\(model, batches\), or model\.fit\(batches\.as_keras\(\)\)"):
        model.fit(hk.data.GlobalBatches((X, Y), 8))


def test_a_loop_over_epochs():
    batches, whole = hk.data.GlobalBatches(X, 8, shuffle_seed=1), alone(X, 8, shuffle_seed=1)
    for epoch in range(2):
        for batch in batches.one_epoch():
            np.testing.assert_array_equal(hk.allgather(batch), next(whole))
            assert batches.epoch == epoch
    assert batches.state == alone(X, 8, shuffle_seed=1).state_at(2 * 6)
