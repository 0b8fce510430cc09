"""Callbacks that run on the chief only, as those of trackers and tuners do: made, stopping, raising, and by autolog."""

from __future__ import annotations

import copy
from functools import partial

import keras
import numpy as np
import pytest
from helpers.as_one import line, mine, plain, raises_on_several, same_logs, same_weights

import hvdkit as hk
from hvdkit.keras import keras_callbacks, metric_combiner

layers = keras.layers
BOTH = pytest.mark.parametrize("plainly", [False, True], ids=["hk.fit", "fit"])


def dense(plainly=False):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)
    model.compile(hk.DistributedOptimizer(optimizer) if plainly else optimizer, "mse", metrics=["mae"])
    return model


def fit(plainly, x, y, callbacks, epochs=4, model=None):
    """Train in batches of 8 rows in total; three in an epoch."""
    model = model or dense(plainly)
    options = {"epochs": epochs, "shuffle": False, "verbose": 0}
    if not plainly:
        return hk.fit(model, x, y, batch_size=8, callbacks=callbacks, **options)
    x, y = (mine(each, hk.rank(), hk.size()) for each in (x, y))
    callbacks = [hk.callbacks.BroadcastInitial(), hk.callbacks.MetricAverage(), *callbacks]
    return model.fit(x, y, batch_size=8 // hk.size(), callbacks=callbacks, **options)


class Acts(keras.callbacks.Callback):
    """Calls ``action`` with the model in a hook of the epoch or batch ``number``."""

    def __init__(self, hook, number, action):
        super().__init__()
        self.number, self.action = number, action
        setattr(self, hook, self.act)

    def act(self, number, logs=None):
        if number == self.number:
            self.action(self.model)


def stop(model):
    model.stop_training = True


class PrunedError(Exception):
    """What a tuner's callback raises."""


def prune(model):
    raise PrunedError("unpromising")


def test_a_function_makes_the_callback_on_the_chief_only():
    made = []

    def make():
        made.append(keras.callbacks.CSVLogger("log.csv"))
        return made[-1]

    callback = hk.callbacks.on_chief(make)
    assert len(made) == hk.is_chief()
    assert type(callback) is (keras.callbacks.CSVLogger if hk.is_chief() else keras.callbacks.Callback)
    with pytest.raises(TypeError, match=r"callback: got a function that returns None, expected a callback"):
        hk.callbacks.on_chief(lambda: None)


class LocalError(Exception):
    """Cannot be pickled."""

    def __reduce__(self):
        raise TypeError("not this one")


def test_a_function_that_raises_is_an_error_on_every_rank():
    def fail(error):
        raise error

    with pytest.raises(OSError, match=r"^no server$") as raised:
        hk.callbacks.on_chief(lambda: fail(OSError("no server")))
    if not hk.is_chief():
        assert "hk.callbacks.on_chief: rank 0 raised OSError: no server" in str(raised.value.__cause__)
    with pytest.raises(LocalError if hk.is_chief() else hk.HvdkitError, match="no server"):
        hk.callbacks.on_chief(lambda: fail(LocalError("no server")))


@BOTH
@pytest.mark.parametrize(("hook", "epochs"), [("on_epoch_begin", 2), ("on_epoch_end", 2), ("on_train_batch_end", 1)])
def test_a_callback_of_the_chief_stops_all_ranks(plainly, hook, epochs, rng):
    x, y = line(rng, 24)
    model = dense(plainly)
    history = fit(plainly, x, y, [hk.callbacks.on_chief(Acts(hook, 1, stop))], model=model)
    assert len(history.history["loss"]) == epochs
    assert model.stop_training
    if not plainly and hook == "on_train_batch_end":  # it reads the logs of batches, which are exchanged
        assert int(model.optimizer.iterations) == 2
    assert len(fit(plainly, x, y, [], epochs=2, model=model).history["loss"]) == 2


@BOTH
def test_what_a_callback_of_the_chief_raises_is_raised_on_all_ranks(plainly, rng):
    x, y = line(rng, 24)
    model = dense(plainly)
    seen = []
    after = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    callbacks = [hk.callbacks.on_chief(lambda: Acts("on_epoch_end", 1, prune)), after]
    with pytest.raises(PrunedError, match="unpromising"):
        fit(plainly, x, y, callbacks, model=model)
    assert seen[:1] == [0]
    history = fit(plainly, x, y, callbacks[1:], epochs=2, model=model)  # as for the next trial
    assert len(history.history["loss"]) == 2
    hk.compare_variables(model.trainable_variables)


def test_a_learning_rate_of_the_chief_is_an_error(rng):
    x, y = line(rng, 24)

    def slow_down(model):
        model.optimizer.learning_rate = 0.001

    with raises_on_several(hk.CollectiveMismatchError, r"callbacks' on_epoch_end of epoch 1: got .*0\.001"):
        fit(False, x, y, [hk.callbacks.on_chief(Acts("on_epoch_end", 1, slow_down))])


def test_copies_run_on_the_chief_only_as_well(rng):
    """KerasTuner copies the callbacks for each trial."""
    x, y = line(rng, 24)
    callbacks = copy.deepcopy([hk.callbacks.on_chief(lambda: Acts("on_epoch_end", 1, stop))])
    assert len(fit(False, x, y, callbacks).history["loss"]) == 2


def test_trackers_get_validation_metrics_of_all_ranks_in_plain_fit(rng):
    x, y = line(rng, 24)
    seen = {}
    looks = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.update(logs))
    looks.on_test_end = lambda logs: seen.update(of_test=logs["loss"])
    model = dense(True)
    own = tuple(mine(each, hk.rank(), hk.size()) for each in (x, y))
    model.fit(*own, validation_data=own, verbose=0, callbacks=[hk.callbacks.MetricAverage(), looks])
    assert seen["of_test"] == pytest.approx(seen["val_loss"])
    assert np.ptp(hk.allgather_object(seen["of_test"])) == 0


# ---- trackers --------------------------------------------------------------------------------------------------------


def tracker(library, name, attribute):
    """Return a class like a tracker's callback: its hook of batches is also defined if it logs epochs."""

    class Logs(keras.callbacks.Callback):
        def __init__(self, logs_batches):
            super().__init__()
            self.batches = []
            setattr(self, attribute, logs_batches)

        def on_batch_end(self, batch, logs=None):
            if getattr(self, attribute):
                self.batches.append(logs["loss"])

    return type(name, (Logs,), {"__module__": f"{library}.integration"})


@pytest.mark.parametrize(("library", "name"), keras_callbacks._TRACKERS)
def test_a_tracker_costs_an_exchange_per_batch_only_if_it_logs_batches(library, name, rng, monkeypatch, capfd):
    x, y = line(rng, 24)
    kind = tracker(library, name, keras_callbacks._TRACKERS[library, name])
    exchanges, real = [], metric_combiner.grouped_allreduce

    def counted(*args, **options):
        exchanges.append(1)
        return real(*args, **options)

    monkeypatch.setattr(metric_combiner, "grouped_allreduce", counted)
    for logs_batches, number in ((False, 2), (True, 2 + 6)):  # two epochs, six batches
        exchanges.clear()
        callback = hk.callbacks.on_chief(partial(kind, logs_batches))
        fit(False, x, y, [callback], epochs=2)
        assert len(exchanges) == (number if hk.size() > 1 else 0)
        if hk.is_chief():
            assert len(callback.batches) == 6 * logs_batches
    capfd.readouterr()
    fit(False, x, y, [kind(False)], epochs=1)
    warns = f"{name} logs a run on each of {hk.size()} ranks; pass hk.callbacks.on_chief" in capfd.readouterr().err
    assert warns == (hk.is_chief() and hk.size() > 1)


def test_autolog_logs_one_run_of_hk_fit(rng, monkeypatch):
    """As MLflow does, it replaces keras.Model.fit, keeps Keras's function, and appends its callback."""
    x, y = line(rng, 24)
    kept = keras.Model.fit
    runs = []

    class Logs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            runs[-1].append(logs["loss"])

    def patched(self, *args, **kwargs):
        runs.append([])
        kwargs["callbacks"] = [*(kwargs.get("callbacks") or []), Logs()]
        return kept(self, *args, **kwargs)

    options = {"batch_size": 8, "epochs": 2, "shuffle": False}
    one, expected = plain(dense, x, y, **options)
    monkeypatch.setattr(keras.Model, "fit", patched, raising=False)
    stops = keras.callbacks.EarlyStopping("loss")
    many = dense()
    keras.utils.set_random_seed(11)
    found = hk.fit(many, x, y, **options, callbacks=[stops], verbose=0).history
    same_logs(found, expected)
    same_weights(many, one)
    assert runs == ([found["loss"]] if hk.is_chief() else [])
    assert keras.Model.fit is patched
