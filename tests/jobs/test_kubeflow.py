"""The command of the TrainJob's launcher, run here: SIGTERM saves, and its exit code is the one that is retried."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.jobs import environment
from helpers.speed import WAIT, wait_until

from hvdkit.watchdog.verdict import PREEMPTED

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import time
import tensorflow as tf
import hvdkit as hk

hk.init()
total = tf.Variable(0.0)
with hk.Supervisor("logs", variables=[total], save_model_secs=None) as sv:
    while sv.global_step < 10_000 and not sv.should_stop():
        total.assign_add(1.0)
        sv.step()
        time.sleep(0.02)
        if sv.global_step == 20 and hk.is_chief():
            print("trains", flush=True)
"""


@pytest.mark.nightly
def test_a_preempted_launcher_saves_and_ends_with_the_code_that_is_retried(tmp_path):
    _, job = yaml.safe_load_all((ROOT / "launch" / "kubeflow-trainjob.yaml").read_text())
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    (tmp_path / "id_rsa").touch(mode=0o640)
    *shell, script = job["spec"]["trainer"]["command"]
    for path, here in (
        ("/root/.ssh/id_rsa", tmp_path / "id_rsa"),
        ("/run/key", tmp_path / "key"),
        ("/etc/mpi/hostfile", tmp_path / "hostfile"),
        ("-- python", f"-- {sys.executable}"),
    ):
        assert path in script
        script = script.replace(path, str(here))
    log = tmp_path / "log"
    with log.open("w") as output:
        launcher = subprocess.Popen(
            [*shell, script], cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), stdout=output, stderr=output
        )
    wait_until(lambda: "trains" in log.read_text() or launcher.poll() is not None, log.read_text)
    launcher.send_signal(signal.SIGTERM)  # to hvdkit run itself, as the shell has become it
    assert launcher.wait(WAIT) == PREEMPTED, log.read_text()
    assert "SIGTERM: all ranks saved and ended" in log.read_text()
    assert list((tmp_path / "logs" / "checkpoints").glob("step-*"))
