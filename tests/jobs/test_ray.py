"""``hk.ray.run`` on a real Ray cluster of two workers on this machine, as users call it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.jobs import call, environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "ray.md"
PYTHON = ROOT / ".cache" / "ray" / "bin" / "python"  # made by `make test-nightly`
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-nightly installs Ray in .cache/ray"),
]
BEGIN = """
import os, signal, sys, time
import psutil
import ray
import tensorflow as tf
import hvdkit as hk

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)

def raised(*args, **kwargs):
    began = time.monotonic()
    try:
        hk.ray.run(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error} [{error.__cause__}]", time.monotonic() - began
    raise AssertionError("no error")

def kill_actor():
    os.kill(psutil.Process().parent().parent().pid, signal.SIGKILL)
"""


def run_program(folder, code, **extra):
    (folder / "program.py").write_text(BEGIN + code)
    env = environment(PYTHONPATH=str(ROOT), RAY_AUTH_MODE="disabled", **extra)
    return call([PYTHON, "program.py"], cwd=folder, env=env)


RESULTS = """
offset = 0.5

def train(scale, *, add):
    cluster = hk.init()
    total = hk.allreduce(tf.constant(float(scale * cluster.rank)) + offset, hk.Sum)
    return cluster.rank, cluster.local_rank, float(total) + add, os.getcwd(), os.environ.get("MINE")

os.environ["MINE"] = "5"
here = os.getcwd()
expected = [(0, 0, 14.0, here, "5"), (1, 1, 14.0, here, "5")]
results = hk.ray.run(train, (3,), {"add": 10}, env=["MINE"])
assert results == expected, results
assert hk.ray.run(train, [3], {"add": 10}, num_workers=1, resources={"CPU": 2}, env=["MINE"])[0][2] == 10.5

def fail():
    hk.init()
    if hk.rank() == 1:
        raise KeyError("the key")
    hk.barrier()

error, _ = raised(fail)
assert error.startswith("KeyError: 'the key'") and "on rank 1" in error and "in fail" in error, error

def exits():
    hk.init()
    sys.exit(3 if hk.rank() == 1 else 0)

error, _ = raised(exits)
assert "HvdkitError: hk.ray.run: rank 1 on" in error and "exit(3)" in error or "exit code 3" in error, error

lock = __import__("threading").Lock()
error, _ = raised(lambda: lock)
assert error.startswith("TypeError: the variable lock that <lambda> uses: got lock, which cannot be pickled"), error

error, seconds = raised(train, (1,), {"add": 1}, num_workers=3, wait=3)
assert "ClusterError: num_workers: got 3 ranks with 1 CPU each (PACK), and a cluster that has in all 2 CPU" in error
assert seconds < 60, seconds
error, _ = raised(train, (1,), {"add": 1}, resources={"GPU": 1}, wait=1)
assert "in all 0 GPU, free 0 GPU" in error, error
assert ray.available_resources()["CPU"] == 2.0
print("all held")
"""


def test_results_and_errors(tmp_path):
    done = run_program(tmp_path, RESULTS)
    assert done.returncode == 0 and "all held" in done.stdout, done.stdout + done.stderr
    assert "hvdkit run: starting 2 ranks as Ray actors, each with 1 CPU" in done.stderr


KILLED = """
def waits():
    hk.init()
    if hk.rank() == 1:
        kill_actor()
    hk.barrier()

error, seconds = raised(waits)
print(error)
assert error.startswith("HvdkitError: hk.ray.run: rank 1 on"), error
assert "the Ray actor of rank 1 died" in error, error

def train(logdir, kills):
    hk.init()
    total = tf.Variable(0.0)
    with hk.Supervisor(logdir, variables=[total], save_steps=5) as sv:
        first = sv.global_step
        while sv.global_step < 20:
            total.assign_add(1.0)
            sv.step()
            if kills and sv.global_step == 12 and first == 0 and hk.rank() == 1:
                kill_actor()
                time.sleep(100)
    return first, sv.global_step, float(total)

results = hk.ray.run(train, ("killed", True), restarts=1)
assert results[0] == results[1] and results[0][0] in (5, 10) and results[0][1:] == (20, 20.0), results
assert hk.ray.run(train, ("whole", False)) == [(0, 20, 20.0)] * 2
error, _ = raised(waits, restarts=1)
assert "the Ray actor of rank 1 died" in error, error
print("all held")
"""


def test_a_killed_actor_ends_the_others_and_a_restart_continues(tmp_path):
    done = run_program(tmp_path, KILLED)
    assert done.returncode == 0 and "all held" in done.stdout, done.stdout + done.stderr
    assert "hvdkit run: restarting in 1 s (restart 1 of 1)" in done.stderr
    assert "training begins at step" in done.stderr


def test_the_program_of_the_page(tmp_path):
    name, text = re.search(r"^```python file=(\S+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL).groups()
    (tmp_path / name).write_text(text)
    done = call([PYTHON, name], cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT), RAY_AUTH_MODE="disabled"))
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])) == 5, done.stdout
