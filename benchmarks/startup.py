"""Measure startup overhead: `import hvdkit` over TensorFlow, `hk.init()` over `hvd.init()`, `hvdkit run` over `mpirun`.

python benchmarks/startup.py
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from figures import Goal, Metric
from harness import Benchmark, Case, Config, Variant, main
from processes import BIN, environment, launch

EVERYTHING = "import hvdkit as hk, tensorflow, keras; hk.init, hk.allreduce, hk.DistributedOptimizer, hk.data"
SECONDS = (Metric(name="seconds", title="seconds", digits=3),)


def cases(_: Config) -> list[Case]:
    """Return a case for each pair."""
    raw = "import tensorflow, horovod.tensorflow as hvd"
    ours = "import hvdkit as hk, tensorflow, horovod.tensorflow"
    return [
        pair(
            "import",
            "`import hvdkit`",
            0.2,
            without=("`import tensorflow`", partial(timed, "", "import tensorflow")),
            with_it=("`import hvdkit, tensorflow`", partial(timed, "", "import hvdkit, tensorflow")),
        ),
        pair(
            "everything",
            "importing all of hvdkit",
            0.2,
            without=("TensorFlow and Keras", partial(timed, "", "import tensorflow, keras")),
            with_it=("hvdkit's parts, TensorFlow and Keras", partial(timed, "", EVERYTHING)),
        ),
        pair(
            "init",
            "`hk.init()`",
            0.5,
            without=("`hvd.init()`", partial(timed, raw, "hvd.init()")),
            with_it=("`hk.init()`", partial(timed, ours, "hk.init()")),
        ),
        pair(
            "run",
            "starting four ranks",
            1.0,
            without=("`mpirun`", partial(started, "mpirun")),
            with_it=("`hvdkit run`", partial(started, "hvdkit", "run")),
        ),
    ]


Timing = tuple[str, Callable[[Path], dict[str, float]]]  # a title, and what returns the seconds


def pair(name: str, title: str, limit: float, *, without: Timing, with_it: Timing) -> Case:
    """Return a case that compares a start without and with hvdkit, which may take ``limit`` seconds longer."""
    goal = Goal(
        upper="with", lower="without", metric="seconds", limit=limit, difference=True, about=f"{title}, extra seconds"
    )
    variants = [
        Variant(name=name, title=title, run=run) for name, (title, run) in (("without", without), ("with", with_it))
    ]
    return Case(name=name, title=title, variants=variants, metrics=SECONDS, goals=[goal])


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
    about="""Each pair runs in fresh processes on two ranks, of which the slower one counts. The last pair is the time
    until the last of four ranks has started its program. The goals limit the differences.""",
    cases=cases,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
