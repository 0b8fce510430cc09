"""Files that a model writes after hk.fit: complete at any time, so that all ranks may save and load the same file."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.as_one import same_values
from helpers.saved_models import Witness, load, trained

import hvdkit as hk


@pytest.fixture(autouse=True)
def forget():
    yield
    Witness.path = Witness.seen = None


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


@pytest.mark.core
def test_the_chief_may_save_alone(shared_path):
    model = trained()
    Witness.path = path = shared_path / "model.keras"
    if hk.is_chief():
        model.save(path)
    hk.barrier()
    np.testing.assert_array_equal(load(model, path)[0], model.get_weights()[0])
