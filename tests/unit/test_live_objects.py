"""Instances of a class are found, also of subclasses, while other threads work."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from hvdkit.cluster.live_objects import live_instances


class Layer:
    pass


class Dense(Layer):
    pass


def test_instances_of_a_class_and_its_subclasses_are_found():
    layers = [Layer(), Dense()]
    assert {id(each) for each in live_instances(Layer)} == {id(each) for each in layers}
    assert live_instances(Dense) == layers[1:]
    del layers
    assert not live_instances(Layer)


def test_another_thread_may_build_tuples_meanwhile():
    """A search by ``gc.get_objects`` makes about one in 5,000 of them fail."""
    ended = threading.Event()

    def search():
        while not ended.is_set():
            live_instances(Layer)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=search)
    thread.start()
    sys.setswitchinterval(1e-5)
    try:
        assert all(len(tuple((i,) for i in range(50))) == 50 for _ in range(30_000))
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()


@pytest.mark.nightly
def test_eager_tensors_may_allocate_memory_meanwhile():
    """They create their dictionary when they are looked at; a collection at that moment was a segmentation fault."""
    program = """
import gc
import tensorflow as tf
from hvdkit.cluster.live_objects import live_instances
for _ in range(20):
    gc.disable()  # a collection would look at the tensors, too
    tensors = [tf.ones([2]) for _ in range(500)]
    gc.set_threshold(gc.get_count()[0] + 50, 1, 1)  # reached while they are looked at
    gc.enable()
    live_instances(tf.Graph)
print(gc.isenabled())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]
