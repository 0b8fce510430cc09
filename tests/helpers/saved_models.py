"""Models to save: one to load again, and one whose files are read while they are written."""

from __future__ import annotations

import keras
import numpy as np

import hvdkit as hk

X = np.random.default_rng(3).normal(size=(24, 4)).astype("f4")
Y = X[:, :1] * 2 + 1


def model_of(optimizer):
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(1)])
    if optimizer is not None:
        model.compile(optimizer, keras.losses.MeanSquaredError(), jit_compile=False)
    return model


def fit(model, x=X, y=Y):
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model


@keras.saving.register_keras_serializable("saved_models")
class Witness(keras.layers.Dense):
    """A layer that reads the target file while the model is being saved."""

    path = None
    seen = None

    def save_own_variables(self, store):
        super().save_own_variables(store)
        if self.path is not None and self.path.exists():
            Witness.seen = self.path.read_bytes()
        if self.path is None:
            raise OSError("the disk is full")


def trained(kind=keras.Sequential):
    """Return a model trained by hk.fit for an epoch."""
    keras.utils.set_random_seed(3)
    model = kind([keras.Input((3,)), keras.layers.Dense(4), Witness(1)])
    model.compile("adam", "mse")
    hk.fit(model, np.ones((8, 3)), np.ones((8, 1)), batch_size=8, verbose=0)
    return model


def load(model, path):
    """Return the weights in a file."""
    if path.name.endswith(".weights.h5"):
        twin = keras.models.clone_model(model)
        twin.load_weights(path)
        return twin.get_weights()
    return keras.saving.load_model(path, compile=path.suffix == ".keras").get_weights()  # .h5 has no "mse"
