"""Optimizers in one process: which state is kept, and what is refused with sharded and with local variables."""

from __future__ import annotations

import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from packaging import version

import hvdkit as hk
from hvdkit.cluster.logs import warn_once

hk.init()
opts = keras.optimizers


def test_a_schedule_of_the_persons_own_is_taken_as_it_is():
    class Halves(opts.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.5 ** (tf.cast(step, tf.float32) + 1.0)

        def get_config(self):
            return {}

    variable = keras.Variable([0.0])
    optimizer = hk.DistributedOptimizer(opts.SGD(Halves()))
    for _ in range(2):
        optimizer.apply([tf.ones([1])], [variable])
    np.testing.assert_allclose(variable.numpy(), [-0.75])


def variables():
    return [keras.Variable(np.arange(1.0, 4.0, dtype="f4")), keras.Variable([[2.0]])]


@pytest.mark.parametrize("make", [lambda: opts.Adam(0.1), lambda: opts.SGD(0.1, momentum=0.9, use_ema=True)])
def test_slots_of_a_built_optimizer_are_kept(make):
    """With accumulation the copy has variables that the original lacks; the slots must still be copied."""
    plain, vs = make(), variables()
    plain.apply([tf.fill(v.shape, 3.0) for v in vs], vs)
    copy = hk.DistributedOptimizer(plain, accumulate_steps=2)
    slots = {v.path.split("/", 1)[1]: v.numpy() for v in plain.variables}
    ours = {v.path.split("/", 1)[1]: v.numpy() for v in copy.variables}
    assert set(slots) <= set(ours)
    for name, value in slots.items():
        if name != "iteration":
            np.testing.assert_array_equal(ours[name], value, err_msg=name)
    assert int(copy.iterations) == int(plain.iterations) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: opts.Lamb(0.1), "optimizer: got Lamb"),
        (lambda: opts.Adafactor(0.1), "optimizer: got Adafactor"),
        (lambda: opts.Muon(0.1), "optimizer: got Muon"),
        (lambda: opts.LossScaleOptimizer(opts.SGD(0.1, clipnorm=1.0)), "clipnorm: got 1.0, .*clip_global_norm"),
        (lambda: opts.SGD(0.1, global_clipnorm=1.0), "global_clipnorm: got 1.0, .*clip_global_norm"),
        (lambda: opts.MultiOptimizer(opts.OptimizerMap(opts.SGD(0.1), {"b": opts.SGD(0.1)})), "MultiOptimizer"),
    ],
)
def test_what_needs_whole_variables_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        hk.DistributedOptimizer(make(), shard_states=True)


def test_what_cannot_be_local():
    variable, other = keras.Variable([1.0]), keras.Variable([1.0])
    with pytest.raises(TypeError, match="variables: got str, expected TensorFlow or Keras variables"):
        hk.register_local_variables(["kernel"])
    with pytest.raises(ValueError, match="layer 'late', which is not built"):
        hk.register_local_variables(keras.layers.Dense(1, name="late"))
    with pytest.raises(TypeError, match="local_layers: got ResourceVariable"):
        hk.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[tf.Variable(1.0)])
    table = hk.layers.ShardedEmbedding(5, 2)
    table.build()
    with pytest.raises(ValueError, match="which is sharded"):
        hk.register_local_variables(table)
    optimizer = hk.DistributedOptimizer(opts.SGD(0.1))
    optimizer.build([variable, other])
    with pytest.raises(ValueError, match="made local after the optimizer was built"):
        optimizer.register_local_var(variable)
    hk.register_local_variables(variable)
    with pytest.raises(ValueError, match="made local after the optimizer was built"):
        optimizer.apply([tf.ones([1]), tf.ones([1])], [variable, other])
    with pytest.raises(ValueError, match=r"global_clipnorm: got 1\.0, expected None with local variables"):
        hk.DistributedOptimizer(opts.SGD(0.1, global_clipnorm=1.0)).build([variable, other])
    many = opts.MultiOptimizer(opts.OptimizerMap(opts.SGD(0.1)))
    with pytest.raises(ValueError, match="one optimizer for sharded or local variables"):
        hk.DistributedOptimizer(many).build([variable, other])
    with pytest.raises(ValueError, match="op: got Max"):
        hk.average_gradients([tf.ones([1])], op=hk.Max, variables=[variable])


def test_optimizers_that_would_be_wrong_are_refused(tmp_path):
    layer = hk.layers.ShardedEmbedding(4, 2)
    layer.build()
    for name in ("Lamb", "Adafactor"):
        with pytest.raises(ValueError, match=f"optimizer: got {name}, expected one that updates each"):
            hk.DistributedOptimizer(getattr(keras.optimizers, name)()).build(layer.trainable_variables)
    plain = keras.optimizers.Adam()
    plain.build(layer.trainable_variables)
    with pytest.raises(ValueError, match="does not support slots that are sharded"):
        hk.checkpoint.save(tmp_path / "plain", {"layer": layer, "optimizer": plain})
    with pytest.raises(ValueError, match="compression: got fp16, expected None where op is None"):
        hk.DistributedOptimizer(plain, op=None, compression="fp16")


def test_bad_options_are_refused():
    for options in (
        {"accumulate_steps": 0},
        {"accumulate_steps": 1.5},
        {"clip_global_norm": -1.0},
        {"compression": "fp8"},
        {"op": hk.Min},
        {"op": "average"},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            hk.DistributedOptimizer(opts.SGD(0.1), **options)


def test_adam_says_that_it_updates_rows_of_tables(caplog):
    """Its results are not those of Keras; who has chosen rows knows it."""
    warn_once.cache_clear()
    ids = tf.constant([[1], [2]])
    for sparse_updates, logged in (("lazy", 0), ("exact", 0), ("auto", 1), ("auto", 1)):
        layer = hk.layers.ShardedEmbedding(8, 2, seed=1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids))
        optimizer = hk.DistributedOptimizer(opts.Adam(0.1), sparse_updates=sparse_updates)
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        found = [each for each in caplog.messages if "Adam updates only those rows" in each]
        assert len(found) == logged, sparse_updates
    assert 'sparse_updates="exact"' in found[0]


class Lookahead(opts.SGD):
    """A user's optimizer that keeps another one, under the name that Keras's LossScaleOptimizer uses."""

    def __init__(self, inner_optimizer, **options):
        super().__init__(0.5, **options)
        self.inner_optimizer = inner_optimizer


@pytest.mark.parametrize("op", [hk.Average, None])
def test_only_a_loss_scale_is_updated_by_its_inner_optimizer(op, tmp_path):
    shared = keras.Variable([4.0])
    local = keras.Variable([4.0])
    hk.register_local_variables([local])
    optimizer = hk.DistributedOptimizer(Lookahead(opts.SGD(0.1)), op=op)
    for _ in range(2):
        optimizer.apply([tf.constant([2.0]), tf.constant([2.0])], [shared, local])
    assert float(shared[0]) == float(local[0]) == 2.0
    path = hk.checkpoint.save(tmp_path / "step-2", {"optimizer": optimizer})
    optimizer.iterations.assign(7)
    hk.checkpoint.restore(path, {"optimizer": optimizer})
    assert int(optimizer.iterations) == 2


def test_a_loss_scale_around_a_distributed_optimizer_is_noticed_when_it_is_made():
    """By what Keras's constructor assigns; not by options, hvdkit's own one, or copies."""
    optimizer = hk.DistributedOptimizer(opts.SGD(0.1, loss_scale_factor=4.0))
    again = pickle.loads(pickle.dumps(optimizer))
    assert optimizer.loss_scale_factor == again.loss_scale_factor == optimizer.get_config()["loss_scale_factor"] == 4.0
    optimizer.loss_scale_factor = 8.0
    assert optimizer.scale_loss(1.0) == 8.0
    inside = hk.DistributedOptimizer(opts.LossScaleOptimizer(opts.SGD(0.1))).inner_optimizer
    assert not any(each._hvdkit_wrapped for each in (optimizer, again, inside))
    opts.LossScaleOptimizer(optimizer)
    assert optimizer._hvdkit_wrapped == (version.parse(keras.__version__) >= version.parse("3.10"))
