"""Data sets for the training scripts in ``models/``."""

from .cifar10 import load_cifar10
from .clicks import Clicks, load_criteo, load_movielens, planted_clicks
from .dataset import Dataset
from .digits import load_digits
from .distortion import Distortion, distorted_inputs, evaluation_inputs
from .synthetic import synthetic_images
from .tables import linear_data, load_diabetes

__all__ = [
    "Clicks",
    "Dataset",
    "Distortion",
    "distorted_inputs",
    "evaluation_inputs",
    "linear_data",
    "load_cifar10",
    "load_criteo",
    "load_diabetes",
    "load_digits",
    "load_movielens",
    "planted_clicks",
    "synthetic_images",
]
