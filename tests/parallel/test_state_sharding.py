"""shard_states=True: each rank keeps 1/N of the slots, and the weights equal those of one process."""

from __future__ import annotations

import contextlib
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import same_values
from helpers.pairwise import some_at

import hvdkit as hk
from hvdkit.checkpoint.matching import without_numbers
from hvdkit.optimizer.compression import reduce_scatter
from hvdkit.sharding.shards import differs_by_rank, flat_shard_of

opts = keras.optimizers
# Kernel, table with a sparse gradient, one without a gradient in some steps, scalar; two of other dtypes.
SHAPES = {"kernel": (5, 3), "table": (9, 2), "some": (4,), "scalar": (), "double": (7,), "half": (3, 2)}
DTYPES = {"double": "float64", "half": "bfloat16"}
SINGLE = tuple(name for name in SHAPES if name not in DTYPES)
STEPS = 2


def variables(names=SINGLE):
    rng = np.random.default_rng(1)
    return [
        keras.Variable(rng.normal(size=SHAPES[name]), dtype=DTYPES.get(name, "float32"), name=name) for name in names
    ]


def gradients(step, rank):
    """Return one rank's gradients: repeated rows for the table, and None for one variable in every other step."""
    rng = np.random.default_rng([step, rank])
    made = {name: tf.constant(rng.normal(size=shape), DTYPES.get(name, "float32")) for name, shape in SHAPES.items()}
    ids = rng.integers(0, 9, 4)
    rows = tf.constant(rng.normal(size=(4, 2)), tf.float32)
    made["table"] = tf.IndexedSlices(rows, tf.constant(ids), tf.constant([9, 2], tf.int64))
    return [None if name == "some" and step % 2 else grad for name, grad in made.items()]


def combined(step, op=hk.Average):
    """Return the combined gradients of all ranks without any exchange."""
    everywhere = zip(*(gradients(step, rank) for rank in range(hk.size())), strict=True)
    divisor = hk.size() if op == hk.Average else 1

    def total(grads):
        return tf.add_n([tf.cast(dense(g), tf.float64) for g in grads]) / divisor

    return [None if g[0] is None else tf.cast(total(g), g[0].dtype) for g in everywhere]


def stepped(optimizer, grads_of, names=SINGLE, steps=STEPS):
    weights = variables(names)
    for step in range(steps):
        optimizer.apply(grads_of(step)[: len(names)], weights)
    return weights


def own(step):
    return gradients(step, hk.rank())


def assert_equal(ours, theirs, rtol=2e-5, atol=2e-6):
    for mine, other in zip(ours, theirs, strict=True):
        coarse = mine.dtype == "bfloat16"
        got, expected = (np.asarray(tf.cast(v.value, tf.float64)) for v in (mine, other))
        np.testing.assert_allclose(got, expected, rtol=0.02 if coarse else rtol, atol=0.02 if coarse else atol)
    hk.compare_variables(ours)


def clipped(step, limit=0.5):
    grads = combined(step)
    squares = sum(float(tf.reduce_sum(tf.square(tf.cast(g, tf.float64)))) for g in grads if g is not None)
    factor = min(1.0, limit / math.sqrt(squares))
    return [None if g is None else g * tf.cast(factor, g.dtype) for g in grads]


@pytest.mark.parametrize(
    ("options", "grads_of", "reference", "tolerance"),
    some_at(
        (3,),
        [
            ({"clip_global_norm": 0.5}, own, clipped, 2e-5),
            ({"op": hk.Sum}, own, lambda step: combined(step, hk.Sum), 2e-5),
            ({"op": None, "clip_global_norm": 0.5}, combined, clipped, 2e-5),
            ({"compression": "fp16"}, own, combined, 2e-3),
            ({"compression": "bf16"}, own, combined, 2e-2),
            ({"clip_global_norm": 0.5, "scaled": 4.0}, own, clipped, 2e-5),
            ({"op": None, "scaled": 4.0}, combined, combined, 2e-5),
        ],
        every=4,
    ),
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else "",
)
def test_options_keep_their_meaning(options, grads_of, reference, tolerance):
    scale = options.get("scaled", 1.0)
    inner = opts.SGD(0.1, momentum=0.9)
    plain = inner if scale == 1.0 else opts.LossScaleOptimizer(inner, initial_scale=scale)
    options = {key: value for key, value in options.items() if key != "scaled"}
    optimizer = hk.DistributedOptimizer(plain, shard_states=True, **options)

    def given(step):
        return [None if g is None else dense(g) * tf.cast(scale, g.dtype) for g in grads_of(step)]

    names = tuple(SHAPES)  # of all dtypes
    expected = stepped(opts.SGD(0.1, momentum=0.9), reference, names)
    assert_equal(stepped(optimizer, grads_of if scale == 1.0 else given, names), expected, tolerance, tolerance)


def dense(grad):
    return tf.convert_to_tensor(grad) if isinstance(grad, tf.IndexedSlices) else grad


@pytest.mark.parametrize("op", [hk.Average, hk.Sum])
def test_accumulation_combines_once_an_update(op):
    def all_of(step, rank):  # without a missing gradient
        return gradients(2 * step, rank)

    optimizer = hk.DistributedOptimizer(opts.Adam(0.05, use_ema=True), accumulate_steps=2, op=op, shard_states=True)
    ours = stepped(optimizer, lambda step: all_of(step, hk.rank()), steps=4)

    def both(step):
        pairs = zip(combined(4 * step, op), combined(4 * step + 2, op), strict=True)
        return [(a + b) / (2 if op == hk.Average else 1) for a, b in pairs]

    assert_equal(ours, stepped(opts.Adam(0.05), both, steps=2))
    sums = optimizer._accumulated_gradients
    assert [tuple(v.shape) for v in sums] == [SHAPES[name] for name in SINGLE] and not any(map(flat_shard_of, sums))


class Halving(opts.Optimizer):
    """A user-defined optimizer: w -= lr (g + m / 2), m = g."""

    def build(self, variables):
        super().build(variables)
        self.last = self.add_optimizer_variables(variables, "last")

    def update_step(self, gradient, variable, learning_rate):
        gradient, rate = tf.cast(gradient, variable.dtype), tf.cast(learning_rate, variable.dtype)
        last = self.last[self._get_variable_index(variable)]
        self.assign_sub(variable, rate * (gradient + last / 2))
        self.assign(last, gradient)


def test_an_optimizer_of_ones_own_with_constraints_and_excluded_variables():
    def make():
        optimizer = Halving(0.1, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["scalar", "some"])
        return optimizer

    def trained(optimizer, grads_of):
        weights = variables()
        weights[0].constraint = keras.constraints.UnitNorm()
        weights[2].constraint = keras.constraints.NonNeg()
        optimizer._exclude_from_weight_decay = {optimizer._var_key(weights[1])}
        for step in range(STEPS):
            optimizer.apply(grads_of(step)[: len(weights)], weights)
        return weights

    ours = trained(hk.DistributedOptimizer(make(), shard_states=True), lambda step: [*map(dense, own(step))])
    assert_equal(ours, trained(make(), combined))


def test_beside_sharded_tables_with_one_norm():
    """The table's rows and slots are unchanged, all other slots are sharded, and the norm covers both."""

    def trained(shard_states):
        layer = hk.layers.ShardedEmbedding(11, 3, seed=1, name="ids")
        weight = keras.Variable(np.linspace(0, 1, 9).reshape(3, 3).astype("f4"), name="weight")
        layer.build()
        options = {"clip_global_norm": 0.4, "shard_states": shard_states}
        optimizer = hk.DistributedOptimizer(opts.Adam(0.05), **options)
        for step in range(3):
            ids = np.random.default_rng([step, hk.rank()]).integers(0, 11, 6)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(layer(ids) @ weight - 1))
            trained = [*layer.trainable_variables, weight]
            optimizer.apply(tape.gradient(loss, [v.value for v in trained]), trained)
        return weight, layer.gather()

    (ours, table), (theirs, other) = trained(True), trained(False)
    assert_equal([ours], [theirs])
    np.testing.assert_allclose(table, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("native", [False, True])
def test_both_ways_to_reduce_and_scatter(native, rank, size):
    """By alltoall, as within a host, and by Horovod's op, as between hosts."""
    for dtype, wire, op in [
        ("float32", None, hk.Average),
        ("float64", tf.float16, hk.Sum),
        ("float16", None, hk.Average),
        ("float32", tf.bfloat16, hk.Average),
    ]:
        flat = tf.cast(tf.range(3 * size) + rank, dtype)
        mine = reduce_scatter(flat, op, wire, "test", native=native)
        total = size * np.arange(3 * rank, 3 * rank + 3) + size * (size - 1) / 2
        assert mine.dtype == dtype
        np.testing.assert_allclose(mine.numpy(), total / (size if op == hk.Average else 1), rtol=1e-2)


def bytes_of(variables):
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)


@pytest.mark.core(2)
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shapes", [[*SHAPES.values()], [()], [(1000, 7), (3,)]], ids=["mixed", "scalar", "large"])
def test_each_rank_keeps_its_share_of_the_slots(shapes, rank, size):
    weights = [keras.Variable(np.zeros(shape), dtype="float32") for shape in shapes]
    doubles = [keras.Variable(np.zeros(5), dtype="float64")]
    optimizer = hk.DistributedOptimizer(opts.Adam(0.1, amsgrad=True), shard_states=True)
    optimizer.build([*weights, *doubles])
    slots = optimizer.variables[2:]
    shares = [sum(math.prod(s) for s in shapes), 5]
    held = [max(0, min(-(-n // size), n - rank * -(-n // size))) for n in shares]
    assert bytes_of(slots) == 3 * (4 * held[0] + 8 * held[1])
    assert all(flat_shard_of(v) is not None for v in slots) == (size > 1)
    total = sum(hk.allgather_object(bytes_of(slots)))
    assert total == 3 * (4 * shares[0] + 8 * shares[1])


def test_one_exchange_of_gradients_and_one_of_weights(size):
    weights = variables((*SINGLE, "double"))
    optimizer = hk.DistributedOptimizer(opts.Adam(0.1), shard_states=True)
    optimizer.build(weights)

    @tf.function
    def step():
        optimizer.apply([tf.cast(v.value, v.dtype) + 0.0 for v in weights], weights)

    graph = step.get_concrete_function().graph
    counts = [op.type for op in graph.get_operations() if op.type.startswith("Horovod")]
    dtypes = 2  # float32 and float64
    expected = ["HorovodAllgather"] * dtypes + ["HorovodAlltoall"] * dtypes
    assert sorted(counts) == (expected if size > 1 else [])
    reference = [keras.Variable(v.value) for v in weights]
    plain = opts.Adam(0.1)
    for _ in range(2):
        step()
        plain.apply([v + 0.0 for v in reference], reference)
    assert_equal(weights, reference)


def test_fit_with_the_chiefs_values(rank, size):
    """Ranks start with different weights, and end with those of one process that started with the chief's."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 6)).astype("f4"), rng.normal(size=(48, 1)).astype("f4")

    def fitted(wrap, x, y, batch, seed, callbacks, **inner):
        keras.utils.set_random_seed(seed)
        layers = [keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = opts.LossScaleOptimizer(opts.Adam(0.01, use_ema=True, ema_momentum=0.5, **inner))
        model.compile(wrap(optimizer), "mse", jit_compile=False)
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, callbacks=callbacks)
        return model.variables

    def divided(optimizer):
        return hk.DistributedOptimizer(optimizer, shard_states=True, accumulate_steps=2)

    alone = rank == 0 and fitted(lambda x: x, x, y, 12, 1, [], gradient_accumulation_steps=2)
    alone = hk.broadcast_object([v.numpy() for v in alone] if rank == 0 else None)
    mine = np.concatenate([np.arange(i + rank * 12 // size, i + (rank + 1) * 12 // size) for i in range(0, 48, 12)])
    ours = fitted(divided, x[mine], y[mine], 12 // size, 1 + rank, [hk.callbacks.BroadcastInitial()])
    assert_equal(ours, list(map(keras.Variable, alone)), 1e-4, 3e-6)


@pytest.mark.core(2)
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shard_states", [True, False])
def test_a_checkpoint_is_taken_up_divided_or_not(shard_states, shared_path, rank, size):
    def made():
        return hk.DistributedOptimizer(opts.Adam(0.05, name="slots"), shard_states=shard_states)

    saved = hk.DistributedOptimizer(opts.Adam(0.05, name="slots"), shard_states=True)
    names = tuple(SHAPES)
    weights = stepped(saved, own, names)
    path = hk.checkpoint.save(shared_path / "step-2", {"optimizer": saved, "weights": weights})
    again, fresh = variables(names), made()
    fresh.build(again)
    hk.checkpoint.restore(path, {"optimizer": fresh, "weights": again})
    for step in (2, 3):
        saved.apply(own(step), weights)
        fresh.apply(own(step), again)
    if shard_states:
        same_values([*again, *fresh.variables], [*weights, *saved.variables])
    assert_equal(again, weights)
    back = hk.checkpoint.save(shared_path / "back", {"optimizer": fresh, "weights": again})
    hk.checkpoint.restore(back, {"optimizer": saved, "weights": weights})
    folders = []
    for name in ("back", "third"):
        path = hk.checkpoint.save(shared_path / "third", {"optimizer": saved, "weights": weights})
        hk.checkpoint.verify(shared_path / name)
        folders.append(shared_path / str(rank) / name)
        hk.checkpoint.export_npy(shared_path / name, folders[-1])
    first, second = ({without_numbers(str(f.relative_to(d))): np.load(f) for f in d.rglob("*.npy")} for d in folders)
    assert first.keys() == second.keys() and len(first) == 2 + 3 * len(SHAPES)
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)
    kinds = [v.partition for v in hk.checkpoint.inspect(path).variables if v.kind == "sharded"]
    assert kinds == (["flat"] * 2 * len(SHAPES) if size > 1 else [])


def test_the_supervisor_goes_on_where_it_was(shared_path, rank):
    def session(logdir, steps):
        weights = variables()
        optimizer = hk.DistributedOptimizer(opts.Adam(0.05), shard_states=True)
        optimizer.build(weights)
        options = {"optimizer": optimizer, "variables": weights, "check_steps": 1, "save_steps": 2}
        with hk.Supervisor(logdir, **options) as sv:
            for step in range(sv.global_step, steps):
                optimizer.apply(own(step)[: len(weights)], weights)
                sv.step()
        return [*weights, *optimizer.variables]

    session(shared_path / "run", 3)
    continued = session(shared_path / "run", 4)
    same_values(continued, session(shared_path / "straight", 4))


def test_a_built_optimizer_is_divided_with_its_state(rank, size):
    plain, weights = opts.Adam(0.05), variables(tuple(SHAPES))
    plain.apply(combined(0), weights)
    again = [keras.Variable(v.value, name=v.name) for v in weights]
    optimizer = hk.DistributedOptimizer(plain, shard_states=True)
    assert sum(map(differs_by_rank, optimizer.variables)) == (2 * len(SHAPES) if size > 1 else 0)
    optimizer.apply(own(2), weights)
    twin = opts.Adam(0.05)
    twin.build(again)
    for mine, theirs in zip(twin.variables, plain.variables, strict=True):
        mine.assign(theirs)
    twin.apply(combined(2), again)
    assert_equal(weights, again)
    plain.iterations.assign(rank)
    if size > 1:
        with pytest.raises(hk.CollectiveMismatchError, match=r"different values of .*iteration on rank 1"):
            hk.DistributedOptimizer(plain, shard_states=True)


def made_model(wrap, scaled):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = opts.LossScaleOptimizer(opts.Adam(0.1), initial_scale=4.0) if scaled else opts.Adam(0.1)
    model.compile(wrap(optimizer), "mse", jit_compile=False)
    return model


def with_sharded_states(optimizer):
    return hk.DistributedOptimizer(optimizer, shard_states=True)


@pytest.mark.parametrize("scaled", [False, True])
def test_kerass_own_files_hold_whole_optimizers_only(scaled, tmp_path, size):
    model = made_model(with_sharded_states, scaled)
    model.optimizer.build(model.trainable_variables)
    if size > 1:
        with pytest.raises(hk.HvdkitError, match=r"1/\d \(shard_states=True\).*hk.checkpoint.save"):
            model.save(tmp_path / "model.keras")
    else:
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert len(loaded.optimizer.variables) == (8 if scaled else 6)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_whole_optimizer_that_keras_saved_is_loaded_by_part(scaled, rng, tmp_path):
    x = rng.normal(size=(8, 3)).astype("float32")
    y = rng.normal(size=(8, 2)).astype("float32")
    plain = made_model(lambda optimizer: optimizer, scaled)
    plain.fit(x, y, batch_size=8, verbose=0)
    plain.save_weights(tmp_path / "model.weights.h5")
    model = made_model(with_sharded_states, scaled)
    model.optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "model.weights.h5")
    for each in (plain, model):
        each.fit(x, y, batch_size=8, verbose=0)  # the same batch on every rank
    same_values(model.trainable_variables, plain.trainable_variables, rtol=1e-6)
    assert int(model.optimizer.iterations) == 2


def test_keras_cannot_swap_in_averages_of_which_a_rank_has_a_part(size):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(with_sharded_states(opts.Adam(0.1, use_ema=True)), "mse")
    x = np.ones((8, 3), "float32")
    refused = pytest.raises(ValueError, match=r"callbacks: got SwapEMAWeights, .* leave shard_states out")
    with refused if size > 1 else contextlib.nullcontext():
        hk.fit(model, x, x[:, :2], callbacks=[keras.callbacks.SwapEMAWeights()], verbose=0)
