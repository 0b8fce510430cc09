"""One process of benchmarks/control_plane.py: rank 0, or some of the simulated ranks, in one phase of a job.

    python control_plane.py rank0 watchdog 256 FOLDER --seconds 10 --fault kill
    python control_plane.py ranks watchdog 256 FOLDER --first 1 --stop 128

The processes of a phase exchange files in FOLDER: rank 0 writes ``place.json``, simulated ranks write
``ranks-FIRST.json``, and rank 0's figures are in ``rank0.json``. All processes of a host share the clock
``time.monotonic``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from simulated_checkpoint import checkpoint_rank0, checkpoint_ranks
from simulated_exchange import exchange_rank0, exchange_ranks, manifest_rank0
from simulated_launcher import launcher_rank0, launcher_ranks
from simulated_watchdog import watchdog_rank0, watchdog_ranks

PHASES = {
    "watchdog": (watchdog_rank0, watchdog_ranks),
    "exchange": (exchange_rank0, exchange_ranks),
    "checkpoint": (checkpoint_rank0, checkpoint_ranks),
    "manifest": (manifest_rank0, exchange_ranks),
    "launcher": (launcher_rank0, launcher_ranks),
}


def main() -> None:
    """Run the part that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["rank0", "ranks"])
    parser.add_argument("phase", choices=PHASES)
    parser.add_argument("size", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--stop", type=int)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--fault", default="none")
    args = parser.parse_args()
    ranks = range(args.first, args.size if args.stop is None else args.stop)
    rank0, others = PHASES[args.phase]
    if args.part == "rank0":
        rank0(args.size, args.folder, args.seconds, args.fault)
    else:
        others(args.size, args.folder, ranks, args.fault)


if __name__ == "__main__":
    main()
