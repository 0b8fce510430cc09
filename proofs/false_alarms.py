"""Run healthy jobs under stress: the watchdog must not end any of them.

    python proofs/false_alarms.py --runs 1000
    python proofs/false_alarms.py --runs 20 --stresses lock "sentinel killed"

Each run is a job of four ranks with hvdkit's own sentinels, coordinator and reporter, but without TensorFlow and MPI,
so that a thousand runs take minutes. At one step one rank is stressed: it holds Python's lock for twice the heartbeat's
limit, saves for three times the limit within ``hk.busy``, forks children, or is stopped by a debugger; or the whole
job is stopped (SIGSTOP) and continued; or a sentinel is killed or stopped; or the host's clock jumps by an hour and
back (a library that ``cc`` compiles); or four processes per core compute all the time. Several jobs run at once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import paths
import psutil
import tyro
from figures import Sheet
from harness import Output, publish
from processes import environment

ABOUT = """Healthy jobs of four ranks, each under one kind of stress, and how many of them the watchdog ended or
reported."""
RANKS, STEPS = 4, 10
STRESSES = ("none", "lock", "save", "fork", "stop", "debugger", "sentinel killed", "sentinel stopped", "clock", "load")
_PTRACE_ATTACH, _PTRACE_DETACH = 16, 17


@dataclass(frozen=True, kw_only=True)
class Config(Output):
    """Run healthy jobs under stress."""

    runs: int = 1000
    """Total number of jobs, divided among the stresses."""
    stresses: tuple[str, ...] = STRESSES
    """Stresses to apply."""
    at_once: int = 4
    """Jobs at a time: 4 jobs are 16 ranks and 16 sentinels."""
    heartbeat: float = 1.5
    """Heartbeat limit in seconds; hvdkit's default is 10."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run; ``problem`` is empty if nothing went wrong."""

    stress: str
    problem: str


def run(stress: str, seed: int, heartbeat: float) -> Outcome:
    """Run one job."""
    folder = Path(tempfile.mkdtemp(prefix="hvdkit-healthy-"))
    env = environment(
        HVDKIT_HEARTBEAT_SECONDS=str(heartbeat),
        HVDKIT_WATCHDOG_SECONDS=str(4 * heartbeat),
        HVDKIT_FLIGHT_DIR=str(folder),
    )
    clock = folder / "clock"
    if stress == "clock":
        env |= {"LD_PRELOAD": str(clock_library()), "JUMPING_CLOCK": str(clock)}
    computing = [sys.executable, "-c", "while True: pass"]
    load = [subprocess.Popen(computing) for _ in range(4 * (os.cpu_count() or 1) if stress == "load" else 0)]
    ranks = []
    for rank in range(RANKS):
        words = [str(folder), str(rank), str(RANKS), str(STEPS), stress, str(seed)]
        with (folder / f"out-{rank}").open("wb") as out:
            command = [sys.executable, str(paths.WORKERS / "stressed_rank.py"), *words]
            ranks.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
    try:
        until = time.monotonic() + 120
        acted = False
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
            time.sleep(0.02)
            if not acted and (folder / "act").exists() and (text := (folder / "act").read_text()):
                acted = True
                act(stress, int(text), [rank.pid for rank in ranks], heartbeat, seed, clock)
        codes = [rank.poll() for rank in ranks]
        said = "".join((folder / f"out-{rank}").read_text() for rank in range(RANKS))
        wrong = [line for line in said.splitlines() if "hvdkit: rank" in line or "Traceback" in line]
        if codes != [0] * RANKS or wrong:
            return Outcome(stress, f"seed {seed}: exit codes {codes}; {' | '.join(wrong) or said[-300:]}")
        return Outcome(stress, "")
    finally:
        for one in (*ranks, *load):
            one.kill()
            one.wait()
        shutil.rmtree(folder, ignore_errors=True)


def act(stress: str, pid: int, every: list[int], heartbeat: float, seed: int, clock: Path) -> None:
    """Apply a stress to a job from outside."""
    chosen = random.Random(seed)
    if stress == "stop":  # the whole job, rank by rank
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for one in chosen.sample(every, len(every)):
                os.kill(one, number)
                time.sleep(0.05 * chosen.random())
            time.sleep(2 * heartbeat if number == signal.SIGSTOP else 0)
    elif stress == "clock":
        for hours in (1, -1, 0):
            clock.write_bytes(struct.pack("l", 3600 * hours))
            time.sleep(heartbeat)
    elif stress == "debugger":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.ptrace(_PTRACE_ATTACH, pid, None, None) == 0:
            os.waitpid(pid, 0)
            time.sleep(2 * heartbeat)
            libc.ptrace(_PTRACE_DETACH, pid, None, None)
    else:
        for one in sentinels_of(pid):
            os.kill(one, signal.SIGKILL if stress == "sentinel killed" else signal.SIGSTOP)


@cache
def clock_library() -> Path:
    """Return the compiled library that makes the clock of a process jump."""
    folder = Path(tempfile.mkdtemp(prefix="hvdkit-clock-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "jumping_clock.so"
    source = paths.WORKERS / "jumping_clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True)
    return library


def sentinels_of(pid: int) -> list[int]:
    """Return the sentinels that watch a process."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            words = process.cmdline()
            leads = os.getsid(process.pid) == process.pid  # unlike the process that starts the sentinel
            if leads and "watch" in words and words[words.index("watch") + 1] == str(pid):
                found.append(process.pid)
    return found


def main() -> int:
    """Run the selected stresses, and record how many jobs were ended."""
    config = tyro.cli(Config, description=__doc__)
    began = time.monotonic()
    if "clock" in config.stresses:
        clock_library()  # compile before several jobs need it
    jobs = list(itertools.islice(itertools.cycle(config.stresses), config.runs))
    done: Counter[str] = Counter()
    alarms: Counter[str] = Counter()
    with ThreadPoolExecutor(config.at_once) as pool:
        for outcome in pool.map(lambda job: run(job[1], job[0], config.heartbeat), enumerate(jobs)):
            done[outcome.stress] += 1
            if outcome.problem:
                alarms[outcome.stress] += 1
                print(f"{outcome.stress}: {outcome.problem}", file=sys.stderr)
            elif done.total() % 50 == 0:
                print(f"{done.total()} runs, {alarms.total()} alarms", file=sys.stderr)
    rows = [[stress, str(done[stress]), str(alarms[stress])] for stress in config.stresses]
    rows.append(["all", str(done.total()), str(alarms.total())])
    code = publish(
        "false_alarms",
        "False alarms",
        ABOUT,
        config,
        folder="proofs",
        sheets=[Sheet(title="jobs", header=["stress", "jobs", "ended or reported"], rows=rows)],
        notes=[f"{time.monotonic() - began:.0f} s in all, {config.at_once} jobs at a time"],
    )
    return code or min(1, alarms.total())


if __name__ == "__main__":
    sys.exit(main())
