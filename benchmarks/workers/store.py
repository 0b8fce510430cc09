"""One rank of benchmarks/store.py: train a sharded table under a Supervisor; the chief writes the seconds of steps."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import hvdkit as hk

# isort: split
import keras
import numpy as np
from upath import UPath

WIDTH = 16
BATCH = 256
IDS = 20
WARM_UP = 20  # steps that are not counted


def main() -> None:
    """Train, and write the chief's figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logdir")
    parser.add_argument("result", type=Path)
    parser.add_argument("--seconds", type=float, default=45.0, help="of training")
    parser.add_argument("--every", type=float, default=12.0, help="seconds between saves")
    parser.add_argument("--megabytes", type=float, default=40.0, help="of the table, over all ranks")
    args = parser.parse_args()
    hk.init()
    keras.utils.set_random_seed(hk.rank())
    rows = int(args.megabytes * 1e6) // (4 * WIDTH)
    model = keras.Sequential(
        [
            keras.Input((IDS,), dtype="int64"),
            hk.layers.ShardedEmbedding(rows, WIDTH),
            keras.layers.Flatten(),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    ids = np.random.randint(0, rows, (BATCH, IDS))
    y = np.random.rand(BATCH, 1).astype("float32")
    ends: list[float] = []
    with hk.Supervisor(args.logdir, model=model, save_model_secs=args.every, max_to_keep=None) as sv:
        began = time.perf_counter()
        while not sv.should_stop():
            loss = model.train_on_batch(ids, y)
            sv.step(loss=loss)
            ends.append(time.perf_counter())
            if hk.is_chief() and ends[-1] - began > args.seconds:
                sv.request_stop()
    if hk.is_chief():
        names = [path.name for path in UPath(args.logdir, "checkpoints").iterdir()]
        saved = {int(name.removeprefix("step-")) for name in names if name.startswith("step-")}
        args.result.write_text(json.dumps(figures(ends, saved - {len(ends)})))


def figures(ends: list[float], saved: set[int]) -> dict[str, float]:
    """Return the figures of all steps.

    Args:
        ends: when each step ended, in seconds.
        saved: the steps after which a save began.
    """
    seconds = np.diff(ends)[WARM_UP:]
    # The first difference is the duration of step 2.
    starts = [seconds[step - 2 - WARM_UP] for step in saved if step >= WARM_UP + 2]
    if not starts:
        raise SystemExit(f"no save began in {len(ends)} steps; raise --seconds, or lower --every")
    return {
        "ms": 1e3 * float(seconds.mean()),
        "median": 1e3 * float(np.median(seconds)),
        "call": 1e3 * statistics.median(map(float, starts)),
        "saves": len(starts),
    }


if __name__ == "__main__":
    main()
