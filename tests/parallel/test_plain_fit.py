"""Plain model.fit on several ranks: each common mistake is corrected, causes a warning, or is an error.

The optimizer compares weights; all else needs one of hvdkit's callbacks.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import raises_on_several
from helpers.tiers import at_night

import hvdkit as hk
from hvdkit.cluster.logs import warn_once
from hvdkit.keras import plain_fit

opts = keras.optimizers
RNG = np.random.default_rng(7)
X = RNG.normal(size=(32, 4)).astype("f4")
Y = (X[:, :1] * 2 + 1).astype("f4")


def model_of(optimizer, seed, built=True, **options):
    keras.utils.set_random_seed(seed)
    first = [keras.Input((4,))] if built else []
    model = keras.Sequential([*first, keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=False, **options)
    return model


def own(rank):
    """Return rows that differ by rank."""
    return X[:8] + rank, Y[:8]


@pytest.mark.core(2)
@pytest.mark.ranks(1, 2)
def test_a_missing_broadcast_is_made_up_for(rank, size, capfd):
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.1 + rank, momentum=0.9)), seed=rank)
    model.fit(*own(rank), batch_size=4, verbose=0)
    hk.compare_variables([*model.variables, *model.optimizer.variables])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
    assert ("before the first step" in capfd.readouterr().err) == (rank == 0 and size > 1)


def test_a_missing_callback_is_warned_about_once(rank, size, capfd):
    warn_once.cache_clear()
    for _ in range(2):
        model_of(hk.DistributedOptimizer(opts.SGD(0.1)), seed=1).fit(*own(rank), batch_size=4, verbose=0)
    assert capfd.readouterr().err.count("no callback of hvdkit") == (rank == 0 and size > 1)
    warn_once.cache_clear()

    class OwnStep(keras.Sequential):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(data[0]) - data[1]))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    keras.utils.set_random_seed(1)
    model = OwnStep([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hk.DistributedOptimizer(opts.SGD(0.1)), jit_compile=False)
    model.fit(*own(rank), batch_size=4, verbose=0)
    assert ("no callback of hvdkit" in capfd.readouterr().err) == (rank == 0 and size > 1)
    warn_once.cache_clear()
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.1)), seed=1)
    model.fit(*own(rank), batch_size=4, verbose=0, callbacks=[hk.callbacks.StopOnNonFinite()])
    hk.fit(model, X, Y, batch_size=8, verbose=0)
    variable = keras.Variable([0.0])
    optimizer = hk.DistributedOptimizer(opts.SGD(0.1))
    tf.function(lambda: optimizer.apply([tf.ones(1)], [variable]))()  # a loop
    assert "no callback of hvdkit" not in capfd.readouterr().err


def test_a_traced_loop_starts_with_the_chiefs_weights(rank, size, capfd):
    model = model_of(None, seed=rank)
    optimizer = hk.DistributedOptimizer(opts.SGD(0.1, momentum=0.9))

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step(*own(rank))
    hk.compare_variables([*model.variables, *optimizer.variables])
    assert ("before the first step" in capfd.readouterr().err) == (rank == 0 and size > 1)


def test_an_eager_loop_may_broadcast_after_its_first_step(rank, size):
    """As Horovod's examples do."""
    variable = keras.Variable([float(rank)])
    optimizer = hk.DistributedOptimizer(opts.SGD(0.1))
    optimizer.apply([tf.ones(1)], [variable])
    hk.broadcast_variables([variable, *optimizer.variables])
    optimizer.apply([tf.ones(1)], [variable])
    hk.compare_variables([variable])


def test_weights_that_differ_at_the_end_of_fit_are_an_error(rank, size):
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.1)), seed=rank, built=False)
    with raises_on_several(hk.CollectiveMismatchError, r"at the end of fit.*hk\.fit"):
        model.fit(*own(rank), batch_size=4, verbose=0)


class Stops(keras.callbacks.Callback):
    """Stops training on one rank only."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = hk.rank() == 0


class Slows(keras.callbacks.Callback):
    """Lowers the learning rate on one rank only."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.1 / (1 + hk.rank())


@pytest.mark.parametrize(("callback", "words"), [(Stops, "stop_training"), (Slows, "learning rate")])
def test_callbacks_that_decide_by_rank_are_an_error_on_every_rank(callback, words, rank, size):
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.1)), seed=1)
    with raises_on_several(hk.CollectiveMismatchError, f"{words}.*hk.fit"):
        model.fit(*own(rank), batch_size=4, epochs=2, callbacks=[hk.callbacks.StepLog(8), callback()], verbose=0)
    with raises_on_several(hk.CollectiveMismatchError, f"{words} after epoch 1.*hk.fit"):  # the last epoch
        model.fit(*own(rank), batch_size=4, callbacks=[callback(), hk.callbacks.StopOnNonFinite()], verbose=0)


def test_steps_that_differ_are_an_error_on_every_rank(rank, size):
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.1)), seed=1)
    x, y = X[: 8 + 4 * rank], Y[: 8 + 4 * rank]
    with raises_on_several(hk.CollectiveMismatchError, r"steps per epoch.*hk\.fit"):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[hk.callbacks.BroadcastInitial()])


@pytest.mark.parametrize("averaged", [True, False])
def test_local_logs_are_warned_about_once(averaged, rank, size, capfd):
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.01)), seed=1)
    callbacks = [hk.callbacks.BroadcastInitial(), *([hk.callbacks.MetricAverage()] if averaged else [])]
    model.fit(*own(rank), batch_size=4, epochs=3, callbacks=callbacks, verbose=0)
    said = capfd.readouterr().err.count("loss differs between ranks")
    assert said == (1 if rank == 0 and size > 1 and not averaged else 0)


def test_a_missing_broadcast_in_eager_mode_is_an_error(rank, size):
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.1)), seed=rank, run_eagerly=True)
    with raises_on_several(hk.CollectiveMismatchError, r"before the first step.*hk\.fit"):
        model.fit(*own(rank), verbose=0)


@pytest.mark.parametrize("which", ["BroadcastInitial", "MetricAverage", "Supervisor"])
def test_an_optimizer_that_does_not_average_is_an_error_on_every_rank(which, rank, size, shared_path):
    callback = {
        "BroadcastInitial": hk.callbacks.BroadcastInitial,
        "MetricAverage": hk.callbacks.MetricAverage,
        "Supervisor": lambda: hk.callbacks.SupervisorCallback(shared_path),
    }[which]()
    model = model_of("adam", seed=1)
    with raises_on_several(hk.CollectiveMismatchError, r"hk\.fit.*DistributedOptimizer"):
        model.fit(*own(rank), batch_size=4, callbacks=[callback], verbose=0)


@pytest.mark.nightly(1)
@pytest.mark.ranks(1, 2)
def test_the_same_data_on_every_rank_are_warned_about(rank, size, capfd):
    """In any order: each rank shuffles as it likes."""
    callbacks = [hk.callbacks.LearningRateWarmup(4, scale=1.0)]

    def dataset_of(x, y):
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(32, seed=rank).batch(5)

    for options in ({}, {"run_eagerly": True}, {"steps_per_execution": 2}):
        for wrap in (lambda x, y: (x, y), lambda x, y: (dataset_of(x, y),)):
            model = model_of(hk.DistributedOptimizer(opts.SGD(0.01)), seed=1, **options)
            keras.utils.set_random_seed(rank)  # of the order
            model.fit(*wrap(*own(rank)), epochs=2, verbose=0, callbacks=callbacks)
            assert "each of" not in capfd.readouterr().err
            model.fit(*wrap(X, Y), verbose=0, callbacks=callbacks)
            said = f"each of {size} ranks trains on the same data" in capfd.readouterr().err
            assert said == (rank == 0 and size > 1), (options, wrap)


def test_a_dataset_is_read_once_per_epoch(rank, size):
    rows = []

    def generator():
        for i in range(8):
            rows.append(i)
            yield X[i] + rank, Y[i]

    spec = (tf.TensorSpec((4,), tf.float32), tf.TensorSpec((1,), tf.float32))
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.01)), seed=1)
    model.fit(tf.data.Dataset.from_generator(generator, output_signature=spec).batch(4), epochs=2, verbose=0)
    assert rows == [*range(8)] * 2


def test_each_fit_is_compared(rank, size, capfd):
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.1, momentum=0.9)), seed=1)
    callbacks = [hk.callbacks.StepLog(8)]
    model.fit(*own(rank), batch_size=4, verbose=0)
    capfd.readouterr()
    model.set_weights([w + rank for w in model.get_weights()])
    model.optimizer.learning_rate = 0.1 + rank
    model.fit(*own(rank), batch_size=4, verbose=0, callbacks=callbacks)
    hk.compare_variables([*model.variables, *model.optimizer.variables])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
    assert ("before the first step" in capfd.readouterr().err) == (rank == 0 and size > 1)
    with pytest.raises(hk.CollectiveMismatchError, match=r"stop_training.*hk\.fit"):
        model.fit(*own(rank), batch_size=4, epochs=2, callbacks=[*callbacks, Stops()], verbose=0)
    rows = 8 + 4 * rank
    with pytest.raises(hk.CollectiveMismatchError, match=r"steps per epoch.*hk\.fit"):
        model.fit(X[:rows], Y[:rows], batch_size=4, verbose=0, callbacks=callbacks)
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=callbacks)
    assert ("each of" in capfd.readouterr().err) == (rank == 0)
    assert "train_step" not in vars(model)
    model.set_weights([w + rank for w in model.get_weights()])
    with pytest.raises(hk.CollectiveMismatchError, match=r"at the end of fit.*hk\.fit"):  # without a callback
        model.fit(*own(rank), batch_size=4, verbose=0)


def test_plain_fit_after_hk_fit_is_compared(rank, size, capfd):
    model = model_of(opts.SGD(0.01), seed=1)
    callbacks = [hk.callbacks.StepLog(8)]
    hk.fit(model, X, Y, batch_size=8, verbose=0, callbacks=callbacks)
    assert "each of" not in capfd.readouterr().err
    assert plain_fit._CHECKS.get(model) is None  # hk.fit has its own comparisons
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=callbacks)
    assert ("each of" in capfd.readouterr().err) == (rank == 0 and size > 1)
    hk.fit(model, X, Y, batch_size=8, verbose=0, callbacks=callbacks)


def test_a_callback_on_one_rank_only_is_an_error_on_every_rank(rank, size):
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.1)), seed=1)
    callbacks = [hk.callbacks.StopOnNonFinite()] if rank == 0 else []
    with raises_on_several(hk.CollectiveMismatchError, "the beginning of fit"):
        model.fit(*own(rank), batch_size=4, verbose=0, callbacks=callbacks)
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.1)), seed=1)
    callbacks = [hk.callbacks.on_chief(hk.callbacks.StopOnNonFinite())]
    model.fit(*own(rank), batch_size=4, verbose=0, callbacks=callbacks)


def test_statistics_that_are_not_synchronized_are_refused(rank, size):
    """Also of a layer whose variables are not trained, which the optimizer does not see."""
    layer = keras.layers.BatchNormalization(synchronized=True, scale=False, center=False)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
    model.compile(hk.DistributedOptimizer(opts.SGD(0.1)), "mse", jit_compile=False)
    with raises_on_several(ValueError, "synchronized.*BroadcastInitial"):
        model.fit(*own(rank), verbose=0, callbacks=[hk.callbacks.StepLog(8)])
    model.fit(*own(rank), verbose=0, callbacks=[hk.callbacks.StepLog(8), hk.callbacks.BroadcastInitial()])


@pytest.mark.nightly(1)
@pytest.mark.ranks(1, 2)
def test_one_path_written_by_every_rank_is_an_error_before_anything_is_saved(rank, size, shared_path, tmp_path):
    kinds = keras.callbacks
    writers = {
        "ModelCheckpoint": lambda path: kinds.ModelCheckpoint(path / "m.keras", save_freq=1),
        "CSVLogger": lambda path: kinds.CSVLogger(path / "log.csv"),
        "TensorBoard": lambda path: kinds.TensorBoard(path / "board"),
        "BackupAndRestore": lambda path: kinds.BackupAndRestore(path / "backup", save_freq=1),
    }
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.01)), seed=1)
    used = []  # callbacks of earlier fits that still exist
    for number, (name, make) in enumerate(writers.items()):
        if number % 2 == 0:  # the first fit of a model, and later ones
            model = model_of(hk.DistributedOptimizer(opts.SGD(0.01)), seed=1)
        words = rf"^callbacks: got {name} that writes '.*' on ranks 0 and 1.*, expected one rank .*on_chief"
        for path in (shared_path, tmp_path / f"{rank}"):
            used.append([hk.callbacks.BroadcastInitial(), make(path)])
            with raises_on_several(hk.CollectiveMismatchError, words) if path == shared_path else nullcontext():
                model.fit(*own(rank), batch_size=4, verbose=0, callbacks=used[-1])
        other = model_of(hk.DistributedOptimizer(opts.SGD(0.01)), seed=1)  # without a callback of hvdkit
        with raises_on_several(hk.CollectiveMismatchError, words):
            other.fit(*own(rank), batch_size=4, verbose=0, callbacks=[make(shared_path)])
    hk.barrier()
    if size > 1:
        # TensorBoard writes the header of its file when it gets the model.
        saved = [path for path in shared_path.rglob("*") if path.is_file() and "tfevents" not in path.name]
        assert [path for path in saved if path.stat().st_size] == []
    on_chief = hk.callbacks.on_chief(writers["CSVLogger"](shared_path))
    model.fit(*own(rank), batch_size=4, verbose=0, callbacks=[hk.callbacks.BroadcastInitial(), on_chief])
    hk.barrier()
    assert len((shared_path / "log.csv").read_text().splitlines()) == 2


def test_weights_that_callbacks_set_at_the_end_are_compared(rank, size):
    """Each rank restores the weights of its own best epoch."""
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.01)), seed=1)

    class Restores(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            self.model.set_weights([w + hk.rank() for w in self.model.get_weights()])

    with raises_on_several(hk.CollectiveMismatchError, r"at the end of fit.*hk\.fit"):
        model.fit(*own(rank), batch_size=4, verbose=0, callbacks=[hk.callbacks.BroadcastInitial(), Restores()])
    model.fit(*own(rank), batch_size=4, verbose=0, callbacks=[hk.callbacks.BroadcastInitial()])


def test_a_fit_without_an_epoch_is_not_warned_about(rank, size, capfd):
    warn_once.cache_clear()
    for callbacks in ([hk.callbacks.BroadcastInitial()], []):
        model = model_of(hk.DistributedOptimizer(opts.SGD(0.01)), seed=rank)
        model.fit(*own(rank), epochs=2, initial_epoch=2, verbose=0, callbacks=callbacks)
    assert "fit:" not in capfd.readouterr().err


def test_nothing_of_a_fit_that_failed_is_left_in_the_next(rank, size):
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.01)), seed=1)

    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        model.fit(*own(rank), batch_size=4, verbose=0, callbacks=[hk.callbacks.BroadcastInitial(), Fails()])
    hk.fit(model, X, Y, batch_size=8, verbose=0)
    assert "train_step" not in vars(model)


def test_a_loop_that_scales_its_loss_is_no_fit(rank, size, capfd):
    """It broadcasts after its first step, as programs for Horovod do."""
    warn_once.cache_clear()
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = hk.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(opts.SGD(0.01)))
    for step in range(2):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean((model(X) - Y) ** 2))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        if step == 0:
            hk.broadcast_variables([*model.variables, *optimizer.variables])
    hk.compare_variables(model.trainable_variables)
    assert "fit:" not in capfd.readouterr().err


# ---- jit_compile=True ---------------------------------------------------------------------------------------------


def compiled_fit(jit_compile, *more, **options):
    """Return what plain fit with a callback of hvdkit gives, on rows that differ by rank."""
    keras.utils.set_random_seed(3)
    first = [keras.Input((4,)), keras.layers.Dense(8, "tanh"), *more, keras.layers.Dense(1)]
    model = keras.Sequential(first)
    model.compile(hk.DistributedOptimizer(opts.Adam(0.05)), "mse", metrics=["mae"], jit_compile=jit_compile, **options)
    rows = slice(hk.rank() % 2, None, 2)
    data = {"batch_size": 6, "epochs": 2, "verbose": 0, "validation_data": (X[:6], Y[:6])}  # 16 rows: 6, 6, 4
    callbacks = [hk.callbacks.MetricAverage()]
    history = [model.fit(X[rows], Y[rows], callbacks=callbacks, **data).history for _ in range(2)]
    hk.compare_variables([*model.variables, *model.optimizer.variables])
    return history, model.get_weights(), model.evaluate(X, Y, verbose=0), model.jit_compile


@pytest.mark.nightly(1)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("options", at_night(({}, {"steps_per_execution": 2}), but=[{"steps_per_execution": 2}]))
def test_jit_compile_with_a_callback(options):
    plain = compiled_fit(False, **options)
    ours = compiled_fit(True, **options)
    assert ours[3] is True
    keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain[:3], ours[:3])


@pytest.mark.nightly
def test_jit_compile_says_what_it_compiles(caplog, monkeypatch, rank):
    monkeypatch.setattr(logging.getLogger("hvdkit"), "propagate", True)
    caplog.set_level("INFO", "hvdkit")
    compiled_fit(True, keras.layers.Dropout(0.2))
    if rank == 0:
        assert "reading_rows of Sequential" not in caplog.text
        assert "train_step of Sequential" in caplog.text and "in 2 programs" in caplog.text, caplog.text


def test_ranks_that_differ_in_jit_compile(rank):
    with pytest.raises(hk.CollectiveMismatchError, match=r"fit: use of XLA \(jit_compile\): got '(on|off)' on rank"):
        compiled_fit(rank == 0)


def test_the_variable_switches_xla_off(monkeypatch):
    monkeypatch.setenv("HVDKIT_JIT_COMPILE", "off")
    compiled_fit(True)
