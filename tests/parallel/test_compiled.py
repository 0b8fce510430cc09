"""Steps compiled by XLA give the results of uncompiled steps on any number of ranks, in hk.fit and in loops."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import line, same_nests
from helpers.counting import counting
from helpers.tiers import at_night

import hvdkit as hk
from hvdkit.compiling import compiled_step, programs
from hvdkit.keras import measured_function

layers, opts = keras.layers, keras.optimizers
RNG = np.random.default_rng(7)
X = RNG.normal(size=(50, 8)).astype("f4")
Y = X[:, :3].argmax(axis=1)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def dense(*more):
    return keras.Sequential([keras.Input((8,)), layers.Dense(16, "tanh"), *more, layers.Dense(3)])


def recurrent():
    return keras.Sequential([keras.Input((8,)), layers.Reshape((4, 2)), layers.LSTM(8), layers.Dense(3)])


def attention():
    inputs = keras.Input((8,))
    rows = layers.Dense(4)(layers.Reshape((4, 2))(inputs))
    mixed = layers.LayerNormalization()(rows + layers.MultiHeadAttention(2, 2)(rows, rows))
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(mixed)))


def convolution():
    image = [layers.Reshape((4, 2, 1)), layers.Conv2D(4, 2, padding="same"), layers.BatchNormalization()]
    return keras.Sequential([keras.Input((8,)), *image, layers.MaxPooling2D(2), layers.Flatten(), layers.Dense(3)])


class OwnLoss(keras.Model):
    """A model with its own train_step, whose loss is a mean of rows."""

    def __init__(self):
        super().__init__()
        self.inner = dense()
        self.mean = keras.metrics.Mean("own")

    def call(self, x, training=False):
        return self.inner(x, training=training)

    @property
    def metrics(self):
        return [self.mean]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int32), outputs))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        self.mean.update_state(loss)
        return {"own": self.mean.result()}


class Gan(keras.Model):
    """Two networks with two optimizers, and noise drawn in the step."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(8)])
        self.critic = keras.Sequential([keras.Input((8,)), layers.Dense(8, "tanh"), layers.Dense(1)])
        self.seeds = keras.random.SeedGenerator(11)
        self.mean = keras.metrics.Mean("d")

    def compile(self, first, second, **options):
        super().compile(**options)
        self.first, self.second = first, second

    def call(self, x):
        return self.critic(x)

    def train_step(self, real):
        noise = keras.random.normal((tf.shape(real)[0], 4), seed=self.seeds)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.softplus(self.critic(self.generator(noise))))
            loss += tf.reduce_mean(tf.nn.softplus(-self.critic(real)))
        variables = self.critic.trainable_variables
        self.first.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            fooled = tf.reduce_mean(tf.nn.softplus(-self.critic(self.generator(noise))))
        variables = self.generator.trainable_variables
        self.second.apply_gradients(zip(tape.gradient(fooled, variables), variables, strict=True))
        self.mean.update_state(loss)
        return {"d": self.mean.result()}


def fitted(make, optimizer, *, jit_compile, x=X, y=Y, batch_size=12, compiles=None, **options):
    """Return what ``hk.fit``, ``hk.evaluate`` and ``hk.predict`` of a program give."""
    keras.utils.set_random_seed(3)
    model = make()
    how = {"loss": LOSS, "metrics": ["accuracy"], "jit_compile": jit_compile} | (compiles or {})
    model.compile(optimizer(), **how)
    history = hk.fit(model, x, y, batch_size=batch_size, epochs=2, verbose=0, **options)
    results = {"history": history.history, "weights": model.get_weights(), "outputs": hk.predict(model, x, verbose=0)}
    if y is not None:
        results["scores"] = hk.evaluate(model, x, y, batch_size=batch_size, verbose=0, return_dict=True)
    assert hk.compare_variables(model.variables)
    return results


CASES = {
    "dense": (dense, lambda: opts.SGD(0.1, momentum=0.9), {}),
    "dropout": (lambda: dense(layers.Dropout(0.3), layers.GaussianNoise(0.1)), lambda: opts.SGD(0.1), {}),
    "batch_norm": (lambda: dense(layers.BatchNormalization()), lambda: opts.SGD(0.1), {}),
    "synchronized": (lambda: dense(layers.BatchNormalization(synchronized=True)), lambda: opts.SGD(0.1), {}),
    "recurrent": (recurrent, lambda: opts.SGD(0.1), {}),
    "attention": (attention, lambda: opts.Adagrad(0.1), {}),
    "convolution": (convolution, lambda: opts.SGD(0.1), {}),
    "accumulation": (dense, lambda: opts.SGD(0.1, gradient_accumulation_steps=2), {}),
    "clipping": (dense, lambda: opts.SGD(0.1, global_clipnorm=0.1), {}),
    "loss_scale": (dense, lambda: opts.LossScaleOptimizer(opts.SGD(0.1)), {}),
    "moving_average": (dense, lambda: opts.SGD(0.1, use_ema=True), {}),
    "shard_states": (dense, lambda: hk.DistributedOptimizer(opts.Adagrad(0.1), shard_states=True), {}),
    "several_steps": (dense, lambda: opts.SGD(0.1), {"compiles": {"steps_per_execution": 3}}),
    "few_rows": (dense, lambda: opts.SGD(0.1), {"x": X[:13], "y": Y[:13], "batch_size": 4}),
    "weights": (dense, lambda: opts.SGD(0.1), {"sample_weight": np.linspace(0, 2, len(X))}),
}


def assert_compiled_is_equal(name):
    make, optimizer, options = CASES[name]
    plain = fitted(make, optimizer, jit_compile=False, **options)
    same_nests(plain, fitted(make, optimizer, jit_compile=True, **options))


@pytest.mark.nightly
def test_ranks_that_have_built_other_models_before_number_their_names_apart(caplog):
    if hk.is_chief():
        attention()
    assert_compiled_is_equal("attention")
    if hk.is_chief():
        assert "in 2 programs" in caplog.text, caplog.text  # the update, too: ranks compute the same


@pytest.mark.parametrize("name", at_night(CASES, but=("dense", "accumulation")))
def test_hk_fit_compiled_equals_hk_fit(name):
    assert_compiled_is_equal(name)


@pytest.mark.nightly(1, 3)
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("name", ["synchronized", "few_rows", "loss_scale"])
def test_hk_fit_compiled_on_other_numbers_of_ranks(name):
    assert_compiled_is_equal(name)


def test_an_own_train_step():
    same_nests(own_loss(False), own_loss(True))


def own_loss(jit_compile):
    keras.utils.set_random_seed(3)
    model = OwnLoss()
    model.compile(opts.SGD(0.1), jit_compile=jit_compile)
    history = hk.fit(model, X, Y, batch_size=12, epochs=2, verbose=0)
    return {"history": history.history, "weights": model.get_weights()}


def test_two_optimizers():
    def run(jit_compile):
        keras.utils.set_random_seed(3)
        model = Gan()
        model.compile(opts.Adagrad(0.05), opts.SGD(0.05), jit_compile=jit_compile)
        history = hk.fit(model, X, batch_size=12, epochs=2, verbose=0)
        return history.history, model.generator.get_weights(), model.critic.get_weights()

    same_nests(run(False), run(True))


def loop_of(wrap, make, optimizer, batches, *, weight=False):
    """Return losses and weights of a user's loop with a step wrapped by ``wrap``."""
    keras.utils.set_random_seed(3)
    model, optimizer = make(), hk.DistributedOptimizer(optimizer())

    @wrap
    def step(x, y, rows):
        tape = tf.GradientTape()
        if weight:
            tape = hk.DistributedGradientTape(tape, weight=rows)
        with tape:
            loss = LOSS(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"loss": hk.allreduce(loss)}

    losses = [float(step(x, y, tf.cast(len(x), tf.float32))["loss"]) for x, y in batches]
    assert hk.compare_variables(model.variables) or len(model.non_trainable_variables)
    return losses, [v.numpy() for v in model.trainable_variables]


def local_batches(number=4, *, uneven=False):
    """Return this rank's batches."""
    found = []
    for index in range(number):
        rows = slice(index * 12 + hk.rank(), (index + 1) * 12, hk.size())
        stop = None if not uneven else 1 + (index + hk.rank()) % 3
        found.append((tf.constant(X[rows][:stop]), tf.constant(Y[rows][:stop])))
    return found


LOOPS = ("dense", "dropout", "recurrent", "attention", "clipping", "accumulation", "loss_scale", "shard_states")


@pytest.mark.parametrize("name", at_night(LOOPS, but=("recurrent", "shard_states")))
def test_a_loop_compiled_equals_the_loop(name):
    make, optimizer, _ = CASES[name]
    if name == "shard_states":
        optimizer = lambda: opts.Adagrad(0.1)  # noqa: E731
    batches = local_batches()
    same_nests(loop_of(tf.function, make, optimizer, batches), loop_of(hk.compiled, make, optimizer, batches))


@pytest.mark.nightly(1, 3)
@pytest.mark.ranks(1, 2, 3)
def test_a_loop_with_uneven_batches():
    batches = local_batches(uneven=True)
    with_wrap = [loop_of(wrap, dense, lambda: opts.SGD(0.1), batches) for wrap in (tf.function, hk.compiled)]
    same_nests(*with_wrap)


def test_exchanges_are_those_of_the_uncompiled_step():
    batches = local_batches(2)
    seen = []
    for wrap in (tf.function, hk.compiled):
        with counting() as counts:
            loop_of(wrap, dense, lambda: opts.SGD(0.1), batches[:1] * 3)
            seen.append(sorted(counts.exchanges()))
    assert seen[0] == seen[1]


@pytest.mark.ranks(1, 2, 3)
def test_arguments_and_results_are_those_of_a_function():
    @hk.compiled
    def step(data, scale, *, add=None):
        if scale > 1:  # Python
            return None, data["x"] * scale, {"n": tf.shape(data["x"])[0]}
        if tf.reduce_sum(data["x"]) > 0:  # AutoGraph
            return data["x"]
        return data["x"] - 1.0 if add is None else data["x"] + add

    nothing, x, rest = step({"x": np.ones((2, 3), "f4")}, 3)
    assert nothing is None and x.numpy().tolist() == [[3.0] * 3] * 2 and int(rest["n"]) == 2
    assert step({"x": tf.ones([2])}, 1).numpy().tolist() == [1, 1]
    assert step({"x": -tf.ones([2])}, 1, add=tf.constant(5.0)).numpy().tolist() == [4, 4]
    assert step({"x": -tf.ones([2])}, 1).numpy().tolist() == [-2, -2]
    assert step.__name__ == "step"


@pytest.mark.ranks(1, 2, 3)
def test_a_step_inside_another_function():
    w = tf.Variable([1.0, 2.0])

    @hk.compiled
    def step(x):
        (gradient,) = hk.average_gradients([w * x])
        w.assign_sub(0.1 * gradient)
        return tf.reduce_sum(w)

    outer = tf.function(lambda x: step(x) + step(x))
    outer(tf.constant(1.0))
    np.testing.assert_allclose(w.numpy(), [0.81, 1.62], rtol=1e-6)


def test_what_xla_cannot_compile_runs_outside():
    table = layers.StringLookup(vocabulary=["a", "b"])
    seen = []

    def note(x):
        seen.append(len(x))
        return x

    @hk.compiled
    def step(words, x):
        ids = table(words)
        y = tf.ensure_shape(tf.numpy_function(note, [x], tf.float32), x.shape)
        z = tf.py_function(lambda v: v + 1, [tf.matmul(y, y)], tf.float32)
        return ids, z, tf.unique(ids)[0]

    ids, z, unique = step(tf.constant(["a", "c", "a"]), tf.ones([3, 3]))
    assert ids.numpy().tolist() == [1, 0, 1] and float(z[0, 0]) == 4 and unique.numpy().tolist() == [1, 0]
    assert seen == [3]


def test_strings_in_a_model():
    words = np.array([["a"], ["b"], ["c"]] * 8, object)
    y = np.arange(24) % 3

    def make():
        inputs = keras.Input((1,), dtype="string")
        ids = layers.StringLookup(vocabulary=["a", "b", "c"])(inputs)
        rows = layers.Flatten()(layers.Embedding(4, 4)(ids))
        return keras.Model(inputs, layers.Dense(3)(layers.Dense(8, "tanh")(rows)))

    data = {"x": tf.constant(words), "y": y, "batch_size": 6}
    same_nests(
        fitted(make, lambda: opts.SGD(0.1), jit_compile=False, **data),
        fitted(make, lambda: opts.SGD(0.1), jit_compile=True, **data),
    )


@pytest.mark.ranks(1, 2, 3)
def test_checks_and_ids_out_of_range_still_raise():
    rows = tf.Variable(tf.ones([4, 2]))

    @hk.compiled
    def step(ids, x):
        tf.debugging.assert_positive(x)
        return tf.matmul(tf.gather(rows, ids), x)

    assert step(tf.constant([0, 3]), tf.ones([2, 2])).shape == (2, 2)
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.constant([0, 9]), tf.ones([2, 2]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.constant([0, 3]), -tf.ones([2, 2]))


@pytest.mark.ranks(1, 2, 3)
def test_the_number_of_compilations_is_bounded():
    w = tf.Variable(tf.ones([3, 3]))
    traced = []

    def step(x):
        traced.append(x.shape)
        (gradient,) = hk.average_gradients([tf.matmul(x, tf.matmul(x, w), transpose_a=True)])
        w.assign_sub(0.001 * gradient)
        return tf.reduce_sum(w)

    expected = tf.Variable(w)
    compiled = compiled_step.CompiledStep(step)
    for number in range(1, 20):
        x = np.ones((number + hk.rank() % 2 * (number > 9), 3), "f4")
        mine = x.T @ (x @ expected.numpy())
        expected.assign_sub(0.001 * hk.allreduce(mine))
        np.testing.assert_allclose(float(compiled(x)), expected.numpy().sum(), rtol=1e-4)
    assert compiled.signatures == compiled_step.MOST_SIGNATURES
    assert len(traced) == compiled_step.MOST_SIGNATURES + 1
    assert hk.compare_variables([w])


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("rank", [0, -1])
def test_a_compile_error_on_one_rank_only(rank, monkeypatch):
    batches = local_batches()
    plain = loop_of(tf.function, dense, lambda: opts.SGD(0.1), batches)
    if hk.rank() == rank % hk.size():

        def fail(text):
            raise ValueError("cannot compile")

        monkeypatch.setattr(programs, "_digest", fail)
    same_nests(plain, loop_of(hk.compiled, dense, lambda: opts.SGD(0.1), batches))


def test_an_error_of_the_step_is_raised():
    @hk.compiled
    def step(x):
        raise ValueError("in the step")

    with pytest.raises(ValueError, match="in the step"):
        step(tf.ones([]))
    with pytest.raises(TypeError, match=r"step: got int, expected a function; write @hk\.compiled"):
        hk.compiled(3)


@pytest.mark.nightly
def test_runs_are_bit_identical():
    first, second = (fitted(dense, lambda: opts.SGD(0.1), jit_compile=True) for _ in range(2))
    keras.tree.map_structure(np.testing.assert_array_equal, first, second)


# ---- HVDKIT_JIT_COMPILE -------------------------------------------------------------------------------------------


def long_fit(epochs=1, **options):
    """Return the measured choice of a model after 120 steps, and its weights."""
    keras.utils.set_random_seed(3)
    model = dense()
    model.compile(opts.SGD(0.1), LOSS, metrics=["accuracy"])
    hk.fit(model, np.tile(X, (29, 1)), np.tile(Y, 29), batch_size=12, epochs=epochs, verbose=0, **options)
    return model, measured_function.choice_of(model)


def test_auto_measures_and_all_ranks_choose_the_same(monkeypatch, lines):
    plain, nothing = long_fit()
    assert nothing is None
    monkeypatch.setenv("HVDKIT_JIT_COMPILE", "auto")
    monkeypatch.setattr(measured_function, "AFTER_SECONDS", 0.0)
    model, choice = long_fit()
    assert choice.is_compiled in (False, True)
    assert len(set(hk.allgather_object(choice.is_compiled))) == 1
    same_nests(plain.get_weights(), model.get_weights())
    if hk.rank() == 0:
        assert "ms with XLA and" in lines.text


def test_auto_compiles_nothing_in_short_runs_and_with_op_determinism(monkeypatch, lines):
    monkeypatch.setenv("HVDKIT_JIT_COMPILE", "auto")
    _, choice = long_fit()
    assert choice.is_compiled is None and "XLA" not in lines.text
    monkeypatch.setattr(measured_function, "AFTER_SECONDS", 0.0)
    monkeypatch.setattr(measured_function, "is_op_determinism_enabled", lambda: True)
    _, choice = long_fit()
    assert choice.is_compiled is False and "XLA" not in lines.text


@pytest.mark.nightly
def test_the_choice_is_saved_with_the_run(monkeypatch, tmp_path_factory):
    logdir = hk.broadcast_object(str(tmp_path_factory.mktemp("run")))
    monkeypatch.setenv("HVDKIT_JIT_COMPILE", "auto")
    monkeypatch.setattr(measured_function, "AFTER_SECONDS", 0.0)
    monkeypatch.setattr(measured_function, "_LEAST_GAIN", 1000.0)  # XLA wins
    _, choice = long_fit(logdir=logdir)
    assert choice.is_compiled is True
    monkeypatch.setattr(measured_function, "AFTER_SECONDS", 1e9)
    _, choice = long_fit(logdir=logdir, epochs=2)
    assert choice.is_compiled is True


@pytest.mark.nightly
def test_the_variable_decides_for_all(monkeypatch, lines):
    plain = fitted(dense, lambda: opts.SGD(0.1), jit_compile=False)
    monkeypatch.setenv("HVDKIT_JIT_COMPILE", "on")
    same_nests(plain, fitted(dense, lambda: opts.SGD(0.1), jit_compile=False))
    assert hk.rank() or "train_step of Sequential" in lines.text
    lines.clear()
    monkeypatch.setenv("HVDKIT_JIT_COMPILE", "off")
    same_nests(plain, fitted(dense, lambda: opts.SGD(0.1), jit_compile=True))
    loop_of(hk.compiled, dense, lambda: opts.SGD(0.1), local_batches(1))
    assert "XLA" not in lines.text
    monkeypatch.setenv("HVDKIT_JIT_COMPILE", "perhaps")
    with pytest.raises(ValueError, match="HVDKIT_JIT_COMPILE: got perhaps, expected on, off or auto"):
        hk.compiled(lambda x: x)


def test_ranks_that_differ_in_jit_compile(monkeypatch, size):
    if size == 1:
        return
    model = dense()
    model.compile(opts.SGD(0.1), LOSS, jit_compile=hk.rank() == 0)
    with pytest.raises(hk.CollectiveMismatchError, match="jit_compile"):
        hk.fit(model, X, Y, batch_size=12, verbose=0)


def test_later_calls_use_what_was_traced(rng, monkeypatch):
    x, y = line(rng)
    for value in ("on", "off"):
        monkeypatch.setenv("HVDKIT_JIT_COMPILE", value)
        calls = []

        class Watched(keras.Sequential):
            def call(self, *args, calls=calls, **kwargs):
                calls.append(args)
                return super().call(*args, **kwargs)

        model = Watched([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        for method, data in ((hk.fit, (x, y)), (hk.evaluate, (x, y)), (hk.predict, (x,))):
            method(model, *data, verbose=0)
            traced = len(calls)
            method(model, *data, verbose=0)
            assert len(calls) == traced, method
