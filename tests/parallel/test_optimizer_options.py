"""Every Keras optimizer with every Keras option: the same updates as in one process on the whole batch."""

from __future__ import annotations

from itertools import cycle

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import same_values
from helpers.pairwise import printed

import hvdkit as hk
from hvdkit.optimizer.row_updates import ELEMENTWISE

opts = keras.optimizers
STEPS = 4
SHAPES = {"kernel": (4, 3), "embedding": (6, 2), "bias": (3,), "gain": ()}

# Each class with its specific options, all different from the defaults.
CLASSES = {
    "Adadelta": lambda **k: opts.Adadelta(**{"learning_rate": 1.0, "rho": 0.9, "epsilon": 1e-6} | k),
    "Adafactor": lambda **k: opts.Adafactor(
        **{"learning_rate": 0.05, "relative_step": False, "clip_threshold": 0.9, "beta_2_decay": -0.7} | k
    ),
    "Adagrad": lambda **k: opts.Adagrad(
        **{"learning_rate": 0.1, "initial_accumulator_value": 0.2, "epsilon": 1e-6} | k
    ),
    "Adam": lambda **k: opts.Adam(**{"learning_rate": 0.05, "beta_1": 0.8, "beta_2": 0.95} | k),
    "Adam amsgrad": lambda **k: opts.Adam(**{"learning_rate": 0.05, "amsgrad": True} | k),
    "AdamW": lambda **k: opts.AdamW(**{"learning_rate": 0.05, "weight_decay": 0.02, "amsgrad": True} | k),
    "Adamax": lambda **k: opts.Adamax(**{"learning_rate": 0.05, "beta_1": 0.8} | k),
    "Ftrl": lambda **k: opts.Ftrl(
        **{"learning_rate": 0.1, "learning_rate_power": -0.4, "l1_regularization_strength": 0.01}
        | {"l2_regularization_strength": 0.02, "l2_shrinkage_regularization_strength": 0.01, "beta": 0.1}
        | k
    ),
    "Lamb": lambda **k: opts.Lamb(**{"learning_rate": 0.05, "beta_1": 0.8} | k),
    "Lion": lambda **k: opts.Lion(**{"learning_rate": 0.02, "beta_2": 0.9} | k),
    "Muon": lambda **k: opts.Muon(**{"learning_rate": 0.02, "nesterov": False, "exclude_embeddings": False} | k),
    "Nadam": lambda **k: opts.Nadam(**{"learning_rate": 0.05, "beta_1": 0.8} | k),
    "RMSprop": lambda **k: opts.RMSprop(**{"learning_rate": 0.02, "momentum": 0.5, "centered": True} | k),
    "SGD": lambda **k: opts.SGD(**{"learning_rate": 0.1} | k),
    "SGD momentum": lambda **k: opts.SGD(**{"learning_rate": 0.1, "momentum": 0.9} | k),
    "SGD nesterov": lambda **k: opts.SGD(**{"learning_rate": 0.1, "momentum": 0.9, "nesterov": True} | k),
    "ScheduleFreeAdamW": lambda **k: opts.ScheduleFreeAdamW(**{"learning_rate": 0.05, "warmup_steps": 2} | k),
}
# Options of Keras's base class. Functions create those with state.
OPTIONS = {
    "none": dict,
    "weight decay": lambda: {"weight_decay": 0.05},
    "clipnorm": lambda: {"clipnorm": 0.3},
    "clipvalue": lambda: {"clipvalue": 0.1},
    "global_clipnorm": lambda: {"global_clipnorm": 0.3},
    "average": lambda: {"use_ema": True, "ema_momentum": 0.6},
    "overwritten by the average": lambda: {"use_ema": True, "ema_momentum": 0.6, "ema_overwrite_frequency": 2},
    "loss_scale_factor": lambda: {"loss_scale_factor": 16.0},
    "accumulation": lambda: {"gradient_accumulation_steps": 2},
    "accumulation, weight decay, average": lambda: {
        "gradient_accumulation_steps": 2,
        "weight_decay": 0.05,
        "use_ema": True,
        "ema_momentum": 0.6,
    },
    "schedule": lambda: {"learning_rate": opts.schedules.InverseTimeDecay(0.05, 1, 0.5)},
    "function": lambda: {"learning_rate": lambda: 0.05},
}
# Options that Keras allows together, for every class.
TOGETHER = {
    "none": dict,
    "clipnorm": lambda: OPTIONS["weight decay"]() | OPTIONS["clipnorm"]() | OPTIONS["overwritten by the average"](),
    "global_clipnorm": lambda: OPTIONS["global_clipnorm"]() | OPTIONS["loss_scale_factor"]() | OPTIONS["schedule"](),
    "clipvalue": lambda: OPTIONS["clipvalue"]() | OPTIONS["accumulation, weight decay, average"](),
    "function": lambda: OPTIONS["function"]() | OPTIONS["weight decay"]() | OPTIONS["overwritten by the average"](),
}
WAYS = ["apply", "pairs", "without variables"]
# Rejected by an optimizer with shard_states=True.
NORMS = ("clipnorm", "global_clipnorm")


def variables():
    rng = np.random.default_rng(1)
    return [keras.Variable(rng.normal(size=shape).astype("f4"), name=name) for name, shape in SHAPES.items()]


def gradients(step, rank):
    """Return one rank's gradients: for the embedding, rows that repeat."""
    rng = np.random.default_rng([step, rank])
    made = {name: tf.constant(rng.normal(size=shape), "float32") for name, shape in SHAPES.items()}
    rows = tf.constant(rng.normal(size=(5, 2)), tf.float32)
    made["embedding"] = tf.IndexedSlices(rows, tf.constant(rng.integers(0, 6, 5)), tf.constant([6, 2]))
    return list(made.values())


def combined(step, op):
    """Return the combined gradients of all ranks without any exchange."""
    everywhere = zip(*(gradients(step, rank) for rank in range(hk.size())), strict=True)
    divisor = hk.size() if op == hk.Average else 1
    return [tf.add_n([tf.convert_to_tensor(g) for g in grads]) / divisor for grads in everywhere]


def scaled(grads, factor):
    """Keras divides only dense gradients by a loss scale."""
    return grads if factor == 1.0 else [tf.convert_to_tensor(g) * factor for g in grads]


def stepped(optimizer, grads_of, way="apply"):
    weights = variables()
    optimizer.exclude_from_weight_decay(var_list=[weights[2]], var_names=["gain"])
    weights[0].constraint = keras.constraints.MaxNorm(1.5)
    if way == "without variables":
        optimizer.build(weights)
    if way == "graph":
        optimizer.build(weights)
    in_graph = tf.function(lambda grads: optimizer.apply(grads, weights))
    for number in range(STEPS):
        grads = scaled(grads_of(number), optimizer.loss_scale_factor or 1.0)
        if way == "pairs":
            optimizer.apply_gradients(zip(grads, weights, strict=True))
        elif way == "without variables":
            optimizer.apply(grads)
        elif way == "graph":
            in_graph(grads)
        else:
            optimizer.apply(grads, weights)
    optimizer.finalize_variable_values(weights)
    return weights


def assert_equal(ours, theirs, rtol=3e-5, atol=3e-6):
    same_values(ours, theirs, rtol=rtol, atol=atol)
    hk.compare_variables(ours)


def can_divide(optimizer, option):
    return type(optimizer) in ELEMENTWISE and option not in NORMS


def test_every_class_is_covered():
    every = {n for n, c in vars(opts).items() if isinstance(c, type) and issubclass(c, opts.Optimizer)} - {"Optimizer"}
    named = {name.split()[0] for name in CLASSES}
    assert {cls.__name__ for cls in ELEMENTWISE} | every - {"LossScaleOptimizer", "MultiOptimizer"} <= named


def class_cases():
    """Return each class with a group of options, once with whole states and, if it can, once with sharded ones.

    The options' code is in Keras's base class: Adam alone runs with every group.
    """
    cases = []
    sharded_groups = cycle(group for group in TOGETHER if group not in NORMS)
    for name, group in [*zip(CLASSES, cycle(TOGETHER), strict=False), *(("Adam", group) for group in TOGETHER)]:
        cases.append((name, group, False))
        if can_divide(CLASSES[name](), "none"):
            cases.append((name, next(sharded_groups), True))
    axes = zip(dict.fromkeys(cases), cycle([hk.Average, hk.Sum]), cycle(WAYS), strict=False)
    return [(*case, op, way) for case, op, way in axes]


@pytest.mark.parametrize(("name", "option", "shard_states", "op", "way"), class_cases())
def test_every_class_updates_as_one_process_does(name, option, shard_states, op, way):
    made, plain = (CLASSES[name](**TOGETHER[option]()) for _ in range(2))
    optimizer = hk.DistributedOptimizer(made, op=op, shard_states=shard_states)
    ours = stepped(optimizer, lambda step: gradients(step, hk.rank()), way)
    # Muon's iterations amplify rounding errors.
    coarse = {"rtol": 2e-3, "atol": 2e-4} if name == "Muon" else {}
    # A sum over ranks is also a sum over accumulated steps, of which Keras takes the mean.
    many = made.gradient_accumulation_steps or 1 if op == hk.Sum else 1
    assert_equal(ours, stepped(plain, lambda step: [many * g for g in combined(step, op)]), **coarse)
    assert int(optimizer.iterations) == int(plain.iterations)
    if not shard_states:
        assert [v.shape for v in optimizer.variables] == [v.shape for v in plain.variables]


def test_states_that_cannot_be_sharded_are_refused():
    for name, option in printed((name, option) for name in CLASSES for option in TOGETHER):
        made = CLASSES[name](**TOGETHER[option]())
        if not can_divide(made, option):
            with pytest.raises(ValueError, match=r"shard_states=True|clip_global_norm"):
                hk.DistributedOptimizer(made, shard_states=True)


TRACED = ("weight decay", "overwritten by the average", "accumulation, weight decay, average", "schedule")


@pytest.mark.parametrize(
    ("option", "way"), [*((option, "pairs") for option in OPTIONS), *((option, "graph") for option in TRACED)]
)
def test_every_option_means_what_it_does_in_one_process(option, way):
    """Sharded states for every second option, and in graphs for the others."""
    shard_states = option not in NORMS and ([*OPTIONS].index(option) % 2 == 0) == (way == "graph")
    made, plain = (opts.Adam(**{"learning_rate": 0.05} | OPTIONS[option]()) for _ in range(2))
    optimizer = hk.DistributedOptimizer(made, shard_states=shard_states)
    ours = stepped(optimizer, lambda step: gradients(step, hk.rank()), way)
    assert_equal(ours, stepped(plain, lambda step: combined(step, hk.Average)))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_loss_scales_around_all_options(accumulate, rank, size):
    """The second step overflows on one rank only: all ranks skip it."""
    options = ["none", "weight decay", "clipnorm", "global_clipnorm", "overwritten by the average"]
    for inner, option in printed(zip(cycle(["Adam", "SGD momentum", "Lamb"]), options, strict=False)):
        sharded = accumulate == 1 and can_divide(CLASSES[inner](), option)
        check_a_loss_scale(inner, option, sharded, accumulate, rank, size)


def check_a_loss_scale(inner, option, shard_states, accumulate, rank, size):
    scale = 8.0
    plain = CLASSES[inner](**OPTIONS[option]() | ({"gradient_accumulation_steps": 2} if accumulate == 2 else {}))
    scaling = opts.LossScaleOptimizer(CLASSES[inner](**OPTIONS[option]()), initial_scale=scale)
    optimizer = hk.DistributedOptimizer(scaling, shard_states=shard_states, accumulate_steps=accumulate)
    ours, theirs = variables(), variables()
    for step in range(STEPS + 1):
        skipped, number = step == 1, step - (step > 1)
        overflows = skipped and rank == size - 1
        mine = scaled(gradients(number, rank), np.inf if overflows else float(optimizer.scale_loss(1.0)))
        optimizer.apply(mine, ours)
        if not skipped:
            plain.apply(combined(number, hk.Average), theirs)
    assert_equal(ours, theirs)
    assert float(optimizer.dynamic_scale) == scale / 2 and int(optimizer.iterations) == int(plain.iterations)


def test_optimizers_by_variable():
    options = ["none", "clipnorm", "overwritten by the average", "accumulation"]
    for option, by in printed(zip(options, cycle(["map", "function"]), strict=False)):
        check_optimizers_by_variable(option, by)


def check_optimizers_by_variable(option, by):
    def made():
        adam, sgd = opts.Adam(0.05, **OPTIONS[option]()), opts.SGD(0.1, momentum=0.9, **OPTIONS[option]())
        if by == "map":
            return opts.MultiOptimizer(opts.OptimizerMap(sgd, {"kernel|gain": adam}))
        return opts.MultiOptimizer(lambda v: adam if v.name in ("kernel", "gain") else sgd)

    def run(optimizer, grads_of):
        weights = variables()
        for step in range(STEPS):
            optimizer.apply(grads_of(step), weights)
        return weights

    optimizer = hk.DistributedOptimizer(made())
    ours = run(optimizer, lambda step: gradients(step, hk.rank()))
    assert_equal(ours, run(made(), lambda step: combined(step, hk.Average)))
    assert sorted(type(part).__name__ for part in optimizer.optimizers) == ["Adam", "SGD"]


@pytest.mark.core(2)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_variables_that_take_their_gradient_as_their_value(accumulate, rank, size):
    """Like the scales of Keras's float8 layers: the maximum over ranks, unscaled and not part of the norm."""
    history, weight = keras.Variable([0.0, 0.0], name="amax"), keras.Variable([1.0, 1.0], name="weight")
    history.overwrite_with_gradient = True
    optimizer = hk.DistributedOptimizer(opts.SGD(1.0), clip_global_norm=1e6, accumulate_steps=accumulate)
    if accumulate > 1:
        with pytest.raises(ValueError, match=r"amax \(overwrite_with_gradient\).*accumulate_steps=1"):
            optimizer.build([history, weight])
        return
    optimizer.apply([tf.constant([10.0 * rank, 100.0 - rank]), tf.fill([2], rank + 1.0)], [history, weight])
    np.testing.assert_allclose(history, [10.0 * (size - 1), 100.0])
    np.testing.assert_allclose(weight, [1 - (size + 1) / 2] * 2)
