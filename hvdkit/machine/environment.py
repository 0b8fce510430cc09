"""Environment variables: which contain secrets, which a launcher has set for its job, and which hvdkit reads."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from hvdkit.errors import printable, see

# Names of variables whose values are neither shown nor forwarded to other hosts.
SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD")
_JOB_VARIABLE = re.compile(
    r"OMPI_(?!MCA_|ALLOW_)|OMPI_MCA_(ess|orte|pmix)(_|$)|PMIX_(?!MCA_)|PMI_"
    r"|HOROVOD_(RANK|SIZE|HOSTNAME|LOCAL_(RANK|SIZE)|CROSS_(RANK|SIZE)|GLOO_RENDEZVOUS_)"
)
# Set by horovodrun --gloo for its ranks, or by users.
_GLOO_VARIABLES = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")
# The variables that hvdkit reads; a test compares them with its source.
_HVDKIT_VARIABLES = (
    "HVDKIT_BUCKET_BYTES",
    "HVDKIT_DATA_CACHE",
    "HVDKIT_DATA_CACHE_GB",
    "HVDKIT_DATA_TIMEOUT_SECONDS",
    "HVDKIT_DEBUG",
    "HVDKIT_EXIT_SECONDS",
    "HVDKIT_FLIGHT_DIR",
    "HVDKIT_FUNCTION",
    "HVDKIT_HEARTBEAT_SECONDS",
    "HVDKIT_JIT_COMPILE",
    "HVDKIT_LAST",
    "HVDKIT_LOG_LEVEL",
    "HVDKIT_METRICS",
    "HVDKIT_OTEL",
    "HVDKIT_PROFILE",
    "HVDKIT_PROFILE_TIMELINE",
    "HVDKIT_RECORD_STEPS",
    "HVDKIT_REQUIRES",
    "HVDKIT_RPATH",
    "HVDKIT_RUN",
    "HVDKIT_SENTINEL",
    "HVDKIT_SUMMARY",
    "HVDKIT_TUNED",
    "HVDKIT_UNWIND_SECONDS",
    "HVDKIT_WATCHDOG_SECONDS",
)
_REMOVED = {"HVDKIT_CHECK": "ranks in different collectives are always named"}


def outside_a_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of its job, which a nested launcher would mistake for its own.

    MPI_Init adds some. With Open MPI's ``OMPI_MCA_ess=pmi``, mpirun ends with 1 and prints nothing.

    Example:
        >>> outside_a_job({"OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_btl": "tcp,self", "PMIX_RANK": "0"})
        {'OMPI_MCA_btl': 'tcp,self'}
        >>> outside_a_job({"HOROVOD_RANK": "0", "HOROVOD_CONTROLLER": "gloo"})
        {}
    """
    removed = _GLOO_VARIABLES if "HOROVOD_RANK" in environment else ()
    return {name: value for name, value in environment.items() if not _JOB_VARIABLE.match(name) and name not in removed}


def ineffective_settings(environment: Mapping[str, str]) -> str | None:
    """Return a warning of the variables ``HVDKIT_...`` that hvdkit does not read, or None. Those of tests are left out.

    Example:
        >>> ineffective_settings({"HVDKIT_CHECK": "1", "HVDKIT_LOGLEVEL": "DEBUG", "HVDKIT_DEBUG": "1"})
        'HVDKIT_CHECK was removed (ranks in different collectives are always named), HVDKIT_LOGLEVEL is unknown (did you
        mean HVDKIT_LOG_LEVEL?): set in the environment without effect; see `hvdkit docs settings`'
    """
    found = []
    for name in sorted(environment):
        if name in _HVDKIT_VARIABLES or not name.startswith("HVDKIT_") or name.startswith("HVDKIT_TEST"):
            continue
        near = difflib.get_close_matches(name, _HVDKIT_VARIABLES, 1, 0.85)
        if name in _REMOVED:
            found.append(f"{name} was removed ({_REMOVED[name]})")
        else:
            found.append(f"{printable(name)} is unknown{f' (did you mean {near[0]}?)' if near else ''}")
    return f"{', '.join(found)}: set in the environment without effect; {see('settings')}" if found else None
