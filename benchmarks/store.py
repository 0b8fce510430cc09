"""Compare training with checkpoints in a slow object store with training that saves to a folder, in the same run.

python benchmarks/store.py
python benchmarks/store.py --np 4 --megabytes-per-second 50
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from figures import Goal, Metric
from harness import Benchmark, Case, Config, Variant, main
from processes import environment, launch, ranks, worker

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.object_store import BUCKET, Request, served

METRICS = (
    Metric(name="ms", title="ms/step, mean"),
    Metric(name="median", title="median"),
    Metric(name="call", title="a step that begins a save, ms"),
    Metric(name="saves", title="saves", digits=0),
)


@dataclass(frozen=True, kw_only=True)
class StoreConfig(Config):
    """Measure training while checkpoints are uploaded."""

    np: int = 2
    """Number of ranks."""
    seconds: float = 45.0
    """Of training, per run."""
    megabytes: float = 40.0
    """Size of a checkpoint, over all ranks."""
    every: float = 12.0
    """Seconds between saves."""
    megabytes_per_second: float = 10.0
    """What the store takes, from all ranks together."""


def cases(config: StoreConfig) -> list[Case]:
    """Return the only case."""
    rate = f"{config.megabytes_per_second:g} MB/s"
    return [
        Case(
            name="slow",
            title=f"{config.megabytes:g} MB every {config.every:g} s, {config.np} ranks, a store of {rate}",
            variants=[
                Variant(name="local", title="a local folder", run=partial(in_folder, config)),
                Variant(name="store", title=f"a store of {rate}", run=partial(in_store, config)),
            ],
            metrics=METRICS,
            goals=[
                Goal(upper="store", lower="local", metric="ms", limit=1.05, headline=True,
                     about="Step with checkpoints in a slow store / in a folder"),
                Goal(upper="store", lower="local", metric="call", limit=1.0,
                     about="Step that begins a save, slow store / folder"),
            ],
            reference="local",
        )
    ]  # fmt: skip


def in_folder(config: StoreConfig, folder: Path) -> Mapping[str, float]:
    """Train with a local logdir."""
    return train(config, folder, str(folder / "run"), {})


def in_store(config: StoreConfig, folder: Path) -> Mapping[str, float]:
    """Train with a logdir in a store on this host, which takes as long for each request as the rate says."""
    with served() as store:
        store.fault = limited(config.megabytes_per_second * 1e6)
        return train(config, folder, f"s3://{BUCKET}/run", store.environment)


def limited(rate: float) -> Callable[[Request], None]:
    """Return a fault that delays requests, so that all together have at most ``rate`` bytes per second."""
    lock = threading.Lock()
    free_at = time.monotonic()

    def delay(request: Request) -> None:
        nonlocal free_at
        with lock:
            free_at = max(free_at, time.monotonic()) + request.length / rate
            until = free_at
        time.sleep(max(0.0, until - time.monotonic()))

    return delay


def train(config: StoreConfig, folder: Path, logdir: str, env: Mapping[str, str]) -> Mapping[str, float]:
    """Run the worker; return its figures."""
    seconds, every, megabytes = (20.0, 4.0, 8.0) if config.quick else (config.seconds, config.every, config.megabytes)
    options = ("--seconds", seconds, "--every", every, "--megabytes", megabytes)
    program = worker("store.py", logdir, folder / "result.json", *options)
    keys = [word for name in env for word in ("--env", name)]
    launch([ranks(config.np, program, keys)], env=environment(**env), timeout=600)
    return json.loads((folder / "result.json").read_text())


BENCHMARK = Benchmark(
    name="store",
    title="Checkpoints in an object store",
    about="""A recommender's table, sharded across ranks, is trained under `hk.Supervisor` with timed saves: to a local
    folder, or to an S3 server on this host behind a proxy that delays uploads. The server's own work is done by the
    cores that train. A step is that of rank 0, from one end to the next, saves included; the last save is not.""",
    cases=cases,
    config=StoreConfig,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
