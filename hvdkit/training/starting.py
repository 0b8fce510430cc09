"""Before the first step: optimizers that combine gradients, weights of the chief, random numbers of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvdkit import cluster
from hvdkit.collectives import broadcast_object, broadcast_variables
from hvdkit.collectives.ops import ReduceOp
from hvdkit.collectives.shards import is_part
from hvdkit.collectives.variables import SEED_STATE
from hvdkit.errors import describe
from hvdkit.optimizer import DistributedOptimizer
from hvdkit.optimizer.mixins import Distributed

_GOLDEN = 0x9E3779B1  # odd: multiples differ for all ranks
_MOST_OPTIMIZERS = 64  # in a list; longer ones hold something else


@dataclass(frozen=True)
class _Original:
    """An optimizer in whose place a distributed copy trains. Not a tuple: Keras would save it with the copy."""

    optimizer: Any
    rate: float


def distribute_optimizers(model: Any) -> None:
    """Make every optimizer of a model combine gradients over ranks: the compiled one, and those in attributes.

    Raises:
        ValueError: an optimizer sums gradients; the average is the gradient of the global batch.
    """
    made: dict[int, Any] = {}
    for owner in _owners(model):
        for name, value in list(vars(owner).items()):
            changed = _distributed(value, made)
            if changed is not value:
                setattr(owner, name, changed)
    config = getattr(model, "_compile_config", None)
    if config is not None and "optimizer" in config.config and getattr(model, "optimizer", None) is not None:
        config.config["optimizer"] = model.optimizer  # saved with the model: its rate is the one that changes


def optimizers_of(model: Any) -> list[Any]:
    """Return the distributed optimizers of a model, each once."""
    found: dict[int, Any] = {}

    def note(value: Any) -> None:
        if isinstance(value, Distributed):
            found[id(value)] = value
        for part in _parts(value):
            note(part)

    for owner in _owners(model):
        for value in vars(owner).values():
            note(value)
    return list(found.values())


def check_originals(model: Any) -> None:
    """Refuse a learning rate set on an optimizer in whose place a distributed copy trains.

    Raises:
        ValueError: it has another rate than when it was copied.
    """
    for optimizer in optimizers_of(model):
        original = getattr(optimizer, "_hvdkit_original", None)
        if original is not None and _rate(original.optimizer) != original.rate:
            got = f"a learning rate set on the {type(original.optimizer).__name__} that was given to compile"
            remedy = "set it on model.optimizer, which hk.fit has made distributed"
            raise ValueError(describe("optimizer", got, "one set on the optimizer that trains", remedy))


def _rate(optimizer: Any) -> float:
    return float(np.asarray(optimizer.learning_rate))


def _owners(model: Any) -> Iterator[Any]:
    """Yield the model, and models inside it, which may have their own optimizers."""
    yield model
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.Model):
            yield layer


def _parts(value: Any) -> Iterable[Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return parts if len(parts) <= _MOST_OPTIMIZERS else ()


def _distributed(value: Any, made: dict[int, Any]) -> Any:
    """Return ``value`` with its optimizers distributed: itself, or those in a list, tuple or dict."""
    if isinstance(value, Distributed):
        if value._hvdkit.op != ReduceOp.Average:
            remedy = "use hk.Average: hk.fit takes care of losses that are sums"
            raise ValueError(describe("op", value._hvdkit.op.name, "hk.Average of optimizers for hk.fit", remedy))
        return value
    if isinstance(value, keras.optimizers.Optimizer):
        if id(value) not in made:
            made[id(value)] = new = DistributedOptimizer(value)
            object.__setattr__(new, "_hvdkit_original", _Original(value, _rate(value)))
        return made[id(value)]
    parts = [_distributed(part, made) for part in _parts(value)]
    if all(mine is part for mine, part in zip(parts, _parts(value), strict=True)):
        return value
    # A plain container: Keras tracks it again.
    return (
        dict(zip(value, parts, strict=True))
        if isinstance(value, dict)
        else tuple(parts)
        if isinstance(value, tuple)
        else parts
    )


class Variables:
    """The variables of a model and its optimizers, which begin with the chief's values.

    Args:
        model: a Keras model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[int, Any] = {}

    def begin(self) -> None:
        """Give every rank the chief's values of all variables that exist, and its own random numbers."""
        self._known = {}
        self._take(self._all())

    def begin_new(self) -> None:
        """Do the same for variables that have been made since."""
        self._take([v for v in self._all() if id(v) not in self._known])

    def _take(self, variables: list[Any]) -> None:
        self._known |= {id(v): v for v in variables}
        broadcast_variables([v for v in variables if v.name != SEED_STATE])
        spread_seeds([v for v in variables if v.name == SEED_STATE])

    def _all(self) -> list[Any]:
        listed = [*self._model.variables, *(v for optimizer in optimizers_of(self._model) for v in optimizer.variables)]
        return [v for v in {id(v): v for v in listed}.values() if not is_part(v)]


def spread_seeds(states: list[Any], broadcast: Callable[[Any], Any] = broadcast_object) -> None:
    """Give random generators states that differ between ranks and follow from the chief's.

    Ranks with equal states would drop the same units of unlike rows. Ranks along other axes of the mesh than "data"
    work on one batch, and so have equal states.
    """
    values = broadcast([np.asarray(v) for v in states])
    step = cluster.group(cluster.DATA).index * _GOLDEN
    for variable, value in zip(states, values, strict=True):
        value = value.copy()
        value[0] = (int(value[0]) + step) % 2**31 if step else value[0]
        variable.assign(value)
