"""One rank of ``hvdkit tune``: time a model's computation, allreduces, and steps with several settings.

    python -m hvdkit.commands.bench.tune_worker '{"model": "cifar10", "batch": 64, ...}'

The chief prints the results as one line, which ``hvdkit tune`` extracts from the output.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hvdkit as hk
from hvdkit.commands.bench.worker import send_result, traffic
from hvdkit.commands.bench.workloads import Workload, measure, optimizer, train_step, workload

BUCKET = "HVDKIT_BUCKET_BYTES"
_COPY_BYTES = 32 * 1024 * 1024
_ALLREDUCE_BYTES = (4, 4096, 32_768, 2**20, 2**22, 2**24)
_REPEATS = 7


@dataclass(frozen=True, kw_only=True)
class MeasurementRequest:
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
    buckets: Sequence[int] = ()


def main() -> None:
    """Run the measurements and print the results."""
    request = MeasurementRequest(**json.loads(sys.argv[1]))
    hk.init()
    work = workload(request.model, request.batch)
    needs_no_rows = not work.sharded_bytes or hk.size() == 1
    compute: list[float] = []
    if request.compute and needs_no_rows:
        plain = train_step(work, optimizer(request.optimizer))
        compute = measure(plain, work.batches(), request.steps * request.rounds, request.warm_up)
    elif request.compute:
        compute = measure(_matmul(), ((),) * 10**6, request.steps * request.rounds, request.warm_up)
    steps, rows = _time_steps(work, request)
    send_result(
        {
            "local_ranks": hk.local_size(),
            "compute": compute,  # seconds of steps without communication
            "copy": _copy_seconds() if request.compute else 0.0,  # seconds to copy one byte
            "gradients": gradients(work),  # bytes and readiness of each dense gradient
            "rows": rows,  # bytes sent in alltoalls per step, and number of alltoalls
            "exchanges": _time_allreduces() if request.links else [],  # bytes and seconds of allreduces
            "steps": steps,  # seconds of each step, by bucket in the requested order, then by round
        }
    )


def _matmul() -> Any:
    """Return a step that only computes: its time shows whether other ranks compete for this rank's cores."""
    import tensorflow as tf

    left = tf.Variable(tf.random.normal([1024, 1024]))
    return tf.function(lambda: tf.reduce_sum(tf.matmul(left, left)))


def _time_steps(work: Workload, request: MeasurementRequest) -> tuple[list[list[list[float]]], tuple[int, int]]:
    """Return the seconds of steps by bucket and round, and the rows that a step exchanges: bytes and alltoalls."""
    distributed = hk.DistributedOptimizer(optimizer(request.optimizer))
    steps = []
    for nbytes in request.buckets:
        os.environ[BUCKET] = str(nbytes)  # read when the step is traced
        steps.append(train_step(work, distributed))
        measure(steps[-1], work.batches(), 0, request.warm_up)
    seconds: list[list[list[float]]] = [[] for _ in steps]
    for _ in range(request.rounds):
        for number, step in enumerate(steps):
            hk.barrier()
            seconds[number].append(measure(step, work.batches(), request.steps, 1))
    rows = (0, 0)
    if steps and work.sharded_bytes:
        collectives, sent = traffic(steps[0], work, distributed)
        rows = (sent - work.gradient_bytes, collectives - 1)
    return seconds, rows


def gradients(work: Workload) -> list[tuple[int, float]]:
    """Return the bytes of each dense gradient, and the time at which it is computed as a fraction of the step.

    Assumes that the forward pass takes a third of the step, and that a layer's time in both passes is proportional to
    its multiplications: its weights times the positions at which each is used.
    """
    from hvdkit.sharding.shards import shard_of

    positions: dict[int, int] = {}
    for layer in work.model._flatten_layers():
        # A nested model, or a layer that is not called exactly once, lacks an output.
        shape = getattr(getattr(layer, "output", None), "shape", (None,))
        count = math.prod(extent or 1 for extent in shape[1:-1])
        for variable in layer.trainable_variables:
            positions[id(variable)] = min(count, positions.get(id(variable), count))
    variables = [v for v in work.model.trainable_variables if shard_of(v) is None]
    multiplications = [math.prod(v.shape) * positions.get(id(v), 1) for v in variables]
    total = sum(multiplications) or 1
    done = 0
    result = []
    for variable, count in zip(reversed(variables), reversed(multiplications), strict=True):
        done += count
        result.append((4 * math.prod(variable.shape), (1 + 2 * done / total) / 3))
    return result[::-1]


def _copy_seconds() -> float:
    """Return the seconds to copy one byte."""
    import numpy as np

    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.empty(_COPY_BYTES, np.uint8)
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return statistics.median(times) / _COPY_BYTES


def _time_allreduces() -> list[tuple[int, float]]:
    """Return bytes and seconds of allreduces, each inside a graph, like those of gradients."""
    import tensorflow as tf

    result = []
    for nbytes in _ALLREDUCE_BYTES:
        variable = tf.Variable(tf.zeros([nbytes // 4]))
        allreduce = tf.function(lambda variable=variable: hk.allreduce(variable.read_value(), hk.Sum)[0])
        allreduce()
        times = []
        for _ in range(_REPEATS):
            hk.barrier()
            started = time.perf_counter()
            float(allreduce())
            times.append(time.perf_counter() - started)
        result.append((nbytes, statistics.median(times)))
    return result


if __name__ == "__main__":
    main()
