"""Runs all checks, in the report's order."""

from __future__ import annotations

import os
from collections.abc import Callable

from hvdkit.commands.doctor import Doctor, host_checks, live_checks, mpi_checks, software_checks
from hvdkit.commands.doctor.facts import Facts, gather
from hvdkit.commands.doctor.finding import Finding


def examine(config: Doctor, announce: Callable[[str], None] = lambda text: None) -> list[Finding]:
    """Gather the facts, run the checks and return one finding each, in a fixed order; ``announce`` shows progress.

    Example:
        >>> {finding.name for finding in examine(Doctor(run=False))} >= {"python", "horovod", "mpi-library"}
        True
    """
    announce("loading TensorFlow, Horovod and mpi4py in a subprocess")
    facts = gather(config.np, config.timeout)
    checks = (*software_checks.CHECKS, *mpi_checks.CHECKS, *host_checks.CHECKS)
    findings = [_run_check(check, facts) for check in checks]
    if config.run:
        for check in live_checks.CHECKS:
            announce(f"starting {live_checks.RANKS} ranks ({check.__name__.replace('_', ' ')})")
            findings.append(_run_check(check, facts, timeout=config.timeout))
    return findings


def _run_check(check: Callable[..., Finding], facts: Facts, **options: float) -> Finding:
    """Run a check. If it raises, return that as a finding, so that the other checks still run."""
    try:
        return check(facts, **options)
    except Exception as error:
        if os.environ.get("HVDKIT_DEBUG") == "1":
            raise
        what = f"this check failed: {type(error).__name__}: {error}"
        remedy = "HVDKIT_DEBUG=1 hvdkit doctor shows the traceback; please report it"
        return Finding(check.__name__.replace("_", "-"), "warning", what, remedy)
