"""``hvdkit doctor``: finds problems with this machine's setup, and their remedies.

It first gathers facts about this machine (:class:`Facts`). Each check is a function from these facts to one
:class:`Finding`, and the report shows the findings. It also runs without TensorFlow, Horovod, mpi4py or MPI, because
that is when it is needed most: code that might crash or hang runs in a subprocess with a timeout. The modules, in
reading order:

    examine.py          runs all checks, in the report's order
    finding.py          the result of a check
    facts.py            gathers the facts; probe.py is the subprocess that imports the large packages
    software_checks.py  Python, TensorFlow, Keras, NumPy, Horovod, mpi4py
    mpi_checks.py       the MPI library, the launchers, pitfalls of Open MPI
    host_checks.py      cores, root, shared memory, ssh, environment, network interfaces, GPUs
    smoke.py            trains small programs (smoke_program.py) instead of the other checks
    live_checks.py      two ranks start with each launcher and run one allreduce (allreduce.py); the algorithm of
                        MPI's allreduce (algorithm.py)
    report.py           shows the findings, as text or JSON
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from hvdkit.errors import describe
from hvdkit.machine.terminal import is_terminal

_SMOKE_FACTOR = 5


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Find problems with this machine's setup, and their remedies.

    Checks versions, Horovod's build, the MPI library, launchers, import order, network interfaces, GPUs,
    cores, root and shared memory, then starts two ranks that run one allreduce. Exit code: 0 if training can
    start (possibly with warnings), 1 if a problem prevents it.

    For example:
        hvdkit doctor              all checks, for one rank per GPU or core
        hvdkit doctor -np 8        for 8 ranks
        hvdkit doctor --no-run     without starting ranks
        hvdkit doctor --json       for programs
        hvdkit doctor --smoke      train small programs with each launcher, in about a minute

    See `hvdkit docs doctor`.
    """

    np: Annotated[int | None, arg(aliases=["-np"], help_behavior_hint="")] = None
    """Number of ranks to start on this host; default: one per GPU, or per core without GPUs."""
    run: bool = True
    """Start two ranks with each launcher, and run one allreduce."""
    json: bool = False
    """Print JSON instead of text."""
    smoke: bool = False
    """Instead of the other checks, train small programs with each launcher, compare them with one process, continue
    from a checkpoint at another number of ranks and kill a rank. The last line is "N passed, M failed"."""
    timeout: float = 60.0
    """Seconds after which a probe or a start of ranks counts as hung; five times as many with --smoke."""

    def __post_init__(self) -> None:
        if self.np is not None and self.np < 1:
            raise ValueError(describe("np", self.np, "at least 1", "pass the ranks you want on this host"))
        if self.timeout <= 0:
            raise ValueError(describe("timeout", self.timeout, "more than 0 seconds", "leave it at 60"))


def doctor(config: Doctor) -> int:
    """Run every check, print the report on stdout, and return the exit code."""
    if config.smoke:
        from hvdkit.commands.doctor.smoke import smoke

        return smoke(_SMOKE_FACTOR * config.timeout)
    from rich.console import Console

    from hvdkit.commands.doctor import report
    from hvdkit.commands.doctor.examine import examine

    with Console(stderr=True, force_terminal=is_terminal(sys.stderr)).status("starting") as status:
        findings = examine(config, status.update)
    if config.json:
        print(report.as_json(findings))
    else:
        report.print_text(findings, sys.stdout)
    return report.exit_code(findings)
