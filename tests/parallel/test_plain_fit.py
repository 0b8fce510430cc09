"""Plain model.fit on several ranks: what a user does by habit is made right, warned about, or an error."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdkit as hk

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
    """Return rows of this rank only."""
    return X[:8] + rank, Y[:8]


@pytest.mark.contract
def test_a_missing_broadcast_is_made_up_for(rank, size, capfd):
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.1 + rank, momentum=0.9)), seed=rank)
    model.fit(*own(rank), batch_size=4, verbose=0)
    hk.compare_variables([*model.variables, *model.optimizer.variables])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
    assert ("BroadcastInitial" in capfd.readouterr().err) == (rank == 0 and size > 1)


def test_weights_that_differ_at_the_end_of_fit_are_an_error(rank, size):
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.1)), seed=rank, built=False)
    if size == 1:
        model.fit(*own(rank), batch_size=4, verbose=0)
        return
    with pytest.raises(hk.CollectiveMismatchError, match=r"at the end of fit.*hk\.fit"):
        model.fit(*own(rank), batch_size=4, verbose=0)


class Stops(keras.callbacks.Callback):
    """Stops on one rank only."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = hk.rank() == 0


class Slows(keras.callbacks.Callback):
    """Lowers one rank's learning rate."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.1 / (1 + hk.rank())


@pytest.mark.contract
@pytest.mark.parametrize(("callback", "words"), [(Stops, "stop_training"), (Slows, "learning rates")])
def test_callbacks_that_decide_by_rank_are_an_error_on_every_rank(callback, words, rank, size):
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.1)), seed=1)

    def run():
        model.fit(*own(rank), batch_size=4, epochs=2, callbacks=[callback()], verbose=0)

    if size == 1:
        run()
        return
    with pytest.raises(hk.CollectiveMismatchError, match=f"{words}.*hk.fit"):
        run()


@pytest.mark.contract
def test_steps_that_differ_are_an_error_on_every_rank(rank, size):
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.1)), seed=1)
    x, y = X[: 8 + 4 * rank], Y[: 8 + 4 * rank]
    if size == 1:
        model.fit(x, y, batch_size=4, verbose=0)
        return
    with pytest.raises(hk.CollectiveMismatchError, match=r"steps per epoch.*hk\.fit"):
        model.fit(x, y, batch_size=4, verbose=0)


@pytest.mark.contract
@pytest.mark.parametrize("averaged", [True, False])
def test_local_logs_are_warned_about_once(averaged, rank, size, capfd):
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.01)), seed=1)
    callbacks = [hk.callbacks.MetricAverage()] if averaged else []
    model.fit(*own(rank), batch_size=4, epochs=3, callbacks=callbacks, verbose=0)
    said = capfd.readouterr().err.count("loss is each rank's own")
    assert said == (1 if rank == 0 and size > 1 and not averaged else 0)


def test_a_missing_broadcast_in_eager_mode_is_an_error(rank, size):
    model = model_of(hk.DistributedOptimizer(opts.SGD(0.1)), seed=rank, run_eagerly=True)
    if size == 1:
        model.fit(*own(rank), verbose=0)
        return
    with pytest.raises(hk.CollectiveMismatchError, match=r"before the first step.*hk\.fit"):
        model.fit(*own(rank), verbose=0)


@pytest.mark.contract
@pytest.mark.parametrize("which", ["BroadcastInitial", "MetricAverage", "Supervisor"])
def test_an_optimizer_that_does_not_average_is_an_error_on_every_rank(which, rank, size, shared_path):
    callback = {
        "BroadcastInitial": hk.callbacks.BroadcastInitial,
        "MetricAverage": hk.callbacks.MetricAverage,
        "Supervisor": lambda: hk.callbacks.SupervisorCallback(shared_path),
    }[which]()
    model = model_of("adam", seed=1)

    def run():
        model.fit(*own(rank), batch_size=4, callbacks=[callback], verbose=0)

    if size == 1:
        run()
        return
    with pytest.raises(hk.CollectiveMismatchError, match=r"hk\.fit.*DistributedOptimizer"):
        run()


@pytest.mark.contract
def test_the_same_arrays_on_every_rank_are_warned_about(rank, size, capfd):
    model_of(hk.DistributedOptimizer(opts.SGD(0.1)), seed=1).fit(X, Y, batch_size=8, verbose=0)
    assert ("each of" in capfd.readouterr().err) == (rank == 0 and size > 1)
    model_of(hk.DistributedOptimizer(opts.SGD(0.1)), seed=1).fit(*own(rank), batch_size=8, verbose=0)
    assert "each of" not in capfd.readouterr().err
