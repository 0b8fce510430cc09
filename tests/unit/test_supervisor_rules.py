"""Supervisor and checkpoints in one process: arguments, other runs' folders, retention, non-finite values."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import same_values
from helpers.faults import flip
from helpers.supervised import Run, X, Y

import hvdkit as hk
from hvdkit.checkpoint.folder import list_checkpoints

hk.init()


def test_bad_arguments_name_themselves(tmp_path):
    with pytest.raises(ValueError, match="save_steps: got 0"):
        hk.Supervisor(tmp_path, save_steps=0)
    for bad in ({"save_steps": True}, {"save_model_secs": "60"}, {"model": 3}, {"optimizer": "adam"}):
        (name,) = bad
        with pytest.raises(TypeError, match=name):
            hk.Supervisor(tmp_path, **bad)
    with pytest.raises(ValueError, match="save_model_secs: got -1"):
        hk.Supervisor(tmp_path, save_model_secs=-1)
    with pytest.raises(ValueError, match="model: got a model that is not built"):
        hk.Supervisor(tmp_path, model=keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(hk.HvdkitError, match="outside its session"):
        hk.Supervisor(tmp_path, model=keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])).step()
    for loss, got in (("abc", "abc"), (tf.zeros(2), r"EagerTensor \[2\]")):
        session = hk.Supervisor(tmp_path / "run", variables=tf.Variable(1.0), summary_steps=np.int64(1))
        with pytest.raises(TypeError, match=rf"step\(loss=...\): got {got}, expected one number"), session as sv:
            sv.step(loss=loss)


def test_a_file_where_the_folder_should_be_is_named(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(hk.CheckpointError, match="pass a folder"):
        hk.Supervisor(tmp_path / "run", variables=[tf.Variable(1.0)]).__enter__()


def test_a_saved_learning_rate_is_kept_and_said(tmp_path, caplog):
    def session(rate):
        optimizer = keras.optimizers.SGD(rate)
        optimizer.build([keras.Variable(1.0)])
        return optimizer, hk.Supervisor(tmp_path / "run", optimizer=optimizer)

    with session(0.5)[1] as sv:
        sv.step()
    optimizer, again = session(0.25)
    with again:
        assert float(optimizer.learning_rate) == 0.5
    assert "saved learning rate 0.5, not 0.25" in caplog.text


def test_what_may_be_infinite_is_saved(tmp_path):
    """A mask among the weights, a metric, the best loss so far."""

    class Masked(keras.layers.Layer):
        def build(self, shape):
            self.mask = self.add_weight(
                shape=(3,), initializer=keras.initializers.Constant(-np.inf), trainable=False, name="mask"
            )

        def call(self, x):
            return tf.where(tf.math.is_inf(self.mask), x, self.mask)

    model = keras.Sequential([keras.Input((3,)), Masked(), keras.layers.Dense(1)])
    best = tf.Variable(np.inf, trainable=False)
    state = {"model": model, "best": best, "array": np.array([np.nan]), "value": float("inf")}
    hk.checkpoint.save(tmp_path / "step-000000001", state)
    best.assign(0.0)
    assert hk.checkpoint.restore(tmp_path / "step-000000001", state)["value"] == float("inf")
    assert best.numpy() == np.inf


def test_a_checkpoint_by_hand_is_refused_too(tmp_path):
    weight = tf.Variable([1.0, np.nan])
    with pytest.raises(hk.NonFiniteError, match=r"w: got nan .*on rank 0 at step 3.*from the initial values"):
        hk.checkpoint.save(tmp_path / "step-000000003", {"w": weight})
    assert not [*tmp_path.iterdir()]


def test_old_checkpoints_go_but_those_to_be_kept(tmp_path):
    run = Run()
    with run.supervised(tmp_path / "run", save_steps=1, max_to_keep=2, keep_every=6, asynchronous=False) as sv:
        run.train(sv)
    kept = [path.name[-2:] for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert kept == ["06", "12", "18", "19", "20"]
    hidden = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith(".")]
    assert hidden == []


def test_the_folder_of_another_model_is_refused_and_kept(tmp_path):
    first = Run()
    with first.supervised(tmp_path / "run") as sv:
        first.train(sv, until=3)
    other = Run(units=6)
    before = [np.asarray(v.value).copy() for v in other.model.variables]
    with pytest.raises(hk.CheckpointError, match=r"'model/.*kernel' was saved as float32\[6, 5\].*\[6, 6\].*here"):
        other.supervised(tmp_path / "run").__enter__()
    same_values(other.model.variables, before)
    assert hk.checkpoint.latest(tmp_path / "run") is not None


def test_another_number_of_steps_to_accumulate_or_batch_size_is_refused(tmp_path):
    with Run().supervised(tmp_path / "run") as sv:
        sv.step()
    other = Run(accumulate_steps=2)
    with pytest.raises(hk.CheckpointError, match=r"accumulate_steps: got 2, expected 3"):
        other.supervised(tmp_path / "run").__enter__()
    other = Run()
    other.batches = hk.data.GlobalBatches((X, Y), 30, shuffle_seed=1)
    kernel = other.model.layers[0].kernel.numpy().copy()
    with pytest.raises(hk.CheckpointError, match=r"'position' does not fit this run: .*batch_size"):
        other.supervised(tmp_path / "run").__enter__()
    np.testing.assert_array_equal(other.model.layers[0].kernel.numpy(), kernel)


def test_nothing_begins_anew_where_every_checkpoint_is_damaged(tmp_path):
    run = Run()
    with run.supervised(tmp_path / "run") as sv:
        run.train(sv, until=2)
    flip(hk.checkpoint.latest(tmp_path / "run") / "replicated.safetensors", -40)
    with pytest.raises(hk.CorruptCheckpointError, match=r"all 1 checkpoints are damaged.*replicated\.safetensors"):
        Run().supervised(tmp_path / "run").__enter__()


def test_a_second_session_on_one_logdir_is_refused(tmp_path):
    run = Run()
    with run.supervised(tmp_path / "run"), pytest.raises(hk.CheckpointError, match=r"pid|process"):
        Run().supervised(tmp_path / "run").__enter__()
    with Run().supervised(tmp_path / "run"):
        pass
