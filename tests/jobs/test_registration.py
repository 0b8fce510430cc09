"""Saved models with hvdkit's layers load in a new process that imports hvdkit, before or after Keras."""

from __future__ import annotations

import json

import pytest
from helpers.jobs import run

SAVE = """
import hvdkit as hk
hk.init()
import keras, json
import numpy as np
layers = [
    hk.layers.ShardedEmbedding(9, 4, combiner="mean", seed=1),
    hk.layers.ColumnParallelDense(6, activation="relu", seed=2),
    hk.layers.RowParallelDense(2, seed=3),
]
model = keras.Sequential([keras.Input((2,), dtype="int64"), *layers])
model.compile(hk.DistributedOptimizer(keras.optimizers.Adam()), "mse", jit_compile=False)
ids = np.array([[1, 2], [8, 0]])
model.fit(ids, np.ones((2, 2)), verbose=0)
model.save("FOLDER/model.keras")
json.dump([keras.saving.serialize_keras_object(x) for x in layers], open("FOLDER/layers.json", "w"))
np.save("FOLDER/predicted.npy", model.predict(ids, verbose=0))
"""
LOAD = """
import json
import numpy as np
assert "hvdkit.layers" not in sys.modules
model = keras.models.load_model("FOLDER/model.keras", compile=COMPILE)
predicted = model.predict(np.array([[1, 2], [8, 0]]), verbose=0)
np.testing.assert_allclose(predicted, np.load("FOLDER/predicted.npy"), rtol=1e-5)
saved = json.load(open("FOLDER/layers.json"))
for config, layer in zip(saved, model.layers, strict=True):
    made = keras.saving.deserialize_keras_object(config), keras.layers.deserialize(config)
    assert {type(x) for x in made} == {type(layer)} == {getattr(hk.layers, type(layer).__name__)}
assert keras.saving.get_registered_object("hvdkit>ShardedEmbedding") is hk.layers.ShardedEmbedding
"""
ORDERS = {
    "hvdkit first": """
import importlib.util, sys
before = list(sys.meta_path)
import hvdkit as hk
(finder,) = [f for f in sys.meta_path if f not in before]
assert finder.find_spec("json") is None
assert importlib.util.find_spec("keras").name == "keras" and "keras" not in sys.modules  # looked for, not imported
hk.init()
import keras
assert finder not in sys.meta_path
""",
    "keras first": "import sys, tensorflow as tf, keras, hvdkit as hk; hk.init()\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    job = run(SAVE.replace("FOLDER", str(path)))
    assert job.code == 0, job.output
    return path


@pytest.mark.nightly
@pytest.mark.parametrize("order", ORDERS)
def test_a_new_process_loads_a_saved_model(order, folder):
    code = ORDERS[order] + LOAD.replace("FOLDER", str(folder)).replace("COMPILE", str(order == "keras first"))
    job = run(code)
    assert job.code == 0, job.output
    assert json.loads((folder / "layers.json").read_text())[0]["registered_name"] == "hvdkit>ShardedEmbedding"
