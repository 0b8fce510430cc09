"""``hvdkit bench`` of a built-in model, and of a program with a slow rank. Options and figures: unit/test_bench.py."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
from helpers.jobs import call, environment
from helpers.speed import slowdown
from helpers.traces import check_trace

ROOT = Path(__file__).resolve().parents[2]
SLOW = """
import time
import hvdkit as hk
hk.init()
import keras, numpy as np, tensorflow as tf

class Slow:  # rank 1's disk takes its time
    def __init__(self, data):
        self.data, self.shape, self.dtype = data, data.shape, data.dtype
    def __len__(self):
        return len(self.data)
    def __getitem__(self, rows):
        time.sleep(PAUSE * hk.rank())
        return self.data[rows]

batches = hk.data.GlobalBatches(Slow(np.ones((320, 64), "float32")), 32, epochs=1)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(64)])
optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(0.01))

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - x) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss

LOOP
"""
COUNTED = """
with hk.Supervisor("run", model=model, optimizer=optimizer, data=batches) as sv:
    for x in sv.batches():
        sv.step(loss=step(x))
"""
BARE = """
for x in batches:
    float(step(x))
"""


def bench(folder, *options):
    command = [sys.executable, "-m", "hvdkit", "bench", *options]
    done = call(command, cwd=folder, env=environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("loop", [COUNTED, BARE], ids=["counted", "bare"])
def test_the_profile_of_a_program_blames_the_slow_rank_and_its_input(tmp_path, loop):
    """Steps are counted by a Supervisor, or only at the combination of gradients."""
    pause = 0.5 * slowdown()  # long compared with delays between ranks on shared cores
    (tmp_path / "train.py").write_text(SLOW.replace("LOOP", loop).replace("PAUSE", str(pause)))
    options = ["--profile", "profile", "--profile-steps", "4-8", "--json", "out.json", "-np", "2"]
    out, err = bench(tmp_path, *options, *(["--timeline"] if loop is BARE else []), "--", sys.executable, "train.py")
    assert "rank 1 is the straggler: " in out and "; its input takes" in out
    assert "profile/trace.json.gz" in err and "[rank 0] rank  host" in out
    profile = json.loads((tmp_path / "profile" / "profile.json").read_text())
    assert profile == json.loads((tmp_path / "out.json").read_text())
    assert profile["problems"] == [] and profile["verdict"] in out
    fast, slow = profile["ranks"]
    assert fast["steps"] == slow["steps"] == 5
    assert slow["parts_ms"]["input"] > 900 * pause
    assert fast["parts_ms"]["wait"] > 500 * pause and slow["waited_for_ms"] > 500 * pause
    for rank in (fast, slow):
        assert sum(rank["parts_ms"].values()) == pytest.approx(rank["step_ms"])
        assert min(rank["parts_ms"].values()) >= 0
        assert rank["parts_ms"]["compute"] > 0 and rank["parts_ms"]["exchange"] > 0
    document = json.loads(gzip.decompress((tmp_path / "profile" / "trace.json.gz").read_bytes()))
    named = check_trace(document)
    assert {pid for _, pid, _ in named} == {0, 1}
    assert any(name.startswith("Horovod ") for name in map(str, named.values())) == (loop is BARE)
    assert len(list((tmp_path / "profile").glob("plugins/profile/*/*.rank-[01].xplane.pb"))) == 2


@pytest.mark.parametrize(
    "optimizer",
    [
        "keras.optimizers.Adam()",
        pytest.param("keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())", marks=pytest.mark.nightly),
    ],
)
def test_steps_of_a_loop_with_sharded_states_are_counted(tmp_path, optimizer):
    program = SLOW.replace("LOOP", BARE).replace("PAUSE", "0")
    program = program.replace("keras.optimizers.SGD(0.01)", f"{optimizer}, shard_states=True")
    (tmp_path / "train.py").write_text(program)
    bench(tmp_path, "--profile", "profile", "--profile-steps", "4-8", "-np", "2", "--", sys.executable, "train.py")
    profile = json.loads((tmp_path / "profile" / "profile.json").read_text())
    assert [rank["steps"] for rank in profile["ranks"]] == [5, 5]


@pytest.mark.nightly
def test_a_built_in_model_is_timed_on_all_ranks_and_on_one(tmp_path):
    options = ["--batch", "4", "--steps", "4", "--warm-up", "2", "--profile", "p", "--json", "out.json"]
    out, _ = bench(tmp_path, *options, "--model", "cifar10", "-np", "2")
    assert "cifar10, 4 examples per rank, sgd, CPU" in out and "ms/step" in out and "compute takes" not in out[:20]
    assert "hvdkit-bench:" not in out
    found = json.loads((tmp_path / "out.json").read_text())
    many, alone = found["runs"]
    assert (many["ranks"], alone["ranks"]) == (2, 1)
    assert many["collectives"] == 1 and many["bytes"] == [4 * 1_068_298] * 2
    assert [len(times) for times in many["step_ms"]] == [4, 4]
    assert found["scaling_efficiency"] == pytest.approx(alone["ms_per_step"] / many["ms_per_step"])
    profile = json.loads((tmp_path / "p" / "profile.json").read_text())
    assert [rank["steps"] for rank in profile["ranks"]] == [11, 11]
