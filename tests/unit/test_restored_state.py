"""States in a checkpoint that are plain values: restored, or refused if they cannot be states."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

import hvdkit as hk
from hvdkit.keras.callback_states import CallbackStates
from hvdkit.supervisor.saved_state import Position


def states(**options):
    callback = keras.callbacks.EarlyStopping("loss", **options)
    callback.set_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
    callback.on_train_begin()
    return callback, CallbackStates([], [callback])


def test_a_state_is_restored_as_json():
    for best in (None, 0.25, np.inf, -np.inf):
        callback, saved = states()
        callback.best = best
        callback.wait = 2
        again, restored = states()
        restored.restore(json.loads(json.dumps(saved.state)))
        restored.apply()
        assert (again.best, again.wait) == (best, 2)


def test_what_cannot_be_a_state_is_refused():
    good = states()[1].state["EarlyStopping"]
    for bad in (None, [], "x", {**good, "best": "abc"}, {**good, "best": [1]}, {**good, "wait": None}):
        with pytest.raises(hk.CorruptCheckpointError, match="expected counters and the best value"):
            states()[1].restore({"EarlyStopping": bad})


def test_a_state_of_the_users_own_may_have_any_value():
    class Own(keras.callbacks.EarlyStopping):
        def get_state(self):
            return {"wait": None, "stopped_epoch": "never"}

        def set_state(self, state):
            self.mine = state

    callback = Own("loss")
    restored = CallbackStates([], [callback])
    restored.restore(restored.state)
    assert restored.stopped_by == ""
    restored.apply()
    assert callback.mine == {"wait": None, "stopped_epoch": "never"}


def test_what_cannot_be_a_position_is_refused():
    for bad in (None, 4, -1, "x", [4], {"global_step": 4}, {"global_step": -1, "data": None}, {"data": None}):
        with pytest.raises(hk.CorruptCheckpointError, match="expected global_step and data"):
            Position(None).restore(bad)
