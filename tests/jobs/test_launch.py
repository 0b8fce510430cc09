"""Run every launch command of the docs: each exits normally and reports which ranks trained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.jobs import call, environment

ROOT = Path(__file__).resolve().parents[2]
RANK_TAG = re.compile(r"\[(?:1,)?(\d+)\]<stderr>")
SCRIPT = ["models/train.py", "cifar10", "--data", "synthetic", "--steps", "2", "--batch-size", "12"]


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        (["launch/local.sh"], 2),  # horovodrun -np 2
        pytest.param(["mpirun", "--tag-output", "-np", "2", "python"], 2, marks=pytest.mark.nightly),
        # horovodrun --gloo -np 2
        pytest.param(["env", "GLOO=1", "NP=2", "launch/local.sh"], 2, marks=pytest.mark.nightly),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_the_script_runs_under(launcher, ranks):
    done = call([*launcher, *SCRIPT], cwd=ROOT, env=environment(NP="2"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"all {ranks} ranks hold the same 1068298 weights, bit for bit" in done.stdout
    assert done.stdout.count("finished") == 1
    assert chattering(done.stdout + done.stderr) <= {"0"}


def chattering(output):
    """Return the ranks, by their lines' tags, that print TensorFlow's startup messages (horovodrun prints its own)."""
    return {tag[1] for line in output.splitlines() if "oneDNN" in line and (tag := RANK_TAG.match(line))}
