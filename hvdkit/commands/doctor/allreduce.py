"""The program of each rank in the live check: ``python -m hvdkit.commands.doctor.allreduce`` under a launcher.

It uses Horovod and mpi4py directly, because the check must not depend on the code that it helps to debug.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Print one line of JSON: this rank, the world size, and the sum of ``rank + 1`` over all ranks."""
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # as hk.init() does
    import tensorflow as tf  # before MPI: see the check import-order

    # mpi4py before hvd.init(), so that it owns MPI. Otherwise the first rank that ends makes Horovod finalize MPI on
    # every rank, and a rank that is still in an mpi4py call crashes.
    mpi4py_size = start_mpi4py()
    import horovod.tensorflow as hvd

    hvd.init()
    total = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum)
    result = {"rank": hvd.rank(), "size": hvd.size(), "sum": float(total[0]), "mpi4py_size": mpi4py_size}
    sys.stdout.write(f"hvdkit-allreduce {json.dumps(result)}\n")  # one write: launchers tag every write
    sys.stdout.flush()
    hvd.shutdown()


def start_mpi4py() -> int | None:
    """Start MPI and return its world size, or None under Gloo or without mpi4py."""
    if "HOROVOD_RANK" in os.environ:  # set by horovodrun --gloo
        return None
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    return MPI.COMM_WORLD.Get_size()


if __name__ == "__main__":
    main()
