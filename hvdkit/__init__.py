"""hvdkit: train TensorFlow and Keras 3 models across GPUs and hosts with Horovod."""

from hvdkit._version import __version__

__all__ = ["__version__"]
