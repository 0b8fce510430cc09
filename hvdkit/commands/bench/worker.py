"""One rank of ``hvdkit bench``: time the steps of a built-in workload.

    python -m hvdkit.commands.bench.worker '{"model": "cifar10", "batch": 64, ...}'

The chief prints all ranks' results as one line, which ``hvdkit bench`` extracts from the output.
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict, dataclass
from typing import Any

import hvdkit as hk
from hvdkit.cluster.progress import progress
from hvdkit.commands.bench.workloads import Workload, measure, optimizer, train_step, workload

# Starts the line of results.
MARK = "hvdkit-bench: "


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The options of a rank, as in :class:`config.Bench`; ``extra`` is the number of steps to profile."""

    model: str
    batch: int
    optimizer: str
    steps: int
    warm_up: int
    extra: int = 0


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One rank's results.

    Attributes:
        seconds: time of each step.
        memory: peak memory of the process in bytes.
        threads: compute threads of this rank.
        collectives: Horovod ops per step.
        sent: bytes that this rank passes to them per step.
        device: "GPU" or "CPU".
    """

    seconds: list[float]
    memory: int
    threads: int
    collectives: int
    sent: int
    device: str


def main() -> None:
    """Run the workload and print the results."""
    options = WorkerOptions(**json.loads(sys.argv[1]))
    hk.init()
    import tensorflow as tf

    work = workload(options.model, options.batch)
    distributed = hk.DistributedOptimizer(optimizer(options.optimizer))
    step = train_step(work, distributed)
    seconds = measure(step, work.batches(), options.steps, options.warm_up, progress().at_step)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if options.extra:
        before = options.steps + options.warm_up
        measure(step, work.batches(), options.extra, 0, lambda number: progress().at_step(before + number))
    collectives, sent = traffic(step, work, distributed)
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    device = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    result = RankResult(
        seconds=seconds, memory=memory, threads=threads, collectives=collectives, sent=sent, device=device
    )
    send_result(asdict(result))


def send_result(result: dict[str, Any]) -> None:
    """Send this rank's results to the command: the chief prints all ranks' results as one line."""
    results = hk.allgather_object(result)
    if hk.is_chief():
        print(MARK + json.dumps(results), flush=True)


def traffic(step: Any, work: Workload, distributed: Any) -> tuple[int, int]:
    """Return the number of collectives in a step, and the bytes that this rank passes to them. Every rank calls it.

    Sizes that depend on the batch, such as the number of rows that ranks request, are measured on one batch.
    """
    import tensorflow as tf

    def collectives(graph: Any) -> list[Any]:
        return [op for op in graph.get_operations() if op.type.startswith("Horovod")]

    def inputs_of(op: Any) -> list[Any]:
        return [tensor for tensor in op.inputs if tensor.dtype.is_floating or tensor.dtype.is_integer]

    ops = collectives(step.get_concrete_function(*work.data[0]).graph)
    tensors = [tensor for op in ops for tensor in inputs_of(op)]
    if all(tensor.shape.is_fully_defined() for tensor in tensors):
        return len(ops), sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors)

    plain = train_step(work, distributed).python_function

    @tf.function
    def counted(inputs: Any, labels: Any) -> Any:
        loss = plain(inputs, labels)
        tensors = [tensor for op in collectives(tf.compat.v1.get_default_graph()) for tensor in inputs_of(op)]
        sent = [tf.size(tensor, tf.int64) * tensor.dtype.size for tensor in tensors]
        return loss, tf.add_n(sent)

    return len(ops), int(counted(*work.data[0])[1])


if __name__ == "__main__":
    main()
