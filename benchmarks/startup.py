"""Measure startup overhead: `import hvdkit` over TensorFlow, `hk.init()` over `hvd.init()`, `hvdkit run` over `mpirun`.

python benchmarks/startup.py
"""

from __future__ import annotations

import json
import re
import sys
import time
from functools import partial
from pathlib import Path

from figures import Goal, Metric
from harness import Benchmark, Case, Config, Way, main
from processes import BIN, environment, launch

# name: (title, (untimed, timed code) without hvdkit, the same with it, maximum overhead in seconds)
PAIRS = {
    "import": ("`import hvdkit`", ("", "import tensorflow"), ("", "import hvdkit, tensorflow"), 0.2),
    "everything": (
        "importing all of hvdkit",
        ("", "import tensorflow, keras"),
        ("", "import hvdkit as hk, tensorflow, keras; hk.init, hk.allreduce, hk.DistributedOptimizer, hk.data"),
        0.2,
    ),
    "init": (
        "`hk.init()`",
        ("import tensorflow, horovod.tensorflow as hvd", "hvd.init()"),
        ("import hvdkit as hk, tensorflow, horovod.tensorflow", "hk.init()"),
        0.5,
    ),
}
SECONDS = (Metric(name="seconds", title="seconds", digits=3),)


def cases(_: Config) -> list[Case]:
    """Return a case for each pair."""
    found = [
        pair(name, title, partial(timed, *without), partial(timed, *with_it), limit)
        for name, (title, without, with_it, limit) in PAIRS.items()
    ]
    start = pair("run", "starting four ranks", partial(started, "mpirun"), partial(started, "hvdkit", "run"), 1.0)
    return [*found, start]


def pair(name: str, title: str, without, with_it, limit: float) -> Case:
    """Return a case that compares the same code with and without hvdkit."""
    difference = Goal(
        upper="with", lower="without", metric="seconds", limit=limit, difference=True, about=f"{title}, extra seconds"
    )
    ways = {
        "import": ("`import tensorflow`", "`import hvdkit, tensorflow`"),
        "everything": ("TensorFlow and Keras", "hvdkit's parts, TensorFlow and Keras"),
        "init": ("`hvd.init()`", "`hk.init()`"),
        "run": ("`mpirun`", "`hvdkit run`"),
    }[name]
    return Case(
        name=name,
        title=title,
        ways=[
            Way(name="without", title=ways[0], run=without),
            Way(name="with", title=ways[1], run=with_it),
        ],
        metrics=SECONDS,
        goals=[difference],
    )


def started(*words_and_folder: str | Path) -> dict[str, float]:
    """Return the seconds until the last of four ranks has started its program."""
    program, *words = map(str, words_and_folder[:-1])
    begin = time.time()
    command = [str(BIN / program), *words, "-np", "4", "sh", "-c", "date +began-%s.%N"]
    printed = launch([command], env=environment(threads=None), timeout=120)
    return {"seconds": max(float(text) for text in re.findall(r"began-([\d.]+)", printed)) - begin}


def timed(before: str, statement: str, _: Path) -> dict[str, float]:
    """Return the seconds that ``statement`` takes on the slower of two ranks."""
    code = f"""
import json, time, os
{before}
started = time.perf_counter()
{statement}
seconds = time.perf_counter() - started
os.write(1, (json.dumps({{"seconds": seconds}}) + chr(10)).encode())
"""
    command = [str(BIN / "mpirun"), "-np", "2", sys.executable, "-c", code]
    lines = launch([command], env=environment(threads=None), timeout=120).splitlines()
    return {"seconds": max(json.loads(line)["seconds"] for line in lines if line.startswith('{"seconds'))}


BENCHMARK = Benchmark(
    name="startup",
    title="Starting",
    about="""Each pair in fresh processes on two ranks, the slower one counts; the last pair is the time until the last
    of four ranks has begun its program. What counts is the difference.""",
    cases=cases,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
