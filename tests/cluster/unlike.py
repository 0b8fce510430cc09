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
        return hk.allreduce(tf.cast(x, tf.float64))  # other dtype
    if sys.argv[1] == "extra" and odd:
        y = y + hk.allreduce(x)
    return hk.allreduce(x * 2)


step(tf.ones([3]))
step(tf.ones([3 + cluster.rank]))  # one rank traces once more: no difference
