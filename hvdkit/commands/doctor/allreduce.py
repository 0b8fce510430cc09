"""What each rank of the live check runs: ``python -m hvdkit.commands.doctor.allreduce`` under a launcher.

Raw Horovod and mpi4py, since the check must not depend on what it helps to debug.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Print one line of JSON: this rank, the size of its world, and the sum of all ranks' ``rank + 1``."""
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # as hk.init() does
    import tensorflow as tf  # before MPI: see the check import-order

    # mpi4py before hvd.init(), so that it owns MPI. Otherwise the first rank that ends makes Horovod finalise MPI
    # on every rank, and one that is still in an mpi4py call crashes.
    mpi4py_size = start_mpi4py()
    import horovod.tensorflow as hvd

    hvd.init()
    total = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum)
    result = {"rank": hvd.rank(), "size": hvd.size(), "sum": float(total[0]), "mpi4py_size": mpi4py_size}
    sys.stdout.write(f"hvdkit-allreduce {json.dumps(result)}\n")  # one write: launchers tag every write
    sys.stdout.flush()
    hvd.shutdown()


def start_mpi4py() -> int | None:
    """Start MPI and return the size of its world, or None under Gloo, which has no MPI, or without mpi4py."""
    if "HOROVOD_RANK" in os.environ:  # set by horovodrun --gloo
        return None
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    return MPI.COMM_WORLD.Get_size()


if __name__ == "__main__":
    main()
