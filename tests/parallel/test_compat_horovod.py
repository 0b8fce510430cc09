"""Programs for Horovod under hvdkit.compat.horovod: Horovod's own examples, rewritten."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdkit as hk
import hvdkit.compat.horovod as hvd

RNG = np.random.default_rng(11)
IMAGES = RNG.random((96, 8, 8, 1)).astype("f4")
LABELS = (IMAGES.mean((1, 2, 3)) > 0.5).astype("i8")


def convolutional(classes=2):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Dropout(0.25),
            keras.layers.Flatten(),
            keras.layers.Dense(classes, activation="softmax"),
        ]
    )


@pytest.mark.ranks(1, 2)
def test_keras_mnist(rank, size, tmp_path):
    """Every rank shuffles the whole data set and trains fewer epochs."""
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (rank, size, hk.local_rank())
    epochs = math.ceil(4.0 / hvd.size())
    labels = keras.utils.to_categorical(LABELS, 2)
    model = convolutional()
    opt = keras.optimizers.Adadelta(1.0 * hvd.size())
    opt = hvd.DistributedOptimizer(opt)
    model.compile(loss=keras.losses.CategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(str(tmp_path / "checkpoint-{epoch}.keras")))
    model.fit(
        IMAGES, labels, batch_size=16, callbacks=callbacks, epochs=epochs, verbose=0, validation_data=(IMAGES, labels)
    )
    loss, accuracy = model.evaluate(IMAGES, labels, verbose=0)
    assert math.isfinite(loss) and 0 <= accuracy <= 1
    hk.compare_variables(model.trainable_variables)
    assert len(list(tmp_path.glob("*.keras"))) == (epochs if rank == 0 else 0)


def test_tensorflow2_keras_mnist(rank, size):
    dataset = tf.data.Dataset.from_tensor_slices((tf.constant(IMAGES), tf.constant(LABELS)))
    dataset = dataset.repeat().shuffle(96).batch(16)
    model = convolutional()
    scaled_lr = 0.001 * hvd.size()
    opt = keras.optimizers.Adam(scaled_lr)
    opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])
    rates = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
        Watch(),
    ]
    steps = 12 // hvd.size()
    history = model.fit(dataset, steps_per_epoch=steps, callbacks=callbacks, epochs=5, verbose=0).history
    assert len({str(each) for each in hk.allgather_object(history)}) == 1
    assert rates[0] == pytest.approx(0.001) and rates[-1] == pytest.approx(0.001 * size)
    assert rates[3 * steps] == pytest.approx(0.001 * size)  # multiplied only once
    hk.compare_variables(model.trainable_variables)


def test_tensorflow2_mnist(rank, size):
    """A loop with a tape, and variables broadcast after the first step, inside the function."""
    keras.utils.set_random_seed(rank)
    model, loss = convolutional(), keras.losses.SparseCategoricalCrossentropy()
    opt = keras.optimizers.Adam(0.001 * hvd.size())
    opt.build(model.trainable_variables)

    @tf.function
    def training_step(images, labels, first_batch):
        with tf.GradientTape() as tape:
            probabilities = model(images, training=True)
            value = loss(labels, probabilities)
        tape = hvd.DistributedGradientTape(tape)
        grads = tape.gradient(value, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.trainable_variables, root_rank=0)
            hvd.broadcast_variables(opt.variables, root_rank=0)
        return value

    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).repeat().shuffle(96).batch(8)
    for batch, (images, labels) in enumerate(dataset.take(12 // hvd.size())):
        training_step(images, labels, batch == 0)
    hk.compare_variables([*model.trainable_variables, *opt.variables])


@pytest.mark.core
def test_collectives_have_horovods_arguments(rank, size):
    x = tf.constant([float(rank)])
    assert hvd.allreduce(x, average=False).numpy()[0] == sum(range(size))
    assert hvd.allreduce(x, average=True).numpy()[0] == (size - 1) / 2
    assert hvd.allreduce(x, op=hvd.Max, name="x").numpy()[0] == size - 1
    half = hvd.allreduce(x, compression=hvd.Compression.fp16)
    np.testing.assert_allclose(half, [(size - 1) / 2], rtol=1e-3)
    rows = hvd.allreduce(tf.IndexedSlices(x[:, None], [rank], [size, 1]), op=hvd.Sum)
    np.testing.assert_allclose(tf.convert_to_tensor(rows), np.arange(size, dtype="f4")[:, None])
    assert hvd.allgather(x).shape == (size,)
    assert hvd.broadcast(x, root_rank=size - 1).numpy()[0] == size - 1
    assert hvd.broadcast_object({"a": rank}, 0) == {"a": 0}
    assert hvd.is_initialized() and hvd.cross_size() == 1 and hvd.cross_rank() == 0
    with pytest.raises(ValueError, match="average"):
        hvd.allreduce(x, average=True, op=hvd.Sum)
    with pytest.raises(AttributeError, match="elastic"):
        _ = hvd.elastic
