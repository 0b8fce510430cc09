"""Importing hvdkit: cheap where nothing is launched, and safe in any order where something is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from jobs import MPI, run

HEAVY = ("tensorflow", "keras", "horovod", "mpi4py")
CHATTER = re.compile(r"^\[1,(\d+)\]<stderr>:.*(?:oneDNN|cpu_feature_guard|absl::InitializeLog|To enable)", re.MULTILINE)


def blocked(*modules):
    """The start of a script in which ``modules`` are not installed."""
    return f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {modules}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def test_a_plain_import_loads_nothing_heavy():
    job = run(f"import sys, hvdkit as hk; dir(hk); print([m for m in {HEAVY} if m in sys.modules])")
    assert (job.code, job.output) == (0, "[]\n")


def test_hvdkit_imports_where_none_of_them_is_installed():
    job = run(
        blocked(*HEAVY) + "import hvdkit as hk; print(hk.__version__, issubclass(hk.ClusterError, hk.HvdkitError))"
    )
    assert job.code == 0 and job.output.endswith("True\n"), job.output


@pytest.mark.parametrize(
    ("missing", "use", "command"),
    [
        ("horovod", "hk.init()", "hvdkit build-horovod"),
        ("tensorflow", "hk.init()", "pip install 'hvdkit[cpu]'"),
    ],
)
def test_the_first_use_names_the_command_that_brings_what_is_missing(missing, use, command):
    job = run(blocked(missing) + f"import hvdkit as hk\ntry: {use}\nexcept ImportError as e: print('!', e.name, e)")
    assert job.code == 0
    assert f"! {missing}" in job.output and command in job.output, job.output


def test_one_process_needs_no_mpi():
    job = run(
        blocked("mpi4py")
        + "import gc, hvdkit as hk; print(hk.init().size, hk.allgather_object('x'), hk.allreduce(2.0))\n"
        + "print(gc.isenabled(), gc.get_freeze_count() > 200_000)"
    )
    assert job.code == 0 and "1 ['x'] 2.0\nTrue True\n" in job.output, job.output


def test_a_launcher_started_by_a_process_that_was_alone():
    """What a world of one tells Horovod must not reach the ranks of another world."""
    child = "import hvdkit as hk; c = hk.init(); print(f'rank {c.rank} of {c.size}')"
    code = (
        "import os, subprocess, sys, hvdkit as hk\nbefore = dict(os.environ)\nhk.init(); hk.allreduce(1.0)\n"
        "place = ('RANK', 'SIZE', 'CONTROLLER', 'CPU_OPERATIONS', 'HOSTNAME')\n"
        "assert not [n for n in os.environ if n.startswith('HOROVOD_') and n.endswith(place) and n not in before]\n"
        f"subprocess.run([*{MPI}, '2', sys.executable, '-c', {child!r}], check=True)"
    )
    job = run(code)
    assert job.code == 0 and "rank 0 of 2" in job.output and "rank 1 of 2" in job.output, job.output


@pytest.mark.parametrize(
    "order",
    [
        ("mpi4py.MPI", "hvdkit", "tensorflow"),
        ("hvdkit", "mpi4py.MPI", "tensorflow"),
        ("tensorflow", "hvdkit", "mpi4py.MPI"),
    ],
    ids=" ".join,
)
def test_three_ranks_end_well_whatever_was_imported_first(order):
    """Open MPI 4.1 loaded before TensorFlow crashes at exit, with three ranks on a host or more."""
    imports = "".join(f"import {name}\n" for name in order)
    job = run(imports + "import hvdkit as hk; hk.init(); assert hk.allreduce(1, hk.Sum) == 3", MPI, 3)
    assert job.code == 0, job.output
    if order[0] != "tensorflow":
        assert len(set(CHATTER.findall(job.output))) <= 1, f"TensorFlow spoke on several ranks:\n{job.output}"
