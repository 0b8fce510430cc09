"""One rank of ``hvdkit tune``: time a model's computation, allreduces, and steps with several settings.

    python -m hvdkit.bench.tuner '{"model": "cifar10", "batch": 64, ...}'

The chief prints the results as one line, which ``hvdkit tune`` extracts from the output.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import hvdkit as hk
from hvdkit.bench.worker import MARK, traffic
from hvdkit.bench.workloads import Workload, measure, optimizer, train_step, workload

BUCKET = "HVDKIT_BUCKET_BYTES"
_COPIED = 32 * 1024 * 1024
_SIZES = (4, 4096, 32_768, 2**20, 2**22, 2**24)
_REPEATS = 7


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A request to a rank: what to measure.

    Attributes:
        model: name of a built-in workload.
        batch: examples per step on each rank.
        optimizer: name of the optimizer.
        steps: steps per measurement.
        warm_up: warm-up steps.
        rounds: measurements per setting; settings alternate.
        compute: time steps without communication, and copies.
        links: time allreduces.
        buckets: values of HVDKIT_BUCKET_BYTES with which to time steps.
    """

    model: str
    batch: int
    optimizer: str
    steps: int
    warm_up: int
    rounds: int
    compute: bool = False
    links: bool = False
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Found:
    """One rank's measurements; times in seconds.

    Attributes:
        local_ranks: number of ranks on this rank's host.
        compute: times of steps without communication.
        copy: time to copy one byte.
        gradients: bytes and readiness of each dense gradient.
        rows: bytes sent in alltoalls per step, and number of alltoalls.
        exchanges: bytes and seconds of allreduces.
        steps: times of each step, by bucket in the requested order, then by round.
    """

    local_ranks: int
    compute: list[float]
    copy: float
    gradients: list[tuple[int, float]]
    rows: tuple[int, int]
    exchanges: list[tuple[int, float]]
    steps: list[list[list[float]]]


def main() -> None:
    """Run the measurements and print the results."""
    told = json.loads(sys.argv[1])
    wanted = Wanted(**told | {"buckets": tuple(told["buckets"])})
    hk.init()
    work = workload(wanted.model, wanted.batch)
    dense = not work.sharded_bytes or hk.size() == 1
    compute: list[float] = []
    if wanted.compute and dense:
        plain = train_step(work, optimizer(wanted.optimizer))
        compute = measure(plain, work.batches(), wanted.steps * wanted.rounds, wanted.warm_up)
    elif wanted.compute:
        compute = measure(_matmul(), ((),) * 10**6, wanted.steps * wanted.rounds, wanted.warm_up)
    steps, rows = _steps(work, wanted)
    mine = Found(
        local_ranks=hk.local_size(),
        compute=compute,
        copy=_copy_seconds() if wanted.compute else 0.0,
        gradients=gradients(work),
        rows=rows,
        exchanges=_allreduces() if wanted.links else [],
        steps=steps,
    )
    everyone = hk.allgather_object(asdict(mine))
    if hk.is_chief():
        print(MARK + json.dumps(everyone), flush=True)


def _matmul() -> Any:
    """Return a step that only computes: its time shows whether other ranks compete for this rank's cores."""
    import tensorflow as tf

    left = tf.Variable(tf.random.normal([1024, 1024]))
    return tf.function(lambda: tf.reduce_sum(tf.matmul(left, left)))


def _steps(work: Workload, wanted: Wanted) -> tuple[list[list[list[float]]], tuple[int, int]]:
    """Return the seconds of steps by bucket and round, and the rows that a step exchanges: bytes and alltoalls."""
    combining = hk.DistributedOptimizer(optimizer(wanted.optimizer))
    steps = []
    for nbytes in wanted.buckets:
        os.environ[BUCKET] = str(nbytes)  # read when the step is traced
        steps.append(train_step(work, combining))
        measure(steps[-1], work.batches(), 0, wanted.warm_up)
    found: list[list[list[float]]] = [[] for _ in steps]
    for _ in range(wanted.rounds):
        for number, step in enumerate(steps):
            hk.barrier()
            found[number].append(measure(step, work.batches(), wanted.steps, 1))
    rows = (0, 0)
    if steps and work.sharded_bytes:
        collectives, sent = traffic(steps[0], work, combining)
        rows = (sent - work.gradient_bytes, collectives - 1)
    return found, rows


def gradients(work: Workload) -> list[tuple[int, float]]:
    """Return the bytes of each dense gradient, and the time at which it is computed as a fraction of the step.

    The forward pass takes a third of the step. A layer's share of both passes is its number of multiplications: its
    weights times the positions at which each is used.
    """
    from hvdkit.collectives.shards import shard_of

    places: dict[int, int] = {}
    for layer in work.model._flatten_layers():
        # A nested model, or a layer that is not called exactly once, lacks an output.
        shape = getattr(getattr(layer, "output", None), "shape", (None,))
        used = 1
        for extent in shape[1:-1]:
            used *= extent or 1
        for variable in layer.trainable_variables:
            places[id(variable)] = min(used, places.get(id(variable), used))
    variables = [v for v in work.model.trainable_variables if shard_of(v) is None]
    counts = [_count(v) * places.get(id(v), 1) for v in variables]
    total, done, found = sum(counts) or 1, 0, []
    for variable, count in zip(reversed(variables), reversed(counts), strict=True):
        done += count
        found.append((4 * _count(variable), (1 + 2 * done / total) / 3))
    return found[::-1]


def _count(variable: Any) -> int:
    count = 1
    for extent in variable.shape:
        count *= extent
    return count


def _copy_seconds() -> float:
    """Return the seconds to copy one byte."""
    import numpy as np

    source, target = np.ones(_COPIED, np.uint8), np.empty(_COPIED, np.uint8)
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return statistics.median(times) / _COPIED


def _allreduces() -> list[tuple[int, float]]:
    """Return bytes and seconds of allreduces, each inside a graph, like those of gradients."""
    import tensorflow as tf

    found = []
    for nbytes in _SIZES:
        held = tf.Variable(tf.zeros([nbytes // 4]))
        exchange = tf.function(lambda held=held: hk.allreduce(held.read_value(), hk.Sum)[0])
        exchange()
        times = []
        for _ in range(_REPEATS):
            hk.barrier()
            started = time.perf_counter()
            float(exchange())
            times.append(time.perf_counter() - started)
        found.append((nbytes, statistics.median(times)))
    return found


if __name__ == "__main__":
    main()
