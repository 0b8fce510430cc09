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


@pytest.mark.core
def test_one_process_needs_no_mpi():
    job = run(
        without("mpi4py")
        + "import gc, hvdkit as hk; print(hk.init().size, hk.allgather_object('x'), hk.allreduce(2.0))\n"
        + "print(gc.isenabled(), gc.get_freeze_count() > 200_000)"
    )
    assert job.code == 0 and "1 ['x'] 2.0\nTrue True\n" in job.output, job.output


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


# In a rank after all imports: the targets of the hwloc functions that each library binds lazily.
CALLED = """
import ctypes, os
from pathlib import Path
from hvdkit.cluster.hwloc import lazy_slots, libraries

def owner(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[-1]

def own_copy(path):
    library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    return {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in lazy_slots(path)}

paths = libraries()
framework = next(i for i, path in enumerate(paths) if "libtensorflow_framework" in path)
called = {name: owner(slot.value) for name, slot in lazy_slots(paths[framework]).items()}
assert len(called) > 50 and set(called.values()) == {os.path.realpath(paths[framework])}, called
for path in paths[:framework]:
    assert {name: slot.value for name, slot in lazy_slots(path).items()} == own_copy(path), path
"""


ORDERS = [
    ("hvdkit", "mpi4py.MPI", "tensorflow"),
    ("mpi4py.MPI", "tensorflow", "hvdkit"),
    pytest.param(("mpi4py.MPI", "hvdkit", "tensorflow"), marks=pytest.mark.nightly),
    pytest.param(("tensorflow", "hvdkit", "mpi4py.MPI"), marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_three_ranks_end_well_whatever_was_imported_first(order):
    """Open MPI 4.1 and TensorFlow export the same functions of hwloc: each must call its own.

    MPI crashes at exit if it calls TensorFlow's, with three or more ranks on a host; TensorFlow finds no NUMA nodes if
    it calls MPI's, as it does for its first operation.
    """
    imports = "".join(f"import {name}\n" for name in order)
    work = "hk.init()\nassert hk.allreduce(tensorflow.constant([1.0]), hk.Sum).numpy() == 3\n"
    job = run(imports + "import hvdkit as hk\n" + work + CALLED, MPI, 3)
    assert job.code == 0, job.output
    assert "hwloc" not in job.output and "NUMA" not in job.output, job.output
    if order.index("hvdkit") < order.index("tensorflow"):
        assert not CHATTER.findall(job.output), job.output


def test_only_start_up_lines_are_held_back_even_if_the_process_aborts():
    lines = (
        "WARNING: All log messages before absl::InitializeLog() is called\nI0000 00:00 port.cc] oneDNN\nE0000 real\n"
    )
    code = "import os\nfrom hvdkit.cluster.tensorflow_loading import _filtered_stderr\nwith _filtered_stderr():\n"
    job = run(f"{code}    os.write(2, {lines.encode()!r})\n    os.write(2, b'F0000 no AVX')\n    os.abort()")
    assert (job.code, job.output) == (-6, "E0000 real\nF0000 no AVX")


def test_the_level_of_tensorflows_log_is_the_users():
    code = "import os, sys, hvdkit as hk\nhk.init()\n"
    code += "sys.stdout.write(f'level {os.environ[\"TF_CPP_MIN_LOG_LEVEL\"]}\\n')"  # in a single write
    for asked, seen in (({}, "12"), ({"TF_CPP_MIN_LOG_LEVEL": "0"}, "00")):
        job = run(code, MPI, 2, **asked)
        levels = sorted(re.findall(r"^\[1,(\d)\]<stdout>:level (\d)$", job.output, re.MULTILINE))
        assert job.code == 0 and "".join(level for _, level in levels) == seen, job.output
        assert asked or not CHATTER.findall(job.output), job.output
