"""A job that cannot start ends immediately and gives the reason. Other files test ranks that fail later."""

from __future__ import annotations

import re

import pytest
from helpers.jobs import GLOO, MPI, run

from hvdkit.watchdog.uncaught import cause_of

START = "import os, signal, sys, time\nimport hvdkit as hk, numpy as np\nc = hk.init()\nhk.barrier()\n"


def untagged(output):
    """Return the lines of a job without its launcher's tags."""
    return [re.sub(r"^\[(?:1,)?\d+\]<std(?:out|err)>: ?", "", line) for line in output.splitlines()]


@pytest.mark.parametrize(("rank", "size"), [(0, 4), (2, 4)])
def test_a_world_smaller_than_promised(rank, size):
    """Set variables of a launcher that does not run: the process must neither run as 1 of 1 nor wait for ranks."""
    place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    extra = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in place.items()}
    job = run("import hvdkit as hk; hk.init(); print('began')", **extra)
    assert job.code != 0 and "began" not in job.output
    assert f"OMPI_COMM_WORLD_SIZE={size} without an mpirun" in job.output, job.output
    assert f"mpirun -np {size}" in job.output


def test_srun_without_a_plugin_for_mpi():
    job = run("import hvdkit as hk; hk.init()", SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2", SLURM_MPI_TYPE="none")
    assert job.code == 1 and "srun --mpi: got none" in job.output and "srun --mpi=pmix (`srun" in job.output, job.output


def test_more_ranks_than_slots():
    job = run("print('began')", MPI, 64, OMPI_MCA_rmaps_base_oversubscribe="0")
    assert job.code != 0 and "began" not in job.output
    assert "not enough slots" in job.output


def test_under_gloo_log_lines_are_whole_and_beginning_again_is_refused():
    """The launcher tags every write. Its rendezvous keeps old addresses, and a rank that connects to one aborts."""
    lines = "import logging\nfor i in range(200): logging.getLogger('hvdkit').warning('=%d %s=', i, 'x' * 300)\n"
    job = run(START + lines + "hk.barrier()\nhk.shutdown()\nhk.init()\nprint('began')", GLOO, 2)
    assert job.code != 0 and "began" not in job.output
    assert "hk.init(): called after hk.shutdown() under horovodrun --gloo" in job.output
    logged = [line for line in untagged(job.output) if "xxx" in line]
    assert len(logged) == 400
    assert all(re.fullmatch(r"=\d+ x{300}=", line) for line in logged)


def test_a_process_that_is_ended_flushes_files_opened_before_the_import(tmp_path):
    """Importing TensorFlow freezes all objects: the garbage collector no longer lists them."""
    script = (
        f"import gc\nfile = open({str(tmp_path / 'log')!r}, 'w')\nfile.write('kept')\ngc.freeze()\n"
        "from hvdkit.watchdog.ending import end_process\nend_process(3)"
    )
    job = run(script)
    assert job.code == 3, job.output
    assert (tmp_path / "log").read_text() == "kept"


@pytest.mark.parametrize(("error", "code"), [("NonFiniteError", 65), ("CheckpointError", 1)])
def test_a_process_alone_ends_with_the_exit_code_of_the_error(error, code):
    script = f"import atexit, hvdkit as hk\nhk.init()\natexit.register(print, 'ended')\nraise hk.{error}('why')"
    job = run(script)
    assert job.code == code and job.output.count("Traceback") == 1, job.output
    assert f"hvdkit.errors.{error}: why\n" in job.output and "ended\n" in job.output, job.output


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "Graph execution error:\n\nDetected at node a\n  File x\n\nMPI failed.\n\t [[{{node a.1}}]] [Op:f]",
            "MPI failed.",
        ),
        ("the disk is full\nby 3 bytes", "the disk is full"),
        ("Graph execution error:", "Graph execution error:"),
        ("", "no message"),
    ],
)
def test_the_cause_is_the_line_that_says_most(message, cause):
    assert cause_of(RuntimeError(message)) == cause
