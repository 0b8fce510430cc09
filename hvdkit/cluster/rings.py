"""Rules for Open MPI to use ring algorithms for large allreduce and allgather messages between hosts.

With N ranks and S bytes, a ring sends 2 (N-1)/N S bytes from each rank to its neighbor, which is the minimum for any
algorithm (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
Distrib. Comput. 69, 2009). Open MPI chooses another algorithm for large messages, which took 1.7 to 2.1 times as long
as that bound on four hosts. A ring sends 2 (N-1) messages in sequence, so it pays off if the transfer of each part of
S/N bytes takes longer than its latency. Two ranks are a special case: exchanging all of S in both directions at once
moves as many bytes as two exchanges of halves, with one latency less.

An allgather is the second half of a ring allreduce: (N-1)/N of the combined input of all ranks goes around the ring
(weights with sharded optimizer state, gradients of rows). Open MPI's choice took 1.6 times as long on four hosts.

Within a host, Open MPI's choice is kept: shared memory has no links.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

RULES = Path(__file__).with_name("open-mpi-rules.conf")
# Prefix of the variables with which users configure collectives. If one is set, the rules are not used.
_VARIABLE_PREFIX = "OMPI_MCA_coll"
_FILE = Path("~/.openmpi/mca-params.conf")

# Algorithm numbers of Open MPI's coll/tuned; 0 leaves the choice to Open MPI.
NO_RULE = 0
RECURSIVE_DOUBLING = 3
RING = 4
_PART_BYTES = 128 * 1024
_TWO_RANKS_BYTES = 1024 * 1024


def allreduce_rule(size: int, nbytes: int) -> int:
    """Return the number of the allreduce algorithm for ``size`` ranks and a message of ``nbytes``.

    Example:
        >>> allreduce_rule(4, 25_000_000) == RING, allreduce_rule(4, 4096) == NO_RULE
        (True, True)
        >>> allreduce_rule(2, 25_000_000) == RECURSIVE_DOUBLING
        True
    """
    if size <= 2:
        return RECURSIVE_DOUBLING if size == 2 and nbytes >= _TWO_RANKS_BYTES else NO_RULE
    return RING if nbytes >= size * _PART_BYTES else NO_RULE


def is_configured(environ: Mapping[str, str]) -> bool:
    """Return True if the user has configured Open MPI's collectives, in variables or in the parameter file."""
    if any(name.startswith(_VARIABLE_PREFIX) for name in environ):
        return True
    try:
        return any(line.strip().startswith("coll") for line in _FILE.expanduser().read_text().splitlines())
    except (OSError, RuntimeError):  # no such file, or no home
        return False


def variables() -> dict[str, str]:
    """Return the environment variables that make Open MPI use the rules when it starts."""
    return {
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_dynamic_rules_filename": str(RULES),
    }
