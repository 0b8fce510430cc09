"""A SavedModel of a checkpoint, written by one process and served by plain TensorFlow."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers.jobs import call, without
from helpers.speed import WAIT

import hvdkit as hk
from hvdkit.checkpoint.entries import State
from hvdkit.checkpoint.state import flatten
from hvdkit.checkpoint.writing import Save, Snapshot

X = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)


def build(units=3):
    keras.utils.clear_session()  # the same names every time, as on every rank
    layers = keras.layers
    body = [layers.Dense(8, activation="tanh"), layers.BatchNormalization(), layers.Dropout(0.5)]
    return keras.Sequential([keras.Input((4,)), *body, layers.Dense(units)])


def save(target: Path, models: list[keras.Model]) -> Path:
    """Save as ranks that hold ``models``, in threads that exchange only files."""
    saves = []
    for rank, model in enumerate(models):
        snapshot = Snapshot.of(State(flatten({"model": model, "other": 1}).tensors), rank)
        saves.append(Save(target, snapshot, step=5, rank=rank, size=len(models), token="t").start())
    for one in saves:
        assert one.wait(WAIT) and one.error is None, one.error
    return target


@pytest.fixture
def saved(tmp_path):
    """Return a checkpoint of two ranks with different moving statistics, and the outputs of a model with their mean."""
    models = [build() for _ in range(2)]
    for rank, model in enumerate(models):
        model.set_weights(models[0].get_weights())
        model.layers[1].moving_mean.assign(np.arange(8) * (rank + 1.0))
        model.layers[1].moving_variance.assign(np.arange(8) + 1.0 + rank)
    path = save(tmp_path / "run" / "checkpoints" / "step-000000005", models)
    models[0].layers[1].moving_mean.assign(np.arange(8) * 1.5)
    models[0].layers[1].moving_variance.assign(np.arange(8) + 1.5)
    return path, models[0](X, training=False).numpy()


def served(folder: Path, *models: Path) -> list[np.ndarray]:
    """Return the outputs of each model in a new process without hvdkit and Horovod."""
    code = """
import sys
import numpy as np, tensorflow as tf
inputs, *models = sys.argv[1:]
for model in models:
    served = tf.saved_model.load(model)
    np.save(model + ".npy", served.serve(np.load(inputs)).numpy())
assert not {"hvdkit", "horovod", "mpi4py"} & set(sys.modules)
"""
    np.save(folder / "x.npy", X)
    done = call([sys.executable, "-c", code, folder / "x.npy", *models], cwd="/")
    assert done.returncode == 0, done.stderr
    return [np.load(f"{model}.npy") for model in models]


@pytest.mark.nightly
def test_plain_tensorflow_serves_it_with_the_ranks_mean_statistics(saved, tmp_path):
    """As exported by the function, and by the command, which needs no Horovod and no MPI."""
    path, expected = saved
    model = build()
    assert hk.checkpoint.export_saved_model(path, model, tmp_path / "served" / "1") == tmp_path / "served" / "1"
    np.testing.assert_array_equal(model(X, training=False), expected)
    assert [p.name for p in (tmp_path / "served").iterdir()] == ["1"]

    (tmp_path / "mine.py").write_text(f"import keras\n{inspect.getsource(build)}")
    code = """
import sys
from hvdkit.commands.cli import main
sys.exit(main(["checkpoint", "export", *sys.argv[1:]]))
"""
    logdir, to = path.parents[1], tmp_path / "by_command"
    arguments = [str(logdir), "--to", str(to), "--format", "saved-model", "--model", "mine:build"]
    done = call([sys.executable, "-c", without("horovod", "mpi4py") + code, *arguments], cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr  # no startup messages of TensorFlow
    assert done.stdout == f"{to}: a SavedModel\n"

    for outputs in served(tmp_path, tmp_path / "served" / "1", to):
        # Sums in float32 of terms as large as 6: near 0 the error is absolute.
        np.testing.assert_allclose(outputs, expected, rtol=1e-6, atol=2e-6)


def test_another_model_is_refused_and_nothing_is_written(saved, tmp_path):
    with pytest.raises(hk.CheckpointError, match=r"kernel' was saved as float32\[8, 3\].*is float32\[8, 7\]"):
        hk.checkpoint.export_saved_model(saved[0], build(units=7), tmp_path / "served")
    with pytest.raises(hk.CheckpointError, match="contains no 'net', only"):
        hk.checkpoint.export_saved_model(saved[0], build(), tmp_path / "served", key="net")
    with pytest.raises(ValueError, match="which is not built"):
        hk.checkpoint.export_saved_model(saved[0], keras.Sequential([keras.layers.Dense(3)]), tmp_path / "served")
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


def test_overwrite_replaces_the_folder(saved, tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "old").touch()
    with pytest.raises(ValueError, match="not empty"):
        hk.checkpoint.export_saved_model(saved[0], build(), tmp_path / "served")
    hk.checkpoint.export_saved_model(saved[0], build(), tmp_path / "served", overwrite=True)
    assert not (tmp_path / "served" / "old").exists()
    assert (tmp_path / "served" / "saved_model.pb").exists()
