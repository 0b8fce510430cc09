"""Code shared by all workers that time steps: start together, warm up, time, and write a result file."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PATIENCE = 240.0  # seconds to wait for other processes


def parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options common to all workers."""
    made = argparse.ArgumentParser(description=about)
    made.add_argument("--folder", type=Path, required=True, help="for results, and for files that processes wait for")
    made.add_argument("--steps", type=int, default=40, help="timed steps")
    made.add_argument("--processes", type=int, default=1, help="number of processes")
    made.add_argument("--number", type=int, default=0, help="number of this process, if no launcher sets it")
    return made


def meet(folder: Path, number: int, processes: int, where: str) -> None:
    """Wait until every process has reached this call, without using any framework."""
    (folder / f"{where}-{number}").touch()
    until = time.monotonic() + PATIENCE
    while len(list(folder.glob(f"{where}-*"))) < processes:
        if time.monotonic() > until:
            raise TimeoutError(f"process {number} waited {PATIENCE:.0f} s for the others at {where!r}")
        time.sleep(0.001)


def time_steps(
    args: argparse.Namespace,
    step: Callable[[int], object],
    number: int,
    *,
    warm_up: int = 8,
    before: Callable[[], object] = lambda: None,
    extra: Callable[[], Mapping[str, float]] = dict,
) -> None:
    """Time ``step`` while all processes run it, and write its median as this process's result.

    Args:
        args: parsed options of :func:`parser`.
        step: called with its number; returns when it is done.
        number: number of this process.
        warm_up: number of untimed steps at the start.
        before: called before each timed step, untimed, e.g. a barrier.
        extra: called at the end, returns further figures.
    """
    for count in range(warm_up):
        step(count)
    meet(args.folder, number, args.processes, "start")
    seconds = []
    for count in range(args.steps):
        before()
        started = time.perf_counter()
        step(count)
        seconds.append(time.perf_counter() - started)
    leave(args.folder, number, {"ms": 1000 * statistics.median(seconds), **extra()})
    meet(args.folder, number, args.processes, "end")  # no process ends while another still needs it


def leave(folder: Path, number: int, result: Mapping[str, float]) -> None:
    """Write this process's result, with its peak memory."""
    memory = {"memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    (folder / f"result-{number}.json").write_text(json.dumps({**memory, **result}))
