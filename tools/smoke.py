"""Run by every rank: one allreduce and one alltoall, compared with NumPy. Exit code 0 means that both are correct."""

import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()
rank, size = hvd.rank(), hvd.size()
if size != int(sys.argv[1]):
    sys.exit(f"rank {rank}: got a world of {size}, expected {sys.argv[1]}")

values = np.arange(1000, dtype=np.float32)
total = hvd.allreduce(tf.constant(values * (rank + 1)), op=hvd.Sum).numpy()
np.testing.assert_array_equal(total, values * sum(range(1, size + 1)))

# Rank r sends r + d + 1 rows of value 10 r + d to rank d.
splits = [rank + d + 1 for d in range(size)]
rows = np.repeat([10 * rank + d for d in range(size)], splits).astype(np.float32)
received, counts = hvd.alltoall(tf.constant(rows), splits=tf.constant(splits, tf.int32))
np.testing.assert_array_equal(counts, [r + rank + 1 for r in range(size)])
np.testing.assert_array_equal(received, np.repeat([10 * r + rank for r in range(size)], counts.numpy()))
hvd.shutdown()
