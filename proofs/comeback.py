"""Show a run that loses a host and continues on the others.

    python proofs/comeback.py       # about 2 minutes; needs root, iproute2, openssh-server

Four hosts (network namespaces with sshd) with a rank on each, started by ``hvdkit run --max-restarts 1 --min-np 3``.
At a random step, the network of one host is cut off. Records the seconds until the job has ended and until it trains
again, and compares the losses with those of an uninterrupted run of four ranks.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import paths
import tyro
from figures import Sheet
from harness import Output, publish
from helpers.hosts import Hosts, missing
from helpers.jobs import environment
from resume import LIMIT, WORKER, differences, losses, picture

ABOUT = """Four hosts in network namespaces of one machine, one rank on each, under `hvdkit run --max-restarts 1
--min-np 3`. At a random step, the network of one host is cut off, and the job continues on three."""


@dataclass(frozen=True, kw_only=True)
class Config(Output):
    """Cut off one of four hosts in the middle of a run."""

    steps: int = 300
    """Number of steps of the run."""
    seed: int = 0
    """Seed of the step and the host."""
    heartbeat: float = 10.0
    """HVDKIT_HEARTBEAT_SECONDS of the run."""


@dataclass(frozen=True)
class Run:
    """Results of a run.

    Attributes:
        losses: (step, loss, ranks) by step.
        over: seconds from the cut until the job had ended.
        again: seconds from the cut until it was training again.
    """

    losses: list[tuple[int, float, int]]
    code: int
    output: str
    over: float = 0.0
    again: float = 0.0


def train(folder: Path, config: Config, cut_at: int | None = None, victim: int = 0) -> Run:
    """Train on four hosts; cut off host ``victim`` after step ``cut_at``."""
    folder.mkdir()
    log = folder / "log" / "losses.jsonl"
    command = ["hvdkit", "run", "--max-restarts", "1", "--min-np", "3"]
    program = [sys.executable, str(WORKER), str(folder / "log"), "--steps", str(config.steps), "--dropout", "0"]
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", "HVDKIT_HEARTBEAT_SECONDS": str(config.heartbeat)}
    env = environment(PYTHONPATH=str(paths.ROOT), **env)
    with Hosts(4) as hosts, (folder / "out").open("wb") as out:
        process = hosts[0].start(
            [*command, "-H", hosts.list, "--", *program], env=env, stdout=out, stderr=subprocess.STDOUT
        )
        cut = over = again = 0.0
        while process.poll() is None:
            time.sleep(0.05)
            lines = log.read_text().count("\n") if log.exists() else 0
            if cut_at is not None and not cut and lines >= cut_at:
                hosts[victim].cut()
                cut, before = time.monotonic(), lines
            if cut and not over and "; the job ended after" in (folder / "out").read_text(errors="replace"):
                over, before = time.monotonic() - cut, lines
            if over and not again and lines > before:
                again = time.monotonic() - cut
    output = (folder / "out").read_text(errors="replace")
    return Run(losses(folder / "log"), process.returncode, output, over, again)


def main() -> int:
    """Run both, record the results, and return MISSED if the losses differ."""
    config = tyro.cli(Config, description=__doc__)
    if (why := missing()) is not None:
        sys.exit(f"cannot simulate hosts on this machine: {why}")
    chance = random.Random(config.seed)
    step, victim = chance.randint(config.steps // 4, config.steps * 3 // 4), chance.randint(1, 3)
    with tempfile.TemporaryDirectory() as name:
        whole = train(Path(name) / "whole", config)
        cut = train(Path(name) / "cut", config, step, victim)
    print("\n".join(line for line in cut.output.splitlines() if line.startswith("hvdkit run:")), file=sys.stderr)
    worst = max(differences(whole.losses, cut.losses))
    rows = [
        [number, f"{through:.6f}", f"{continued:.6f}", ranks]
        for (number, through, _), (_, continued, ranks) in zip(whole.losses, cut.losses, strict=True)
        if number % max(1, config.steps // 10) == 0
    ]
    return publish(
        "comeback",
        "A run that loses a host",
        ABOUT,
        config,
        folder="proofs",
        missed=worst > LIMIT or cut.code != 0,
        sheets=[Sheet(title="", header=["step", "4 ranks, uninterrupted", "continued", "ranks"], rows=rows)],
        pictures=[picture("comeback", whole.losses, cut.losses)],
        notes=[
            f"host {victim} cut off at step {step}: the job ended after {cut.over:.1f} s and was training again after "
            f"{cut.again:.1f} s, exit code {cut.code}",
            f"largest relative difference of the loss, over all steps: {worst:.1e}",
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
