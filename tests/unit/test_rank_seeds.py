"""What rank_seeds swaps for a step is restored, also if the step raises."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from hvdkit.internals import context
from hvdkit.keras import rank_seeds


@pytest.mark.parametrize("traced", [False, True])
def test_generators_and_seeds_are_those_of_before_after_a_step_that_raises(traced, monkeypatch):
    monkeypatch.setattr(rank_seeds, "_seed_offset", lambda: 7)
    keras.utils.set_random_seed(3)
    generator, seed = rank_seeds.global_generator(), context.context()._seed
    seen = []

    def step():
        graph = tf.compat.v1.get_default_graph()
        before = graph.seed
        try:
            with rank_seeds.rank_seeds():
                seen.append(rank_seeds.global_generator() is not generator)
                raise RuntimeError("in a step")
        finally:
            seen.append(graph.seed == before)

    with pytest.raises(RuntimeError, match="in a step"):
        (tf.function(step, autograph=False) if traced else step)()
    assert seen == [True, True]
    assert rank_seeds.global_generator() is generator and context.context()._seed == seed
