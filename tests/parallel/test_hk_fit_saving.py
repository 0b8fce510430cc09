"""Files that a model writes after hk.fit: complete at any time, so that all ranks may save and load the same file."""

from __future__ import annotations

import builtins
import copy
import inspect
import pickle

import keras
import numpy as np
import pytest
from helpers.as_one import same_values

import hvdkit as hk


@keras.saving.register_keras_serializable("test_hk_fit_saving")
class Witness(keras.layers.Dense):
    """A layer that reads the target file while the model is being saved."""

    path = None
    seen = None

    def save_own_variables(self, store):
        super().save_own_variables(store)
        if self.path is not None and self.path.exists():
            Witness.seen = self.path.read_bytes()
        if self.path is None:
            raise OSError("the disk is full")


@pytest.fixture(autouse=True)
def forget():
    yield
    Witness.path = Witness.seen = None


def trained(kind=keras.Sequential):
    """Return a model trained by hk.fit for an epoch."""
    keras.utils.set_random_seed(3)
    model = kind([keras.Input((3,)), keras.layers.Dense(4), Witness(1)])
    model.compile("adam", "mse")
    hk.fit(model, np.ones((8, 3)), np.ones((8, 1)), batch_size=8, verbose=0)
    return model


def load(model, path):
    """Return the weights in a file."""
    if path.name.endswith(".weights.h5"):
        twin = keras.models.clone_model(model)
        twin.load_weights(path)
        return twin.get_weights()
    return keras.saving.load_model(path, compile=path.suffix == ".keras").get_weights()  # .h5 has no "mse"


@pytest.mark.parametrize("name", ["model.keras", "model.h5", "model.weights.h5"])
def test_all_ranks_save_one_file_and_load_it(name, shared_path):
    model = trained()
    Witness.path = path = shared_path / name
    method = model.save_weights if name.endswith(".weights.h5") else model.save
    for _ in range(5):  # no barrier: a rank loads while others save
        method(path)
        same_values(load(model, path), model.get_weights())
    hk.barrier()
    assert [file.name for file in shared_path.iterdir()] == [name]


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


def test_the_chief_may_save_alone(shared_path):
    model = trained()
    Witness.path = path = shared_path / "model.keras"
    if hk.is_chief():
        model.save(path)
    hk.barrier()
    np.testing.assert_array_equal(load(model, path)[0], model.get_weights()[0])


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
