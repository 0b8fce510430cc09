"""Ranks that wait for each other in different collectives end with an error that names both, with their lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.jobs import GLOO, MPI, run, started
from helpers.jobs_that_fail import PATHS

SCRIPT = Path(__file__).with_name("unlike.py")
LINES = {text.split("  # ")[1]: n for n, text in enumerate(SCRIPT.read_text().splitlines(), 1) if "  # " in text}


def run_unlike(kind):
    ranks, _ = KINDS[kind]
    code = f"import runpy, sys; sys.argv = ['', {kind!r}]; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    return run(code, MPI, ranks, PYTHONPATH=PATHS)


def at(comment):
    return f"hvdkit.allreduce of float32(3,) ({SCRIPT}:{LINES[comment]})"


KINDS = {
    "branch": (3, f"waits in {at('in a branch')}, but rank 0 in {at('after it')}, and neither can continue"),
    "eager": (2, f"waits in barrier() ({SCRIPT}:{LINES['alone']}), but rank 0 in {at('the first')}, and neither"),
    "extra": (2, f"waits in {at('the second')}, but rank 0 in {at('the first')}, and neither can continue"),
}
AT_NIGHT = ("extra",)  # found as "branch" is


jobs = started(run_unlike, "kind")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.nightly] * (k in AT_NIGHT)) for k in KINDS])
def test_the_lines_that_differ(jobs, kind):
    job = jobs[(kind,)].result()
    assert job.code == 1 and "trained" not in job.output, job.output
    words = r"hvdkit: rank 1 on \S+ failed: CollectiveMismatchError: " + re.escape(KINDS[kind][1])
    assert re.search(words, job.output), job.output


UNLIKE_SETS = """
import numpy as np, hvdkit as hk
hk.init()
sets = [hk.ProcessSet(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
x = np.ones(3, np.float32)
for one in sets:
    if one.included():
        hk.allreduce(x, process_set=one)
print('together', flush=True)
hk.allreduce(x, process_set=sets[hk.rank()])
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("launcher", "extra"), [(GLOO, {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}), (MPI, {})])
def test_ranks_in_unlike_process_sets_end_with_an_error(launcher, extra):
    """Each rank waits for the next one, in a cycle."""
    job = run(UNLIKE_SETS, launcher, 3, **extra)
    assert job.code != 0 and job.output.count("together") == 3, job.output
    words = (
        r"rank 1 on .* waits in allreduce\(.*process_set=\[1, 2\].*, but rank 0 in allreduce\(.*process_set=\[0, 1\]"
    )
    assert re.search(words, job.output), job.output


LATE = """
import time
import numpy as np, hvdkit as hk
hk.init()
x = np.ones(20_000, np.float32)
{before}
time.sleep(15 if hk.rank() == 2 else 0)
hk.allreduce(x)
print('averaged', flush=True)
"""
JOIN_ONE_BY_ONE = """
for _ in range(hk.rank() + 1):
    hk.allreduce(x)
hk.join()
"""
WAIT_FOR_THOSE_BEFORE = """
for _ in range(10):
    handles = [hk.allreduce_async(x) for _ in range(2)]
    time.sleep(0.01 * hk.rank())
    hk.allgather_object(1)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("before", [JOIN_ONE_BY_ONE, WAIT_FOR_THOSE_BEFORE], ids=["join", "asynchronous"])
def test_two_ranks_may_wait_for_a_late_one(before):
    """Rank 0 must not mistake one collective for two, whatever the ranks exchanged before."""
    job = run(LATE.format(before=before), MPI, 3)
    assert job.code == 0 and job.output.count("averaged") == 3, job.output


NEXT_MODEL = """
import keras, tensorflow as tf, hvdkit as hk
cluster = hk.init()
keras.utils.set_random_seed(0)

def batches(model):
    for number in range(8):
        if cluster.rank == 1 and (model, number) == (0, 4):
            raise FileNotFoundError("part-4.csv")
        yield tf.ones([4, 3]), tf.ones([4, 1])

def step_of(model):
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(0.1))

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step(tf.ones([4, 3]), tf.ones([4, 1]))
    return step

models = [keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)]) for _ in range(3)]
for number, step in enumerate([step_of(model) for model in models]):
    try:
        for x, y in batches(number):
            step(x, y)
    except FileNotFoundError as error:
        print(f"next model: {error}", flush=True)
"""


@pytest.mark.nightly
def test_gradients_of_two_models_are_never_combined():
    """The same shapes, in functions of the same name: only the models tell the ranks' gradients apart."""
    job = run(NEXT_MODEL, MPI, 2)
    assert job.code == 1 and "next model: part-4.csv" in job.output, job.output
    names = (
        r"hvdkit: rank [01] on \S+ failed: CollectiveMismatchError: waits in hvdkit\.gradients.* of .* but rank [01] in"
    )
    assert re.search(names, job.output) and re.search(r"hvdkit\.gradients\.\d+ of", job.output), job.output


NEXT_FIT = """
import keras, numpy as np, tensorflow as tf, hvdkit as hk
cluster = hk.init()
x, y = np.ones((16, 3), "f4"), np.ones((16, 1), "f4")

def read(rows):
    if cluster.rank == 1:
        raise FileNotFoundError("part-4.csv")
    return rows

for number in range(2):
    inputs = keras.Input((3,))
    reading = keras.layers.Lambda(lambda z: tf.ensure_shape(tf.numpy_function(read, [z], "float32"), z.shape))
    rows = inputs if number else reading(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(rows))
    model.compile("sgd", "mse")
    try:
        hk.fit(model, x, y, batch_size=8, verbose=0)
    except Exception as error:
        print(f"rank {cluster.rank}, model {number}: {type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.nightly
def test_a_fit_after_a_caught_failure_names_it():
    """Horovod has stopped by then, of which its own message is that it has not been initialized."""
    job = run(NEXT_FIT, MPI, 2)
    failure = r"ClusterError: rank 1 on \S+ failed: .*part-4.csv"
    assert job.code == 1 and all(re.search(f"rank 0, model {n}: {failure}", job.output) for n in (0, 1)), job.output
    assert "has not been initialized" not in job.output, job.output
