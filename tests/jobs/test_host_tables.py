"""Tables in host memory, with computation on another device: here TensorFlow's second logical CPU."""

from __future__ import annotations

from helpers.jobs import run

CODE = """
import hvdkit as hk

hk.init()
import keras
import numpy as np
import tensorflow as tf

device = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * 2)
results = {}
for host in (False, True):
    with tf.device("CPU:1"):
        tables = [
            hk.layers.Table("cut", 30_000, 4, host=host),
            hk.layers.Table("small", 3, 4, host=host),
            hk.layers.Table("words", 64, 4, evict="lru", host=host),
        ]
        layer = hk.layers.ShardedEmbeddingCollection(tables, seed=1)
        layer.build()
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        optimizer = hk.DistributedOptimizer(keras.optimizers.Adam(0.1))

        @tf.function
        def step(ids):
            with tf.GradientTape() as tape:
                found = list(layer(ids, training=True).values())
                loss = tf.reduce_sum(dense(tf.concat(found, 1)))
            variables = [*layer.trainable_variables, *dense.trainable_variables]
            optimizer.apply(tape.gradient(loss, variables), variables)
            return found

        words = tf.constant([7, -8, 2**40])
        ids = {"cut": tf.constant([5, 29_999, 5]), "small": tf.constant([0, 2, 2]), "words": words}
        for _ in range(2):
            found = step(ids)
    place = "CPU:0" if host else "CPU:1"
    slots = [v for v in optimizer.variables if v.shape.rank == 2 and v.shape[1] == 4]
    assert len(slots) == 6
    for variable in [*layer.weights, *slots]:
        assert variable.value.device.endswith(place), (variable.path, variable.value.device)
    assert all(v.device.endswith("CPU:1") for v in found), [v.device for v in found]
    assert dense.kernel.value.device.endswith("CPU:1")
    results[host] = [layer.gather(t.name) for t in tables]
for one, other in zip(*results.values()):
    np.testing.assert_array_equal(one, other)
plan = hk.plan_tables(tables, 2, optimizer="adam")
assert plan.ranks[0].weights == 0 and plan.ranks[0].host > 0 and " host" in str(plan), plan
print("same")
"""


def test_host_tables_stay_with_their_slots_and_train_alike():
    job = run(CODE)
    assert job.code == 0 and job.output.endswith("same\n"), job.output
