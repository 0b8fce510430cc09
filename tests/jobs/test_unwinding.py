"""If one rank raises, the interpreters of the other ranks exit normally, and no buffered data is lost."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.jobs import call, environment, started
from helpers.jobs_that_fail import HVDKIT_LINE, LAUNCHERS, PATHS, without_start
from helpers.speed import scaled

SCRIPT = Path(__file__).with_name("unwinding.py")
RANKS = 3
MARKS = ("closed", "finally", "first-handler", "kept", "last-handler")
# (call in which the other ranks wait, launcher, exit code, cause)
DISK, NAN = "failed: ValueError: the disk is full", "failed: NonFiniteError: the loss is NaN"
JOBS = [
    ("graph", "mpirun", 1, DISK),
    ("eager", "hvdkit run", 65, NAN),
    ("exchange", "horovodrun", 1, DISK),
    ("sleep", "horovodrun --gloo", 1, DISK),
    ("finally", "mpirun", 1, DISK),
    pytest.param("sleep", "mpirun", 1, DISK, marks=pytest.mark.nightly),
    pytest.param("eager", "horovodrun --gloo", 1, NAN, marks=pytest.mark.nightly),
    pytest.param("sleep", "hvdkit run", 1, DISK, marks=pytest.mark.nightly),
]


def run(kind, launcher):
    """Run one job; return its exit code, its output, and the contents of each file that its ranks wrote."""
    with tempfile.TemporaryDirectory(prefix="hvdkit-unwinding-") as folder:
        command = [*LAUNCHERS[launcher], "-np", str(RANKS), sys.executable, str(SCRIPT), folder, kind]
        env = environment(PYTHONPATH=PATHS, TF_CPP_MIN_LOG_LEVEL="2", HVDKIT_UNWIND_SECONDS=scaled(3))
        done = call(command, env=env, stderr=subprocess.STDOUT)
        found = {path.name: path.read_text() for path in Path(folder).iterdir()}
    return done.returncode, done.stdout, found


endings = started(run, "kind", "launcher")


@pytest.mark.parametrize(("kind", "launcher", "code", "cause"), JOBS)
def test_files_finally_clauses_and_handlers(endings, kind, launcher, code, cause):
    got, output, found = endings[kind, launcher].result()
    lines = [line for line in without_start(output).splitlines() if HVDKIT_LINE.search(line)]
    assert len(lines) == 1 and "rank 1 on " in lines[0] and cause in lines[0], output
    assert got == code, output
    assert output.count("Traceback") - output.count('horovodrun", line') == 1, output  # only rank 1's
    expected = {f"{name}-{rank}": name if name in ("closed", "kept") else "" for name in MARKS for rank in range(RANKS)}
    if kind == "finally":  # it does not return: after the deadline files are flushed and the rank exits
        for rank in (0, 2):
            for name in ("finally", "first-handler", "last-handler"):
                del expected[f"{name}-{rank}"]
    assert found == expected, output
