"""A script whose ranks build unlike graphs: ``python unlike.py extra|dtype``."""

import sys

import tensorflow as tf

import hvdkit as hk

cluster = hk.init()
odd = cluster.rank == 1


@tf.function
def step(x):
    y = hk.allreduce(x)
    if sys.argv[1] == "dtype" and odd:
        return hk.allreduce(tf.cast(x, tf.float64))  # another dtype
    if sys.argv[1] == "extra" and odd:
        y = y + hk.allreduce(x)  # one more
    return hk.allreduce(x * 2)  # the second


step(tf.ones([3]))
