"""Kill a rank of a job of many ranks with a sharded table, and continue the job on fewer ranks and on the same number.

python proofs/many_ranks.py --np 12
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import paths
import psutil
import tyro
from figures import Sheet
from harness import Output, publish
from resume import complete, newest, rank_processes, start, wait_for_save

WORKER = paths.WORKERS / "many_ranks.py"
STEPS, KILLED_AFTER = 60, 25
LIMIT = 1e-3
ABOUT = """A Keras model with a sharded embedding under `hk.Supervisor`, with a checkpoint every ten steps. One rank
is killed during training; then two thirds of the ranks continue, and in another run all of them."""


@dataclass(frozen=True, kw_only=True)
class ManyRanks(Output):
    """Kill one of many ranks and continue."""

    np: int = 12
    """Number of ranks, each of which needs at least 1 GB."""


def main() -> int:
    """Compare continued runs with an uninterrupted one; return MISSED if they differ."""
    config = tyro.cli(ManyRanks, description=__doc__)
    size, fewer, flags = config.np, config.np * 2 // 3, ("--steps", str(STEPS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = complete(WORKER, folder / "uninterrupted", size, *flags)
        code, seconds, saved = train_and_kill(folder / "killed", size, *flags)
        found = complete(WORKER, folder / "killed", fewer, *flags)
        train_and_kill(folder / "same", size, *flags)
        same = complete(WORKER, folder / "same", size, *flags)["digest"] == expected["digest"]
    apart = max(abs(a - b) / max(abs(a), 1e-3) for a, b in zip(expected["weights"], found["weights"], strict=True))
    rows = [
        [f"{size}, uninterrupted", STEPS, "", f"{expected['loss']:.6f}", ""],
        [f"{size}, one killed (exit code {code}, {seconds:.1f} s)", saved, "", "", ""],
        [f"{fewer}, continued", STEPS, found["from"], f"{found['loss']:.6f}", f"{apart:.1e}"],
    ]
    ending = "equal bit for bit" if same else "DIFFERENT"
    header = ["ranks", "saved up to step", "restored step", "last loss", "largest relative difference of the sums"]
    return publish(
        "many_ranks",
        "Many ranks, one of them killed",
        ABOUT,
        config,
        folder="proofs",
        missed=not (apart < LIMIT and found["from"] == saved and code != 0 and same),
        sheets=[Sheet(title="", header=header, rows=rows)],
        notes=[f"continued on all {size} ranks: weights and tables are {ending}"],
    )


def train_and_kill(logdir: Path, size: int, *flags: str) -> tuple[int, float, int]:
    """Kill the last rank after some steps; return the launcher's exit code, seconds until all ranks ended, the step."""
    process = start(WORKER, logdir, size, *flags)
    wait_for_save(process, logdir, KILLED_AFTER)
    ranks = rank_processes(process.pid, WORKER)
    struck = time.monotonic()
    ranks[-1].kill()
    code = process.wait(timeout=120)
    psutil.wait_procs(ranks, timeout=60)
    return code, time.monotonic() - struck, newest(logdir)


if __name__ == "__main__":
    sys.exit(main())
