"""Train an epoch over large Parquet files on 4 ranks; kill the run within the epoch and continue it on 3 ranks.

    python proofs/large_input.py                     # 20 GB in the user's cache; about 30 minutes on two cores
    python proofs/large_input.py --gigabytes 0.01    # a minute

Shows how long the steps wait for input, in a loop and in hk.fit; how many bytes each rank reads and how much memory it
takes; and that the continued run has the ids of an uninterrupted one, each step's, and its weights up to rounding.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paths
import tyro
from figures import Sheet
from harness import Output, publish
from large_files import Files
from resume import complete, newest, rank_processes, start, wait_for_save

WORKER = paths.WORKERS / "large_input.py"
MOST_WAIT = 0.02  # of the time of all steps
LIMIT = 1e-3
ABOUT = """40 Parquet files with an id, 256 float32 features, a list of 0 to 15 items and a label; row groups of 16,384
rows (17 MB). `shuffle="blocks"` with its defaults, 8,192 examples per global batch. The model has a sharded table of
100,000 x 16 and two hidden layers of 256; it is trained with SGD for an epoch, under `hk.Supervisor` in a loop. The
files are removed from the page cache before each run. In `hk.fit`, 100 steps are profiled."""


@dataclass(frozen=True, kw_only=True)
class LargeInput(Output):
    """Train on large files."""

    gigabytes: float = 20.0
    """Size of all files. Waits are not judged below 1 GB."""
    data_dir: Path | None = None
    """Folder for the files, which are kept there and used again. Default: a temporary folder."""


@dataclass(frozen=True)
class Job:
    """What all runs have in common.

    Attributes:
        batch: global batch size.
        buffer: examples in the windows of all lanes.
        save_steps: steps between checkpoints, a twentieth of the epoch.
        rest: seconds to rest after a step, so that a short run is not over before it is killed.
    """

    files: Files
    batch: int
    buffer: int
    rest: float

    @property
    def steps(self) -> int:
        return -(-self.files.rows // self.batch)

    @property
    def save_steps(self) -> int:
        return max(1, self.steps // 20)

    def prepare(self, logdir: Path, size: int) -> list[str]:
        """Remove the files from the page cache, create the array of ids, and return the worker's options."""
        logdir.mkdir(exist_ok=True)
        np.save(logdir / f"ids-{size}.npy", np.full((self.steps, self.batch), -1, np.int64))
        self.files.forget()
        options = {"files": self.files.folder, "batch": self.batch, "buffer": self.buffer, "rest": self.rest}
        options["save-steps"] = self.save_steps
        return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def main() -> int:
    """Run all parts; return MISSED if the ids or weights differ, or steps wait for too long."""
    config = tyro.cli(LargeInput, description=__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = Files.of(config.data_dir or folder, config.gigabytes)
        files.write()
        job = Job(files, min(8192, files.rows // 64), min(2**18, files.rows // 4), 0.05 if config.gigabytes < 1 else 0)
        whole = complete(WORKER, folder / "whole", 4, *job.prepare(folder / "whole", 4))
        saved, reached = train_and_kill(job, folder / "killed")
        continued = complete(WORKER, folder / "killed", 3, *job.prepare(folder / "killed", 3))
        waits = profile_fit(job, folder)
        apart = difference(folder / "whole" / "weights.npz", folder / "killed" / "weights.npz")
        total = files.bytes
        same = ids_are_equal(job, folder, saved)
    share = max(rank["wait"] / rank["seconds"] for rank in whole)
    fit_share = max(sum(w for w, _ in steps) / sum(ms for _, ms in steps) for steps in waits)
    judged = config.gigabytes >= 1
    fine = (
        same and apart < LIMIT and continued[0]["from"] == saved and whole[0]["to"] == continued[0]["to"] == job.steps
    )
    return publish(
        "large_input",
        "An epoch over large files",
        ABOUT,
        config,
        folder="proofs",
        missed=not fine or (judged and max(share, fit_share) > MOST_WAIT),
        sheets=[
            input_sheet("4 ranks, uninterrupted", whole),
            input_sheet("3 ranks, continued", continued),
            fit_sheet(waits),
            reading_sheet("4 ranks, uninterrupted", whole, total),
            loss_sheet(whole, continued),
        ],
        notes=[
            f"all 4 ranks killed in step {reached} of {job.steps}; continued on 3 ranks from the checkpoint of step "
            f"{continued[0]['from']}",
            f"ids of every row of every step: {'equal' if same else 'DIFFERENT'}; each example is used once",
            f"largest difference of the weights, relative to the largest weight of the array: {apart:.1e} "
            f"(at most {LIMIT:.0e}; sums over 3 and 4 ranks are rounded differently)",
            f"waiting for input: {share:.2%} of the loop's time, {fit_share:.2%} of hk.fit's (at most {MOST_WAIT:.0%})",
        ],
    )


def train_and_kill(job: Job, logdir: Path) -> tuple[int, int]:
    """Kill all ranks after about half of the steps; return the steps of the last checkpoint, and those trained."""
    process = start(WORKER, logdir, 4, *job.prepare(logdir, 4))
    wait_for_save(process, logdir, job.steps // 2)
    time.sleep(1)
    for rank in rank_processes(process.pid, WORKER):
        rank.kill()
    process.wait(timeout=60)
    trained = int((np.load(logdir / "ids-4.npy", mmap_mode="r")[:, 0] >= 0).sum())
    print(f"killed in step {trained} of {job.steps}, saved step {newest(logdir)}", file=sys.stderr, flush=True)
    return newest(logdir), trained


def ids_are_equal(job: Job, folder: Path, saved: int) -> bool:
    """Return whether the ids before the kill and after it are those of the uninterrupted run, each example once."""
    whole, killed, continued = (
        np.load(folder / name) for name in ("whole/ids-4.npy", "killed/ids-4.npy", "killed/ids-3.npy")
    )
    parts = np.array_equal(killed[:saved], whole[:saved]) and np.array_equal(continued[saved:], whole[saved:])
    unread = bool((continued[:saved] == -1).all())
    return parts and unread and np.array_equal(np.sort(whole[whole >= 0]), np.arange(job.files.rows))


def difference(whole: Path, continued: Path) -> float:
    """Return the largest difference of the weights, relative to the largest weight of the array."""
    with np.load(whole) as expected, np.load(continued) as found:
        return max(float(np.abs(found[name] - w).max() / np.abs(w).max()) for name, w in expected.items())


def profile_fit(job: Job, folder: Path) -> list[list[tuple[float, float]]]:
    """Profile 100 steps of hk.fit on 4 ranks; return the wait for input and the time of each step of each rank, ms."""
    steps = min(150, job.steps)
    first = min(50, steps // 2)
    options = ["--fit-steps", str(steps), "--profile", f"{folder / 'profile'}:{first}-{steps - 2}"]
    complete(WORKER, folder / "fit", 4, *job.prepare(folder / "fit", 4), *options)
    ranks = json.loads((folder / "profile" / "profile.json").read_text())["ranks"]
    return [[(step["input"], step["ms"]) for step in rank["each_step"]] for rank in ranks]


def input_sheet(title: str, ranks: Sequence[dict[str, Any]]) -> Sheet:
    """Return the waits for input in the loop."""
    header = ["rank", "ms/step", "input: median ms", "99 % ms", "longest ms", "first step, ms", "share of the time"]
    rows = []
    for number, rank in enumerate(ranks):
        waits = [f"{1e3 * rank[name]:.1f}" for name in ("median_wait", "p99_wait", "longest_wait", "first_wait")]
        step = 1e3 * rank["seconds"] / rank["steps"]
        rows.append([number, f"{step:.0f}", *waits, f"{rank['wait'] / rank['seconds']:.2%}"])
    return Sheet(title=f"Input of the loop: {title}", header=header, rows=rows)


def fit_sheet(waits: Sequence[Sequence[tuple[float, float]]]) -> Sheet:
    """Return the waits for input in ``hk.fit``."""
    rows = []
    for number, steps in enumerate(waits):
        inputs = [wait for wait, _ in steps]
        whole = sum(ms for _, ms in steps)
        figures = [statistics.median(inputs), float(np.quantile(inputs, 0.99)), max(inputs)]
        rows.append(
            [number, f"{whole / len(steps):.0f}", *(f"{ms:.1f}" for ms in figures), f"{sum(inputs) / whole:.2%}"]
        )
    header = ["rank", "ms/step", "input: median ms", "99 % ms", "longest ms", "share of the time"]
    return Sheet(title=f"Input of hk.fit: 4 ranks, {len(waits[0])} profiled steps", header=header, rows=rows)


def reading_sheet(title: str, ranks: Sequence[dict[str, Any]], total: int) -> Sheet:
    """Return what each rank has read, and its memory."""
    part, rows = total / len(ranks), []
    for number, rank in enumerate(ranks):
        read = [f"{rank['read'] / 1e9:.3f}", f"{rank['read'] / part:.3f}"]
        memory = [f"{rank[name] / 1e6:.0f}" for name in ("memory_before", "memory_peak")]
        rows.append([number, *read, f"{rank['reading_cpu'] / rank['cpu']:.1%}", *memory])
    header = ["rank", "GB read", "of total/N", "reading: share of CPU time", "MB before the first step", "peak MB"]
    return Sheet(title=f"Reading and memory: {title}, files of {total / 1e9:.2f} GB", header=header, rows=rows)


def loss_sheet(whole: Sequence[dict[str, Any]], continued: Sequence[dict[str, Any]]) -> Sheet:
    """Return losses of both runs at the steps of checkpoints."""
    after = dict(continued[0]["losses"])
    rows = [[step, f"{loss:.6f}", f"{after[step]:.6f}"] for step, loss in whole[0]["losses"] if step in after]
    return Sheet(title="Losses", header=["step", "4 ranks, uninterrupted", "continued on 3 ranks"], rows=rows)


if __name__ == "__main__":
    sys.exit(main())
