"""Time a step of sharded embeddings beside replicated tables: lookup, loss, update.

    python benchmarks/embedding.py                                      # one table of 1,000,000 x 64, SGD
    python benchmarks/embedding.py --work many --optimizer adagrad      # 26 tables of mixed sizes, ragged ids

4,096 samples a rank with 26 features whose ids follow Zipf's law (1.2), one compute thread a process. The ways are
interleaved, so that a slow minute of the machine meets all of them alike; ratios are taken within a round, and their
median counts:

    plain      one process: a replicated table, tf.gather and scatter_sub (Keras's optimizer for the others)
    hvdkit-1   one process
    hvdkit-2   horovodrun -np 2
    sparse-2   raw Horovod, replicated tables, sparse gradients gathered
    dense-2    raw Horovod, replicated tables, sparse gradients made dense (one table with SGD only: it takes long)
    hvdkit-2-ahead           with --ahead: each step sends the next one's ids
    torchrec-1, torchrec-2   with --torchrec PYTHON, of an environment as torchrec_worker.py says (one table, SGD),
                             table by table; torchrec-columns-2: each rank half of the columns
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from dense import machine

HERE = Path(__file__).resolve().parent
WAYS = {"plain": ("plain", 1), "hvdkit-1": ("hvdkit", 1), "hvdkit-2": ("hvdkit", 2), "sparse-2": ("sparse", 2)}
DENSE = {"dense-2": ("dense", 2)}
GOALS = [("hvdkit-2", "sparse-2", 0.45), ("hvdkit-2", "hvdkit-1", 1.08), ("hvdkit-1", "plain", 1.0)]


def main() -> int:
    """Run all rounds and print the table; exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=["one", "many"], default="one")
    parser.add_argument("--optimizer", choices=["sgd", "adagrad", "adam"], default="sgd")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is run (default: 5)")
    parser.add_argument("--steps", type=int, default=40, help="timed steps in a run (default: 40)")
    parser.add_argument("--ahead", action="store_true", help="also with ids that travel a step ahead (layer.ask)")
    parser.add_argument("--torchrec", type=Path, help="the Python that has TorchRec")
    parser.add_argument("--json", type=Path, help="also write all results here")
    args = parser.parse_args()
    ways = WAYS | (DENSE if (args.work, args.optimizer) == ("one", "sgd") else {})
    if args.ahead:
        ways |= {"hvdkit-2-ahead": ("ahead", 2)}
    if args.torchrec is not None:
        ways |= {"torchrec-1": ("torchrec", 1), "torchrec-2": ("torchrec", 2), "torchrec-columns-2": ("columns", 2)}
    rounds = []
    for number in range(args.rounds):
        rounds.append({name: run(*way, args) for name, way in ways.items()})
        shown = ", ".join(f"{name} {result['ms']:.1f}" for name, result in rounds[-1].items())
        print(f"round {number + 1}/{args.rounds}: {shown} ms", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rounds": rounds}, indent=2))
    return report(rounds, args)


def run(way: str, size: int, args: argparse.Namespace) -> dict[str, float]:
    """Run one way; return the slowest rank's median, and the largest of everything else."""
    env = os.environ | {
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        kind = ["hvdkit", "--ahead"] if way == "ahead" else [way]
        worker = [sys.executable, str(HERE / "embedding_worker.py"), *kind, "--folder", folder, "--work", args.work]
        worker += ["--optimizer", args.optimizer, "--steps", str(args.steps)]
        command = worker if size == 1 else ["horovodrun", "-np", str(size), *worker]
        if way in ("torchrec", "columns"):
            peer = [str(HERE / "torchrec_worker.py"), "--folder", folder, "--steps", str(args.steps)]
            peer += ["--sharding", "column_wise"] if way == "columns" else []
            command = [str(args.torchrec), "-m", "torch.distributed.run", "--nproc-per-node", str(size), *peer]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
        results = [json.loads(file.read_text()) for file in Path(folder).glob("result-*.json")]
    return {key: max(result[key] for result in results) for key in results[0]}


def report(rounds: list[dict[str, dict[str, float]]], args: argparse.Namespace) -> int:
    """Print the table and the goals; return 1 if one is missed."""
    what = "one table of 1,000,000 x 64" if args.work == "one" else "26 tables of mixed sizes and widths, ragged ids"
    print(f"\n{what}, {args.optimizer}; {machine()}\n")
    print("| way | ms/step: median (min-max) | memory a rank |\n|---|---|---|")
    for name in rounds[0]:
        times = [r[name]["ms"] for r in rounds]
        spread = f"{statistics.median(times):.1f} ({min(times):.1f}-{max(times):.1f})"
        print(f"| {name} | {spread} | {statistics.median(r[name]['memory_mb'] for r in rounds):.0f} MB |")
    print()
    missed = 0
    for upper, lower, goal in GOALS:
        ratio = statistics.median(r[upper]["ms"] / r[lower]["ms"] for r in rounds)
        missed += not say(f"{upper} / {lower}", ratio, goal)
    one, two = rounds[0]["hvdkit-1"], rounds[0]["hvdkit-2"]
    missed += not say("table memory of a rank of 2 / whole", two["table_mb"] / one["table_mb"], 1.02 / 2)
    missed += not say("bytes sent / (distinct ids of a pair of ranks x (id + 2 rows))", two["bytes_ratio"], 1.05)
    missed += not say("alltoalls in a step", two["alltoalls"], 3)
    return int(missed > 0)


def say(what: str, value: float, goal: float) -> bool:
    """Print a goal and whether it is met."""
    print(f"- {what} = {value:.3f}, goal <= {goal}: {'met' if value <= goal else 'MISSED'}")
    return value <= goal


if __name__ == "__main__":
    sys.exit(main())
