"""A job that cannot start ends immediately and gives the reason. Other files test ranks that fail later."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.jobs import GLOO, MPI, call, run

from hvdkit import errors

START = "import os, signal, sys, time\nimport hvdkit as hk, numpy as np\nc = hk.init()\nhk.barrier()\n"


def untagged(output):
    """Return the lines of a job without its launcher's tags."""
    return [re.sub(r"^\[(?:1,)?\d+\]<std(?:out|err)>: ?", "", line) for line in output.splitlines()]


def test_a_world_smaller_than_promised():
    """Set variables of a launcher that does not run: the process must neither run as 1 of 1 nor wait for ranks."""
    for rank in (0, 2):
        place = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": rank, "LOCAL_SIZE": 4}
        extra = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in place.items()}
        job = run("import hvdkit as hk; hk.init(); print('began')", **extra)
        assert job.code != 0 and "began" not in job.output
        assert "OMPI_COMM_WORLD_SIZE=4 without an mpirun" in job.output and "mpirun -np 4" in job.output, job.output


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


@pytest.mark.nightly
def test_a_process_alone_ends_with_the_exit_code_of_the_error():
    for error, code in (("NonFiniteError", 65), ("CheckpointError", 1)):
        script = f"import atexit, hvdkit as hk\nhk.init()\natexit.register(print, 'ended')\nraise hk.{error}('why')"
        job = run(script)
        assert job.code == code and job.output.count("Traceback") == 1, job.output
        page = getattr(errors, error).page
        assert f"hvdkit.errors.{error}: why\nsee `hvdkit docs {page}`\n" in job.output, job.output
        assert "ended\n" in job.output, job.output
    job = run("import hvdkit as hk\nhk.init()\nhk.data.divide([], 'columns')")
    assert job.code == 1 and "\n  ... 1 frame of hvdkit (" in job.output and "ValueError: parts: got" in job.output


@pytest.mark.nightly
def test_the_report_of_a_rank_names_the_page_about_its_error():
    """It is a line of the traceback's report; the last line names the error."""
    job = run(START + "if hk.rank() == 1:\n    raise hk.NonFiniteError('why')\nhk.barrier()", MPI, 2)
    lines = untagged(job.output)
    page = f"[rank 1] see `hvdkit docs {errors.NonFiniteError.page}`"
    assert job.code == 65 and lines.count(page) == 1, job.output
    assert lines[lines.index(page) - 1] == "[rank 1] hvdkit.errors.NonFiniteError: why", job.output


@pytest.mark.nightly
def test_ranks_that_catch_a_missing_init_report_failures_as_others():
    """The hooks for errors before ``hk.init()`` give way to those of the job."""
    before = "import hvdkit as hk\ntry:\n    hk.rank()\nexcept hk.ClusterError:\n    hk.init()\n"
    job = run(before + "if hk.rank() == 1:\n    raise ValueError('why')\nhk.barrier()", MPI, 2)
    assert job.code == 1, job.output
    assert any(re.fullmatch(r"hvdkit: rank 1 on \S+ failed: ValueError: why", line) for line in untagged(job.output))


LOOPS = {
    "a loop": "for x, _ in batches:\n    hk.allreduce(x.sum())\n    spoil()\n",
    "hk.fit": "hk.fit(model, batches, epochs=9, verbose=0, callbacks=[keras.callbacks.LambdaCallback("
    "on_train_batch_end=lambda *_, **__: spoil())])\n",
    "a Supervisor": "with hk.Supervisor(f'{folder}/_log', model=model, data=batches) as sv:\n    for x, _ in batches:\n"
    "        hk.allreduce(x.sum())\n        spoil()\n        sv.step(loss=0.0)\n",
}


@pytest.mark.parametrize(
    "loop", [pytest.param(loop, marks=[pytest.mark.nightly] * (loop != "hk.fit")) for loop in LOOPS]
)
def test_a_data_file_that_disappears_under_one_rank_ends_all(loop, tmp_path):
    """Rank 1 removes a file that only it reads later; the other ranks wait for it in a collective."""
    script = (
        f"import itertools, keras, pathlib\nfolder = pathlib.Path({str(tmp_path)!r})\n"
        "lines = ''.join(f'{i},{i}\\n' for i in range(20_000))\n"
        "[(folder / f'{i}.csv').write_text(lines) for i in range(6) if hk.rank() == 0]\nhk.barrier()\n"
        "source = hk.data.delimited(folder, {'x': 'float32', 'y': 'float32'}).map(lambda b: (b['x'] * 0, b['y'] * 0))\n"
        "batches = hk.data.GlobalBatches(source, 256, shuffle='blocks', interleave=2)\n"
        "model = keras.Sequential([keras.layers.Input([1]), keras.layers.Dense(1)])\nmodel.compile('sgd', 'mse')\n"
        "steps = itertools.count()\n"
        "def spoil():\n    if next(steps) == 9 and hk.rank() == 1:\n        (folder / '5.csv').unlink()\n"
    )
    job = run(START + script + LOOPS[loop], MPI, 2)
    assert job.code == 1, job.output
    last = [line for line in untagged(job.output) if line.startswith("hvdkit: ")][-1]
    assert re.search(r"rank 1 on \S+ failed.*: DataError: .*5\.csv has disappeared", last), job.output


LATE = (
    "import time, hvdkit as hk\nhk.init()\nimport tensorflow as tf\nstep = tf.function(lambda x: hk.allreduce(x))\n"
    "for i in range(31):\n    time.sleep(45 if (i, hk.rank()) == (30, 1) else 0)\n    step(tf.ones([2]))\n"
)


def waits(folder, *launcher):
    """Run a loop in which rank 1 takes one step 45 s after rank 0; return the output, and the files of each rank."""
    done = call([*launcher, sys.executable, "-c", LATE], cwd=folder, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    texts = ["", ""]
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        rank = re.search(r"rank[.-](\d)", str(path.relative_to(folder)))
        assert rank is not None, path
        texts[int(rank[1])] += path.read_text()
    return done.stdout, texts


@pytest.mark.nightly
def test_each_rank_writes_where_it_waits_once_and_to_its_own_file(tmp_path):
    launchers = {
        "mpirun": ("mpirun", "--bind-to", "none", "-np", "2", "--output-filename", "files"),
        "gloo": (*GLOO, "2", "--output-filename", "files"),
        "run": ("hvdkit", "run", "-np", "2", "--logs", "files", "--"),
    }
    with ThreadPoolExecutor(2) as pool:
        jobs = []
        for name, launcher in launchers.items():
            folder = tmp_path / name
            folder.mkdir()
            jobs.append(pool.submit(waits, folder, *launcher))
    where = r"hvdkit\.allreduce of float32\(2,\) \(<string>:\d+\) \(on \S+\)"
    lines = (
        rf"\[rank 0\] has waited for rank 1 for 3\d s in {where}; rank 1 is in no collective \(\w+\)$",
        rf"\[rank 1\] is in no collective \(\w+\); its last one was {where}$",
    )
    for job in jobs:
        output, files = job.result()
        for rank, line in enumerate(lines):
            assert len(re.findall(line, output, re.MULTILINE)) == 1, output
            assert len(re.findall(line, files[rank], re.MULTILINE)) == 1, files
            assert not re.search(line, files[1 - rank], re.MULTILINE), files
