"""Ranks may end at different times if process sets or a profile need Horovod: it runs until the last has ended."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from helpers.jobs import call, environment, started
from helpers.jobs_that_fail import LAUNCHERS, PATHS, without_start
from helpers.speed import scaled

# Ranks 1 and 3 train 1 step, ranks 0 and 2 train 8, eager and graph collectives in turn.
TRAIN = """
    import time
    import tensorflow as tf
    import hvdkit as hk
    cluster = hk.init(mesh={"data": 2, "model": 2})
    step = tf.function(lambda x: hk.allreduce(x, hk.Sum, process_set="data"))
    for number in range(1 if cluster.rank % 2 else 8):
        time.sleep(0.5 * SLOWDOWN)
        total = step(tf.ones([8])) if number % 2 else hk.allreduce(1.0, hk.Sum, process_set="data")
    print(f"rank {cluster.rank}: {number + 1} steps", flush=True)
"""
PROFILED = """
    import time
    import tensorflow as tf
    import hvdkit as hk
    cluster = hk.init()
    x = tf.Variable(1.0)
    for _ in range(9):
        with hk.DistributedGradientTape(tf.GradientTape()) as tape:
            y = x * x
        tape.gradient(y, [x])
    if cluster.is_chief:
        with hk.busy("uploading"):
            time.sleep(4)
"""
NEEDED = "if cluster.rank % 2 == 0: hk.allreduce(tf.ones(3))"
JOBS = [
    ("horovodrun --gloo", ""),
    pytest.param("hvdkit run", "hk.shutdown()", marks=pytest.mark.nightly),
    pytest.param("mpirun", NEEDED, marks=pytest.mark.nightly),
    pytest.param("mpirun", "", marks=pytest.mark.nightly),
]


def run(launcher, end):
    """Run the script with the last line ``end``."""
    script = textwrap.dedent(TRAIN).replace("SLOWDOWN", scaled(1)) + end
    env = environment(PYTHONPATH=PATHS, TF_CPP_MIN_LOG_LEVEL="2", HVDKIT_HEARTBEAT_SECONDS=scaled(3))
    command = [*LAUNCHERS[launcher], "-np", "4", sys.executable, "-c", script]
    return call(command, env=env, stderr=subprocess.STDOUT)


endings = started(run, "launcher", "end")


@pytest.mark.nightly
@pytest.mark.parametrize(("launcher", "end"), JOBS)
def test_sets_that_end_at_different_times(endings, launcher, end):
    done = endings[launcher, end].result()
    for rank in range(4):
        assert f"rank {rank}: {1 if rank % 2 else 8} steps" in done.stdout, done.stdout
    if end == NEEDED:  # ranks 0 and 2 wait for all ranks after the others have ended
        assert done.returncode and "ended before the others: rank" in done.stdout, done.stdout
    else:
        assert done.returncode == 0 and "hvdkit" not in without_start(done.stdout), done.stdout


@pytest.mark.parametrize("launcher", ["horovodrun --gloo", pytest.param("mpirun", marks=pytest.mark.nightly)])
def test_a_profile_is_written_if_the_chief_ends_later(launcher, tmp_path):
    env = environment(PYTHONPATH=PATHS, TF_CPP_MIN_LOG_LEVEL="2", HVDKIT_PROFILE=f"{tmp_path}:5-7")
    command = [*LAUNCHERS[launcher], "-np", "2", sys.executable, "-c", textwrap.dedent(PROFILED)]
    done = call(command, env=env, stderr=subprocess.STDOUT)
    assert done.returncode == 0 and "profile: " in done.stdout and "not written" not in done.stdout, done.stdout
    assert (tmp_path / "profile.json").exists()
