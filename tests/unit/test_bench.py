"""``hvdkit bench`` without ranks: its workloads, options and figures. Launches: jobs/test_bench_command.py."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
from helpers.speed import WAIT

import hvdkit as hk
from hvdkit.commands.cli import main
from hvdkit.commands.measure.bench import as_json, as_table, milliseconds
from hvdkit.commands.measure.config import Bench
from hvdkit.commands.measure.jobs import ResultsFilter
from hvdkit.commands.measure.measurements import Gradient, RankMeasurement, merge_jobs, round_seconds
from hvdkit.commands.measure.workloads import measure, optimizer, train_step, workload
from hvdkit.commands.run.job import prepare

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


REFUSED = (
    (["-np", "0"], "-np: got 0, expected at least 1"),
    (["--model", "alexnet"], "alexnet"),
    (["--batch", "0"], "--batch: got 0, expected at least 1"),
    (["--timeline"], "--profile: got none, expected a folder, for --timeline"),
    (["--profile", "{}", "--profile-steps", "5"], "--profile-steps: got 5, expected FIRST-LAST"),
    (["--profile", "{}", "--profile-steps", "1-5"], "steps to profile: got 1-5, expected 3 <= FIRST <= LAST"),
    (["-np", "2", "--", "python", "x.py"], "--profile: got none, expected a folder, for a program"),
    (["--profile", "/proc/x"], "--profile: got /proc/x"),
    (["--json", "/nowhere/x.json"], "--json: got /nowhere/x.json (No such file or directory), expected a file"),
    (["--json", "{}"], "(Is a directory), expected a file that can be written"),
    (["--profile", "{}", "--", "x.py"], "program: got x.py, expected a command"),
    (["-H", "a:0"], "-H: got 'a:0'"),
)


def test_what_cannot_work_is_refused_before_anything_starts(capsys, tmp_path):
    for options, message in REFUSED:
        assert main(["bench", *(option.format(tmp_path) for option in options)]) == 2, options
        printed = capsys.readouterr()
        assert message in " ".join((printed.out + printed.err).replace("│", " ").split()), options


def test_defaults():
    config = Bench(model="resnet50")
    assert (config.batch_size, config.optimizer_name) == (8, "momentum")
    assert config.run_config().np == 2 and config.run_config(1).np == 1
    assert Bench(hosts="a:4,b:4").run_config().np is None  # one per slot


# ---- figures --------------------------------------------------------------------------------------------------


def rank(*seconds, memory=100, sent=8):
    return RankMeasurement(
        local_ranks=1,
        threads=1,
        device="CPU",
        memory=memory,
        steps=[[list(seconds)]],
        collectives=3,
        sent=sent,
        has_rows=False,
        gradients=[],
        compute=[],
        copy=0.0,
        exchanges=[],
    )


MANY = [rank(0.010, 0.020, 0.030), rank(0.012, 0.018, 0.032, memory=300, sent=16)]
ALONE = [rank(0.008, 0.008, 0.016)]


def test_a_step_takes_as_long_as_on_the_rank_where_it_takes_longest():
    assert milliseconds(MANY) == [12, 20, 32] and round_seconds(MANY) == [0.02]
    slower = [rank(0.040, 0.040, 0.040, memory=200)]
    jobs = [merge_jobs([MANY, MANY, MANY]), merge_jobs([ALONE, slower, ALONE])]
    found = as_json(Bench(batch=10, rounds=3), jobs)
    assert found["scaling_efficiency"] == 0.4  # the median of the rounds' ratios
    assert [len(milliseconds(ranks)) for ranks in jobs] == [9, 9]
    many, alone = found["runs"]
    assert many["examples_per_second"] == 1000 and many["memory"] == [100, 300] and alone["memory"] == [200]
    assert many["step_ms"][0] == [10, 20, 30] * 3


def test_rows_are_what_a_model_with_tables_sends_beyond_its_gradients():
    tables = replace(MANY[0], has_rows=True, sent=1000, gradients=[Gradient(100, 0.5), Gradient(20, 1.0)])
    assert (tables.row_exchanges, tables.row_bytes) == (2, 880)
    for without in (replace(tables, has_rows=False), replace(tables, collectives=0, sent=0)):  # replicated; one rank
        assert (without.row_exchanges, without.row_bytes) == (0, 0)


def test_the_table_and_its_numbers():
    lines = as_table(Bench(batch=10), [MANY, ALONE]).splitlines()
    assert lines[0] == "cifar10, 10 examples per rank, sgd, CPU, 1 thread per rank; 30 steps after 10"
    assert " ".join(lines[1].split()) == "ranks ms/step quartiles examples/s efficiency collectives MB sent MB per rank"
    assert " ".join(lines[2].split()) == "2 20.0 16.0 to 26.0 1000 40 % 3 0.0 0"
    assert lines[4] == "step times vary a lot: other programs run on these machines, and the figures are imprecise"
    assert as_json(Bench(), [MANY])["scaling_efficiency"] is None
    found = as_json(Bench(), [MANY, ALONE])
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
    job = prepare(Bench().run_config(2), [sys.executable], {"HVDKIT_PROFILE": "x"})
    assert job.environment["HVDKIT_PROFILE"] == "x" and "HVDKIT_PROFILE" in job.names
