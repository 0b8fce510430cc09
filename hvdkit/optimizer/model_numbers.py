"""Numbers of models, by which ranks notice that they combine gradients of different ones.

A program may catch an exception that only one rank raises, and go on to its next model while the other ranks are still
training the last one. If both have the same shapes, Horovod would match their gradients, and every rank would train
with the gradients of another model. The number is therefore part of the names by which Horovod matches them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.weak_registry import WeakRegistry

# Horovod keeps an entry for each name, so numbers are used again.
_LARGEST = 1000

_Ranks = tuple[int, ...] | None
_NUMBERS: WeakRegistry[dict[_Ranks, int]] = WeakRegistry()  # of a model's first variable
_USED: Counter[_Ranks] = Counter()


def model_number(variables: Sequence[Any], group: cluster.Group | None) -> int:
    """Return which of the models this is whose gradients a group of ranks has combined, counted from 1.

    A model is known by its first trainable variable. It gets its number when its gradients are first combined, and not
    when it is created: a rank may create models of which the others know nothing.

    Args:
        variables: the variables of the gradients; None for unknown ones, or tensors, which are new in each trace.
        group: the ranks that combine them; None for all.

    Returns:
        The number; 1 if the first one is no variable.
    """
    first = variables[0] if variables else None
    inner = getattr(first, "_value", first)
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
