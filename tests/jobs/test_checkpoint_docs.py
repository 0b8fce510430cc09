"""Run the commands of docs/checkpoints.md verbatim on a run of two ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from helpers.jobs import MPI, call, run

ROOT = Path(__file__).resolve().parents[2]
MINE = """
import keras

def build():
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
"""
TRAIN = """
import os, sys
os.chdir(sys.argv[1])
sys.path.insert(0, ".")
import hvdkit as hk
import keras, numpy as np
from mine import build

hk.init()
model = build()
x = np.arange(40, dtype=np.float32)[:, None]
model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(1e-4)), "mse")
data = hk.data.GlobalBatches((x, 3 * x), 8, shuffle_seed=0)
model.fit(data.as_keras(), epochs=4, shuffle=False, verbose=0, callbacks=[
    hk.callbacks.SupervisorCallback("runs/line", data=data, save_model_secs=None)])
"""


def test_the_commands_of_the_document(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    trained = run(f"import sys; sys.argv[1:] = [{str(tmp_path)!r}]\n{TRAIN}", MPI, 2)
    assert trained.code == 0, trained.output
    document = (ROOT / "docs" / "checkpoints.md").read_text()
    marked = r"<!-- run by: tests/jobs/test_checkpoint_docs.py -->\n```sh\n(.*?)```"
    (block,) = re.findall(marked, document, re.DOTALL)
    shown = []
    for command in block.replace("\\\n", " ").splitlines():
        done = call(command, shell=True, cwd=tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        shown.append(done.stdout)
    listed, inspected, listed_json, verified, weights, some, served = shown
    assert "step-000000020" in listed and "whole" in listed
    assert "step 20, saved by 2 ranks" in inspected and "model/sequential/dense/kernel" in inspected
    assert json.loads(listed_json)["checkpoints"][-1]["step"] == 20
    assert verified.startswith("intact: 1 checkpoint(s)")
    assert weights.endswith(" .npy file(s) and values.json\n")
    assert some == "some: 2 .npy file(s) and values.json\n"
    assert served == "served/1: a SavedModel\n"
    kernels = [np.load(tmp_path / to / "model" / "sequential" / "dense" / "kernel.npy") for to in ("weights", "some")]
    np.testing.assert_array_equal(*kernels)
    assert (tmp_path / "served" / "1" / "saved_model.pb").exists()
