"""One rank of benchmarks/allreduce.py: time an allreduce of float32 over sizes, in one of several variants."""

from __future__ import annotations

import timeit
from collections.abc import Callable

import numpy as np
from timing import leave, meet, parser

BUDGET = 0.5  # seconds per size
MANY, FEW = 400, 8


def main() -> None:
    """Time every size, and write microseconds by size."""
    variants = {
        "graph": hvdkit_graph,
        "eager": hvdkit_eager,
        "horovod": horovod,
        "mpi4py": with_mpi4py,
        "memcpy": memcpy,
    }
    options = parser(__doc__)
    options.add_argument("variant", choices=variants)
    options.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes")
    args = options.parse_args()
    make, rank, agree = variants[args.variant]()
    found = {}
    for size in args.sizes:
        run = make(np.full(size // 4, rank + 1, np.float32))
        timed(run, 3)
        meet(args.folder, rank, args.processes, f"ready-{size}")
        once = agree(timed(run, 3))  # all ranks must run the same number of times
        times = max(FEW, min(MANY, int(BUDGET / once)))
        meet(args.folder, rank, args.processes, f"start-{size}")
        found[f"us_{size}"] = 1e6 * timed(run, times)
    leave(args.folder, rank, found)
    meet(args.folder, rank, args.processes, "end")


def timed(call: Callable[[], object], times: int) -> float:
    """Return the mean seconds of ``times`` consecutive calls."""
    return timeit.timeit(call, number=times) / times


def check(total: np.ndarray, size: int) -> None:
    """Raise an error unless ``total`` is the sum over ranks of 1, 2, ..."""
    if not np.all(np.asarray(total) == size * (size + 1) / 2):
        raise RuntimeError(f"got {np.asarray(total).ravel()[:3]}, expected the sum of 1 to {size}")


def in_graph(reduce: Callable, size: int):
    """Return a factory of compiled functions that reduce an array."""
    import tensorflow as tf

    def make(values):
        tensor, summed = tf.constant(values), tf.function(reduce)
        check(summed(tensor).numpy(), size)
        return lambda: summed(tensor)

    return make


def hvdkit_graph():
    """``hk.allreduce`` in a compiled function."""
    import hvdkit as hk

    cluster = hk.init()
    make = in_graph(lambda x: hk.allreduce(x, hk.Sum), cluster.size)
    return make, cluster.rank, lambda x: max(hk.allgather_object(x))


def hvdkit_eager():
    """``hk.allreduce`` of a tensor in eager mode; arguments are compared over ranks each time."""
    import hvdkit as hk

    cluster = hk.init()
    import tensorflow as tf

    def make(values):
        tensor = tf.constant(values)
        check(hk.allreduce(tensor, hk.Sum).numpy(), cluster.size)
        return lambda: hk.allreduce(tensor, hk.Sum)

    return make, cluster.rank, lambda x: max(hk.allgather_object(x))


def horovod():
    """``hvd.allreduce`` in a compiled function, with Horovod's own settings."""
    import horovod.tensorflow as hvd

    hvd.init()
    import tensorflow as tf

    make = in_graph(lambda x: hvd.allreduce(x, op=hvd.Sum), hvd.size())
    return make, hvd.rank(), lambda x: float(hvd.allreduce(tf.constant(x), op=hvd.Max))


def with_mpi4py():
    """``MPI.COMM_WORLD.Allreduce`` on NumPy arrays, without hvdkit or Horovod."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def make(values):
        total = np.empty_like(values)
        world.Allreduce(values, total)
        check(total, world.size)
        return lambda: world.Allreduce(values, total)

    return make, world.rank, lambda x: world.allreduce(x, MPI.MAX)


def memcpy():
    """A copy of the same bytes within each rank: a lower bound for any exchange."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def make(values):
        copy = np.empty_like(values)
        return lambda: np.copyto(copy, values)

    return make, world.rank, lambda x: world.allreduce(x, MPI.MAX)


if __name__ == "__main__":
    main()
