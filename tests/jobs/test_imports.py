"""Importing hvdkit is cheap without a launcher, and safe in any order with one."""

from __future__ import annotations

import re

import pytest
from helpers.jobs import MPI, run, without

HEAVY = ("tensorflow", "keras", "horovod", "mpi4py")
CHATTER = re.compile(r"^\[1,(\d+)\]<stderr>:.*(?:oneDNN|cpu_feature_guard|absl::InitializeLog|To enable)", re.MULTILINE)


@pytest.mark.core
def test_a_plain_import_loads_nothing_heavy():
    job = run(f"import sys, hvdkit as hk; dir(hk); print([m for m in {HEAVY} if m in sys.modules])")
    assert (job.code, job.output) == (0, "[]\n")


@pytest.mark.core
def test_hvdkit_imports_where_none_of_them_is_installed():
    job = run(
        without(*HEAVY) + "import hvdkit as hk; print(hk.__version__, issubclass(hk.ClusterError, hk.HvdkitError))"
    )
    assert job.code == 0 and job.output.endswith("True\n"), job.output


def test_the_first_use_names_the_command_that_brings_what_is_missing():
    for missing, command in (("horovod", "hvdkit build-horovod"), ("tensorflow", "pip install 'hvdkit[cpu]'")):
        use = "import hvdkit as hk\ntry: hk.init()\nexcept ImportError as e: print('!', e.name, e)"
        job = run(without(missing) + use)
        assert job.code == 0 and f"! {missing}" in job.output and command in job.output, job.output


def test_one_process_needs_no_mpi():
    job = run(
        without("mpi4py")
        + "import gc, hvdkit as hk; print(hk.init().size, hk.allgather_object('x'), hk.allreduce(2.0))\n"
        + "print(gc.isenabled(), gc.get_freeze_count() > 200_000)"
    )
    assert job.code == 0 and "1 ['x'] 2.0\nTrue True\n" in job.output, job.output


FILES = ("array_record", "fsspec", "google_crc32c", "pyarrow", "tenacity")  # of `pip install 'hvdkit[files]'`
TOOLS = ("pandas", "pytest", "scipy", "sklearn")  # of tests and users


def test_training_needs_no_package_for_files():
    """The programs of the quickstart, and every module that they may use."""
    program = """
import numpy as np, keras, hvdkit as hk
hk.init()
x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
hk.fit(model, x, y, batch_size=4, verbose=0)
hk.fit(model, hk.data.GlobalBatches((x, y), 4, epochs=1), verbose=0)
print(len(hk.predict(model, x, verbose=0)), [name for name in hk.__all__ if getattr(hk, name) is None])
try:
    hk.data.parquet("/nowhere/*.parquet", columns=["a"])
except ImportError as error:
    print(error)
"""
    job = run(without(*FILES, *TOOLS) + program)
    assert job.code == 0 and "8 []\n" in job.output and "pip install 'hvdkit[files]'" in job.output, job.output


def test_a_launcher_started_by_a_process_that_was_alone():
    """Horovod's settings in a world of one rank must not reach the ranks of another world."""
    child = "import hvdkit as hk; c = hk.init(); print(f'rank {c.rank} of {c.size}')"
    code = (
        "import os, subprocess, sys, hvdkit as hk\nbefore = dict(os.environ)\nhk.init(); hk.allreduce(1.0)\n"
        "place = ('RANK', 'SIZE', 'CONTROLLER', 'CPU_OPERATIONS', 'HOSTNAME')\n"
        "assert not [n for n in os.environ if n.startswith('HOROVOD_') and n.endswith(place) and n not in before]\n"
        f"subprocess.run([*{MPI}, '2', sys.executable, '-c', {child!r}], check=True)"
    )
    job = run(code)
    assert job.code == 0 and "rank 0 of 2" in job.output and "rank 1 of 2" in job.output, job.output


def test_a_variable_that_is_no_setting_is_named_once():
    names = {"HVDKIT_CHECK": "1", "HVDKIT_LOGLEVEL": "DEBUG", "HVDKIT_LOG_LEVEL": "INFO", "HVDKIT_X\n": ""}
    job = run("import hvdkit as hk\nhk.init(); hk.shutdown(); hk.init()", MPI, 2, **names)
    warnings = [line for line in job.output.splitlines() if "HVDKIT_" in line]
    assert job.code == 0 and len(warnings) == 1 and warnings[0].startswith("[1,0]<stderr>:"), job.output
    assert warnings[0].partition(":")[2] == (
        "HVDKIT_CHECK was removed (ranks in different collectives are always named), HVDKIT_LOGLEVEL is unknown (did "
        r"you mean HVDKIT_LOG_LEVEL?), HVDKIT_X\n is unknown: set in the environment without effect; see `hvdkit docs "
        "settings`"
    )


ORDERS = [
    ("hvdkit", "mpi4py.MPI", "tensorflow"),
    pytest.param(("tensorflow", "hvdkit", "mpi4py.MPI"), marks=pytest.mark.nightly),
]
WORK = "import hvdkit as hk\nhk.init()\nassert hk.allreduce(tensorflow.constant([1.0]), hk.Sum).numpy() == hk.size()\n"


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_ranks_end_well_if_hvdkit_or_tensorflow_comes_before_mpi(order):
    """Open MPI 4.1 and TensorFlow export the same functions of hwloc.

    MPI crashes at exit if TensorFlow is loaded after MPI_Init; TensorFlow must find its NUMA nodes, as it does for its
    first operation.
    """
    job = run("".join(f"import {name}\n" for name in order) + WORK, MPI, 3)
    assert job.code == 0, job.output
    assert "hwloc" not in job.output and "NUMA" not in job.output, job.output
    if order.index("hvdkit") < order.index("tensorflow"):
        assert not CHATTER.findall(job.output), job.output


AFTER_MPI = [
    ("mpi4py.MPI", "hvdkit", "tensorflow"),
    pytest.param(("mpi4py.MPI", "tensorflow", "hvdkit"), marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("order", AFTER_MPI, ids=" ".join)
def test_mpi_before_hvdkit_is_an_error_only_if_mpi_would_crash(order):
    imports = "".join(f"import {name}\n" for name in order)
    job = run(imports + WORK, MPI, 2)
    text = re.sub(r"\[\d+,\d+\]<std\w+>:", "", job.output)  # within a line, too: Python may write it in pieces
    said = re.findall(r"ClusterError: imports: got mpi4py.*; import hvdkit before mpi4py", text)
    assert job.code != 0 and said, job.output  # mpirun may end the other rank before it says the same
    if order[1] == "hvdkit":  # the error comes before TensorFlow is loaded, and MPI ends well
        assert "hwloc_" not in job.output, job.output
    bound = run(imports + WORK, MPI, 2, LD_BIND_NOW="1")
    assert bound.code == 0 and "ClusterError" not in bound.output, bound.output


def test_only_start_up_lines_are_held_back_even_if_the_process_aborts():
    lines = (
        "WARNING: All log messages before absl::InitializeLog() is called\nI0000 00:00 port.cc] oneDNN\nE0000 real\n"
    )
    code = "import os\nfrom hvdkit.cluster.tensorflow_loading import _filtered_stderr\nwith _filtered_stderr():\n"
    job = run(f"{code}    os.write(2, {lines.encode()!r})\n    os.write(2, b'F0000 no AVX')\n    os.abort()")
    assert (job.code, job.output) == (-6, "E0000 real\nF0000 no AVX")


@pytest.mark.nightly
def test_the_level_of_tensorflows_log_is_the_users():
    code = "import os, sys, hvdkit as hk\nhk.init()\n"
    code += "sys.stdout.write(f'level {os.environ[\"TF_CPP_MIN_LOG_LEVEL\"]}\\n')"  # in a single write
    for asked, seen in (({}, "12"), ({"TF_CPP_MIN_LOG_LEVEL": "0"}, "00")):
        job = run(code, MPI, 2, **asked)
        levels = sorted(re.findall(r"^\[1,(\d)\]<stdout>:level (\d)$", job.output, re.MULTILINE))
        assert job.code == 0 and "".join(level for _, level in levels) == seen, job.output
        assert asked or not CHATTER.findall(job.output), job.output
