"""One rank raises at step 5 while the others hold buffered data: ``python unwinding.py FOLDER KIND``.

All ranks have open files with buffered data, a ``finally`` clause and two ``atexit`` handlers. KIND selects the call
in which ranks other than 1 wait: graph, eager, exchange, sleep, or finally.
"""

import atexit
import sys
import time
from pathlib import Path

FOLDER, KIND = Path(sys.argv[1]), sys.argv[2]


def mark(name):
    """Create a marker file for this rank."""
    (FOLDER / f"{name}-{cluster.rank}").write_text("")


atexit.register(lambda: mark("first-handler"))

import tensorflow as tf  # noqa: E402

import hvdkit as hk  # noqa: E402

cluster = hk.init()
atexit.register(lambda: mark("last-handler"))
step = tf.function(lambda x: hk.allreduce(x))
kept = (FOLDER / f"kept-{cluster.rank}").open("w")  # never closed: the interpreter flushes it
kept.write("kept")


def wait():
    """Wait for rank 1, which never arrives, in the call that KIND selects."""
    if KIND == "graph":
        step(tf.ones([10]))
    elif KIND == "eager":
        hk.allreduce(1.0)
    elif KIND == "exchange":
        hk.allgather_object(1)
    elif KIND == "finally":
        try:
            time.sleep(1000)
        finally:
            time.sleep(1000)
    else:
        time.sleep(1000)


with (FOLDER / f"closed-{cluster.rank}").open("w") as file:
    try:
        file.write("closed")
        for number in range(5):
            step(tf.ones([10]))
            hk.allreduce(number)
        if cluster.rank == 1:
            time.sleep(0.5)
            raise hk.NonFiniteError("the loss is NaN") if KIND == "eager" else ValueError("the disk is full")
        wait()
    finally:
        mark("finally")
