"""Prepare a model before the first step: wrap its optimizers, broadcast the chief's weights, seed each rank."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator
from tensorflow.python.eager import context

from hvdkit import cluster
from hvdkit.cluster.agreement import compare, gather
from hvdkit.cluster.logs import get_logger
from hvdkit.collectives import broadcast_object
from hvdkit.collectives.ops import ReduceOp
from hvdkit.errors import describe
from hvdkit.optimizer.copies import Original
from hvdkit.optimizer.distributed import DistributedOptimizer
from hvdkit.optimizer.mixins import DistributedMixin
from hvdkit.sharding.shards import differs_by_rank
from hvdkit.sharding.variables import SEED_STATE, broadcast_variables

_GOLDEN = 0x9E3779B1  # odd, so its multiples differ for all ranks
_MOST_OPTIMIZERS = 64  # longer lists are assumed to contain something else


def distribute_optimizers(model: Any) -> None:
    """Wrap every optimizer of a model, both the compiled one and those in attributes, in a DistributedOptimizer.

    Raises:
        ValueError: an optimizer sums gradients; the gradient of the global batch is the average.
    """
    made: dict[int, Any] = {}
    for owner in _owners(model):
        for name, value in list(vars(owner).items()):
            changed = _distributed(value, made)
            if changed is not value:
                setattr(owner, name, changed)
    config = getattr(model, "_compile_config", None)
    if config is not None and "optimizer" in config.config and getattr(model, "optimizer", None) is not None:
        config.config["optimizer"] = model.optimizer  # saved with the model; its learning rate is current


def optimizers_of(model: Any) -> list[Any]:
    """Return the distinct distributed optimizers of a model."""
    found: dict[int, Any] = {}

    def note(value: Any) -> None:
        if isinstance(value, DistributedMixin):
            found[id(value)] = value
        for part in _parts(value):
            note(part)

    for owner in _owners(model):
        for value in vars(owner).values():
            note(value)
    return list(found.values())


def warn_of_repeated_rows(model: Any) -> None:
    """Warn on the chief, once per process, that rows of tables are updated with the sum of their gradients.

    If a row repeats in a batch, plain Keras scatters its gradients one by one, so an optimizer that squares them adds
    the squares. For optimizers that are linear in the gradient, the result is the same.
    """
    tables = [x for x in model._flatten_layers() if isinstance(x, keras.layers.Embedding) and x.trainable]
    parts = [getattr(each, "inner_optimizer", each) for each in optimizers_of(model)]
    kinds = [type(each).__name__ for each in parts if not isinstance(each, keras.optimizers.SGD)]
    if tables and kinds and cluster.is_chief():
        _warn_once(
            f"Embedding with {kinds[0]}: a row that occurs several times in a batch gets the sum of its "
            "gradients, at any number of ranks; plain Keras squares them one by one, and its results differ a little"
        )


@functools.cache
def _warn_once(words: str) -> None:
    get_logger().warning("%s", words)


def compare_optimizers(model: Any) -> None:
    """Compare the settings of the ranks' optimizers. Their variables are broadcast from the chief later.

    Learning rates may differ if the iteration counts do, e.g. if only the chief has restored a checkpoint.

    Raises:
        CollectiveMismatchError: settings differ.
    """
    ranks = gather(
        cluster.exchange(),
        "optimizers of the model",
        lambda: [_Settings(int(np.asarray(each.iterations)), _settings(each)) for each in optimizers_of(model)],
    )
    settings = [[_with_rate_of(*pair) for pair in itertools.zip_longest(ranks[0], mine)] for mine in ranks]
    remedy = "compile the model with the same optimizer and settings on every rank"
    compare(settings, "optimizer", remedy, show=_first_difference)


class _Settings(NamedTuple):
    """An optimizer's iteration count, class and config."""

    steps: int
    values: dict[str, str]


def _with_rate_of(chief: _Settings | None, mine: _Settings | None) -> dict[str, str]:
    """Return the settings of an optimizer, with the chief's learning rate if iteration counts differ."""
    if mine is None:
        return {}
    if chief is None or chief.steps == mine.steps:
        return mine.values
    return {
        **{key: value for key, value in mine.values.items() if not _is_rate(key)},
        **{key: value for key, value in chief.values.items() if _is_rate(key)},
    }


def _is_rate(key: str) -> bool:
    return key.split(".")[0] == "learning_rate"


def _first_difference(odd: list[dict[str, str]], usual: list[dict[str, str]]) -> tuple[str, str]:
    for mine, theirs in itertools.zip_longest(odd, usual, fillvalue=dict[str, str]()):
        for key in {**theirs, **mine}:
            if mine.get(key) != theirs.get(key):
                return f"{key}={mine.get(key)}", f"{key}={theirs.get(key)}"
    raise AssertionError("equal settings")


def _settings(optimizer: Any) -> dict[str, str]:
    """Return an optimizer's class and config, excluding names, which Keras numbers."""
    found = {"class": type(optimizer).__name__}

    def note(name: str, value: Any) -> None:
        if isinstance(value, (dict, list, tuple)):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, part in pairs:
                if key != "name":
                    note(f"{name}.{key}" if name else str(key), part)
        else:
            is_plain = value is None or isinstance(value, (bool, int, float, str, np.generic))
            found[name] = repr(value) if is_plain else type(value).__name__

    note("", optimizer.get_config())
    return found


def check_originals(model: Any) -> None:
    """Check that the user has not set the learning rate of an optimizer that a distributed copy replaces.

    Raises:
        ValueError: its learning rate has changed since it was copied.
    """
    for optimizer in optimizers_of(model):
        original = optimizer._hvdkit_original
        if original is not None and _rate(original.optimizer) != original.rate:
            got = f"a learning rate set on the {type(original.optimizer).__name__} that was given to compile"
            remedy = "set it on model.optimizer, which hk.fit has made distributed"
            raise ValueError(describe("optimizer", got, "one set on the optimizer that trains", remedy))


def _rate(optimizer: Any) -> float:
    return float(np.asarray(optimizer.learning_rate))


def _owners(model: Any) -> Iterator[Any]:
    """Yield the model and its inner models, which may have their own optimizers."""
    yield model
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.Model):
            yield layer


def _parts(value: Any) -> Iterable[Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return parts if len(parts) <= _MOST_OPTIMIZERS else ()


def _distributed(value: Any, made: dict[int, Any]) -> Any:
    """Return ``value`` with its optimizers wrapped: ``value`` itself, or the items of a list, tuple or dict."""
    if isinstance(value, DistributedMixin):
        if value._hvdkit.op != ReduceOp.Average:
            remedy = "use hk.Average: hk.fit takes care of losses that are sums"
            raise ValueError(describe("op", value._hvdkit.op.name, "hk.Average of optimizers for hk.fit", remedy))
        return value
    if isinstance(value, keras.optimizers.Optimizer):
        if id(value) not in made:
            made[id(value)] = new = DistributedOptimizer(value)
            new._hvdkit_original = Original(value, _rate(value))
        return made[id(value)]
    parts = [_distributed(part, made) for part in _parts(value)]
    if all(mine is part for mine, part in zip(parts, _parts(value), strict=True)):
        return value
    # Return a plain container; Keras tracks it again on assignment.
    return (
        dict(zip(value, parts, strict=True))
        if isinstance(value, dict)
        else tuple(parts)
        if isinstance(value, tuple)
        else parts
    )


class Variables:
    """The variables of a model and its optimizers, initialized with the chief's values.

    Args:
        model: a Keras model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[int, Any] = {}

    def begin(self) -> None:
        """Broadcast the chief's values of all existing variables, and seed each rank differently."""
        self._known = {}
        self._take(self._all(), _global_generator().state)

    def begin_new(self) -> None:
        """Broadcast variables created since the last call."""
        self._take([v for v in self._all() if id(v) not in self._known])

    def _take(self, variables: list[Any], *shared: Any) -> None:
        self._known |= {id(v): v for v in variables}
        broadcast_variables([v for v in variables if v.name != SEED_STATE])
        spread_seeds([v for v in variables if v.name == SEED_STATE], *shared)

    def _all(self) -> list[Any]:
        listed = [*self._model.variables, *(v for optimizer in optimizers_of(self._model) for v in optimizer.variables)]
        return [v for v in {id(v): v for v in listed}.values() if not differs_by_rank(v)]


def spread_seeds(states: list[Any], *shared: Any, broadcast: Callable[[Any], Any] = broadcast_object) -> None:
    """Set the states of random generators, derived from the chief's, to different values on each rank.

    With equal states, ranks would use the same dropout masks for different rows. Ranks along mesh axes other than
    "data" share a batch and therefore have equal states.

    Args:
        states: variables of generators.
        shared: variables that get the chief's state unchanged.
        broadcast: broadcasts an object from the chief.
    """
    values = broadcast([np.asarray(v) for v in [*states, *shared]])
    step = _seed_step()
    for number, (variable, value) in enumerate(zip([*states, *shared], values, strict=True)):
        value = value.copy()
        if step and number < len(states):
            value[0] = (int(value[0]) + step) % 2**31
        variable.assign(value)


class _RankGenerator:
    """Wrapper of Keras's global random generator: equal state on all ranks, but different seeds on each."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def next(self, ordered: bool = True) -> Any:
        """Return this rank's next seed, int64 ``[2]``, and advance the generator."""
        seed = self._generator.next(ordered=ordered)
        return seed + tf.constant([_seed_step(), 0], seed.dtype)


@contextlib.contextmanager
def seeds_of_rank() -> Iterator[None]:
    """Make unseeded ``keras.random`` and TensorFlow's stateful random ops draw different numbers on each rank.

    The latter only need this if TensorFlow's global seed is set. An op uses the seed of the graph in which it is
    created, or in eager mode that of the context.
    """
    step = _seed_step()
    if not step:
        yield
        return
    in_graph = tf.inside_function()
    owner, name = (tf.compat.v1.get_default_graph(), "seed") if in_graph else (context.context(), "_seed")
    before, generator = getattr(owner, name), _global_generator()
    if before is not None:
        setattr(owner, name, (int(before) + step) % 2**31)
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, _RankGenerator(generator))
    try:
        yield
    finally:
        setattr(owner, name, before)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)


def _seed_step() -> int:
    return cluster.group(cluster.DATA).index * _GOLDEN


def _global_generator() -> Any:
    """Return Keras's global random generator, which unseeded ``keras.random`` uses."""
    before = random.getstate()  # Keras seeds a new generator from Python's
    generator = global_seed_generator()
    random.setstate(before)
    return generator
