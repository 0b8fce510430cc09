"""``hvdkit bench``: its options and figures, a built-in model, and a program with a slow rank."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.jobs import call, environment
from helpers.speed import WAIT, slowdown
from helpers.traces import check_trace

import hvdkit as hk
from hvdkit.commands.bench.command import ResultsFilter, with_variables
from hvdkit.commands.bench.config import Bench
from hvdkit.commands.bench.figures import JobResult, Round, as_json, merge_rounds, show
from hvdkit.commands.bench.worker import RankResult
from hvdkit.commands.bench.workloads import measure, optimizer, train_step, workload
from hvdkit.commands.cli import main
from hvdkit.commands.run.job import prepare

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


# ---- real launches --------------------------------------------------------------------------------------------


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


# ---- workloads ------------------------------------------------------------------------------------------------


def test_the_network_is_that_of_the_tutorial():
    hk.init()
    import cifar10
    import keras

    ours = workload("cifar10", 2)
    theirs = keras.Sequential([keras.Input((24, 24, 3)), *cifar10.network(10)])
    assert [w.shape for w in ours.model.trainable_variables] == [w.shape for w in theirs.trainable_variables]
    assert ours.gradient_bytes == 4 * 1_068_298 and ours.sharded_bytes == 0
    assert len(ours.model.losses) == len(theirs.losses) == 2  # weight decay
    images, same, others = (workload("cifar10", 2, rank=rank).data[0][0].numpy() for rank in (None, 0, 1))
    assert (images == same).all() and (images != others).any()


def test_steps_of_a_workload_learn_and_are_timed():
    hk.init()
    work = workload("recommender", 64)
    assert work.sharded_bytes > 30e6 > work.gradient_bytes
    step = train_step(work, hk.DistributedOptimizer(optimizer("adam")))
    inputs, labels = work.data[0]
    first = float(step(inputs, labels))
    numbers = []
    times = measure(step, iter([(inputs, labels)] * 8), steps=5, warm_up=3, each=numbers.append)
    assert len(times) == 5 and min(times) > 0 and numbers == list(range(1, 9))
    assert float(step(inputs, labels)) < first
    with pytest.raises(ValueError, match="batches: got 2, expected 3 of them"):
        measure(lambda x: 0.0, [(1,), (2,)], steps=2, warm_up=1)
    with pytest.raises(ValueError, match="--model: got alexnet, expected mlp or cifar10"):
        workload("alexnet")
    with pytest.raises(ValueError, match="--optimizer: got lion"):
        optimizer("lion")


def test_collectives_of_several_groups_at_once_have_names_of_their_own():
    """As in a mesh: a profile matches collectives across ranks by name."""
    import tensorflow as tf

    from hvdkit.collectives.graphs import op_name

    names = []

    @tf.function
    def step():
        names.extend(op_name("hvdkit.norm", ranks) for ranks in (None, (0, 2), (1, 3), (2, 3)))

    step()
    assert [name.partition(".ranks_")[2] for name in names] == ["", "0_to_2_by_2", "1_to_3_by_2", "2_to_3_by_1"]
    assert all(re.fullmatch(r"[A-Za-z0-9.][A-Za-z0-9_.]*", name) for name in names)  # the names that TensorFlow accepts


# ---- options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-np", "0"], "-np: got 0, expected at least 1"),
        (["--model", "alexnet"], "alexnet"),
        (["--batch", "0"], "--batch: got 0, expected at least 1"),
        (["--timeline"], "--profile: got none, expected a folder, for --timeline"),
        (["--profile", "{}", "--profile-steps", "5"], "--profile-steps: got 5, expected FIRST-LAST"),
        (["--profile", "{}", "--profile-steps", "1-5"], "steps to profile: got 1-5, expected 3 <= FIRST <= LAST"),
        (["-np", "2", "--", "python", "x.py"], "--profile: got none, expected a folder, for a program"),
        (["--profile", "/proc/x"], "--profile: got /proc/x"),
        (["--json", "/nowhere/x.json"], "--json: got /nowhere/x.json, expected a file"),
        (["--profile", "{}", "--", "x.py"], "program: got x.py, expected a command"),
        (["-H", "a:0"], "-H: got 'a:0'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(options, message, capsys, tmp_path):
    assert main(["bench", *(option.format(tmp_path) for option in options)]) == 2
    printed = capsys.readouterr()
    assert message in " ".join((printed.out + printed.err).replace("│", " ").split())


def test_defaults():
    config = Bench(model="resnet50")
    assert (config.batch_size, config.optimizer_name) == (8, "momentum")
    assert config.run_config(None).np == 2 and config.run_config(1).np == 1
    assert Bench(hosts="a:4,b:4").run_config(None).np is None  # one per slot


# ---- figures --------------------------------------------------------------------------------------------------


def rank(*seconds, memory=100, sent=8):
    return RankResult(seconds=list(seconds), memory=memory, threads=1, collectives=3, sent=sent, device="CPU")


MANY = JobResult(2, 10, (rank(0.010, 0.020, 0.030), rank(0.012, 0.018, 0.032, memory=300, sent=16)))
ALONE = JobResult(1, 10, (rank(0.008, 0.008, 0.016),))


def test_a_step_takes_as_long_as_on_the_rank_where_it_takes_longest():
    assert MANY.milliseconds == [12, 20, 32] and MANY.median == 20
    assert MANY.examples_per_second == 1000 and MANY.memory == 300
    slower = replace(ALONE, results=(rank(0.040, 0.040, 0.040),))
    runs, share = merge_rounds([Round(MANY, ALONE), Round(MANY, slower), Round(MANY, ALONE)])
    assert share == 0.4  # the median of the rounds' ratios
    assert [len(run.milliseconds) for run in runs] == [9, 9]


def test_the_table_and_its_numbers():
    stream = io.StringIO()
    show(Bench(), [Round(MANY, ALONE)], stream)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "cifar10, 64 examples per rank, sgd, CPU, 1 thread per rank; 30 steps after 10"
    assert " ".join(lines[1].split()) == "ranks ms/step quartiles examples/s efficiency collectives MB sent MB per rank"
    assert " ".join(lines[2].split()) == "2 20.0 16.0 to 26.0 1000 40 % 3 0.0 0"
    assert lines[4] == "step times vary a lot: other programs run on these machines, and the figures are imprecise"
    assert as_json(Bench(), [Round(MANY)])["scaling_efficiency"] is None
    found = as_json(Bench(), [Round(MANY, ALONE)])
    assert found["runs"][0]["bytes"] == [8, 16] and found["runs"][1]["ms_per_step"] == 8


def test_the_chiefs_line_of_figures_is_taken_out_of_the_output(tmp_path):
    with (tmp_path / "out").open("wb") as file:
        output = ResultsFilter({1: file, 2: file})
        output.feed(0, 1, b"hello\nhvdkit-be")
        output.feed(1, 1, b"I am rank 1\n")
        output.feed(0, 1, b'nch: [{"threads": 1}]\nbye\n')
        assert output.finish(WAIT)
    assert output.results == [{"threads": 1}]
    assert (tmp_path / "out").read_bytes() == b"[rank 0] hello\n[rank 1] I am rank 1\n[rank 0] bye\n"


def test_variables_reach_every_rank():
    job = with_variables(prepare(Bench().run_config(2), [sys.executable]), {"HVDKIT_PROFILE": "x", "B": "1"})
    assert job.environment["B"] == "1" and {"HVDKIT_PROFILE", "B"} <= set(job.names)
