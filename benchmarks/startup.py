"""What starting costs: `import hvdkit` over `import tensorflow`, and `hk.init()` over `hvd.init()`.

    python benchmarks/startup.py

Each pair is run in turn, in fresh processes on two ranks; medians of the differences count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

# name: ((before the clock, timed) without hvdkit, the same with it, the most it may cost in seconds)
PAIRS = {
    "import hvdkit": (("", "import tensorflow"), ("", "import hvdkit, tensorflow"), 0.2),
    "all of hvdkit": (
        ("", "import tensorflow, keras"),
        ("", "import hvdkit as hk, tensorflow, keras; hk.init, hk.allreduce, hk.DistributedOptimizer, hk.data"),
        0.2,
    ),
    "hk.init()": (
        ("import tensorflow, horovod.tensorflow as hvd", "hvd.init()"),
        ("import hvdkit as hk, tensorflow, horovod.tensorflow", "hk.init()"),
        0.5,
    ),
}


def main() -> int:
    """Run the pairs and print the medians; exit 1 if a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how often each pair is run (default: 7)")
    args = parser.parse_args()
    missed = 0
    for name, (without, with_it, limit) in PAIRS.items():
        values = [(timed(*without), timed(*with_it)) for _ in range(args.rounds)]
        base = statistics.median(theirs for theirs, _ in values)
        extra = statistics.median(ours - theirs for theirs, ours in values)
        missed += extra > limit
        verdict = "met" if extra <= limit else "MISSED"
        print(f"{name}: {base:.2f} s without hvdkit, {extra:+.3f} s with it, limit {limit} s: {verdict}", flush=True)
    return int(missed > 0)


def timed(before: str, statement: str) -> float:
    """Return the seconds ``statement`` takes on the slower of two ranks."""
    code = f"""
import json, time, os
{before}
started = time.perf_counter()
{statement}
seconds = time.perf_counter() - started
os.write(1, (json.dumps({{"seconds": seconds}}) + chr(10)).encode())
"""
    bin_folder = Path(sys.executable).parent
    env = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    command = [str(bin_folder / "mpirun"), "-np", "2", sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
    return max(json.loads(line)["seconds"] for line in done.stdout.splitlines() if line.startswith('{"seconds'))


if __name__ == "__main__":
    sys.exit(main())
