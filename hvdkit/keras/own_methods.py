"""Models with their own ``fit``, ``evaluate`` or ``predict``, and the ``fit`` that a tracker's autolog puts in place.

Such a method gets the user's arguments, as in plain Keras. What it passes on to Keras's method, by ``super()`` or by a
reference that it has kept, goes to hvdkit instead: Keras's methods are wrappers, which keep their function in a
closure, and while the user's method runs, another function is there.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import keras

from hvdkit import cluster
from hvdkit.internals import TensorFlowTrainer

Method = TypeVar("Method", bound=Callable[..., object])
_PLAIN_METHODS: weakref.WeakSet[Callable[..., object]] = weakref.WeakSet()
_CALLED: set[tuple[int, str]] = set()  # models, by their ids, and methods, whose own method has called Keras's
_PLAIN = (bool, int, float, str, type(None))


def keras_method(model: keras.Model, name: str) -> types.MethodType:
    """Return Keras's own method of a model, bound to it, even if the model's class has another one."""
    return types.MethodType(getattr(TensorFlowTrainer, name), model)


def has_own(model: object, name: str) -> bool:
    """Return True if a Keras model overrides Keras's method ``name``, and is not in it already."""
    is_keras = getattr(type(model), name, None) is getattr(TensorFlowTrainer, name)
    own = vars(model).get(name) if isinstance(model, keras.Model) else None
    is_own = isinstance(model, keras.Model) and (not is_keras or (own is not None and own not in _PLAIN_METHODS))
    return is_own and (id(model), name) not in _CALLED


def as_plain(method: Method) -> Method:
    """Mark a replacement of a model's method that is not the user's own; return it."""
    _PLAIN_METHODS.add(method)
    return method


def call_own(
    model: keras.Model,
    name: str,
    function: Callable[..., object],
    arguments: Mapping[str, object],
    run: Callable[..., object] | None = None,
) -> Any:
    """Call the model's own method; what it passes to Keras's method goes to ``function``, in which it has no own one.

    Args:
        model, name: a Keras model, and the name of the method.
        function: hvdkit's function, whose defaults are left out of the call.
        arguments: the arguments of ``function`` by name.
        run: called with the model and Keras's arguments by name, in place of ``function``.
    """
    defaults = {key: parameter.default for key, parameter in inspect.signature(function).parameters.items()}
    given = {key: value for key, value in arguments.items() if not _is_default(value, defaults[key])}
    position = [given.pop(key) for key in ("x", "y") if key in given]
    with _intercepting(model, name, run or function):
        return getattr(model, name)(*position, **given)


@contextlib.contextmanager
def _intercepting(model: keras.Model, name: str, run: Callable[..., object]) -> Iterator[None]:
    """Send calls of Keras's method ``name`` of ``model`` to ``run``."""
    method = getattr(TensorFlowTrainer, name)
    signature = inspect.signature(method)
    cell = next(cell for cell in method.__closure__ if callable(cell.cell_contents))
    function = cell.cell_contents

    def intercepted(self: keras.Model, *args: object, **kwargs: object) -> object:
        if self is not model:
            return function(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        arguments.pop("self")
        options = arguments.pop("kwargs", {})
        cell.cell_contents = function
        _CALLED.add((id(model), name))
        try:
            return run(model, **arguments, **options)
        finally:
            _CALLED.discard((id(model), name))
            cell.cell_contents = intercepted

    cell.cell_contents = intercepted
    try:
        yield
    finally:
        cell.cell_contents = function


def is_patched(name: str) -> bool:
    """Return True if a library has replaced Keras's method ``name`` for all models, as autolog of MLflow does."""
    return name in vars(keras.Model)


@contextlib.contextmanager
def patched_on_chief(name: str) -> Iterator[None]:
    """Undo on the other ranks what a library has put in place of Keras's method ``name``."""
    if not is_patched(name) or cluster.is_chief():
        yield
        return
    patch = vars(keras.Model)[name]
    delattr(keras.Model, name)
    try:
        yield
    finally:
        setattr(keras.Model, name, patch)


def _is_default(value: object, default: object) -> bool:
    return value is default or (isinstance(value, _PLAIN) and type(value) is type(default) and value == default)
