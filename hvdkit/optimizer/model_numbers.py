"""Numbers of models, by which ranks notice that they combine gradients of different ones.

A program may catch an exception that only one rank raises, and go on to its next model while the other ranks are still
training the last one. If both have the same shapes, Horovod would match their gradients, and every rank would train
with the gradients of another model. The number is therefore part of the names by which Horovod matches them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.weak_registry import WeakRegistry
from hvdkit.optimizer.gradients import Source
from hvdkit.sharding.shards import AnyVariable, inner_variable

# Horovod keeps an entry for each name, so numbers are used again.
_LARGEST = 1000

_Ranks = tuple[int, ...] | None
# Numbers of a model's variables by their places, and how many each group of ranks has used.
KnownNumbers = tuple[dict[int, dict[_Ranks, int]], dict[_Ranks, int]]
_NUMBERS: WeakRegistry[dict[_Ranks, int]] = WeakRegistry()  # of a model's first variable
_USED: Counter[_Ranks] = Counter()


def model_number(variables: Sequence[Source], group: cluster.Group | None) -> int:
    """Return which of the models this is whose gradients ``group`` (None: all ranks) has combined, counted from 1.

    A model is known by its first trainable variable. It gets its number when its gradients are first combined, and not
    when it is created: a rank may create models of which the others know nothing. Without a variable (if the caller did
    not pass it, or for a tensor, which is new in each trace) it is 1.
    """
    inner = inner_variable(variables[0]) if variables else None
    if not isinstance(inner, tf.Variable):
        return 1
    ranks = None if group is None else tuple(group.ranks)
    numbers = _NUMBERS.get(inner)
    if numbers is None:
        numbers = {}
        _NUMBERS.set(inner, numbers)
    if ranks not in numbers:
        numbers[ranks] = _USED[ranks] % _LARGEST + 1
        _USED[ranks] += 1
    return numbers[ranks]


def known_numbers(variables: Iterable[AnyVariable]) -> KnownNumbers:
    """Return what this rank knows of the numbers of models, to be compared with other ranks."""
    numbers = {index: _NUMBERS.get(inner_variable(v)) or {} for index, v in enumerate(variables)}
    return {index: known for index, known in numbers.items() if known}, dict(_USED)


def agree_on_numbers(variables: Iterable[AnyVariable], ranks: Sequence[KnownNumbers]) -> None:
    """Number a model again if ranks differ: a step that failed on all ranks had combined gradients on some of them.

    Args:
        variables: those of the model, in the same order on all ranks.
        ranks: :func:`known_numbers` of each rank, from an exchange that all of them have entered.
    """
    if all(each == ranks[0] for each in ranks):
        return
    for v in variables:
        _NUMBERS.discard(inner_variable(v))
    for _, used in ranks:
        for group, number in used.items():
            _USED[group] = max(_USED[group], number)
