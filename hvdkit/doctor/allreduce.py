"""What each rank of the live check runs: one allreduce of the ranks' numbers; ``python -m hvdkit.doctor.allreduce``."""

import json
import os
import sys

# As hk.init() does. Raw Horovod otherwise, since this check must not depend on what it helps to debug.
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")

import horovod.tensorflow as hvd
import tensorflow as tf


def main() -> None:
    """Print one line of JSON: this rank, the size of its world, and the sum of all ranks' ``rank + 1``."""
    hvd.init()
    total = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum)
    line = json.dumps({"rank": hvd.rank(), "size": hvd.size(), "sum": float(total[0])})
    sys.stdout.write(f"hvdkit-allreduce {line}\n")  # one write: launchers tag every write
    sys.stdout.flush()
    hvd.shutdown()


if __name__ == "__main__":
    main()
