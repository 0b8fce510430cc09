"""Ranks that do not exit after the end of their scripts."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from helpers.jobs import call, environment, started
from helpers.jobs_that_fail import HVDKIT_LINE, LAUNCHERS, PATHS
from helpers.speed import WAIT, scaled

LIMIT = float(scaled(4))
# Rank 1's exit is late. Handlers that are registered before hk.init() run after those of hvdkit.
PROGRAM = """
    import atexit, ctypes, os, threading, time
    import horovod.tensorflow as hvd
    import hvdkit as hk
    def upload():
        time.sleep(SECONDS)
        print("uploaded", flush=True)
    is_late = os.environ["OMPI_COMM_WORLD_RANK"] == "1"
    if is_late:
        EARLY
    hk.init()
    if is_late:
        LATE
    print(f"trained {hk.allreduce(1.0, hk.Sum)}", flush=True)
"""
HANGS = "hvd.shutdown = lambda: time.sleep(4000)"
HANDLER = "atexit.register(upload)"
THREAD = "threading.Thread(target=upload).start()"
JOBS = [
    ("mpirun", HANGS),
    ("hvdkit run", HANDLER),
    pytest.param("mpirun", THREAD, marks=pytest.mark.nightly),
    pytest.param("hvdkit run", HANGS, marks=pytest.mark.nightly),
]
# Ends that never come. The other rank waits in MPI_Finalize.
ENDLESS_HANDLER = "atexit.register(time.sleep, 4000)"
ENDLESS_THREAD = "threading.Thread(target=time.sleep, args=[4000]).start()"
BEFORE_FINALIZE = "ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).pause)"
DESTRUCTOR = "ctypes.CDLL(None).on_exit(ctypes.CDLL(None).pause, None)"
WEDGES = [
    ("mpirun", ENDLESS_THREAD),
    ("hvdkit run", BEFORE_FINALIZE),
    pytest.param("mpirun", DESTRUCTOR, marks=pytest.mark.nightly),
    pytest.param("mpirun", ENDLESS_HANDLER, marks=pytest.mark.nightly),
    pytest.param("hvdkit run", ENDLESS_HANDLER, marks=pytest.mark.nightly),
    pytest.param("mpirun", BEFORE_FINALIZE, marks=pytest.mark.nightly),
    pytest.param("hvdkit run", DESTRUCTOR, marks=pytest.mark.nightly),
]


def run(launcher, late):
    is_early = late in (HANGS, HANDLER, THREAD, ENDLESS_HANDLER)
    script = textwrap.dedent(PROGRAM).replace("EARLY", late if is_early else "pass")
    script = script.replace("LATE", "pass" if is_early else late).replace("SECONDS", f"{3 * LIMIT:g}")
    env = environment(PYTHONPATH=PATHS, TF_CPP_MIN_LOG_LEVEL="2", HVDKIT_EXIT_SECONDS=f"{LIMIT:g}")
    if late in (ENDLESS_HANDLER, ENDLESS_THREAD):
        env["HVDKIT_WATCHDOG_SECONDS"] = f"{5 * LIMIT:g}"
    return call([*LAUNCHERS[launcher], "-np", "2", sys.executable, "-c", script], env=env, stderr=subprocess.STDOUT)


endings = started(run, "launcher", "late")


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stdout.count("trained 2.0") == 2, done.stdout
    return [line for line in done.stdout.splitlines() if HVDKIT_LINE.search(line)][-1]


@pytest.mark.parametrize(("launcher", "late"), JOBS)
def test_the_end_of_hvdkit_is_bounded_and_that_of_the_program_is_not(endings, launcher, late):
    done = endings[launcher, late].result(WAIT)
    assert done.stdout.count("trained 2.0") == 2, done.stdout
    if late == HANGS:
        # mpirun returns the code of rank 0, which is killed: in MPI_Finalize it no longer runs Python.
        assert done.returncode in ((1,) if launcher == "hvdkit run" else (1, 137)), done.stdout
        named = "rank 1 on", f"did not exit: Horovod has been shutting down for {LIMIT:g} s after the end of its script"
        assert all(words in last_line(done) for words in named), done.stdout
        assert "in <lambda>" in done.stdout and "in _leave" in done.stdout, done.stdout  # the stacks
    else:
        assert done.returncode == 0 and "uploaded" in done.stdout, done.stdout
        assert "did not exit" not in done.stdout, done.stdout
        assert ("rank 1 has not exited: handlers of atexit" in done.stdout) == (late == HANDLER), done.stdout


@pytest.mark.parametrize(("launcher", "late"), WEDGES)
def test_an_end_in_which_nothing_moves_on_any_rank_is_bounded(endings, launcher, late):
    done = endings[launcher, late].result(WAIT)
    last = last_line(done)
    assert done.returncode in ((1,) if launcher == "hvdkit run" else (1, 137)), done.stdout
    verb = "hangs" if late == ENDLESS_THREAD else "did not exit"
    assert f"{verb}: no progress for " in last and "the stacks of all ranks are above" in last, done.stdout
    if late in (ENDLESS_HANDLER, ENDLESS_THREAD):  # without Python, nothing shows which rank waits for the other
        assert "rank 1 on" in last, done.stdout
