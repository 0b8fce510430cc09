"""Large messages between hosts go round a ring: the rules by which Open MPI chooses how to allreduce and to gather.

With N ranks and S bytes a ring sends 2 (N-1)/N S bytes from each rank to its neighbour alone, and no algorithm can do
with fewer (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
Distrib. Comput. 69, 2009). Open MPI's own choice for large messages is another one, which took 1.7 to 2.1 times as long
as that bound on four hosts. A ring passes 2 (N-1) messages on, one after the other, so that it pays where each part of
S/N bytes takes longer than its latency. Two ranks are a case of their own: exchanging all of S both ways at once is as
many bytes as two exchanges of halves, with one pause less.

An allgather is the second half of that: (N-1)/N of what all ranks together give goes round (weights of ranks that share
the optimizer's slots, gradients of rows). Open MPI's own choice took 1.6 times as long on four hosts.

Within a host nothing is changed: memory has no links.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

RULES = Path(__file__).with_name("open-mpi-rules.conf")
# Whoever has set one of these has chosen, for all collectives or for this one.
_CHOSEN = "OMPI_MCA_coll"
_FILE = Path("~/.openmpi/mca-params.conf")

# Algorithms of Open MPI's coll/tuned, by number; 0 leaves the choice to it.
OWN_CHOICE, RECURSIVE_DOUBLING, RING = 0, 3, 4
ALLGATHER_RING = 3
_PART_BYTES = 128 * 1024
_TWO_RANKS_BYTES = 1024 * 1024


def rule(size: int, nbytes: int) -> int:
    """Return the number of the algorithm that ``size`` ranks use for a message of ``nbytes``.

    Example:
        >>> rule(4, 25_000_000) == RING, rule(4, 4096) == OWN_CHOICE, rule(2, 25_000_000) == RECURSIVE_DOUBLING
        (True, True, True)
    """
    if size <= 2:
        return RECURSIVE_DOUBLING if size == 2 and nbytes >= _TWO_RANKS_BYTES else OWN_CHOICE
    return RING if nbytes >= size * _PART_BYTES else OWN_CHOICE


def allgather_rule(size: int, nbytes: int) -> int:
    """Return the number of the algorithm by which ``size`` ranks gather what is ``nbytes`` of all of them together."""
    return ALLGATHER_RING if size > 2 and nbytes >= size * _PART_BYTES else OWN_CHOICE


def chosen(environ: Mapping[str, str]) -> bool:
    """Return True where the person has said how collectives are done."""
    return any(name.startswith(_CHOSEN) for name in environ) or _chooses(_FILE)


def variables() -> dict[str, str]:
    """Return what Open MPI has to find in the environment when it starts, to go by the rules."""
    return {
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_dynamic_rules_filename": str(RULES),
    }


def _chooses(file: Path) -> bool:
    """Return True where a person's file of parameters chooses collectives."""
    try:
        return any(line.strip().startswith("coll") for line in file.expanduser().read_text().splitlines())
    except (OSError, RuntimeError):  # no such file, or no home
        return False
