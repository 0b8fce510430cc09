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
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def main() -> None:
    """Train, evaluate, and print the accuracy and the newest checkpoint."""
    options = parse()
    hk.init()
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1) / 16
    x, x_test, y, y_test = train_test_split(
        images, labels, test_size=0.2, random_state=0
    )

    model = build_model()
    model.compile(
        keras.optimizers.Adam(options.learning_rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    # Every rank passes all examples, and gets its part of every batch. With arrays,
    # hk.fit(model, x, y), a run that continues would repeat the batches of its epoch.
    batches = hk.data.GlobalBatches((x, y), options.batch_size, shuffle_seed=0)
    hk.fit(
        model,
        batches,
        epochs=options.epochs,
        validation_data=(x_test, y_test),
        logdir=options.logdir,  # checkpoints, and summaries for TensorBoard
    )
    result = hk.evaluate(model, x_test, y_test, verbose=0, return_dict=True)
    if hk.is_chief():
        print(f"accuracy {result['accuracy']:.4f} on {len(x_test)} held-out images")
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
