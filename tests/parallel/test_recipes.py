"""Losses and steps that compare the rows of a batch, as their users publish them, with the results of one process.

Each model takes the functions that a program for several ranks adds: ``gather`` is ``hk.gather_rows``, and in one
process it returns its argument. docs/keras.md lists the recipes.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdkit as hk

layers = keras.layers
pytestmark = pytest.mark.ranks(1, 2)

ROWS = 22  # batches of 7, 7, 7 and 1 rows: uneven shares, and a last batch with fewer rows than ranks
OPTIONS = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
TOLERANCE = 1e-5  # of the largest magnitude in an array


def alone(value):
    """Gather or average in one process."""
    return value


def difference(found, expected):
    """Return the largest difference of two arrays, relative to the largest magnitude."""
    found, expected = np.asarray(found, "float64"), np.asarray(expected, "float64")
    assert found.shape == expected.shape
    assert np.isfinite(expected).all()
    return float(np.max(np.abs(found - expected)) / max(np.max(np.abs(expected)), 1e-30))


def compare(build, *data, added=hk.gather_rows, **options):
    """Train ``build(alone)`` in one process and ``build(added)`` on all ranks, and compare weights and History."""
    options = OPTIONS | options
    keras.utils.set_random_seed(1)
    one = build(alone)
    before = [v.numpy() for v in one.trainable_variables]
    expected = one.fit(*data, **options).history
    keras.utils.set_random_seed(1)
    many = build(added)
    found = hk.fit(many, *data, **options).history
    assert all(np.any(old != new.numpy()) for old, new in zip(before, one.trainable_variables, strict=True))
    check([v.numpy() for v in many.weights], [v.numpy() for v in one.weights], found, expected)
    hk.compare_variables(many.trainable_variables)
    return one, many


def check(weights, right_weights, logs, right_logs):
    assert list(logs) == list(right_logs)
    differences = {name: difference(logs[name], right_logs[name]) for name in right_logs}
    differences |= {f"weight {i}": difference(*pair) for i, pair in enumerate(zip(weights, right_weights, strict=True))}
    print(f"largest difference on {hk.size()} ranks: {max(differences.values()):.1e}")
    assert max(differences.values()) <= TOLERANCE, differences


def images(rng, rows=ROWS):
    return rng.normal(size=(rows, 6)).astype("float32")


# ---- losses of two views of a batch ----------------------------------------------------------------------------------


class TwoViews(keras.Model):
    """An encoder that is trained on two views of each image, without labels."""

    def __init__(self, gather):
        super().__init__()
        self.gather = gather
        self.encoder = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(4, use_bias=False)])
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x):
        return self.encoder(x)

    def train_step(self, data):
        first, second = data
        with tf.GradientTape() as tape:
            one = self.gather(self.encoder(first, training=True))
            two = self.gather(self.encoder(second, training=True))
            loss = self.loss_of(one, two)
        gradients = tape.gradient(loss, self.encoder.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.encoder.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


class SimCLR(TwoViews):
    """NT-Xent (arXiv:2002.05709): each view has to find the other one of its image among all views of the batch."""

    temperature = 0.1

    def __init__(self, gather):
        super().__init__(gather)
        self.accuracy = keras.metrics.Mean(name="accuracy")

    @property
    def metrics(self):
        return [self.loss_tracker, self.accuracy]

    def loss_of(self, one, two):
        one = tf.math.l2_normalize(one, axis=1)
        two = tf.math.l2_normalize(two, axis=1)
        rows = tf.shape(one)[0]
        mask = 1e9 * tf.eye(rows)
        similar = tf.matmul(one, two, transpose_b=True)
        logits = tf.concat(
            [
                tf.concat([similar, tf.matmul(one, one, transpose_b=True) - mask], axis=1),
                tf.concat([tf.transpose(similar), tf.matmul(two, two, transpose_b=True) - mask], axis=1),
            ],
            axis=0,
        )
        labels = tf.tile(tf.range(rows), [2])
        found = tf.argmax(logits, axis=1, output_type=tf.int32)
        self.accuracy.update_state(tf.reduce_mean(tf.cast(found == labels, tf.float32)))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits / self.temperature)
        return tf.reduce_mean(losses)

    def train_step(self, data):
        return {**super().train_step(data), "accuracy": self.accuracy.result()}


class BarlowTwins(TwoViews):
    """The correlation of the views' features is an identity matrix (arXiv:2103.03230)."""

    def loss_of(self, one, two):
        rows = tf.cast(tf.shape(one)[0], tf.float32)
        one = (one - tf.reduce_mean(one, axis=0)) / tf.sqrt(tf.math.reduce_variance(one, axis=0) + 1e-3)
        two = (two - tf.reduce_mean(two, axis=0)) / tf.sqrt(tf.math.reduce_variance(two, axis=0) + 1e-3)
        correlation = tf.matmul(one, two, transpose_a=True) / rows
        on_diagonal = tf.linalg.diag_part(correlation)
        off_diagonal = correlation - tf.linalg.diag(on_diagonal)
        return tf.reduce_sum((1 - on_diagonal) ** 2) + 5e-3 * tf.reduce_sum(off_diagonal**2)


class VICReg(TwoViews):
    """Variance, invariance and covariance of the views' features (arXiv:2105.04906)."""

    def loss_of(self, one, two):
        loss = 25.0 * tf.reduce_mean((one - two) ** 2)
        rows = tf.cast(tf.shape(one)[0], tf.float32)
        for view in (one, two):
            spread = tf.sqrt(tf.math.reduce_variance(view, axis=0) + 1e-4)
            loss += 25.0 * tf.reduce_mean(tf.nn.relu(1.0 - spread)) / 2
            centred = view - tf.reduce_mean(view, axis=0)
            covariance = tf.matmul(centred, centred, transpose_a=True) / tf.maximum(rows - 1, 1)
            off_diagonal = covariance - tf.linalg.diag(tf.linalg.diag_part(covariance))
            loss += tf.reduce_sum(off_diagonal**2) / view.shape[1]
        return loss


def compare_views(kind, rng, rate):
    first = images(rng)
    second = first + 0.1 * images(rng)

    def build(gather):
        model = kind(gather)
        model.compile(keras.optimizers.SGD(rate))
        return model

    compare(build, first, second)


@pytest.mark.core(2)
def test_simclr(rng):
    compare_views(SimCLR, rng, 0.1)


@pytest.mark.nightly(1)
def test_barlow_twins(rng):
    compare_views(BarlowTwins, rng, 0.05)


def test_vicreg(rng):
    compare_views(VICReg, rng, 0.01)


# ---- losses that layers add ------------------------------------------------------------------------------------------


class MixtureOfExperts(layers.Layer):
    """Switch routing with a capacity and a load-balance loss (arXiv:2101.03961): one expert for each row."""

    def __init__(self, experts, units, capacity, gather):
        super().__init__()
        self.gather = gather
        self.capacity = capacity
        self.router = layers.Dense(experts)
        self.experts = [layers.Dense(units, activation="tanh") for _ in range(experts)]

    def call(self, x):
        probabilities = tf.nn.softmax(self.router(x))
        experts = len(self.experts)
        chosen = tf.one_hot(tf.argmax(probabilities, axis=1), experts)
        all_probabilities = self.gather(probabilities)
        all_chosen = self.gather(chosen)
        balance = tf.reduce_mean(all_probabilities, axis=0) * tf.reduce_mean(all_chosen, axis=0)
        self.add_loss(0.5 * experts * tf.reduce_sum(balance))
        # Rows beyond the capacity of an expert get nothing. Those of lower ranks come first.
        owners = self.gather(tf.fill(tf.shape(x)[:1], hk.rank()))
        earlier = tf.boolean_mask(all_chosen, owners < hk.rank()) if self.gather is not alone else all_chosen[:0]
        place = tf.cumsum(chosen, exclusive=True) + tf.reduce_sum(earlier, axis=0)
        kept = chosen * tf.cast(place < self.capacity, tf.float32) * probabilities
        outputs = tf.stack([expert(x) for expert in self.experts], axis=1)
        return tf.reduce_sum(outputs * kept[:, :, None], axis=1)


class DiverseClusters(layers.Layer):
    """Soft assignments to clusters; the entropy of their mean over the batch keeps all clusters in use."""

    def __init__(self, clusters, gather):
        super().__init__()
        self.gather = gather
        self.dense = layers.Dense(clusters, activation="softmax")

    def call(self, x):
        assigned = self.dense(x)
        mean = tf.reduce_mean(self.gather(assigned), axis=0)
        self.add_loss(0.3 * tf.reduce_sum(mean * tf.math.log(mean)))  # the negative entropy
        return assigned


def compare_layer(layer, rng):
    x = images(rng)
    y = np.tanh(x[:, :2] * x[:, 1:3])

    def build(gather):
        inputs = keras.Input((6,))
        model = keras.Model(inputs, layers.Dense(2)(layer(gather)(inputs)))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return model

    compare(build, x, y, validation_data=(x[:9], y[:9]))


@pytest.mark.nightly(1)
def test_a_mixture_of_experts_with_a_load_balance_loss(rng):
    compare_layer(lambda gather: MixtureOfExperts(3, 4, 3, gather), rng)


@pytest.mark.nightly(1)
def test_the_entropy_of_the_batch_mean(rng):
    compare_layer(lambda gather: DiverseClusters(4, gather), rng)


# ---- steps -----------------------------------------------------------------------------------------------------------


class Segmentation(keras.Model):
    """A training and an evaluation step with the Dice loss of all pixels of the batch."""

    def __init__(self, gather):
        super().__init__()
        self.gather = gather
        self.network = keras.Sequential(
            [keras.Input((6, 6, 1)), layers.Conv2D(3, 3, padding="same", activation="relu")]
            + [layers.Conv2D(1, 1, activation="sigmoid")]
        )
        self.loss_tracker = keras.metrics.Mean(name="dice_loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x):
        return self.network(x)

    def dice(self, masks, predictions):
        masks, predictions = self.gather(masks), self.gather(predictions)
        both = tf.reduce_sum(masks * predictions)
        return 1 - (2 * both + 1) / (tf.reduce_sum(masks) + tf.reduce_sum(predictions) + 1)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.dice(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"dice_loss": self.loss_tracker.result()}

    def test_step(self, data):
        x, y = data
        self.loss_tracker.update_state(self.dice(y, self(x)))
        return {"dice_loss": self.loss_tracker.result()}


@pytest.mark.nightly(1)
@pytest.mark.core(2)
def test_dice_in_a_train_step(rng):
    x = rng.random((ROWS, 6, 6, 1)).astype("float32")
    y = (x > rng.random((ROWS, 1, 1, 1))).astype("float32")

    def build(gather):
        model = Segmentation(gather)
        model.compile(keras.optimizers.SGD(0.5))
        return model

    compare(build, x, y, validation_data=(x[:8], y[:8]))


class SharpnessAware(keras.Model):
    """SAM (arXiv:2010.01412): the gradient at the worst weights near the current ones. ``average`` is added."""

    def __init__(self, average, *args):
        super().__init__(*args)
        self.average = average

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        first = self.average(tape.gradient(loss, self.trainable_variables))
        norm = tf.linalg.global_norm(first)
        moves = [0.05 * gradient / (norm + 1e-12) for gradient in first]
        for variable, move in zip(self.trainable_variables, moves, strict=True):
            variable.assign_add(move)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        second = tape.gradient(loss, self.trainable_variables)
        for variable, move in zip(self.trainable_variables, moves, strict=True):
            variable.assign_sub(move)
        self.optimizer.apply_gradients(zip(second, self.trainable_variables, strict=True))
        return self.compute_metrics(x, y, self(x))


@pytest.mark.nightly(1)
def test_sam(rng):
    x = images(rng)
    y = np.tanh(x[:, :1] * x[:, 1:2])

    def build(average):
        inputs = keras.Input((6,))
        model = SharpnessAware(average, inputs, layers.Dense(1)(layers.Dense(8, "tanh")(inputs)))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return model

    compare(build, x, y, added=hk.average_gradients)


class Patient(keras.Model):
    """Sums the gradients of three batches, and then applies their sum. It needs no change."""

    def build(self, input_shape):
        super().build(input_shape)
        self.sums = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in self.trainable_variables]
        self.batches = tf.Variable(0, trainable=False)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables), strict=True):
            total.assign_add(gradient / 3)
        self.batches.assign_add(1)
        tf.cond(self.batches % 3 == 0, self.update, lambda: None)
        return {"batches": self.batches, **self.compute_metrics(x, y, self(x))}

    def update(self):
        pairs = [(tf.identity(total), v) for total, v in zip(self.sums, self.trainable_variables, strict=True)]
        self.optimizer.apply_gradients(pairs)
        for total in self.sums:
            total.assign(tf.zeros_like(total))


@pytest.mark.nightly(1)
def test_gradients_that_a_step_sums_over_batches(rng):
    x = images(rng)
    y = np.tanh(x[:, :1] * x[:, 1:2])

    def build(_):
        inputs = keras.Input((6,))
        model = Patient(inputs, layers.Dense(1)(layers.Dense(8, "tanh")(inputs)))
        model.compile(keras.optimizers.SGD(0.3), "mse", metrics=["mae"])
        return model

    one, many = compare(build, x, y, epochs=3)  # 12 batches; no epoch but the last ends with an update
    assert int(many.batches) == int(one.batches) == 12
    one, many = compare(build, x, y, epochs=2)  # ends with two batches in the sums
    for mine, theirs in zip(many.sums, one.sums, strict=True):
        assert difference(mine, theirs) <= TOLERANCE


@pytest.mark.nightly(1)
@pytest.mark.core(2)
def test_a_gan_by_train_on_batch(rng):
    images_of_digits = images(rng)
    noise = rng.normal(size=(2, ROWS, 3)).astype("float32")

    def train_on_batch(model, x, y):
        model.reset_metrics()
        return model.train_on_batch(x, y)

    def fit_on_batch(model, x, y):  # the recipe
        return hk.fit(model, x, y, batch_size=max(len(x), hk.size()), shuffle=False, verbose=0).history["loss"][0]

    def train(on_batch):
        keras.utils.set_random_seed(1)
        generator = keras.Sequential([keras.Input((3,)), layers.Dense(8, "tanh"), layers.Dense(6)])
        discriminator = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(1)])
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        discriminator.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), loss)
        latent = keras.Input((3,))
        gan = keras.Model(latent, discriminator(generator(latent)))
        gan.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), loss)
        losses = {"real": [], "fake": [], "gan": []}
        for start in range(0, ROWS, 7):
            real = images_of_digits[start : start + 7]
            fake = generator(noise[0, start : start + 7]).numpy()
            ones = np.ones((len(real), 1), "float32")
            discriminator.trainable = True
            losses["real"].append(on_batch(discriminator, real, 0.9 * ones))
            losses["fake"].append(on_batch(discriminator, fake, 0 * ones))
            discriminator.trainable = False
            losses["gan"].append(on_batch(gan, noise[1, start : start + 7], ones))
        return [v.numpy() for v in [*generator.weights, *discriminator.weights]], losses

    right_weights, right_losses = train(train_on_batch)
    weights, losses = train(fit_on_batch)
    check(weights, right_weights, losses, right_losses)
