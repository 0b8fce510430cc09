"""Give each rank different random numbers, derived from the chief's random states.

With equal states, ranks would use the same dropout masks for different rows. Ranks along mesh axes other than "data"
share a batch and therefore draw the same numbers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.internals import context, global_seed_generator, global_state

if TYPE_CHECKING:
    import keras

    from hvdkit.sharding.shards import AnyVariable

_GENERATOR = "global_seed_generator"  # Keras 3.12 has no constant for it
_GOLDEN = 0x9E3779B1  # odd, so its multiples differ for all ranks


def spread_seeds(states: list[AnyVariable], replicated: list[AnyVariable], values: list[np.ndarray]) -> None:
    """Set the states of random generators, derived from the chief's, to different values on each rank.

    Args:
        states: variables of generators.
        replicated: variables that get the chief's state unchanged.
        values: the chief's states of both.
    """
    offset = _seed_offset()
    for index, (variable, value) in enumerate(zip([*states, *replicated], values, strict=True)):
        value = value.copy()
        if offset and index < len(states):
            value[0] = (int(value[0]) + offset) % 2**31
        variable.assign(value)


class _RankGenerator:
    """Wrapper of Keras's global random generator: equal state on all ranks, but different seeds on each."""

    def __init__(self, generator: keras.random.SeedGenerator) -> None:
        self._generator = generator

    def next(self, ordered: bool = True) -> tf.Tensor:
        """Return this rank's next seed, int64 ``[2]``, and advance the generator."""
        seed = self._generator.next(ordered=ordered)
        return seed + tf.constant([_seed_offset(), 0], seed.dtype)


@contextlib.contextmanager
def rank_seeds() -> Iterator[None]:
    """Make unseeded ``keras.random`` and TensorFlow's stateful random ops draw different numbers on each rank.

    The latter only need this if TensorFlow's global seed is set. An op uses the seed of the graph in which it is
    created, or in eager mode that of the context.
    """
    offset = _seed_offset()
    if not offset:
        yield
        return
    in_graph = tf.inside_function()
    owner, name = (tf.compat.v1.get_default_graph(), "seed") if in_graph else (context.context(), "_seed")
    before = getattr(owner, name)
    generator = global_generator()
    if before is not None:
        setattr(owner, name, (int(before) + offset) % 2**31)
    global_state.set_global_attribute(_GENERATOR, _RankGenerator(generator))
    try:
        yield
    finally:
        setattr(owner, name, before)
        global_state.set_global_attribute(_GENERATOR, generator)


def _seed_offset() -> int:
    return cluster.group(cluster.DATA).index * _GOLDEN


def global_generator() -> keras.random.SeedGenerator:
    """Return Keras's global random generator, which unseeded ``keras.random`` uses."""
    before = random.getstate()  # Keras seeds a new generator from Python's
    generator = global_seed_generator()
    random.setstate(before)
    return generator
