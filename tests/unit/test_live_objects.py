"""Instances of a class are found, also of subclasses, while other threads work."""

from __future__ import annotations

import sys
import threading

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
