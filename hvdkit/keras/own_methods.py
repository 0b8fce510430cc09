"""Models with their own ``fit``, ``evaluate`` or ``predict``, which call Keras's with ``super()``.

Such a method gets the user's arguments, as in plain Keras. What it passes on to Keras's method goes to hvdkit instead:
while it runs, the model is an instance of a subclass with one more class before Keras's trainer,

    M, ..., keras.Model, interceptor, Keras's trainer, ...

so that ``super().fit`` finds the interceptor's method.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from hvdkit.cluster import size
from hvdkit.errors import HvdkitError, describe
from hvdkit.internals import TensorFlowTrainer
from hvdkit.keras.attribute_swap import swap_attributes

_PLAIN_METHODS: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
_PLAIN = (bool, int, float, str, type(None))


def keras_method(model: keras.Model, name: str) -> Callable[..., Any]:
    """Return Keras's own method of a model, bound to it, even if the model's class has another one."""
    return types.MethodType(getattr(TensorFlowTrainer, name), model)


def has_own(model: Any, name: str) -> bool:
    """Return True if a Keras model has a method of its own instead of Keras's ``name``."""
    is_keras = getattr(type(model), name, None) is getattr(TensorFlowTrainer, name)
    own = vars(model).get(name) if isinstance(model, keras.Model) else None
    return isinstance(model, keras.Model) and (not is_keras or (own is not None and own not in _PLAIN_METHODS))


def as_plain(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a replacement of a model's method that is not the user's own; return it."""
    _PLAIN_METHODS.add(method)
    return method


def call_own(model: Any, name: str, run: Callable[..., Any], function: Callable[..., Any], arguments: Any) -> Any:
    """Call the model's own method; what it passes to Keras's method goes to ``run``.

    Args:
        model: a Keras model.
        name: the method's name.
        run: called with the model and Keras's arguments by name.
        function: hvdkit's function, whose defaults are left out of the call.
        arguments: the arguments of ``function`` by name.

    Returns:
        What the method returns.

    Raises:
        HvdkitError: the method trains the model without ``super()``.
    """
    defaults = {key: parameter.default for key, parameter in inspect.signature(function).parameters.items()}
    given = {key: value for key, value in arguments.items() if not _is_default(value, defaults[key])}
    position = [given.pop(key) for key in ("x", "y") if key in given and ("x" in arguments)]
    with _intercepting(model, name, run):
        return getattr(model, name)(*position, **given)


@contextlib.contextmanager
def _intercepting(model: Any, name: str, run: Callable[..., Any]) -> Iterator[None]:
    """Send calls of Keras's method ``name`` to ``run``."""
    own = type(model)
    signature = inspect.signature(getattr(TensorFlowTrainer, name))
    check_compiled = model._assert_compile_called

    def intercepted(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        arguments.pop("self")
        options = arguments.pop("kwargs", {})
        object.__setattr__(model, "__class__", own)
        try:
            with swap_attributes(model, _assert_compile_called=check_compiled):
                return run(model, **arguments, **options)
        finally:
            object.__setattr__(model, "__class__", intercepting)

    def refuse_fit(method: str | None = None) -> None:
        if method == "fit" and size() > 1:  # one rank trains as in plain Keras
            got = f"{own.__name__}.fit, which calls a fit of Keras that it has kept"
            raise HvdkitError(describe("model", got, "a fit that calls super().fit", "call super().fit in it"))
        check_compiled(method)

    interceptor = type("Interceptor", (TensorFlowTrainer,), {name: intercepted})
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    intercepting = types.new_class(own.__name__, (own, interceptor), exec_body=lambda space: space.update(names))
    object.__setattr__(model, "__class__", intercepting)
    try:
        with swap_attributes(model, _assert_compile_called=refuse_fit):
            yield
    finally:
        object.__setattr__(model, "__class__", own)


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, _PLAIN) and type(value) is type(default) and value == default)
