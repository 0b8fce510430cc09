"""Run a real Slurm on three hosts: ``launch/slurm.sbatch``, plain ``srun`` and ``mpirun``, preemption, a lost node."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.hosts import Hosts
from helpers.jobs_that_fail import SCRIPT, environment
from helpers.slurm import Slurm, missing
from helpers.speed import WAIT, scaled, wait_until

ROOT = Path(__file__).resolve().parents[2]
SBATCH = str(ROOT / "launch" / "slurm.sbatch")
# Programs that start at once, without a framework: one waits for a file; in the other, rank 1 fails twice.
WAITS = 'echo "rank on $(hostname)"; while [ ! -e "$1" ]; do sleep 0.1; done'
FAIL = '[ "${OMPI_COMM_WORLD_RANK:-$SLURM_PROCID}" = 1 ] || sleep 4000; [ -e "$1" ] && exit 3; touch "$1"; kill -9 $$'
WHY = missing()
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(WHY is not None, reason=f"no Slurm: {WHY}")]


@pytest.fixture(scope="module")
def cluster():
    with Hosts(3) as hosts, Slurm(hosts, slots=4) as slurm:
        yield hosts, slurm


def variables(**extra):
    return environment(PYTHONPATH=str(ROOT), TF_CPP_MIN_LOG_LEVEL="2", **extra)


def test_training_is_preempted_and_goes_on(cluster, tmp_path):
    """Another job takes all nodes: Slurm signals the ranks directly; hvdkit run gets no signal."""
    _, slurm = cluster
    if why := slurm.without_pmix():
        pytest.skip(why)
    out, logdir = tmp_path / "out", tmp_path / "line"
    script = [str(ROOT / "models" / "train.py"), "linear", "--logdir", str(logdir), "--save-model-secs", "0.5"]
    nodes = ["--nodes=3", "--ntasks-per-node=1", f"--output={out}"]
    job = slurm.submit([*nodes, SBATCH, *script, "--sleep", "0.03", "--epochs", "5"], variables())
    wait_until(lambda: list(logdir.glob("checkpoints/step-*")), out.read_text)
    slurm.submit(["--partition=urgent", "--nodes=3", "--ntasks-per-node=4", "--output=/dev/null", "--wrap=true"])
    assert slurm.wait(job)["ExitCode"] == "0:0", out.read_text()
    text = out.read_text()
    before, queued, after = text.partition(f"hvdkit: exit code 75; job {job} is queued again")
    saved = re.search(r"^\[rank 0\] SIGTERM: saved at step (\d+)", before, re.MULTILINE)
    assert queued and saved and "restarting" not in text, text
    assert f"[rank 0] training begins at step {saved[1]} from" in after and after.endswith("[rank 0] finished\n"), text


def check_lost_nodes(slurm, log, left, queued, text):
    """Check two jobs that lost a node: one continues on the other node; the second is requeued and gets a third."""
    for name, job in (("left", left), ("queued", queued)):
        assert slurm.wait(job)["ExitCode"] == "0:0", text()
        assert "hvdkit run: rank 1 on host-c is unreachable" in log[name].read_text(), text()
        assert "hvdkit run: excluding host host-c: its slurmd does not answer" in log[name].read_text(), text()
    assert "hvdkit run: 1 ranks on host-b:1" in log["left"].read_text(), text()
    assert f"hvdkit: exit code 69; job {queued} is queued again" in log["queued"].read_text(), text()

    began = re.findall(r"^\[rank (\d)\] rank on (\S+)", log["queued"].read_text(), re.MULTILINE)
    assert set(began[:2]) == {("0", "host-b"), ("1", "host-c")}, text()
    assert set(began[2:]) == {("0", "host-a"), ("1", "host-b")}, text()


def check_last_words(log, plain, text):
    """Without hvdkit run, too, the last line names rank and cause; srun does not wait for a stopped rank."""
    for name, process in plain.items():
        assert process.wait(WAIT) == (137 if name == "srun" else 3), text()
        (line,) = re.findall("^hvdkit: .*", log[name].read_text(), re.MULTILINE)
        cause = r"has been stopped \(SIGSTOP\)" if name == "srun" else r"sys.exit\(3\) while other ranks"
        assert re.match(f"hvdkit: rank 1 on host-b failed at step 20: {cause}", line), text()


def test_jobs_that_fail(cluster, tmp_path):
    """Run all at once: a node dies, a rank of one job fails twice, and ranks end under plain srun and mpirun."""
    hosts, slurm = cluster
    without_pmix = slurm.without_pmix()
    done, marks = tmp_path / "done", tmp_path / "marks"
    log = {name: tmp_path / name for name in ("queued", "left", "fails", "srun", "mpirun")}
    (tmp_path / "wait").write_text(WAITS)
    (tmp_path / "fail").write_text(FAIL)

    def text():
        return "\n".join(f"--- {name}: {file.read_text()}" for name, file in log.items() if file.exists())

    def submit(name, *command):
        nodes = ["--nodes=2", "--ntasks-per-node=1", f"--output={log[name]}"]
        return slurm.submit([*nodes, *command], variables(PYTHON="sh", RESTARTS="1"))

    def start(name, *command):
        with log[name].open("w") as file:
            command = [*command, sys.executable, str(SCRIPT)]
            command += ["SIGSTOP" if name == "srun" else "sys.exit(3)", "1"]
            env = variables(HVDKIT_HEARTBEAT_SECONDS=scaled(3))
            return slurm.start(command, env=env, stdout=file, stderr=subprocess.STDOUT)

    run = f"hvdkit run --slurm --engine mpirun --max-restarts 2 --min-np 1 -- sh {tmp_path}/wait {done}"
    left = submit("left", "--no-kill", "--exclude=host-a", f"--wrap={run}")
    queued = submit("queued", SBATCH, f"{tmp_path}/wait", str(done))
    wait_until(lambda: text().count("] rank on host-") == 4, text)
    hosts[2].kill()
    there = ["--nodes=2", "--ntasks-per-node=1", "--exclude=host-c"]
    plain = {"mpirun": start("mpirun", "salloc", "--quiet", *there, "mpirun")}
    if not without_pmix:
        plain["srun"] = start("srun", "srun", "--mpi=pmix", *there)
    fails = submit("fails", "--exclude=host-c", SBATCH, f"{tmp_path}/fail", str(marks))
    wait_until(lambda: "] rank on host-a" in log["queued"].read_text(), text)
    done.touch()

    check_lost_nodes(slurm, log, left, queued, text)
    # A failure is reported and retried as often as requested; its exit code becomes the job's.
    assert slurm.wait(fails)["ExitCode"] == "3:0", text()
    said = re.findall(r"^hvdkit run: rank 1 on host-b (.+?);", log["fails"].read_text(), re.MULTILINE)
    assert said == ["was killed by SIGKILL (out of memory?)", "ended with exit code 3"], text()

    check_last_words(log, plain, text)
    if without_pmix:
        pytest.skip(without_pmix)
