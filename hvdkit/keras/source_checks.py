"""Find sums in the source of a user's training step: N ranks average their gradients, so a sum is N times too small."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types

import keras

from hvdkit import cluster
from hvdkit.cluster.logs import warn_once
from hvdkit.errors import see

_SUMS = {"reduce_sum", "sum"}
_GATHERS = {"gather_rows", "allgather", "grouped_allgather"}  # of all ranks' rows, whose sum is that of one process
_BY_BATCH = {"compute_average_loss", "scale_regularization_loss"}  # of tf.nn: divide by the global batch size


def warn_of_sums(model: keras.Model) -> None:
    """Warn on the chief of sums over all elements in a model with its own ``train_step`` or ``compute_loss``."""
    own = [name for name in ("train_step", "compute_loss") if has_own_method(model, name)]
    if not own or not cluster.is_chief() or cluster.group(cluster.DATA).size == 1:
        return
    found = sums_in(type(model))
    if found:
        warn_once(
            f"{own[0]} of {type(model).__name__}: calls {', '.join(found)}; hk.fit averages the gradients of the "
            "ranks, so the loss must be a mean over the rows of the step: a sum over rows, or a division by the global "
            "batch size, has 1/N of the gradient on N ranks; use tf.reduce_mean; "
            f"{see('pitfalls#losses-layers-and-random-numbers')}"
        )


def sums_in(model_class: type) -> list[str]:
    """Return the calls, with their lines, that may sum over rows in the methods that a user's class defines.

    These are ``tf.nn.compute_average_loss``, ``reduce_sum`` and ``sum`` without an axis, and uses of a global loss with
    ``reduction="sum"``.
    """
    found: list[str] = []
    for owner in model_class.__mro__:
        if is_of_library(owner):
            continue
        for function in vars(owner).values():
            if inspect.isfunction(function):
                found += _sums_of(function)
    return list(dict.fromkeys(found))


def _sums_of(function: types.FunctionType) -> list[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return []  # without a source, as in an interpreter
    first = function.__code__.co_firstlineno - 1
    found: list[str] = []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if any(_name(call) in _GATHERS for call in calls):
        return []
    for node in calls:
        name = _name(node)
        where = f"in line {first + node.lineno}"
        keywords = {keyword.arg for keyword in node.keywords}
        is_method = isinstance(node.func, ast.Attribute)
        is_sum = name in _SUMS and is_method and len(node.args) == 1 and "axis" not in keywords
        if is_sum or name in _BY_BATCH:
            found.append(f"{name} {where}")
        elif isinstance(node.func, ast.Name):
            value = function.__globals__.get(name)
            if isinstance(value, keras.losses.Loss) and value.reduction == "sum":
                found.append(f"{name} (reduction='sum') {where}")
    return found


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def has_own_method(model: keras.Model, name: str) -> bool:
    """Return True if a class of the user defines a method of ``model``."""
    return not is_of_library(next(each for each in type(model).__mro__ if name in vars(each)))


def is_of_library(owner: type) -> bool:
    """Return True for a class of Keras, TensorFlow or hvdkit."""
    return owner.__module__.split(".")[0] in ("keras", "tensorflow", "hvdkit", "builtins")


def is_of_keras(value: object) -> bool:
    """Return True for a function or class of Keras, and for an object of such a class."""
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).startswith("keras.")
