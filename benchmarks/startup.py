"""What starting costs: `import hvdkit` over TensorFlow's, `hk.init()` over `hvd.init()`, `hvdkit run` over `mpirun`.

    python benchmarks/startup.py

Each pair is run in turn, in fresh processes on two ranks (`hvdkit run`: four); medians of the differences count.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
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
        missed += report(name, values, limit)
    values = [(started(["mpirun"]), started(["hvdkit", "run"])) for _ in range(args.rounds)]
    missed += report("hvdkit run -np 4", values, 1.0)
    return int(missed > 0)


def report(name: str, values: list[tuple[float, float]], limit: float) -> bool:
    """Print the medians of pairs of seconds, without hvdkit and with it; return True if the limit is passed."""
    base = statistics.median(theirs for theirs, _ in values)
    extra = statistics.median(ours - theirs for theirs, ours in values)
    verdict = "met" if extra <= limit else "MISSED"
    print(f"{name}: {base:.2f} s without hvdkit, {extra:+.3f} s with it, limit {limit} s: {verdict}", flush=True)
    return extra > limit


def started(launcher: list[str]) -> float:
    """Return the seconds until the last of four ranks has begun its program."""
    begin = time.time()
    done = launch([*launcher, "-np", "4", "sh", "-c", "date +began-%s.%N"])
    return max(float(text) for text in re.findall(r"began-([\d.]+)", done)) - begin


def launch(command: list[str]) -> str:
    """Run a launcher of this environment to its end; return what it printed."""
    folder = Path(sys.executable).parent
    env = os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    command = [str(folder / command[0]), *command[1:]]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120).stdout


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
    lines = launch(["mpirun", "-np", "2", sys.executable, "-c", code]).splitlines()
    return max(json.loads(line)["seconds"] for line in lines if line.startswith('{"seconds'))


if __name__ == "__main__":
    sys.exit(main())
