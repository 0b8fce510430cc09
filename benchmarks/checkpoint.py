"""Time saving and restoring 2 GB of state beside plain files of the same bytes on the same disk, in the same run.

    python benchmarks/checkpoint.py

Every rank writes (and reads) its share in a plain file, sequentially and with fsync; then hvdkit saves (and restores)
the same bytes. Both are repeated in turn, and medians of the ratios within a round count. Before each reading the
kernel forgets the files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WORKER = Path(__file__).with_name("checkpoint_worker.py")


def main() -> int:
    """Run at each world size, print the table; exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, nargs="+", default=[1, 2], help="world sizes (default: 1 2)")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="state over all ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="a folder on the disk to measure (default: here)"
    )
    args = parser.parse_args()
    missed = 0
    for size in args.np:
        with tempfile.TemporaryDirectory(dir=args.folder, prefix=".checkpoint-benchmark-") as folder:
            rounds = run(size, Path(folder), args)
        missed += report(size, args.gigabytes, rounds)
    return int(missed > 0)


def run(size: int, folder: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    """Run the worker on ``size`` ranks; return its rounds."""
    env = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "mpirun"
    worker = [
        sys.executable,
        str(WORKER),
        str(folder),
        "--gigabytes",
        str(args.gigabytes),
        "--rounds",
        str(args.rounds),
    ]
    done = subprocess.run([mpirun, "--bind-to", "none", "-np", str(size), *worker], env=env, timeout=1800)
    if done.returncode:
        sys.exit(f"{WORKER.name} on {size} ranks ended with exit code {done.returncode}")
    return json.loads((folder / "results.json").read_text())


def report(size: int, gigabytes: float, rounds: list[dict[str, float]]) -> int:
    """Print one world size's table and goals; return the number missed."""

    def median(value) -> float:
        return statistics.median(value(r) for r in rounds)

    print(f"\n{gigabytes:g} GB on {size} rank{'s' if size > 1 else ''}, {len(rounds)} rounds\n")
    print("| | seconds: median (min-max) | MB/s |\n|---|---|---|")
    for key, name in [
        ("plain_write", "plain write"),
        ("save", "save"),
        ("plain_read", "plain read"),
        ("restore", "restore"),
    ]:
        times = [r[key] for r in rounds]
        middle = statistics.median(times)
        print(f"| {name} | {middle:.2f} ({min(times):.2f}-{max(times):.2f}) | {gigabytes * 1000 / middle:.0f} |")
    call, following = median(lambda r: r["stall_call"]), median(lambda r: r["stall_next"])
    print(f"| asynchronous: the call | {call:.3f} | |")
    print(f"| asynchronous: the step after it, over a usual one | {following:.3f} | |\n")
    goals = [
        ("save / plain write speed", median(lambda r: r["plain_write"] / r["save"]), ">=", 0.8),
        ("restore / plain read speed", median(lambda r: r["plain_read"] / r["restore"]), ">=", 0.8),
        (
            "asynchronous stall / save",
            median(lambda r: (r["stall_call"] + max(0, r["stall_next"])) / r["save"]),
            "<=",
            0.1,
        ),
        ("extra MB, blocking", median(lambda r: r["save_mb"]), "<=", 64),
        ("extra MB, asynchronous / shard's", median(lambda r: r["async_mb"] / r["shard_mb"]), "<=", 1),
        ("bytes read / shard's", median(lambda r: r["read_ratio"]), "<=", 1.05),
    ]
    missed = 0
    for name, value, relation, goal in goals:
        met = value <= goal if relation == "<=" else value >= goal
        missed += not met
        print(f"{name} = {value:.3f}, goal {relation} {goal:g}: {'met' if met else 'MISSED'}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
