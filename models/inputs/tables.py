"""Data for linear regression."""

from __future__ import annotations

import numpy as np

from .dataset import Dataset


def linear_data(
    *, train: int = 800, test: int = 200, weight: float = 2.0, bias: float = 0.5, noise: float = 0.1, seed: int = 0
) -> Dataset:
    """Return points on the line ``y = weight * x + bias``, x uniform in [-1, 1), with normal noise.

    The best reachable mean squared error is ``noise ** 2``.
    """
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (train + test, 1))
    y = weight * x + bias + noise * rng.normal(size=x.shape)
    x, y = x.astype(np.float32), y.astype(np.float32)
    return Dataset(name="linear", x_train=x[:train], y_train=y[:train], x_test=x[train:], y_test=y[train:])


def load_diabetes(*, held_out: float = 0.2, seed: int = 0) -> Dataset:
    """Return 442 patients with ten measurements each, and the progression of their diabetes within a year.

    Measurements and target have mean 0 and variance 1 over the training part. The least-squares line explains about
    half of the variance.

    Args:
        held_out: Fraction of the patients to hold out.
        seed: Seed of the choice of held-out patients.

    Source: scikit-learn ``load_diabetes`` (Efron et al., "Least Angle Regression", 2004).
    """
    from sklearn.datasets import load_diabetes as load
    from sklearn.model_selection import train_test_split

    patients = load(scaled=False)
    x_train, x_test, y_train, y_test = train_test_split(
        patients.data, patients.target[:, None], test_size=held_out, random_state=seed
    )
    x_train, x_test = _standardized(x_train, x_test)
    y_train, y_test = _standardized(y_train, y_test)
    return Dataset(name="diabetes", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


def _standardized(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale both parts by the mean and standard deviation of the first."""
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    return ((train - mean) / deviation).astype(np.float32), ((test - mean) / deviation).astype(np.float32)
