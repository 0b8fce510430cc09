"""The scripts in ``models/``: equal to one process, loop equal to fit, and learning."""

from __future__ import annotations

import cifar10
import keras
import linear
import numpy as np
import pytest
import tensorflow as tf
import train
import training
from helpers.as_one import same_values

import hvdkit as hk

QUICK = {"steps": 6, "batch_size": 20, "warmup_steps": 3, "decay_steps": 4, "learning_rate": 0.02, "log_every": 2}


def prepared(config, optimizer=None):
    data = config.load()
    batches = hk.data.GlobalBatches((data.x_train, data.y_train), config.global_batch_size(), shuffle_seed=config.seed)
    model = config.build(data)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or config.optimizer(), loss, jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return data, batches, model


@pytest.fixture(scope="module")
def fitted_alone():
    """Return the weights of one process that trains on whole global batches with a plain optimizer."""
    config = cifar10.Config(**QUICK)
    decay = keras.optimizers.schedules.ExponentialDecay(0.02, 4, 0.1, staircase=True)
    rate = hk.schedules.Warmup(decay, scale=20 / 128, steps=3)
    data, _, model = prepared(config, keras.optimizers.SGD(rate))
    model.layers[0].first_row = 0
    batches = hk.data.GlobalBatches((data.x_train, data.y_train), 20, shuffle_seed=config.seed, rank=0, size=1)
    per_example = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    for _, (images, labels) in zip(range(config.steps), batches, strict=False):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(per_example(labels, model(images, training=True))) + tf.add_n(model.losses)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return model.get_weights()


@pytest.mark.parametrize("form", ["loop", "fit"])
def test_cifar10_equals_one_process(form, fitted_alone):
    config = cifar10.Config(**QUICK, form=form)
    _, batches, model = prepared(config)
    before = [v.numpy() for v in model.trainable_variables]
    average = cifar10.MovingAverage(model)
    (training.fit if form == "fit" else training.loop)(config, model, batches, average)
    same_values(model.get_weights(), fitted_alone, rtol=1e-4, atol=2e-6)
    after = [v.numpy() for v in model.trainable_variables]
    assert max(np.abs(a - b).max() for a, b in zip(before, after, strict=True)) > 1e-5
    assert len(hk.compare_variables(model.variables)) == 12


@pytest.mark.nightly
def test_the_same_run_gives_the_same_bits():
    digests = []
    for _ in range(2):
        config = cifar10.Config(**QUICK)
        _, batches, model = prepared(config)
        training.loop(config, model, batches, cifar10.MovingAverage(model))
        digests.append(hk.compare_variables(model.variables))
    assert digests[0] == digests[1]


def test_moving_average_follows_its_formula():
    config = cifar10.Config(**QUICK)
    _, _, model = prepared(config)
    average = cifar10.MovingAverage(model)
    expected = model.trainable_variables[0].numpy()
    for step in range(1, 4):
        model.trainable_variables[0].assign_add(tf.ones_like(model.trainable_variables[0]))
        average.update(tf.constant(step, tf.int64))
        decay = min(0.9999, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.trainable_variables[0].numpy()
    np.testing.assert_allclose(average.averages[0].numpy(), expected, rtol=1e-5)


@pytest.mark.nightly
def test_train_script_learns_and_reports(capfd, shared_path):
    config = cifar10.Config(data="synthetic", steps=40, batch_size=64, logdir=shared_path, learning_rate=0.02)
    train.train_classifier(config)
    printed = capfd.readouterr()
    if hk.is_chief():
        same = f"all {hk.size()} ranks hold the same 1068298 weights, bit for bit"
        assert (same if hk.size() > 1 else "the model has 1068298 weights") in printed.out
        assert float(printed.out.split("held-out accuracy ")[1].split()[0]) > 0.3
        assert "examples/sec" in printed.err and "step 40, loss" in printed.err
        assert list(shared_path.glob("summaries/events.out.tfevents.*"))
    else:
        assert "accuracy" not in printed.out
    # The same command again has nothing left to train, and gives the same result.
    train.train_classifier(config)
    if hk.is_chief():
        lines = [
            line
            for text in (printed.out, capfd.readouterr().out)
            for line in text.splitlines()
            if "sha256" in line or "digest" in line
        ]
        assert len(lines) == 2
        assert lines[0] == lines[1]


def test_cifar10_files_are_trained_on(shared_path, capfd):
    if hk.is_chief():
        rng = np.random.default_rng(3)
        for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
            records = rng.integers(0, 256, (24, 3073), dtype=np.uint8)
            records[:, 0] %= 10
            (shared_path / name).write_bytes(records.tobytes())
    hk.barrier()
    train.train_classifier(cifar10.Config(data_dir=shared_path, steps=3, batch_size=12))
    assert ("on 24 images after 3 steps" in capfd.readouterr().out) == hk.is_chief()


def test_infinite_loss_names_its_step_and_stops():
    config = cifar10.Config(**{**QUICK, "learning_rate": 1e30})
    _, batches, model = prepared(config)
    with pytest.raises(hk.NonFiniteError, match=r"at step \d+ on rank \d+"):
        training.loop(config, model, batches, cifar10.MovingAverage(model))


def test_infinite_loss_in_fit_stops_unless_told_otherwise():
    config = cifar10.Config(**{**QUICK, "learning_rate": 1e30}, form="fit")
    _, batches, model = prepared(config)
    with pytest.raises(hk.NonFiniteError, match=r"at step \d+ on rank \d+"):
        training.fit(config, model, batches, cifar10.MovingAverage(model))
    hk.barrier()
    config = cifar10.Config(**{**QUICK, "learning_rate": 1e30}, form="fit", allow_nonfinite=True)
    _, batches, model = prepared(config)
    training.fit(config, model, batches, cifar10.MovingAverage(model))
    assert int(model.optimizer.iterations) == 6


@pytest.mark.parametrize(("data", "error"), [("line", 0.012), ("diabetes", 0.75)])
def test_linear_regression_reaches_the_best_line(data, error, capfd):
    assert linear.run(linear.Config(data=data, learning_rate=0.05)) < error
    printed = capfd.readouterr().out
    if hk.is_chief():
        assert "epoch 20, loss = " in printed and "W = [" in printed and "b = [" in printed
    else:
        assert printed == ""
