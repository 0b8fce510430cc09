"""Files that a model writes after hk.fit: complete at any time, with the options of Keras."""

from __future__ import annotations

import builtins
import copy
import inspect
import pickle

import keras
import numpy as np
import pytest
from helpers.saved_models import Witness, load, trained

import hvdkit as hk

hk.init()


@pytest.fixture(autouse=True)
def forget():
    yield
    Witness.path = Witness.seen = None


@pytest.mark.full
@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_a_file_is_whole_while_it_is_written_again(name, tmp_path):
    model = trained()
    Witness.path = path = tmp_path / name
    method = model.save_weights if name.endswith(".weights.h5") else model.save
    method(str(path))
    assert Witness.seen is None
    first = path.read_bytes()
    path.chmod(0o640)
    link = tmp_path / f"link.{name}"
    link.symlink_to(path)
    method(link)
    assert Witness.seen == first
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_save_that_fails_leaves_the_file(tmp_path):
    model = trained()
    Witness.path = path = tmp_path / "model.keras"
    model.save(path)
    first = path.read_bytes()
    Witness.path = None
    with pytest.raises(OSError, match="disk is full"):
        model.save(path)
    assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.full
def test_options_are_those_of_keras(tmp_path, monkeypatch):
    model = trained()
    Witness.path = path = tmp_path / "model.keras"
    assert inspect.signature(model.save) == inspect.signature(keras.Model(name="plain").save)
    model.save(path)
    first = path.read_bytes()
    asked = []
    monkeypatch.setattr(builtins, "input", lambda text: asked.append(text) or "n")
    model.save(path, overwrite=False)
    assert path.read_bytes() == first
    assert str(path) in asked[0]
    monkeypatch.setattr(builtins, "input", lambda text: "y")
    model.layers[0].kernel.assign_add(np.ones((3, 4)))
    model.save(path, overwrite=False)
    np.testing.assert_array_equal(load(model, path)[0], model.get_weights()[0])
    model.save_weights(tmp_path / "several.weights.json", max_shard_size=1)
    model.save(tmp_path / "folder", zipped=False)
    assert (tmp_path / "folder").is_dir()
    with pytest.raises(ValueError, match=r"Received: filepath=.*model\.other"):
        model.save(tmp_path / "model.other")
    with pytest.raises(FileNotFoundError, match=r"missing.model\.keras"):
        model.save(tmp_path / "missing" / "model.keras")


class OwnSave(keras.Sequential):
    """A model class with its own file format."""

    def save(self, filepath):
        return f"saved to {filepath}"


def test_only_the_models_own_attributes_change(tmp_path):
    model = trained()
    Witness.path = tmp_path / "model.keras"
    for other in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "save" not in vars(other)
        np.testing.assert_array_equal(other.get_weights()[0], model.get_weights()[0])
    method = model.save
    hk.evaluate(model, np.ones((8, 3)), np.ones((8, 1)), batch_size=8, verbose=0)
    assert model.save is method
    assert trained(OwnSave).save("here") == "saved to here"
    inner = trained()
    outer = keras.Sequential([keras.Input((3,)), keras.Sequential([keras.layers.Dense(3)]), inner])
    outer.compile("sgd", "mse")
    hk.fit(outer, np.ones((8, 3)), np.ones((8, 1)), batch_size=8, verbose=0)
    assert "save" in vars(outer.layers[0])
