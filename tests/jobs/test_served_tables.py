"""A model with tables sharded over four ranks, exported in one process and served by plain TensorFlow."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.jobs import call, without

MODEL = """
import hvdkit as hk
import keras

FEATURES = ("item", "tags", "words")


def build():
    tables = [
        hk.layers.Table("item", 21_000, 4),
        hk.layers.Table("tags", 9, 3, combiner="mean"),
        hk.layers.Table("words", 3 * 32, 5, evict="lfu"),
    ]
    given = {name: keras.Input((2,) if name == "tags" else (), dtype="int64", name=name) for name in FEATURES}
    vectors = hk.layers.ShardedEmbeddingCollection(tables, {"tags": "column"}, seed=1, name="embed")(given)
    out = keras.layers.Dense(1, name="out")
    return keras.Model(given, out(keras.layers.Concatenate()([vectors[name] for name in FEATURES])))
"""
TRAIN = """
import hvdkit as hk

hk.init()
import keras
import numpy as np
from mine import build

model = build()
model.compile(hk.DistributedOptimizer(keras.optimizers.Adagrad(0.5)), "mse", jit_compile=False)
rng = np.random.default_rng(hk.rank())
x = {"item": rng.integers(0, 21_000, 40), "tags": rng.integers(0, 9, (40, 2)), "words": rng.integers(0, 60, 40) - 2**40}
keep = hk.callbacks.SupervisorCallback("run", save_model_secs=None)
model.fit(x, rng.normal(size=(40, 1)), epochs=2, batch_size=10, callbacks=[keep], verbose=0)
given = np.load("x.npz")
np.save(f"trained-{hk.rank()}.npy", model.predict(dict(given), verbose=0))
"""
SERVE = """
import sys
import numpy as np, tensorflow as tf
given = np.load("x.npz")
served = tf.saved_model.load("served")
np.save("served.npy", served.serve(dict(given)).numpy())
assert not {"hvdkit", "horovod", "mpi4py"} & set(sys.modules)
"""
EXPORT = """
import sys
from hvdkit.commands.cli import main
sys.exit(main(["checkpoint", "export", "run", "--to", "served", "--format", "saved-model", "--model", "mine:build"]))
"""


def run(folder: Path, *command: str) -> None:
    done = call(command, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
def test_plain_tensorflow_predicts_what_the_ranks_did(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(TRAIN)
    rng = np.random.default_rng(5)
    words = rng.integers(0, 70, 11) - 2**40  # some did not occur in training
    np.savez(tmp_path / "x.npz", item=rng.integers(0, 21_000, 11), tags=rng.integers(0, 9, (11, 2)), words=words)
    run(tmp_path, str(Path(sys.executable).parent / "mpirun"), "-np", "2", sys.executable, "train.py")
    run(tmp_path, sys.executable, "-c", without("horovod", "mpi4py") + EXPORT)
    run(tmp_path, sys.executable, "-c", SERVE)
    for rank in range(2):
        np.testing.assert_allclose(
            np.load(tmp_path / "served.npy"), np.load(tmp_path / f"trained-{rank}.npy"), rtol=1e-5, atol=1e-6
        )
