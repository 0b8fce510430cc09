"""Data sets for the training scripts in ``models/``."""

from .cifar10 import load_cifar10
from .click_files import ClickFiles, click_files, write_criteo, write_parquet
from .clicks import Clicks, load_criteo, load_movielens, planted_clicks
from .dataset import Dataset
from .digits import load_digits
from .distortion import Distortion, distorted_inputs, evaluation_inputs
from .image_files import ImageFiles, image_files, write_images
from .synthetic import synthetic_images
from .tables import linear_data, load_diabetes

__all__ = [
    "ClickFiles",
    "Clicks",
    "Dataset",
    "Distortion",
    "ImageFiles",
    "click_files",
    "distorted_inputs",
    "evaluation_inputs",
    "image_files",
    "linear_data",
    "load_cifar10",
    "load_criteo",
    "load_diabetes",
    "load_digits",
    "load_movielens",
    "planted_clicks",
    "synthetic_images",
    "write_criteo",
    "write_images",
    "write_parquet",
]
