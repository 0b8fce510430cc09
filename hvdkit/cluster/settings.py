"""Environment variables that must be set before MPI and Horovod start: waiting, fusion, buckets, algorithms.

The user's settings take precedence: a variable that is already in the environment is not changed.
"""

from __future__ import annotations

import os
from pathlib import Path

from hvdkit.cluster import rings
from hvdkit.cluster.tuned import read_settings
from hvdkit.errors import describe
from hvdkit.machine.cores import available_cores
from hvdkit.machine.launcher import LaunchedRank
from hvdkit.watchdog.settings import EXIT, HEARTBEAT, PATIENCE, STALL, UNWIND, seconds

_BEFORE_MPI = {
    # Open MPI waits by spinning: Horovod's background thread would take a core away from computation.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Reduce each group of gradients separately. Fusing groups that happen to be ready at the same time would make the
    # order of additions, and so the last bit of the result, depend on timing.
    "HOROVOD_DISABLE_GROUP_FUSION": "1",
    # Horovod caches the ranks' agreements by tensor name. If more names were in use than fit into the cache, jobs with
    # several buckets aborted or failed in MPI's allreduce: 1600 names at the default of 1024, 60 at 16 and 64. This did
    # not happen at this size.
    "HOROVOD_CACHE_CAPACITY": "131072",
}
# Milliseconds between Horovod's checks for finished gradients; a step ends by waiting for one. Each check synchronizes
# with all other ranks, which takes time from computation if ranks share cores.
_CYCLE = "0.2"
_CYCLE_ON_SHARED_CORES = "1"
# The overhead of smaller buckets exceeds the waiting time that they save; a single bucket could not be sent before all
# gradients are computed. Between hosts, the links are idle at the beginning of every message.
_BUCKET = "HVDKIT_BUCKET_BYTES"
_BUCKET_BYTES = 8 * 1024 * 1024
_BUCKET_BYTES_BETWEEN_HOSTS = 32 * 1024 * 1024
# Horovod's own stall limit, which does not write stacks, takes effect after the watchdog's.
_LATER_SECONDS = 60
_MUCH_LATER_SECONDS = 86_400
_STALL_REPORT = "HOROVOD_STALL_CHECK_TIME_SECONDS"


def set_environment(launched: LaunchedRank, *, timeline: bool = False) -> None:
    """Set the variables that MPI and Horovod read when they start, unless the user has set them.

    With ``timeline``, Horovod's timeline can be started later.
    """
    cycle = _CYCLE if launched.local_size <= available_cores() else _CYCLE_ON_SHARED_CORES
    defaults = _BEFORE_MPI | {"HOROVOD_CYCLE_TIME": cycle}
    if timeline:
        defaults["HOROVOD_TIMELINE"] = "DYNAMIC"
    if launched.on_several_hosts:
        defaults[_BUCKET] = str(_BUCKET_BYTES_BETWEEN_HOSTS)
        if launched.controller == "mpi" and not rings.is_configured(os.environ):
            defaults |= rings.variables()
    file = os.environ.get("HVDKIT_TUNED", "")
    tuned = read_settings(Path(file)) if file else {}
    for name, value in (defaults | tuned).items():
        os.environ.setdefault(name, value)


def set_stall_limit() -> None:
    """Set Horovod's own limits for a collective that some rank never enters, unless the user has set them."""
    patience = seconds(PATIENCE)
    for name in (UNWIND, EXIT):  # an invalid value is an error before Horovod starts
        seconds(name)
    os.environ.setdefault(PATIENCE, str(patience))  # a second world uses the value of the first
    if STALL in os.environ:
        return
    watched = bool(seconds(HEARTBEAT))
    # Above the watchdog's limit: the watchdog waits for ranks that work or are busy, but Horovod would not.
    later = _MUCH_LATER_SECONDS if watched else _LATER_SECONDS
    limit = round(patience) + later if patience else 0
    os.environ[STALL] = str(limit)
    if watched:  # the watchdog reports waits earlier, with their places
        os.environ.setdefault(_STALL_REPORT, str(limit or _MUCH_LATER_SECONDS))


def bucket_bytes() -> int:
    """Return the minimum bytes of a bucket of gradients: HVDKIT_BUCKET_BYTES, or 8 MiB.

    Raises:
        ValueError: the variable is not a positive integer.
    """
    text = os.environ.get(_BUCKET, str(_BUCKET_BYTES))
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(describe(_BUCKET, text, "a number of bytes, at least 1", "unset it, or write e.g. 8388608"))
    return int(text)
