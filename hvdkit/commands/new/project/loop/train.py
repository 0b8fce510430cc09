"""Train a network that reads handwritten digits.

hvdkit run -np 2 -- python train.py      two ranks on this machine
python train.py --epochs 2               one rank

If a run is interrupted, start it again, with any number of ranks: it continues from its
newest checkpoint.
"""

from __future__ import annotations

import argparse

import hvdkit as hk  # before keras: hvdkit sets up TensorFlow and MPI, in this order

# isort: split
import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def main() -> None:
    """Train, evaluate, and print the accuracy and the newest checkpoint."""
    options = parse()
    hk.init()
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
    x, x_test, y, y_test = train_test_split(
        images, labels, test_size=0.2, random_state=0
    )

    # Every rank passes all examples, and gets its part of every batch.
    batches = hk.data.GlobalBatches(
        (x, y),
        options.batch_size,  # over all ranks
        shuffle_seed=0,
        epochs=options.epochs,
        as_tensors=True,
    )
    model = build_model()
    optimizer = hk.DistributedOptimizer(keras.optimizers.Adam(options.learning_rate))
    log = hk.callbacks.StepLog(options.batch_size, every=20)

    @tf.function
    def train_step(x, y, sample_weight):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            loss = tf.reduce_mean(losses * sample_weight)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)  # averaged over the ranks
        return loss

    # Begins with the chief's weights, or continues from the newest checkpoint.
    with hk.Supervisor(
        options.logdir,
        model=model,
        optimizer=optimizer,
        data=batches,
        save_model_secs=60,
    ) as sv:
        for images, labels in sv.batches():
            loss = train_step(images, labels, batches.sample_weight)
            sv.step(loss=loss)
            log.step(sv.global_step, loss)

    # Each rank predicts its part of the images; all ranks get all predictions.
    predicted = hk.predict(model, x_test, verbose=0).argmax(axis=1)
    if hk.is_chief():
        accuracy = (predicted == y_test).mean()
        print(f"accuracy {accuracy:.4f} on {len(x_test)} held-out images")
        print(f"checkpoint {hk.checkpoint.latest(options.logdir)}")


def build_model() -> keras.Model:
    """Return the network; `hvdkit checkpoint export` calls this function."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Train a network that reads digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="over all ranks")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--logdir", default="runs/digits", help="seen by all ranks")
    return parser.parse_args()


if __name__ == "__main__":
    main()
