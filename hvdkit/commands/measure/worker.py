"""One rank of a job that measures: time steps of a built-in workload, its computation alone, and allreduces.

    python -m hvdkit.commands.measure.worker '{"model": "cifar10", "batch": 64, ...}'

The chief prints all ranks' measurements as one line, which jobs.py reads.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import hvdkit as hk
from hvdkit.cluster.progress import progress
from hvdkit.commands.measure.measurements import BUCKET, Gradient, MeasureRequest, RankMeasurement, TimedAllreduce
from hvdkit.commands.measure.workloads import Inputs, Workload, measure, optimizer, train_step, workload

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

# Starts the line of results.
MARK = "hvdkit-bench: "
_COPY_BYTES = 32 * 1024 * 1024
_ALLREDUCE_BYTES = (4, 4096, 32_768, 2**20, 2**22, 2**24)
_REPEATS = 7


def main() -> None:
    """Measure what is requested on the command line; the chief prints the measurements of all ranks."""
    request = MeasureRequest(**json.loads(sys.argv[1]))
    hk.init()
    measurement = measure_rank(request)
    results = hk.allgather_object(asdict(measurement))
    if hk.is_chief():
        print(MARK + json.dumps(results), flush=True)


def measure_rank(request: MeasureRequest) -> RankMeasurement:
    """Return what this rank measures. Every rank calls it."""
    import tensorflow as tf

    work = workload(request.model, request.batch)
    compute = _time_compute(work, request) if request.compute else []
    distributed = hk.DistributedOptimizer(optimizer(request.optimizer))
    steps = [train_step(work, distributed) for _ in request.buckets]
    numbers = itertools.count(1)

    def count(_: int) -> None:
        progress().at_step(next(numbers))

    seconds = _time_steps(steps, work, request, count)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if request.profiled:
        measure(steps[0], work.batches(), request.profiled, 0, count)
    collectives, sent = traffic(steps[0], work, distributed) if steps else (0, 0)
    return RankMeasurement(
        local_ranks=hk.local_size(),
        threads=tf.config.threading.get_intra_op_parallelism_threads(),
        device="GPU" if tf.config.list_logical_devices("GPU") else "CPU",
        memory=memory,
        steps=seconds,
        collectives=collectives,
        sent=sent,
        has_rows=bool(work.sharded_bytes),
        gradients=gradients(work),
        compute=compute,
        copy=_copy_seconds() if request.compute else 0.0,
        exchanges=_time_allreduces() if request.links else [],
    )


def _time_compute(work: Workload, request: MeasureRequest) -> list[float]:
    """Return the seconds of steps without communication."""
    import tensorflow as tf

    steps = request.steps * request.rounds
    if work.sharded_bytes and hk.size() > 1:
        # A step cannot do without the rows of other ranks. The time of a product shows whether ranks compete for cores.
        left = tf.Variable(tf.random.normal([1024, 1024]))
        product = tf.function(lambda: tf.reduce_sum(tf.matmul(left, left)))
        return measure(product, itertools.repeat(()), steps, request.warm_up)
    return measure(train_step(work, optimizer(request.optimizer)), work.batches(), steps, request.warm_up)


def _time_steps(
    steps: Sequence[tf.types.experimental.PolymorphicFunction],
    work: Workload,
    request: MeasureRequest,
    each: Callable[[int], None],
) -> list[list[list[float]]]:
    """Return the seconds of steps by bucket and round; ``each`` is called after every step."""
    for nbytes, step in zip(request.buckets, steps, strict=True):
        if nbytes is not None:
            os.environ[BUCKET] = str(nbytes)  # read when the step is traced
        measure(step, work.batches(), 0, request.warm_up, each)
    seconds: list[list[list[float]]] = [[] for _ in steps]
    for _ in range(request.rounds):
        for number, step in enumerate(steps):
            hk.barrier()
            seconds[number].append(measure(step, work.batches(), request.steps, 1, each))
    return seconds


def traffic(
    step: tf.types.experimental.PolymorphicFunction, work: Workload, distributed: keras.optimizers.Optimizer
) -> tuple[int, int]:
    """Return the number of collectives in a step, and the bytes that this rank passes to them. Every rank calls it.

    Sizes that depend on the batch, such as the number of rows that ranks request, are measured on one batch.
    """
    import tensorflow as tf

    def collectives(graph: tf.Graph) -> list[tf.Operation]:
        return [op for op in graph.get_operations() if op.type.startswith("Horovod")]

    def inputs_of(op: tf.Operation) -> list[tf.Tensor]:
        return [tensor for tensor in op.inputs if tensor.dtype.is_floating or tensor.dtype.is_integer]

    ops = collectives(step.get_concrete_function(*work.data[0]).graph)
    tensors = [tensor for op in ops for tensor in inputs_of(op)]
    if all(tensor.shape.is_fully_defined() for tensor in tensors):
        return len(ops), sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors)

    plain = train_step(work, distributed).python_function

    @tf.function
    def counted(inputs: Inputs, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        loss = plain(inputs, labels)
        tensors = [tensor for op in collectives(tf.compat.v1.get_default_graph()) for tensor in inputs_of(op)]
        sent = [tf.size(tensor, tf.int64) * tensor.dtype.size for tensor in tensors]
        return loss, tf.add_n(sent)

    return len(ops), int(counted(*work.data[0])[1])


def gradients(work: Workload) -> list[Gradient]:
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
        result.append(Gradient(4 * math.prod(variable.shape), (1 + 2 * done / total) / 3))
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


def _time_allreduces() -> list[TimedAllreduce]:
    """Time allreduces, each inside a graph, like those of gradients."""
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
        result.append(TimedAllreduce(hk.size(), nbytes, statistics.median(times)))
    return result


if __name__ == "__main__":
    main()
