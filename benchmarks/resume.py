"""Show that a run that is killed and continued ends as one that was not.

    python benchmarks/resume.py kill --np 2 --kills 10
    python benchmarks/resume.py resize --plot docs/resume.png

``kill``: a run is ended by kill -9 (one rank, the chief, or all of them, in turn) at random moments, and started again
by the same command, until it is done; its weights, slots and random states must equal, to the bit on every rank,
those of a run that nobody touched.

``resize``: a run of 4 ranks is stopped after a third of its steps and continued by 2, then by 3; its losses stand
beside those of a run of 4 ranks that went through.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKER = Path(__file__).with_name("resume_worker.py")
STEPS = 390
KILLED_STEPS = 900


def main() -> int:
    """Run what is asked for; return 1 if a run that was continued differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    kill = commands.add_parser("kill")
    kill.add_argument("--np", type=int, default=2)
    kill.add_argument("--kills", type=int, default=10)
    kill.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    resize = commands.add_parser("resize")
    resize.add_argument("--plot", type=Path, help="write the loss curves here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.command == "kill":
            return show_kills(Path(folder), args.np, args.kills, random.Random(args.seed))
        return show_resize(Path(folder), args.plot)


def show_kills(folder: Path, np: int, kills: int, chance: random.Random) -> int:
    """Compare a run that is killed ``kills`` times with one that is not."""
    print(f"a run of {np} ranks, {KILLED_STEPS} steps, a checkpoint every 10: ", end="", flush=True)
    started, flags = time.monotonic(), ["--steps", str(KILLED_STEPS)]
    expected = finish(folder / "whole", np, *flags)
    print(f"{time.monotonic() - started:.0f} s, digests of the ranks {expected}", flush=True)
    victims = ["one rank", "the chief", "all ranks"]
    number = 0
    while number < kills:
        victim = victims[number % len(victims)]
        moment = 5 + chance.uniform(0, 2.5)
        before = newest(folder / "killed")
        process = start(folder / "killed", np, *flags)
        try:
            process.wait(timeout=moment)
        except subprocess.TimeoutExpired:
            strike(process, victim)
            process.wait(timeout=60)
        if process.returncode == 0:
            print("  it was done before it could be killed: give it fewer steps a run", flush=True)
            break
        number += 1
        saved = newest(folder / "killed")
        print(f"kill {number}: {victim} after {moment:.1f} s; saved up to step {saved}, before {before}", flush=True)
    found = finish(folder / "killed", np, *flags)
    print(f"killed {number} times, digests of the ranks {found}: {'equal' if found == expected else 'DIFFERENT'}")
    return int(found != expected or number < kills)


def strike(process: subprocess.Popen[str], victim: str) -> None:
    """Send kill -9 to ranks of the job."""
    ranks = rank_processes(process.pid)
    chosen = {"one rank": ranks[-1:], "the chief": ranks[:1], "all ranks": ranks}[victim]
    for pid in chosen:
        os.kill(pid, signal.SIGKILL)


def rank_processes(parent: int) -> list[int]:
    """Return the processes of the ranks, in rank order, below mpirun."""
    import psutil

    found = []
    for child in psutil.Process(parent).children(recursive=True):
        if any(Path(word).name == WORKER.name for word in child.cmdline()):
            found.append((int(child.environ()["OMPI_COMM_WORLD_RANK"]), child.pid))
    return [pid for _, pid in sorted(found)]


def show_resize(folder: Path, plot: Path | None) -> int:
    """Compare the losses of 4 -> 2 -> 3 ranks with those of 4 ranks that went through."""
    flags = ["--dropout", "0", "--rest", "0"]  # dropout masks are each rank's own
    finish(folder / "whole", 4, "--steps", str(STEPS), *flags)
    for number, np in enumerate([4, 2, 3], start=1):
        finish(folder / "resized", np, "--steps", str(number * STEPS // 3), *flags)
    whole, resized = losses(folder / "whole"), losses(folder / "resized")
    differences = [abs(a - b) / a for (_, a, _), (_, b, _) in zip(whole, resized, strict=True)]
    for third in range(3):
        part = slice(third * STEPS // 3, (third + 1) * STEPS // 3)
        ranks, worst = resized[part][0][2], max(differences[part])
        print(f"steps {part.start + 1}-{part.stop} on {ranks} ranks: largest relative difference {worst:.1e}")
    print(f"last loss {whole[-1][1]:.6f} through, {resized[-1][1]:.6f} continued by 2 and 3 ranks")
    if plot:
        draw(whole, resized, plot)
    return int(max(differences) > 0.01)


def draw(whole: list, resized: list, plot: Path) -> None:
    """Draw both curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.figure(figsize=(7, 3.5))
    steps, through, _ = zip(*whole, strict=True)
    plt.plot(steps, through, color="0.7", linewidth=4, label="4 ranks, through")
    for np in dict.fromkeys(size for _, _, size in resized):
        part = [(s, loss) for s, loss, size in resized if size == np]
        label = f"continued on {np} ranks" if np != 4 else "4 ranks, stopped"
        plt.plot(*zip(*part, strict=True), linewidth=1, label=label)
    plt.xlabel("step")
    plt.ylabel("loss")
    plt.yscale("log")
    plt.legend()
    plt.tight_layout()
    plt.savefig(plot, dpi=110)


def losses(logdir: Path) -> list[tuple[int, float, int]]:
    """Return (step, loss, ranks) by step; of a step that was done twice, the last."""
    lines = [json.loads(line) for line in (logdir / "losses.jsonl").read_text().splitlines()]
    return sorted({step: (step, loss, size) for step, loss, size in lines}.values())


def newest(logdir: Path) -> int:
    """Return the step of the newest checkpoint, or 0."""
    names = [p.name for p in (logdir / "checkpoints").glob("step-*")] if logdir.exists() else []
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def start(logdir: Path, np: int, *flags: str) -> subprocess.Popen[str]:
    """Start a run."""
    env = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "mpirun"
    command = [mpirun, "--bind-to", "none", "-np", str(np), sys.executable, str(WORKER), str(logdir), *flags]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def finish(logdir: Path, np: int, *flags: str) -> list[str]:
    """Run to the end; return each rank's digest."""
    process = start(logdir, np, *flags)
    output, _ = process.communicate(timeout=300)
    line = next((line for line in output.splitlines() if line.startswith("digests ")), None)
    if process.returncode or line is None:
        sys.exit(f"{WORKER.name} on {np} ranks ended with exit code {process.returncode}:\n{output}")
    return json.loads(line.removeprefix("digests "))


if __name__ == "__main__":
    sys.exit(main())
