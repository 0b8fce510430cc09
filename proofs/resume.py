"""Show that a run that is killed and continued ends like an uninterrupted run.

    python proofs/resume.py
    python proofs/resume.py --show kill --kills 10

kill: a run is ended by kill -9 (one rank, the chief, or all of them, in turn) at random times, and restarted
with the same command until it is done; its weights, slots and random states must be bitwise equal on every rank
to those of an uninterrupted run.

resize: a run of 4 ranks is stopped after a third of its steps and continued by 2, then by 3; its losses are
compared with those of an uninterrupted run of 4 ranks.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import paths
import psutil
import tyro
from figures import Picture, Sheet
from harness import Output, publish
from processes import BIN, RunFailed, environment, launch

WORKER = paths.WORKERS / "resume.py"
STEPS = 390
KILLED_STEPS = 900
LIMIT = 0.01
ABOUT = """Real images, dropout, BatchNormalization, Adam, gradients accumulated over three steps and a decaying
learning rate under `hk.Supervisor`, with a checkpoint every ten steps. A killed run is started again with the same
command; a resized run continues on another number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Resume(Output):
    """Kill runs and continue them."""

    show: tuple[Literal["kill", "resize"], ...] = ("kill", "resize")
    """Which parts to run."""
    np: int = 2
    """Number of ranks of the run that is killed."""
    kills: int = 4
    """Number of kills."""
    seed: int = 0
    """Seed of the times of the kills."""


def main() -> int:
    """Run the selected parts; return MISSED if a continued run differs."""
    config = tyro.cli(Resume, description=__doc__)
    sheets: list[Sheet] = []
    pictures: list[Picture] = []
    notes: list[str] = []
    right = True
    with tempfile.TemporaryDirectory() as folder:
        if "kill" in config.show:
            sheet, equal = show_kills(Path(folder), config)
            sheets.append(sheet)
            digests = "equal those of an uninterrupted run, bit for bit on all ranks" if equal else "DIFFER"
            notes.append(f"killed {len(sheet.rows)} times: weights, slots and random states {digests}")
            right = equal
        if "resize" in config.show:
            sheet, picture, worst = show_resize(Path(folder))
            sheets.append(sheet)
            pictures.append(picture)
            right = right and worst <= LIMIT
    parts = {"sheets": sheets, "pictures": pictures, "notes": notes}
    return publish("resume", "Runs that are continued", ABOUT, config, folder="proofs", missed=not right, **parts)


def show_kills(folder: Path, config: Resume) -> tuple[Sheet, bool]:
    """Compare a killed run with an uninterrupted one; return the kills, and whether all digests are equal."""
    chance, flags = random.Random(config.seed), ["--steps", str(KILLED_STEPS)]
    expected = complete(WORKER, folder / "unharmed", config.np, *flags)
    victims = ["one rank", "the chief", "all ranks"]
    rows: list[list[Any]] = []
    while len(rows) < config.kills:
        victim = victims[len(rows) % len(victims)]
        before = newest(folder / "killed")
        process = start(WORKER, folder / "killed", config.np, *flags)
        steps, rest = chance.randint(1, KILLED_STEPS // (2 * config.kills)), chance.uniform(0, 0.5)
        wait_for_save(process, folder / "killed", before + steps)
        time.sleep(rest)
        if process.poll() is not None:
            raise RunFailed(f"it ended with exit code {process.returncode} before kill {len(rows) + 1}")
        ranks = rank_processes(process.pid, WORKER)
        for rank in {"one rank": ranks[-1:], "the chief": ranks[:1], "all ranks": ranks}[victim]:
            rank.kill()
        process.wait(timeout=60)
        rows.append([len(rows) + 1, victim, before, newest(folder / "killed")])
        print(f"kill {len(rows)}: {victim}, saved up to step {rows[-1][-1]}", file=sys.stderr, flush=True)
    found = complete(WORKER, folder / "killed", config.np, *flags)
    header = ["kill", "killed", "saved step at the start", "saved step when killed"]
    return Sheet(title=f"{config.np} ranks, {KILLED_STEPS} steps", header=header, rows=rows), found == expected


def show_resize(folder: Path) -> tuple[Sheet, Picture, float]:
    """Compare the losses of 4 -> 2 -> 3 ranks with those of 4 ranks; return the largest difference, too."""
    flags = ["--dropout", "0", "--rest", "0"]  # dropout masks differ by rank
    complete(WORKER, folder / "through", 4, "--steps", str(STEPS), *flags)
    for number, np in enumerate([4, 2, 3], start=1):
        complete(WORKER, folder / "resized", np, "--steps", str(number * STEPS // 3), *flags)
    through, resized = losses(folder / "through"), losses(folder / "resized")
    apart, rows = differences(through, resized), []
    for third in range(3):
        part = slice(third * STEPS // 3, (third + 1) * STEPS // 3)
        rows.append([f"{part.start + 1}-{part.stop}", resized[part][0][2], f"{max(apart[part]):.1e}"])
    header = ["steps", "ranks", "largest relative difference of the loss from 4 ranks, uninterrupted"]
    return (
        Sheet(title="4, then 2, then 3 ranks", header=header, rows=rows),
        picture("resume", through, resized),
        max(apart),
    )


def differences(through: list, continued: list) -> list[float]:
    """Return the relative differences of the losses, step by step."""
    return [abs(a - b) / a for (_, a, _), (_, b, _) in zip(through, continued, strict=True)]


def picture(name: str, through: list, continued: list) -> Picture:
    """Return both runs' losses as curves, one for each number of ranks."""
    curves = {"4 ranks, uninterrupted": [(step, loss) for step, loss, _ in through]}
    for size in dict.fromkeys(size for _, _, size in continued):
        label = f"continued on {size} ranks" if size != 4 else "4 ranks, interrupted"
        curves[label] = [(step, loss) for step, loss, ranks in continued if ranks == size]
    return Picture(name=name, x_label="step", y_label="loss", curves=curves, y_log=True)


def losses(logdir: Path) -> list[tuple[int, float, int]]:
    """Return (step, loss, ranks) by step; for a repeated step, the last."""
    lines = [json.loads(line) for line in (logdir / "losses.jsonl").read_text().splitlines()]
    return sorted({step: (step, loss, size) for step, loss, size in lines}.values())


def newest(logdir: Path) -> int:
    """Return the step of the newest checkpoint, or 0."""
    names = [p.name for p in (logdir / "checkpoints").glob("step-*")] if logdir.exists() else []
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def wait_for_save(process: subprocess.Popen[bytes], logdir: Path, step: int) -> None:
    """Wait until a run has saved ``step`` or a later one; raise RunFailed if it ends before."""
    while newest(logdir) < step:
        if process.poll() is not None:
            raise RunFailed(f"it ended with exit code {process.returncode} at step {newest(logdir)}, before the kill")
        time.sleep(0.01)


def command(worker: Path, logdir: Path, np: int, *flags: str) -> list[str]:
    """Return the command of a run."""
    mpirun = [str(BIN / "mpirun"), "--bind-to", "none", "-np", str(np)]
    return [*mpirun, sys.executable, str(worker), str(logdir), *flags]


def start(worker: Path, logdir: Path, np: int, *flags: str) -> subprocess.Popen[bytes]:
    """Start a run."""
    env, nowhere = environment(threads=None), subprocess.DEVNULL
    return subprocess.Popen(command(worker, logdir, np, *flags), env=env, stdout=nowhere, stderr=nowhere)


def complete(worker: Path, logdir: Path, np: int, *flags: str) -> Any:
    """Run to the end; return the result that the chief prints."""
    started = time.monotonic()
    printed = launch([command(worker, logdir, np, *flags)], env=environment(threads=None), timeout=1800)
    line = next(line for line in printed.splitlines() if line.startswith("result "))
    print(f"{logdir.name}, {np} ranks: done in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return json.loads(line.removeprefix("result "))


def rank_processes(parent: int, script: Path) -> list[psutil.Process]:
    """Return the processes below a launcher that run ``script``, in rank order."""
    found = []
    for process in psutil.Process(parent).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(Path(word) == script for word in process.cmdline()):
                found.append((int(process.environ()["OMPI_COMM_WORLD_RANK"]), process))
    return [process for _, process in sorted(found, key=lambda pair: pair[0])]


if __name__ == "__main__":
    sys.exit(main())
