"""Run a real Slurm on the hosts of :mod:`hosts`: munged, slurmctld on the first host, slurmd on each.

Requires Debian's ``slurm-wlm`` and ``munge`` (slurmctld, slurmd, slurm-client).

    with Hosts(3) as hosts, Slurm(hosts) as slurm:
        job = slurm.submit(["--nodes=3", "launch/slurm.sbatch", "train.py"])
        slurm.wait(job)
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers import hosts as machine
from helpers.hosts import Hosts
from helpers.jobs_that_fail import SCRIPT, Ending, environment, watch
from helpers.speed import WAIT, slowdown

MUNGED, SLURMCTLD, SLURMD = "/usr/sbin/munged", "/usr/sbin/slurmctld", "/usr/sbin/slurmd"
# Seconds without an answer until a node is down, and seconds between the signal to end a job and SIGKILL.
NODE_SECONDS, KILL_WAIT_SECONDS = math.ceil(4 * slowdown()), math.ceil(5 * slowdown())
_PROGRAMS = (MUNGED, SLURMCTLD, SLURMD, "sbatch", "srun", "scontrol")
LAUNCHERS = {
    "srun": ["srun", "--mpi=pmix"],
    "mpirun in salloc": ["salloc", "--quiet", "mpirun", "--bind-to", "none"],
    "hvdkit run --slurm": ["salloc", "--quiet", "hvdkit", "run", "--slurm", "--"],
}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")


def missing() -> str | None:
    """Return why this machine cannot run Slurm, or None if it can."""
    for program in _PROGRAMS:
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: slurm-wlm, munge)"
    return machine.missing()


def run(
    fault: str,
    launcher: str,
    slurm: Slurm,
    *,
    nodes: int = 3,
    act: Callable[[], None] | None = None,
    limit: float = WAIT,
    **extra: str,
) -> Ending:
    """Run the script of :mod:`jobs_that_fail` under Slurm with one rank per node; rank 1 fails.

    Args:
        fault: the fault that :mod:`faulty` injects.
        launcher: one of :data:`LAUNCHERS`.
        slurm: the cluster to run on.
        nodes: number of nodes.
        act: called when the script has reached its fault.
        limit: seconds after which the job is ended.
        **extra: environment variables.
    """
    folder = Path(tempfile.mkdtemp(prefix="hvdkit-fault-"))
    first, *rest = LAUNCHERS[launcher]
    place = [f"--nodes={nodes}", "--ntasks-per-node=1"]
    command = [first, *place, *rest, sys.executable, shutil.copy(SCRIPT, folder), fault, "1"]
    env = environment(PYTHONPATH=str(SCRIPT.parents[2]), TF_CPP_MIN_LOG_LEVEL="2", **extra)
    try:
        with (folder / "out").open("wb") as out:
            process = slurm.start(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        ending = watch(process, folder, act, limit)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    said = [line for line in ending.output.splitlines() if re.match(r"hvdkit run: |hvdkit: ", line)]
    return replace(ending, last=said[-1] if said else "")


class Slurm:
    """Run Slurm on ``hosts`` within a context; all daemons and jobs end with it.

    Args:
        hosts: the started hosts; the first is also the controller.
        slots: number of tasks per node.

    Attributes:
        folder: its configuration and logs.
        environment: variables that its commands need.
    """

    def __init__(self, hosts: Hosts, slots: int = 2) -> None:
        self._hosts, self._slots = hosts, slots
        self.folder = Path(tempfile.mkdtemp(prefix="hvdkit-slurm-"))
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf"), "SLURM_PMIX_FENCE": "ring"}
        self._daemons: list[subprocess.Popen[Any]] = []
        self._before: set[int] = set()

    def __enter__(self) -> Slurm:
        self._before = set(self._processes())
        try:
            self._write()
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start(self, command: Sequence[str], *, env: dict[str, str] | None = None, **options: Any) -> Any:
        """Start a Slurm command on the first host."""
        env = {**(os.environ if env is None else env), **self.environment}
        return self._hosts[0].start(command, env=env, **options)

    def run(self, *command: str, env: dict[str, str] | None = None, check: bool = True) -> str:
        """Run a Slurm command on the first host; return its output."""
        process = self.start(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        written, _ = process.communicate(timeout=WAIT)
        if check and process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {written}")
        return written

    def submit(self, command: Sequence[str], env: dict[str, str] | None = None) -> str:
        """Pass a script and its options to ``sbatch``; return the job id."""
        return self.run("sbatch", "--parsable", *command, env=env).strip().splitlines()[-1]

    def job(self, number: str) -> dict[str, str]:
        """Return Slurm's fields of a job, e.g. JobState, ExitCode, Restarts, NodeList."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "--oneliner", "show", "job", number)))

    def wait(self, number: str, seconds: float = WAIT, until: Callable[[dict[str, str]], bool] | None = None) -> Any:
        """Wait until a job has ended, or until ``until`` is true for its fields; return the fields."""
        limit = time.monotonic() + seconds
        while True:
            job = self.job(number)
            if until(job) if until else job["JobState"] in ENDED:
                return job
            if time.monotonic() > limit:
                raise TimeoutError(f"job {number} is {job['JobState']} after {seconds:g} s:\n{self.logs()}")
            time.sleep(0.1)

    def without_pmix(self) -> str | None:
        """Return why srun cannot start ranks of Open MPI, or None: Debian's plugin opens a file of another package."""
        said = self.run("srun", "--mpi=pmix", "--nodes=1", "true", check=False)
        return f"{said.strip().splitlines()[0]} (Debian: libpmix-dev)" if "error" in said else None

    def logs(self) -> str:
        """Return the last lines of all daemons' logs."""
        tails = [(log.name, log.read_text(errors="replace").splitlines()[-15:]) for log in self.folder.glob("*.log")]
        return "\n".join(f"--- {name}\n" + "\n".join(lines) for name, lines in tails)

    def _write(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        # A network namespace has no cgroups in /sys; slurmd loads their plugin even if it is unused.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for host in self._hosts:
            (self.folder / f"spool-{host.name}").mkdir()
        first = self._hosts[0]
        # The controller runs on the first node, so only jobs that need all nodes get it: nodes of jobs may die.
        nodes = "".join(
            f"NodeName={host.name} NodeAddr={host.address} CPUs={self._slots} Weight={2 if host is first else 1}\n"
            for host in self._hosts
        )
        (self.folder / "slurm.conf").write_text(f"""\
ClusterName=hvdkit
SlurmctldHost={first.name}({first.address})
SlurmUser=root
# A job that is queued again waits until the old credential has expired.
AuthInfo=socket={self.folder}/munge.socket,cred_expire=5
StateSaveLocation={self.folder}/state
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmdLogFile={self.folder}/slurmd-%n.log
SlurmdSpoolDir={self.folder}/spool-%n
TmpFS={self.folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={NODE_SECONDS}
KillWait={KILL_WAIT_SECONDS}
MessageTimeout=5
SchedulerParameters=sched_interval=2,batch_sched_delay=0,bf_interval=2
# Jobs of `urgent` take the nodes of others, which have so many seconds to save and are queued again.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}PartitionName=all Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=60 PriorityTier=2 PreemptMode=OFF
""")

    def _start(self) -> None:
        with (self.folder / "daemons.log").open("wb") as said:
            self._start_daemons({"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said})
        _until(lambda: self.idle() == len(list(self._hosts)), "not all nodes are idle", self.logs)

    def _start_daemons(self, files: dict[str, Any]) -> None:
        places = {name: f"--{option}={self.folder}/munge.{name}" for name, option in _MUNGE.items()}
        self._daemons.append(subprocess.Popen([MUNGED, "--foreground", "--force", *places.values()], **files))
        _until((self.folder / "munge.socket").exists, "munged does not start", self.logs)
        env = {**os.environ, **self.environment}
        self._daemons.append(self._hosts[0].start([SLURMCTLD, "-D"], env=env, **files))
        for host in self._hosts:
            self._daemons.append(host.start([SLURMD, "-D", "-N", host.name], env=env, **files))

    def idle(self) -> int:
        """Return the number of idle nodes."""
        states = self.run("sinfo", "--noheader", "--partition=all", "--Node", "--format=%T", check=False)
        return states.split().count("idle")

    def _processes(self) -> list[int]:
        return [pid for host in self._hosts for pid in host.processes()]

    def _end(self) -> None:
        """Kill the daemons and all processes that they started on the hosts."""
        while pids := set(self._processes()) - self._before:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for daemon in self._daemons:
                daemon.poll()
            time.sleep(0.02)
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


_MUNGE = {"socket": "socket", "key": "key-file", "log": "log-file", "pid": "pid-file", "seed": "seed-file"}


def _until(condition: Callable[[], bool], problem: str, details: Callable[[], str]) -> None:
    limit = time.monotonic() + WAIT
    while not condition():
        if time.monotonic() > limit:
            raise RuntimeError(f"{problem}:\n{details()}")
        time.sleep(0.02)
