"""One rank of benchmarks/ring.py: time the averaging of gradients of given sizes, in one of several variants."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
from timing import leave, meet, parser

TENSORS = 8  # per gradient size
WARM_UP, SMALL_TIMES = 2, 100


def main() -> None:
    """Time every size, and write milliseconds by size."""
    variants = {
        "hvdkit": with_hvdkit,
        "fp16": with_hvdkit,
        "own": with_hvdkit,
        "horovod": with_horovod,
        "central": central,
    }
    options = parser(__doc__)
    options.add_argument("variant", choices=variants)
    options.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes of float32")
    args = options.parse_args()
    rank, barrier, make = variants[args.variant](args.variant)
    found = {}
    for size in args.sizes:
        average = make(size)
        for _ in range(WARM_UP):
            average()
        seconds = []
        for _ in range(args.steps if size > 2**20 else SMALL_TIMES):
            barrier()
            started = time.perf_counter()
            average()
            seconds.append(time.perf_counter() - started)
        found[f"ms_{size}"] = 1000 * statistics.median(seconds)
    leave(args.folder, rank, found)
    meet(args.folder, rank, args.processes, "end")


def in_graph(average: Callable) -> Callable[[int], Callable[[], object]]:
    """Return a factory of compiled functions that average gradients of a given size."""
    import tensorflow as tf

    def make(size: int) -> Callable[[], object]:
        # Variables, which a graph cannot treat as constants.
        held = [tf.Variable(tf.ones([max(1, size // 4 // TENSORS)])) for _ in range(TENSORS)]

        @tf.function
        def averaged():
            return tf.add_n([grad[0] for grad in average([v + 0.0 for v in held])])

        return lambda: float(averaged())

    return make


def with_hvdkit(variant: str):
    """Average with hvdkit and its defaults; "fp16" in 16 bits."""
    import hvdkit as hk

    cluster = hk.init()
    compression = "fp16" if variant == "fp16" else None
    return cluster.rank, hk.barrier, in_graph(lambda grads: hk.average_gradients(grads, compression=compression))


def with_horovod(_: str):
    """Average with Horovod's own function, tensor by tensor like its tape, so that Horovod fuses them."""
    import horovod.tensorflow as hvd

    hvd.init()
    import tensorflow as tf

    def average(grads):
        return [hvd.allreduce(grad, name=f"{grad.shape[0]}-{i}") for i, grad in enumerate(grads)]

    return hvd.rank(), lambda: hvd.allreduce(tf.constant(0.0), name="barrier"), in_graph(average)


def central(_: str):
    """Send all gradients to rank 0, which averages them and returns the mean, like towers."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def make(size: int) -> Callable[[], object]:
        mine = np.ones(max(1, size // 4), np.float32)
        every = np.empty((world.size, len(mine)), np.float32) if world.rank == 0 else None

        def average() -> None:
            world.Gather(mine, every)
            mean = np.mean(every, axis=0) if every is not None else np.empty_like(mine)
            world.Bcast(mean)

        return average

    return world.rank, world.Barrier, make


if __name__ == "__main__":
    main()
