"""Register hvdkit's layers for Keras's saved models without importing Keras or TensorFlow in ``import hvdkit``.

Keras looks up classes by name in a registry, which only exists after Keras is imported. Right after that import, each
layer gets a registry entry that imports ``hvdkit.layers`` when a saved model needs it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import keras

LAYERS = ("ColumnParallelDense", "RowParallelDense", "ShardedEmbedding", "ShardedEmbeddingCollection")


class _LazyLayer:
    """Placeholder for a layer class in Keras's registry; replaced when the layers are imported."""

    def __init__(self, name: str):
        self._name = name

    def from_config(self, config: dict[str, object]) -> keras.layers.Layer:
        """Create the layer from ``config``."""
        return getattr(importlib.import_module("hvdkit.layers"), self._name).from_config(config)


class _KerasImportHook(importlib.abc.MetaPathFinder):
    """Import hook that delegates to the other finders and registers the layers after Keras is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return Keras's spec with a loader that registers the layers at the end; None for any other module."""
        if fullname != "keras":
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader only
        return spec


def register_layers() -> None:
    """Register the layers with Keras, now if it is already imported, otherwise when the user imports it."""
    keras = sys.modules.get("keras")
    if keras is None:
        sys.meta_path.insert(0, _KerasImportHook())
    elif hasattr(keras, "saving"):  # not while it is being imported
        _register(keras)


def _register(keras: ModuleType) -> None:
    registry = keras.saving.get_custom_objects()
    for name in LAYERS:
        registry.setdefault(f"hvdkit>{name}", _LazyLayer(name))
