"""One rank that fails ends the whole job: quickly, with an exit code, and a last word that says who and why."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from jobs import GLOO, MPI, run

START = "import os, signal, sys, time\nimport hvdkit as hk, numpy as np\nc = hk.init()\nhk.barrier()\n"
# What the other ranks wait in: an exchange of objects, or Horovod itself inside a graph.
WAITS = {
    "object": "hk.barrier()",
    "tensor": "import tensorflow as tf; tf.function(lambda x: hk.allreduce(x))(tf.ones([100_000]))",
}
# Starting takes some 6 s; more ranks than cores take longer.
QUICK = 45
LAUNCHERS = {"mpirun": MPI, "horovodrun --gloo": GLOO}
# Under Gloo objects travel through Horovod, too.
PAIRS = [("mpirun", "object"), ("mpirun", "tensor"), ("horovodrun --gloo", "tensor")]


def untagged(output):
    """The lines of a job without the tags of its launcher."""
    return [re.sub(r"^\[(?:1,)?\d+\]<std(?:out|err)>: ?", "", line) for line in output.splitlines()]


@pytest.mark.parametrize(("launcher", "wait"), PAIRS)
def test_an_exception_on_one_rank(launcher, wait):
    code = START + f"if c.rank == 1: raise ValueError('the disk is full')\n{WAITS[wait]}\nprint('trained')"
    job = run(code, LAUNCHERS[launcher], 2)
    assert job.code != 0 and job.seconds < QUICK
    lines = untagged(job.output)
    assert f"[rank 1] hvdkit: rank 1 on {socket.gethostname()} failed: ValueError: the disk is full" in lines
    assert not any("trained" in line for line in lines)
    # The traceback stands in one piece before it.
    end = lines.index("[rank 1] ValueError: the disk is full")
    assert lines[end - 2].startswith("[rank 1] Traceback") and "<module>" in lines[end - 1]


@pytest.mark.parametrize(("launcher", "wait"), PAIRS)
def test_a_rank_that_leaves_while_others_wait(launcher, wait):
    job = run(START + f"if c.rank == 1: sys.exit(3)\n{WAITS[wait]}\nprint('trained')", LAUNCHERS[launcher], 2)
    assert job.code != 0 and job.seconds < QUICK
    assert "trained" not in job.output
    assert re.search(r"hvdkit: rank 0 on \S+ failed: .*(left the job|shut down)", job.output), job.output


def test_a_rank_that_is_killed():
    code = START + f"if c.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n{WAITS['object']}\nprint('trained')"
    job = run(code, MPI, 2)
    assert job.code != 0 and job.seconds < QUICK and "trained" not in job.output


@pytest.mark.parametrize(("rank", "size"), [(0, 4), (2, 4)])
def test_a_world_smaller_than_promised(rank, size):
    """Variables of a launcher that is not there: the process must not run as 1 of 1, nor wait for the others."""
    place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    extra = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in place.items()}
    job = run("import hvdkit as hk; hk.init(); print('began')", **extra)
    assert job.code != 0 and job.seconds < QUICK and "began" not in job.output
    assert f"OMPI_COMM_WORLD_SIZE={size} without an mpirun" in job.output, job.output
    assert f"mpirun -np {size}" in job.output


def test_more_ranks_than_slots():
    job = run("print('began')", MPI, 64, OMPI_MCA_rmaps_base_oversubscribe="0")
    assert job.code != 0 and job.seconds < QUICK and "began" not in job.output
    assert "not enough slots" in job.output


def test_under_gloo_log_lines_are_whole_and_beginning_again_is_refused():
    """The launcher tags every write. Its rendezvous remembers old addresses, and a rank that meets one aborts."""
    lines = "import logging\nfor i in range(200): logging.getLogger('hvdkit').warning('=%d %s=', i, 'x' * 300)\n"
    job = run(START + lines + "hk.barrier()\nhk.shutdown()\nhk.init()\nprint('began')", GLOO, 2)
    assert job.code != 0 and job.seconds < QUICK and "began" not in job.output
    assert "hk.init(): called after hk.shutdown() under horovodrun --gloo" in job.output
    logged = [line for line in untagged(job.output) if "xxx" in line]
    assert len(logged) == 400
    assert all(re.fullmatch(r"\[rank \d\] =\d+ x{300}=", line) for line in logged)
