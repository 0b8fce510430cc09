"""The optimizers of a model: wrap them for ``hk.fit``, and compare them between ranks."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import keras
import numpy as np

from hvdkit import cluster
from hvdkit.cluster.agreement import compare, gather
from hvdkit.cluster.logs import warn_once
from hvdkit.collectives.ops import ReduceOp
from hvdkit.collectives.weak_registry import Attached
from hvdkit.errors import describe
from hvdkit.keras.attribute_swap import exchange_attributes, swap_attributes
from hvdkit.optimizer.copies import Original
from hvdkit.optimizer.distributed import distribute
from hvdkit.optimizer.inner_optimizers import updater_of, updaters_of
from hvdkit.optimizer.mixin import DistributedMixin
from hvdkit.sharding.optimizer_configs import config_of

T = TypeVar("T")
_MAX_OPTIMIZERS = 64  # longer lists are assumed to contain something else


def distribute_optimizers(model: keras.Model) -> None:
    """Wrap every optimizer of a model, both the compiled one and those in attributes, in a DistributedOptimizer.

    One that sums gradients is a ValueError: the gradient of the global batch is the average.
    """
    wrapped: dict[int, keras.Optimizer] = {}
    for owner in model._flatten_layers():
        for name, value in list(vars(owner).items()):
            new_value = _distributed(value, wrapped, model)
            if new_value is not value:
                setattr(owner, name, new_value)
    config = getattr(model, "_compile_config", None)
    if config is not None and "optimizer" in config.config and getattr(model, "optimizer", None) is not None:
        config.config["optimizer"] = model.optimizer  # saved with the model; its learning rate is current


@contextlib.contextmanager
def original_attributes(model: keras.Model) -> Iterator[None]:
    """Undo what :func:`distribute_optimizers` does inside: restore the model's own optimizers."""
    config = getattr(model, "_compile_config", None)
    settings: dict[str, object] = {} if config is None else config.config
    compiled = settings.get("optimizer")
    attributes = [
        (owner, {name: value for name, value in vars(owner).items() if any(True for _ in _optimizers_in(value))})
        for owner in model._flatten_layers()
    ]
    copies = [(optimizer, _COPIES.get(optimizer)) for optimizer in all_optimizers(model)]
    try:
        yield
    finally:
        for owner, values in attributes:
            exchange_attributes(owner, values)
        for optimizer, copy in copies:
            if copy is None:
                _COPIES.remove(optimizer)
            else:
                _COPIES.set(optimizer, copy)
        if compiled is not None:
            settings["optimizer"] = compiled


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """Return the distinct distributed optimizers of a model."""
    return [each for each in all_optimizers(model) if isinstance(each, DistributedMixin)]


def plain_optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """Return the distinct optimizers of a model that are not distributed."""
    return [each for each in all_optimizers(model) if not isinstance(each, DistributedMixin)]


def all_optimizers(model: keras.Model) -> list[keras.Optimizer]:
    """Return the distinct optimizers of a model, in attributes of it and its layers."""
    values = [value for owner in model._flatten_layers() for value in vars(owner).values()]
    return list({id(each): each for value in values for each in _optimizers_in(value)}.values())


def _optimizers_in(value: object) -> Iterator[keras.Optimizer]:
    """Yield an attribute that is an optimizer, or the optimizers that it contains."""
    if isinstance(value, keras.optimizers.Optimizer):
        yield value
    for item in _items(value):
        yield from _optimizers_in(item)


def warn_of_repeated_rows(model: keras.Model) -> None:
    """Warn on the chief, once per process, that rows of tables are updated with the sum of their gradients.

    If a row repeats in a batch, plain Keras scatters its gradients one by one, so an optimizer that squares them adds
    the squares. For optimizers that are linear in the gradient, the result is the same.
    """
    tables = [x for x in model._flatten_layers() if isinstance(x, keras.layers.Embedding) and x.trainable]
    inner = [updater_of(optimizer) for optimizer in optimizers_of(model)]
    nonlinear = [type(optimizer).__name__ for optimizer in inner if not isinstance(optimizer, keras.optimizers.SGD)]
    if tables and nonlinear and cluster.is_chief():
        warn_once(
            f"Embedding with {nonlinear[0]}: a row that occurs several times in a batch gets the sum of its "
            "gradients, at any number of ranks; plain Keras squares them one by one, and its results differ slightly"
        )


def warn_of_float8(model: keras.Model) -> None:
    """Warn on the chief, once per process, that float8 layers round gradients by scales of a rank's own loss.

    The loss of a rank is the mean of its rows, so the gradients of its layers' outputs are N times as large as in one
    process, as are their scales. Steps with other scales round other numbers.
    """
    if cluster.size() == 1 or not cluster.is_chief():
        return
    if any(getattr(variable, "overwrite_with_gradient", False) for variable in model.trainable_variables):
        warn_once(
            "float8 layers: output gradients are rounded with the scale of each rank's mean loss, which is that of one "
            "process times the number of ranks; results are close to those of one process, not equal"
        )


def compare_optimizers(model: keras.Model) -> None:
    """Raise CollectiveMismatchError if settings of the ranks' optimizers differ.

    Their variables are broadcast from the chief later. Learning rates may differ if the iteration counts do, e.g. if
    only the chief has restored a checkpoint.
    """
    ranks = gather(cluster.exchange(), "optimizers of the model", lambda: list(map(_settings, optimizers_of(model))))
    settings = [[_with_chief_rate(*pair) for pair in itertools.zip_longest(ranks[0], local)] for local in ranks]
    remedy = "compile the model with the same optimizer and settings on every rank"
    compare(settings, "optimizer", remedy, show=_first_difference)


class _OptimizerSettings(NamedTuple):
    """An optimizer's iteration count, and its class and config, without names, which Keras numbers."""

    steps: int
    values: dict[str, str]


def _with_chief_rate(chief: _OptimizerSettings | None, local: _OptimizerSettings | None) -> dict[str, str]:
    """Return a rank's settings of an optimizer, with the chief's learning rate if iteration counts differ."""
    if local is None:
        return {}
    if chief is None or chief.steps == local.steps:
        return local.values
    return {
        **{key: value for key, value in local.values.items() if not _is_rate(key)},
        **{key: value for key, value in chief.values.items() if _is_rate(key)},
    }


def _is_rate(key: str) -> bool:
    return key.split(".")[0] == "learning_rate"


def _first_difference(odd: list[dict[str, str]], usual: list[dict[str, str]]) -> tuple[str, str]:
    for got, expected in itertools.zip_longest(odd, usual, fillvalue=dict[str, str]()):
        for key in {**expected, **got}:
            if got.get(key) != expected.get(key):
                return f"{key}={got.get(key)}", f"{key}={expected.get(key)}"
    raise AssertionError("equal settings")


def _settings(optimizer: keras.Optimizer) -> _OptimizerSettings:
    values = {"class": type(optimizer).__name__}

    def flatten(name: str, value: object) -> None:
        if isinstance(value, (dict, list, tuple)):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in pairs:
                if key != "name":
                    flatten(f"{name}.{key}" if name else str(key), item)
        else:
            is_plain = value is None or isinstance(value, (bool, int, float, str, np.generic))
            values[name] = repr(value) if is_plain else type(value).__name__

    flatten("", config_of(optimizer))
    return _OptimizerSettings(int(np.asarray(optimizer.iterations)), values)


@contextlib.contextmanager
def following_originals(model: keras.Model) -> Iterator[None]:
    """Let distributed optimizers follow the learning rate of the optimizers passed to ``compile``, which they replace.

    A callback that holds the original would have no effect otherwise.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers_of(model):
            if optimizer._hvdkit_original is None:
                continue
            variables = _rate_variables(optimizer._hvdkit_original.optimizer)
            if _values(variables) != optimizer._hvdkit_original.rates:
                _follow(optimizer)
            for variable in variables:
                stack.enter_context(swap_attributes(variable, assign=_followed(variable.assign, optimizer)))
        yield


def _followed(assign: Callable[[object], T], optimizer: keras.Optimizer) -> Callable[[object], T]:
    def assign_both(value: object) -> T:
        result = assign(value)
        _follow(optimizer)
        return result

    return assign_both


def _follow(optimizer: keras.Optimizer) -> None:
    original = optimizer._hvdkit_original.optimizer
    variables = _rate_variables(original)
    # A MultiOptimizer that calls a function has no optimizers before it is built, and its copy then has the same ones.
    for own, variable in zip(_rate_variables(optimizer), variables, strict=False):
        if own is not variable:
            own.assign(variable)
    optimizer._hvdkit_original = Original(original, _values(variables))


def _rate_variables(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return the learning rates of an optimizer, and of those inside, that are neither schedules nor functions."""
    rates = [each._learning_rate for each in updaters_of(optimizer)]
    return [rate for rate in rates if isinstance(rate, keras.Variable)]


def _values(variables: Iterable[keras.Variable]) -> tuple[float, ...]:
    return tuple(float(np.asarray(variable)) for variable in variables)


def _items(value: object) -> Iterable[object]:
    """Return the items of a short list, tuple or dict; none for anything else."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return items if len(items) <= _MAX_OPTIMIZERS else ()


class _KnownCopy(NamedTuple):
    """The distributed copy with which ``hk.fit`` has replaced an optimizer."""

    copy: keras.Optimizer
    model: weakref.ref[keras.Model]  # which it trains
    steps: int  # the iteration count of the original when it was copied


# Stored on the original, which the copy references.
_COPIES: Attached[_KnownCopy] = Attached("_hvdkit_copy")


def _copy_for(model: keras.Model, optimizer: keras.Optimizer) -> keras.Optimizer:
    """Return a distributed copy of an optimizer: the earlier one if the model was compiled with it again.

    As in Keras, the optimizer then continues with its slots and iteration count.
    """
    known = _COPIES.get(optimizer)
    if known is not None and known.model() is model:
        is_shared = known.copy.iterations is optimizer.iterations  # also counts the copy's steps
        if not optimizer.built if is_shared else int(np.asarray(optimizer.iterations)) == known.steps:
            return known.copy
    steps = int(np.asarray(optimizer.iterations))
    copy = distribute(optimizer)
    copy._hvdkit_original = Original(optimizer, _values(_rate_variables(optimizer)))
    _COPIES.set(optimizer, _KnownCopy(copy, weakref.ref(model), steps))
    return copy


def _distributed(value: object, wrapped: dict[int, keras.Optimizer], model: keras.Model) -> object:
    """Return an attribute with its optimizers wrapped; ``wrapped`` has those so far, by the id of the original."""
    if isinstance(value, DistributedMixin):
        if value._hvdkit.op != ReduceOp.Average:
            remedy = "use hk.Average: hk.fit handles losses that are sums"
            raise ValueError(describe("op", value._hvdkit.op.name, "hk.Average of optimizers for hk.fit", remedy))
        return value
    if isinstance(value, keras.optimizers.Optimizer):
        if id(value) not in wrapped:
            wrapped[id(value)] = _copy_for(model, value)
        return wrapped[id(value)]
    items = [_distributed(item, wrapped, model) for item in _items(value)]
    if all(new is old for new, old in zip(items, _items(value), strict=True)):
        return value
    # Return a plain container; Keras tracks it again on assignment.
    if isinstance(value, dict):
        return dict(zip(value, items, strict=True))
    return tuple(items) if isinstance(value, tuple) else items
