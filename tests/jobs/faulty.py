"""A small training script that injects one fault on one rank at step 20: ``python faulty.py FAULT RANK``."""

import atexit
import os
import signal
import sys
import threading
import time
from pathlib import Path

import tensorflow as tf

import hvdkit as hk
from hvdkit.cluster.progress import progress

FAULT, AT = sys.argv[1], int(sys.argv[2])
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 40


def fail() -> None:
    """Inject the fault into one rank."""
    if FAULT == "raise":
        raise ValueError("the disk is full")
    if FAULT == "thread":
        threading.Thread(target=lambda: [][0], name="loader").start()
        time.sleep(1000)
    if FAULT in ("sys.exit(3)", "slow sys.exit(3)"):
        sys.exit(3)
    if FAULT == "sys.exit(0)":
        sys.exit(0)
    if FAULT == "os._exit(0)":
        os._exit(0)
    if FAULT == "kill -9":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "out of memory":  # the kernel kills it, as on a host or in a container without free memory
        Path(os.environ["HVDKIT_TEST_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
        b"x" * 2**30
    if FAULT == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "caught":  # in a step; the program goes on as if nothing had happened
        try:
            bad_step(x)
        except tf.errors.OpError:
            time.sleep(1000)
    if FAULT == "hang":
        time.sleep(1000)
    if FAULT == "hk.busy":  # longer than other ranks may wait for a rank that works
        with hk.busy("uploading"):
            time.sleep(7 * float(os.environ["HVDKIT_WATCHDOG_SECONDS"]))
    if FAULT == "killed in hk.busy":
        with hk.busy("uploading"):
            time.sleep(float(os.environ["HVDKIT_HEARTBEAT_SECONDS"]))  # until rank 0 knows
            os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "busy":  # hold Python's lock for twice the heartbeat's limit: no failure
        sys.setswitchinterval(1000)
        until = time.monotonic() + 2 * float(os.environ["HVDKIT_HEARTBEAT_SECONDS"])
        while time.monotonic() < until:
            pass
        sys.setswitchinterval(0.005)


if FAULT == "slow sys.exit(3)":  # after hvdkit's own handlers
    atexit.register(lambda: time.sleep(5 if cluster.rank == AT else 0))
cluster = hk.init()
step = tf.function(lambda x: hk.allreduce(x))
x = tf.ones([1000])


@tf.function
def bad_step(x):
    """Read a file that does not exist on this rank, then exchange."""
    return hk.allreduce(x + tf.strings.to_number(tf.io.read_file("part-3.csv")))


hk.barrier()
number = 0
while number < STEPS or FAULT in ("wait", "hosts"):
    progress().at_step(number)
    if number == 20:
        if cluster.rank == AT:
            print(f"fault at {time.time()}", flush=True)
        if FAULT == "same":
            raise ValueError("the same on every rank")
        if cluster.rank == AT:
            fail()
    if number % 2:
        hk.allreduce(1)
    else:
        step(x)
    number += 1
    time.sleep(0.02)
if FAULT == "busy" and cluster.rank == AT:  # the other ranks have finished and wait for nothing: no failure
    time.sleep(3)
print(f"rank {cluster.rank} has trained {number} steps", flush=True)
