"""hk.load_model in one process: models that were not compiled, other states, and HDF5 files."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from helpers.saved_models import fit, model_of

import hvdkit as hk

hk.init()
opts = keras.optimizers


def test_what_was_not_compiled_stays_so(tmp_path):
    model = model_of(None)
    model.save(tmp_path / "plain.keras")
    assert not hk.load_model(tmp_path / "plain.keras").compiled
    model = fit(model_of(opts.Adam(0.01)))
    model.save(tmp_path / "model.keras")
    assert not hk.load_model(tmp_path / "model.keras", compile=False).compiled


def test_another_state_is_refused(tmp_path):
    model = fit(model_of(opts.Adam(0.01)))
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="objects could not be loaded"):
        hk.load_model(tmp_path / "model.keras", accumulate_steps=2)


def test_an_h5_file_is_refused_if_it_is_compiled(tmp_path):
    model = fit(model_of(opts.Adam(0.01)))
    model.save(tmp_path / "model.h5")
    with pytest.raises(ValueError, match=r"\.keras file"):
        hk.load_model(tmp_path / "model.h5")
    loaded = hk.load_model(tmp_path / "model.h5", compile=False)
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
