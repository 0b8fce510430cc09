"""Ranks that do not exit after the end of their scripts."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from helpers.jobs import call, environment, started
from helpers.jobs_that_fail import HVDKIT_LINE, LAUNCHERS, PATHS
from helpers.speed import WAIT, scaled

LIMIT = float(scaled(2))
# Rank 1's exit is late. Handlers that are registered before hk.init() run after those of hvdkit.
PROGRAM = """
    import atexit, os, threading, time
    import horovod.tensorflow as hvd
    import hvdkit as hk
    def upload():
        time.sleep(SECONDS)
        print("uploaded", flush=True)
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        LATE
    hk.init()
    print(f"trained {hk.allreduce(1.0, hk.Sum)}", flush=True)
"""
HANGS = "hvd.shutdown = lambda: time.sleep(4000)"
HANDLER = "atexit.register(upload)"
THREAD = "threading.Thread(target=upload).start()"
JOBS = [
    ("mpirun", HANGS),
    ("hvdkit run", HANDLER),
    ("mpirun", THREAD),
    pytest.param("hvdkit run", HANGS, marks=pytest.mark.nightly),
]


def run(launcher, late):
    script = textwrap.dedent(PROGRAM).replace("LATE", late).replace("SECONDS", f"{3 * LIMIT:g}")
    env = environment(PYTHONPATH=PATHS, TF_CPP_MIN_LOG_LEVEL="2", HVDKIT_EXIT_SECONDS=f"{LIMIT:g}")
    return call([*LAUNCHERS[launcher], "-np", "2", sys.executable, "-c", script], env=env, stderr=subprocess.STDOUT)


endings = started(run, "launcher", "late")


@pytest.mark.parametrize(("launcher", "late"), JOBS)
def test_the_end_of_hvdkit_is_bounded_and_that_of_the_program_is_not(endings, launcher, late):
    done = endings[launcher, late].result(WAIT)
    last = [line for line in done.stdout.splitlines() if HVDKIT_LINE.search(line)]
    assert done.stdout.count("trained 2.0") == 2, done.stdout
    if late == HANGS:
        # mpirun returns the code of rank 0, which is killed: in MPI_Finalize it no longer runs Python.
        assert done.returncode in ((1,) if launcher == "hvdkit run" else (1, 137)), done.stdout
        named = "rank 1 on", f"did not exit: Horovod has been shutting down for {LIMIT:g} s after the end of its script"
        assert all(words in last[-1] for words in named), done.stdout
        assert "in <lambda>" in done.stdout and "in _leave" in done.stdout, done.stdout  # the stacks
    else:
        assert done.returncode == 0 and "uploaded" in done.stdout, done.stdout
        assert "did not exit" not in done.stdout, done.stdout
        assert ("rank 1 has not exited: handlers of atexit" in done.stdout) == (late == HANDLER), done.stdout
