"""The README's run that survives: killed with four ranks, stopped with Ctrl-C, continued with two, inspected."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.jobs import BIN, call, environment, words
from helpers.speed import WAIT

SCRIPT = Path(__file__).parents[2] / "models" / "train.py"


def start(launcher, ranks, *flags):
    command = [*launcher, str(ranks), sys.executable, str(SCRIPT), "linear", *flags]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def until_saved(process, logdir, step=1):
    """Wait for a checkpoint after ``step``."""
    deadline = time.monotonic() + WAIT
    while not any(int(p.name[5:]) >= step for p in (logdir / "checkpoints").glob("step-*")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ranks_of(process):
    return [
        p for p in psutil.Process(process.pid).children(recursive=True) if SCRIPT.name in " ".join(words(p.pid)[:3])
    ]


@pytest.mark.core
def test_a_run_is_killed_stopped_continued_with_fewer_ranks_and_inspected(tmp_path):
    logdir = tmp_path / "line"
    flags = ["--logdir", str(logdir), "--save-model-secs", "0.5", "--sleep", "0.02", "--epochs", "40"]
    process = start(["horovodrun", "-np"], 4, *flags)
    until_saved(process, logdir)
    os.kill(ranks_of(process)[-1].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=WAIT)
    assert process.returncode != 0
    assert "training begins at step 0 (no checkpoint in " in output

    process = start(["mpirun", "--bind-to", "none", "-np"], 2, *flags)
    until_saved(process, logdir, 200)
    for rank in ranks_of(process):
        rank.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WAIT)
    assert process.returncode == 75, output
    begun = int(re.search(r"training begins at step (\d+) from", output)[1])
    saved = int(re.search(r"SIGINT: saved at step (\d+)", output)[1])
    assert 0 < begun < saved

    process = start(["horovodrun", "-np"], 2, "--logdir", str(logdir), "--epochs", "40")
    output, _ = process.communicate(timeout=WAIT)
    assert process.returncode == 0, output
    assert f"training begins at step {saved} from" in output
    epochs = [int(number) for number in re.findall(r"epoch (\d+), loss", output)]
    assert epochs[-1] == 40
    assert epochs == list(range(epochs[0], 41))
    assert "finished" in output

    assert len(list((logdir / "checkpoints").glob("step-*"))) == 1  # max_to_keep=1
    shown = call([BIN / "hvdkit", "checkpoint", "inspect", logdir])
    assert shown.returncode == 0, shown.stderr
    assert "1000" in shown.stdout
