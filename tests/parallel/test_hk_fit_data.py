"""Data sources of hk.fit, hk.evaluate and hk.predict: GlobalBatches, pandas, ragged and sparse tensors."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import compare, line, plain, ported, same_logs, same_weights
from helpers.tiers import at_night

import hvdkit as hk
from hvdkit.keras.inputs import FitData

layers = keras.layers


def dense(optimizer="adam", **options):
    def build():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1)])
        model.compile(optimizer, "mse", **{"metrics": ["mae"], **options})
        return model

    return build


def known(*arrays):
    return arrays


def stream(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays)


def unknown_length(*arrays):
    return stream(*arrays).filter(lambda *row: True)


def alone(source, batch_size, number, **options):
    """Return the real rows of the first ``number`` global batches, as one process reads them in a loop."""
    batches = hk.data.GlobalBatches(source, batch_size, rank=0, size=1, **options)
    for batch in itertools.islice(batches, number):
        yield tuple(np.asarray(part)[batches.mask] for part in batch)


CASES = [
    pytest.param(known, 22, 8, {"shuffle_seed": 3}, marks=pytest.mark.ranks(1, 2, 3)),  # a last batch of 6
    (known, 25, 8, {}),  # a last batch of one row
    (known, 24, 7, {"shuffle_seed": 1, "remainder": "drop"}),
    pytest.param(unknown_length, 17, 8, {"shuffle_seed": 5}, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("source", "rows", "batch_size", "options"), CASES)
def test_global_batches_train_as_in_one_process(rng, source, rows, batch_size, options):
    x, y = line(rng, rows)
    steps = rows // batch_size if "remainder" in options else -(-rows // batch_size)
    expected_batches = alone(source(x, y), batch_size, 3 * steps, **options)
    # At the end of data of unknown length Keras may count a step that did not run, which changes Adam's next steps.
    build = dense("sgd" if source is unknown_length else "adam")
    one, expected = plain(build, expected_batches, epochs=3, steps_per_epoch=steps)
    batches = hk.data.GlobalBatches(source(x, y), batch_size, **options)
    many, found = ported(build, batches, epochs=3)
    same_logs(found, expected)
    same_weights(many, one)
    hk.compare_variables(many.trainable_variables)
    assert batches.step == 0, "hk.fit moved the iterator"


@pytest.mark.nightly(3)
@pytest.mark.core(2)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("source", at_night([known, unknown_length], but=[known]))
def test_global_batches_to_evaluate_predict_and_validate(rng, source):
    x, y = line(rng, 25)
    batches = hk.data.GlobalBatches(source(x, y), 8, epochs=1)
    one, expected = plain(dense(), x, y, batch_size=6, epochs=2, validation_data=(x, y), validation_batch_size=8)
    many, found = ported(dense(), x, y, batch_size=6, epochs=2, validation_data=batches)
    same_logs(found, expected)
    wanted = one.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    for _ in range(2):
        same_logs(hk.evaluate(many, batches, verbose=0, return_dict=True), wanted)
        found = hk.predict(many, batches, verbose=0)
        np.testing.assert_allclose(found, one.predict(x, verbose=0), rtol=1e-3, atol=1e-5)
    unlabelled = hk.data.GlobalBatches(x, 8)
    np.testing.assert_allclose(hk.predict(many, unlabelled, verbose=0), found, rtol=1e-3, atol=1e-5)


class Built(keras.Model):
    """A model built by its first step."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(1)

    def call(self, inputs):
        return self.out(tf.concat([inputs["a"], inputs["b"]], 1))


@pytest.mark.nightly
def test_dicts_weights_and_class_weights(rng):
    x, y = line(rng, 21)
    weight, classes = rng.uniform(size=21).astype("float32"), rng.integers(0, 2, 21)

    def build():
        model = Built()
        model.compile("adam", "mse", weighted_metrics=["mae"])
        return model

    data = ({"a": x[:, :1], "b": x[:, 1:]}, y, weight)
    batches = hk.data.GlobalBatches(data, 8, as_tensors=True)
    many, found = ported(build, batches, epochs=2)
    one, expected = plain(build, *data[:2], sample_weight=weight, batch_size=8, epochs=2, shuffle=False)
    same_logs(found, expected)
    same_weights(many, one)

    def classifier():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1, "sigmoid")])
        model.compile("adam", "binary_crossentropy")
        return model

    options = {"epochs": 2, "class_weight": {0: 1.0, 1: 3.0}}
    _, found = ported(classifier, hk.data.GlobalBatches((x, classes), 8), **options)
    _, expected = plain(classifier, x, classes, batch_size=8, shuffle=False, **options)
    same_logs(found, expected)


def test_ragged_and_sparse_examples_of_a_stream(rng):
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(34) % 9, [3, 0, 5, 1, 2, 4, 2, 0, 7, 1, 9])
    wide = tf.sparse.from_dense((rng.uniform(size=(11, 6)) > 0.7).astype("float32"))
    y = rng.normal(size=(11, 1)).astype("float32")

    def build():
        words, flags = keras.Input((None,), ragged=True, dtype="int32"), keras.Input((6,), sparse=True)
        rows = layers.Lambda(lambda x: tf.reduce_sum(tf.cast(x, tf.float32), 1, keepdims=True))(words)
        model = keras.Model([words, flags], layers.Dense(1)(layers.Concatenate()([rows, layers.Dense(3)(flags)])))
        model.compile("sgd", "mse")
        return model

    data = tf.data.Dataset.from_tensor_slices(((ragged, wide), y))
    many, found = ported(build, hk.data.GlobalBatches(data, 5), epochs=2)
    one, expected = plain(build, data.batch(5), epochs=2)
    same_logs(found, expected)
    same_weights(many, one)


@pytest.mark.nightly
def test_epochs_are_those_of_the_data_after_initial_epoch_and_a_stop(rng, shared_path):
    """Also within an epoch: a run that ends there continues with the remaining batches."""
    x, y = line(rng, 22)
    options = {"shuffle_seed": 2}
    one, expected = plain(dense(), alone((x, y), 5, 4 * 5, **options), epochs=4, steps_per_epoch=5)
    batches = hk.data.GlobalBatches((x, y), 5, **options)
    many, _ = ported(dense(), batches, epochs=2)
    found = hk.fit(many, batches, epochs=4, initial_epoch=2, verbose=0).history
    same_logs(found, {name: values[2:] for name, values in expected.items()})
    same_weights(many, one)

    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.epochs == 1 and batch == 2:
                self.model.stop_training = True

        def on_epoch_begin(self, epoch, logs=None):
            self.epochs = epoch

    folder = shared_path / "run"
    ported(dense(), batches, epochs=4, logdir=folder, callbacks=[Ends()])
    many, found = ported(dense(), batches, epochs=4, logdir=folder)
    same_weights(many, one)
    same_logs({name: values[1:] for name, values in found.items()}, {n: v[2:] for n, v in expected.items()})


@pytest.mark.parametrize("steps", at_night([4, 6, 7], but=[4]))
def test_steps_per_epoch_goes_on_in_the_data(rng, steps):
    x, y = line(rng, 24)  # 6 batches
    batches = hk.data.GlobalBatches((x, y), 4, shuffle_seed=2)
    one, expected = plain(dense(), alone((x, y), 4, 3 * steps, shuffle_seed=2), epochs=3, steps_per_epoch=steps)
    many, found = ported(dense(), batches, epochs=3, steps_per_epoch=steps)
    same_logs(found, expected)
    same_weights(many, one)
    many, _ = ported(dense(), batches, epochs=1, steps_per_epoch=steps)
    for epoch in (1, 2):  # a run that starts again for each epoch
        hk.fit(many, batches, initial_epoch=epoch, epochs=epoch + 1, steps_per_epoch=steps, verbose=0)
    same_weights(many, one)
    with pytest.raises(ValueError, match=rf"^epochs: got 9, .* at most {18 // steps}; pass GlobalBatches"):
        hk.fit(many, hk.data.GlobalBatches((x, y), 4, epochs=3), epochs=9, steps_per_epoch=steps, verbose=0)


@pytest.mark.nightly
def test_a_backup_goes_on_at_its_epoch(rng, shared_path):
    x, y = line(rng, 22)
    one, expected = plain(dense(), alone((x, y), 8, 3 * 3, shuffle_seed=2), epochs=3, steps_per_epoch=3)

    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise InterruptedError("between epochs")

    def run(*others):
        backup = keras.callbacks.BackupAndRestore(str(shared_path / "backup"))
        batches = hk.data.GlobalBatches((x, y), 8, shuffle_seed=2)
        return ported(dense(), batches, epochs=3, callbacks=[backup, *others])

    with pytest.raises(InterruptedError):
        run(Fails())
    hk.barrier()
    many, found = run()
    same_logs(found, {name: values[1:] for name, values in expected.items()})
    same_weights(many, one)


def test_what_is_wrong_with_global_batches_is_an_error_on_every_rank(rng):
    x, y = line(rng, 24)
    batches = hk.data.GlobalBatches((x, y), 8)
    model = dense()()
    for options, match in (
        ({"y": y}, r"^y: got ndarray, with GlobalBatches as x, expected None; .*GlobalBatches\(\(x, y\)"),
        ({"sample_weight": y}, "^sample_weight: got ndarray, with GlobalBatches"),
        ({"batch_size": 8}, "^batch_size: got 8, with GlobalBatches as x, expected None; leave it out"),
        ({"validation_split": 0.5}, "validation_split"),
    ):
        with pytest.raises(ValueError, match=match):
            hk.fit(model, batches, verbose=0, **options)
    with pytest.raises(ValueError, match=r"^epochs: got 3, .*expected at most 2; pass GlobalBatches\(epochs=3\)"):
        hk.fit(model, hk.data.GlobalBatches((x, y), 8, epochs=2), epochs=3, verbose=0)
    for arguments, error, words in (
        ({"steps_per_epoch": 0}, ValueError, "^steps_per_epoch: got 0, expected an integer of at least 1"),
        ({"steps_per_epoch": 1.5}, TypeError, "^steps_per_epoch: got 1.5, expected an integer"),
        ({"initial_epoch": -1}, ValueError, "^initial_epoch: got -1, expected an integer of at least 0"),
    ):
        with pytest.raises(error, match=words):
            hk.fit(model, batches, epochs=2, verbose=0, **arguments)
    for call, data in (
        (hk.fit, {"x": hk.data.GlobalBatches({"x": x}, 8)}),
        (hk.evaluate, {"x": hk.data.GlobalBatches((x,), 8)}),
        (hk.fit, {"x": batches, "validation_data": hk.data.GlobalBatches(x, 8)}),
    ):
        with pytest.raises(ValueError, match=r"^(x|validation_data): got GlobalBatches without labels, expected .*map"):
            call(model, verbose=0, **data)
    with pytest.raises(TypeError, match=r"a list of 2, expected .*\(\[a, b\], y\)"):
        hk.fit(model, hk.data.GlobalBatches([x, y], 8), verbose=0)
    next(batches)
    with pytest.raises(
        ValueError, match=r"^x: got GlobalBatches at epoch 0, step 1, .*restore\(batches.state_at\(0\)\)"
    ):
        hk.fit(model, batches, verbose=0)
    hk.evaluate(model, batches, verbose=0)
    with pytest.raises(ValueError, match=r"^x: got GlobalBatches of rank 0 of 1, expected"):
        hk.fit(model, hk.data.GlobalBatches((x, y), 8, rank=0, size=1), verbose=0)
    with pytest.raises(hk.CollectiveMismatchError, match=r"^x: got .*'seed': 1.* on rank 1"):
        hk.fit(model, hk.data.GlobalBatches((x, y), 8, shuffle_seed=hk.rank()), verbose=0)
    with pytest.raises(hk.CollectiveMismatchError, match=r"^x, y: got other data \(rows\) on rank 1"):
        hk.fit(model, hk.data.GlobalBatches((x + hk.rank(), y), 8), verbose=0)
    unlike = stream(x, y).shuffle(24, seed=hk.rank())
    with pytest.raises(hk.CollectiveMismatchError, match=r"^x"):
        hk.fit(model, hk.data.GlobalBatches(unlike, 8), verbose=0)
    late = stream(x[:2], y[:2]).concatenate(stream(x[2:] + hk.rank(), y[2:]))  # the digest at the start covers two rows
    with pytest.raises(hk.CollectiveMismatchError, match=r"^x: got a different first batch on rank 1"):
        hk.fit(model, hk.data.GlobalBatches(late, 8, shuffle_seed=2), verbose=0)


# ---- other kinds of data -------------------------------------------------------------------------------------------


def test_files_without_global_batches_are_an_error_with_the_remedy(shared_path):
    if hk.is_chief():
        np.save(shared_path / "a.npy", np.zeros((8, 3), np.float32))
    hk.barrier()
    rows = hk.data.npy(shared_path).map(lambda x: (x, x[:, :1]))
    with pytest.raises(TypeError, match=r"^x: got hk\.data\.npy\(1 files.*; pass hk\.data\.GlobalBatches\(source"):
        hk.fit(dense()(), rows, verbose=0)


@pytest.mark.nightly
def test_pandas_of_several_dtypes(rng):
    pandas = pytest.importorskip("pandas")
    x, y = line(rng, 23)
    columns = {"z": x[:, 0].astype("float64"), "a": (10 * x[:, 1]).astype("int64"), "m": x[:, 2] > 0}
    frame = pandas.DataFrame(columns, index=rng.permutation(23) + 100)
    weight = pandas.Series(rng.uniform(size=23), index=frame.index)
    labels = pandas.Series(y[:, 0], index=frame.index)
    options = {"batch_size": 8, "epochs": 2, "sample_weight": weight, "weighted_metrics": ["mae"]}
    build = dense(weighted_metrics=options.pop("weighted_metrics"))
    compare(build, frame.astype("float32"), labels, validation_split=0.3, **options)
    one, many = compare(build, frame.astype({"a": "int32", "m": "float32"}), labels.to_frame(), **options)
    found = hk.predict(many, frame.astype("float32"), batch_size=5, verbose=0)
    np.testing.assert_allclose(found, one.predict(frame.astype("float32"), verbose=0), rtol=1e-3, atol=1e-5)

    def of_columns():
        inputs = {name: keras.Input((1,), name=name) for name in columns}
        model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(list(inputs.values()))))
        model.compile("adam", "mse")
        return model

    compare(of_columns, dict(frame.astype("float32")), labels, batch_size=8, epochs=2, steps_per_epoch=2)


def test_float64_arrays(rng):
    x, y = line(rng, 23)
    compare(dense(), x.astype("float64"), y.astype("float64"), batch_size=8, epochs=2, validation_split=0.2)


class TwoBatches(keras.utils.PyDataset):
    """Two batches of four rows."""

    def __len__(self):
        return 2

    def __getitem__(self, number):
        return np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32")


def stages(dataset, kind):
    """Return the number of stages of a kind in a dataset and its inputs."""
    return (type(dataset).__name__ == kind) + sum(stages(each, kind) for each in dataset._inputs())


def test_batches_are_read_ahead_in_one_stage():
    """Several at once, or one at a time, with and without an end of the epoch that Keras knows."""
    small, large = np.zeros((8, 2), "float32"), np.zeros((8, 2**18), "float32")
    endless = tf.data.Dataset.from_tensors((small[0], small[0])).repeat()
    for source in ((small, small), (large, small), endless):
        for options in ({"initial_epoch": 0}, {"initial_epoch": 0, "steps": 3}, {}):
            shares = FitData(x=hk.data.GlobalBatches(source, 4), **options).shares()
            assert stages(shares.get_tf_dataset(), "_PrefetchDataset") == 1


def test_the_end_of_an_epoch_waits_for_no_tuner():
    """The user's own dataset keeps its options."""
    rows = np.zeros((8, 2), "float32"), np.zeros((8, 1), "float32")
    given = {
        "arrays": FitData(x=rows[0], y=rows[1], batch_size=4),
        "py_dataset": FitData(x=TwoBatches()),
        "generator": FitData(x=(tuple(part[:4] for part in rows) for _ in range(2)), steps=2),
        "global_batches": FitData(x=hk.data.GlobalBatches(rows, 4)),
        "dataset": FitData(x=tf.data.Dataset.from_tensor_slices(rows).batch(4)),
    }
    enabled = {kind: data.shares().get_tf_dataset().options().autotune.enabled for kind, data in given.items()}
    assert enabled == dict.fromkeys(given, False) | {"dataset": None}


class Augmented(keras.utils.PyDataset):
    """Batches with random noise, made by workers, as those of ``ImageDataGenerator``."""

    def __init__(self, x, y, workers, by_index):
        super().__init__(workers=workers)
        self.x, self.y, self.by_index = x, y, by_index

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(7 * index, 7 * index + 7)
        # With workers, which batch gets which numbers differs from rank to rank.
        seed = (1, index) if self.by_index else (1, index, hk.rank()) if self.workers > 1 else (1, index)
        return self.x[rows] + 0.1 * np.random.default_rng(seed).normal(size=self.x[rows].shape), self.y[rows]


@pytest.mark.nightly
def test_workers_that_draw_other_numbers_get_the_remedy_that_fits(rng):
    x, y = line(rng, 21)

    def build():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    words = r"^x: got a different first batch .*; its workers draw .*: set workers=1 .*default_rng\(\(seed, index\)\)"
    data = Augmented(x, y, workers=2, by_index=False)
    for call in (
        lambda: hk.fit(build(), data, shuffle=False, verbose=0),
        lambda: hk.evaluate(build(), data, verbose=0),
    ):
        with pytest.raises(hk.CollectiveMismatchError, match=words):
            call()
    with pytest.raises(hk.CollectiveMismatchError, match=words):
        hk.fit(build(), x, y, validation_data=data, verbose=0)
    for workers, by_index in ((1, False), (2, True)):  # both remedies

        def make_data(workers=workers, by_index=by_index):
            return Augmented(x, y, workers, by_index)

        compare(build, make_data, epochs=2, shuffle=False)
