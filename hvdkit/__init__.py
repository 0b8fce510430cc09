"""hvdkit: train TensorFlow and Keras 3 models across GPUs and hosts with Horovod.

``__init__.pyi`` lists the public names, which are loaded on first use: ``import hvdkit`` requires neither Horovod nor
MPI, and without a launcher it does not import TensorFlow.
"""

from __future__ import annotations

import lazy_loader

from hvdkit.cluster.tensorflow_loading import prepare_import as _prepare_import
from hvdkit.registration import register_layers as _register_layers

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

_register_layers()
_prepare_import()


def __getattr__(name: str) -> object:
    if name not in __all__:  # Python's message; lazy_loader has its own
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _load(name)
