"""Run projects that ``hvdkit new`` wrote: its next steps, a run that is interrupted, and each cluster's command."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import hosts, slurm
from helpers.hosts import Hosts
from helpers.jobs import call, environment
from helpers.slurm import Slurm
from helpers.speed import STALL, WAIT, wait_until

from hvdkit import checkpoint
from hvdkit.commands.new import New, new

ROOT = Path(__file__).resolve().parents[2]
STEPS = 23  # of an epoch: 1,437 images in batches of 64
RESULT = re.compile(
    r"^(?:\[rank 0\] )?accuracy (0\.\d{4}) on 360 held-out images\n(?:.*\n)*?.*checkpoint (\S+)$", re.MULTILINE
)


def variables(**extra):
    return environment(PYTHONPATH=str(ROOT), TF_CPP_MIN_LOG_LEVEL="2", **extra)


def check_result(output, folder, step, accuracy=0.2):
    """Check the last lines: an accuracy, and a checkpoint of ``step`` that exists."""
    found = RESULT.search(output)
    assert found and float(found[1]) >= accuracy, output
    assert found[2].endswith(f"step-{step:09d}") and (folder / found[2]).is_dir(), output


@pytest.mark.nightly
def test_the_next_steps_and_every_target_work(tmp_path):
    """Run what the user copies, word for word, in a folder whose name has a space."""
    done = call([sys.executable, "-m", "hvdkit", "new", "my project"], cwd=tmp_path, env=variables())
    assert done.returncode == 0, done.stderr
    steps = [line.strip() for line in done.stdout.partition("next steps:\n")[2].splitlines()]
    assert steps[0] == "cd 'my project'" and steps[1].startswith("make setup ") and steps[2].startswith("make train ")
    env = variables(DOCTOR_ARGS=f"--timeout {WAIT:g}")  # a busy machine may need more than a minute for a start
    script = "set -e\n" + "\n".join(steps)
    done = call(["bash", "-c", script], cwd=tmp_path, env=env, stderr=subprocess.STDOUT, timeout=0.8 * STALL)
    assert done.returncode == 0, done.stdout
    folder = tmp_path / "my project"
    check_result(done.stdout, folder, 10 * STEPS, accuracy=0.9)

    done = call(["make", "export"], cwd=folder, env=variables())
    assert done.returncode == 0, done.stdout + done.stderr
    serve = "import numpy, tensorflow as tf; served = tf.saved_model.load('served/1')"
    serve += "; print(served.serve(numpy.zeros((3, 8, 8, 1), 'float32')).shape)"
    assert "(3, 10)" in call([sys.executable, "-c", serve], cwd=folder).stdout
    done = call(["make", "test"], cwd=folder, env=variables(), stderr=subprocess.STDOUT)
    assert done.returncode == 0 and "runs/test/checkpoints/step-" in done.stdout, done.stdout
    assert call(["make", "clean"], cwd=folder).returncode == 0
    assert not (folder / "runs" / "test").exists() and checkpoint.latest(folder / "runs" / "digits")


@pytest.mark.nightly
@pytest.mark.parametrize(("form", "ranks"), [("loop", 1), ("fit", 2)])
def test_a_run_that_is_interrupted_continues(tmp_path, form, ranks):
    """Press Ctrl-C, then start the same command again, in one case on fewer ranks."""
    folder = tmp_path / "mine"
    new(New(path=folder, form=form))
    out = tmp_path / "out"
    run = [sys.executable, "-m", "hvdkit", "run", "-np", "2", "--", sys.executable, "train.py", "--epochs"]
    with out.open("w") as file:
        process = subprocess.Popen(
            [*run, "100000"], cwd=folder, env=variables(), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        wait_until(lambda: re.search(r"Epoch 2/|step 40,", out.read_text()), out.read_text)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 130, out.read_text()
    saved = checkpoint.latest(folder / "runs" / "digits")
    step = int(saved.name.partition("-")[2])
    assert step > 0

    epochs = step // STEPS + 2
    again = [*run, str(epochs)] if ranks == 2 else [sys.executable, "train.py", "--epochs", str(epochs)]
    done = call(again, cwd=folder, env=variables(), stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    assert f"training begins at step {step} from" in done.stdout
    check_result(done.stdout, folder, epochs * STEPS)


@pytest.mark.nightly
def test_over_ssh(tmp_path):
    """Two hosts, one rank on each; `make submit` restarts from the newest checkpoint after a rank is killed."""
    if why := hosts.missing():
        pytest.skip(f"no hosts: {why}")
    folder, out = tmp_path / "mine", tmp_path / "out"
    new(New(path=folder, form="fit", cluster="ssh"))
    with Hosts(2) as several:
        (folder / "hosts").write_text("\n".join(several.list.split(",")) + "\n")
        with out.open("w") as file:
            command = ["make", "submit", "ARGS=--epochs 2", f"PYTHON={sys.executable}"]
            process = several[0].start(command, cwd=folder, env=variables(), stdout=file, stderr=file)
        assert process.wait(WAIT) == 0, out.read_text()
    text = out.read_text()
    check_result(text, folder, 2 * STEPS)
    logs = folder / "logs"
    assert sorted(path.name for path in logs.iterdir()) == ["rank-0.log", "rank-1.log"], text


@pytest.mark.nightly
def test_under_slurm(tmp_path):
    if why := slurm.missing():
        pytest.skip(f"no Slurm: {why}")
    folder = tmp_path / "mine"
    new(New(path=folder, form="loop", cluster="slurm"))
    with Hosts(2) as several, Slurm(several, slots=2) as cluster:
        env = variables(PYTHON=sys.executable) | cluster.environment
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = several[0].start(["make", "submit", "ARGS=--epochs 2"], cwd=folder, env=env, **pipes)
        said, _ = process.communicate(timeout=WAIT)
        assert process.returncode == 0, said
        job = re.search(r"Submitted batch job (\d+)", said)[1]
        ended = cluster.wait(job)
    text = (folder / f"hvdkit-{job}.out").read_text()
    assert ended["ExitCode"] == "0:0", text
    check_result(text, folder, 2 * STEPS)


@pytest.mark.nightly
def test_on_kubernetes_the_launcher_runs_the_same_program(tmp_path):
    """Run the launcher's command of the manifest on this machine; kubectl and a cluster are not needed."""
    yaml = pytest.importorskip("yaml")
    folder = tmp_path / "mine"
    new(New(path=folder, form="loop", cluster="kubernetes"))
    job = yaml.safe_load((folder / "launch" / "kubernetes.yaml").read_text())
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    operators = folder / "hostfile"  # the file that the operator writes
    operators.write_text("localhost slots=4\n")
    command = shlex.join(launcher["command"]).replace("/etc/mpi/hostfile", str(operators))
    command = command.replace("-np 4", "-np 2") + " --epochs 1"
    done = call(["bash", "-c", command], cwd=folder, env=variables(), stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    check_result(done.stdout, folder, STEPS)
