"""A script whose ranks build or run different graphs: ``python unlike.py extra|branch|eager``."""

import sys

import tensorflow as tf

import hvdkit as hk

KIND = sys.argv[1]
cluster = hk.init()
odd = cluster.rank == 1


@tf.function
def step(x):
    y = hk.allreduce(x)  # the first
    if KIND == "extra" and odd:
        y = y + hk.allreduce(x)  # one more
    return hk.allreduce(y * 2)  # the second


@tf.function
def sometimes(x, taken):
    if taken:
        x = hk.allreduce(x, hk.Max)  # in a branch
    return hk.allreduce(x)  # after it


for number in range(5):
    sometimes(tf.ones([3]), tf.constant(number == 1 or (number == 3 and odd and KIND == "branch")))
if KIND == "eager" and odd:
    hk.barrier()  # alone
for _ in range(2):
    step(tf.ones([3]))
print("trained", flush=True)
