"""A script whose ranks build or run different graphs: ``python unlike.py extra|dtype|shape|branch|eager|nothing``."""

import sys
import time

import tensorflow as tf

import hvdkit as hk

KIND = sys.argv[1]
cluster = hk.init()
odd = cluster.rank == 1


@tf.function
def step(x):
    y = hk.allreduce(x)  # the first
    if KIND == "dtype" and odd:
        return hk.allreduce(tf.cast(y, tf.float64))  # another dtype
    if KIND == "extra" and odd:
        y = y + hk.allreduce(x)  # one more
    return hk.allreduce(y[: 2 if KIND == "shape" and odd else 3] * 2)  # the second


@tf.function
def sometimes(x, taken):
    if taken:
        x = hk.allreduce(x, hk.Max)  # in a branch
    return hk.allreduce(x)  # after it


for number in range(5):
    sometimes(tf.ones([3]), tf.constant(number == 1 or (number == 3 and odd and KIND == "branch")))
if KIND == "eager" and odd:
    hk.barrier()  # alone
for _ in range(3000 if KIND == "extra" else 1):
    value = step(tf.ones([3])).numpy()
    time.sleep(0.1 * (KIND == "extra"))
assert (value == 2).all()
print("trained", flush=True)
