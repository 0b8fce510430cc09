"""Random changes of a checkpoint's files: right values, or an error that names the file, in bounded memory.

Nothing on the disk is changed by reading. The changes of JSON have valid checksums. ``HVDKIT_TEST_EXAMPLES=5000`` tries
that many random changes; by default a few are tried, the same ones every time.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.faults import edited, rewritten
from helpers.forged import bounded_memory, copied, outcomes, places, replaced, save_as
from helpers.fuzzing import JSON, examples
from hypothesis import example, given
from hypothesis import strategies as st

import hvdkit as hk
from hvdkit import cluster
from hvdkit.checkpoint.manifest import NAME, step_name
from hvdkit.supervisor.saved_state import Position

FILES = [NAME, "replicated.safetensors", "shard-00001-of-00002.safetensors"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return save_as(tmp_path_factory.mktemp("whole") / step_name(20), size=2, rows=7)


def change_of(data: st.DataObject, content: dict[str, Any]) -> None:
    """Change one to three places of a manifest or a header: to other JSON, to a neighbour's value, or to nothing."""
    for _ in range(data.draw(st.integers(1, 3))):
        paths = [*places(content)]
        if not paths:  # all were removed
            return
        at = data.draw(st.sampled_from(paths))
        other = content
        for key in data.draw(st.sampled_from(paths)):
            other = other[key]
        new = data.draw(JSON | st.just(...) | st.just(copy.deepcopy(other)))
        changed = replaced(content, at, new)
        content.clear()
        content.update(changed)


@pytest.mark.full
@examples()
@given(st.data(), st.sampled_from(FILES))
def test_random_changes_give_right_values_or_an_error_that_names_the_file(whole, tmp_path_factory, data, name):
    path = copied(whole, tmp_path_factory.mktemp("fuzz"))
    if name == NAME:
        edited(path, lambda content: change_of(data, content))
    else:
        rewritten(path, name, lambda entries: change_of(data, entries))
    with bounded_memory():
        outcomes(path)


@examples()
@given(
    st.sampled_from(FILES),
    st.integers(0, 10**6),
    st.binary(max_size=12),
    st.booleans(),
)
@example("manifest.json", 0, b"\xff\xfe", False)
@example("manifest.json", 1, b"\r", False)  # the same JSON
def test_random_bytes_give_right_values_or_an_error_that_names_the_file(whole, tmp_path_factory, name, at, new, cut):
    path = copied(whole, tmp_path_factory.mktemp("fuzz"))
    content = (path / name).read_bytes()
    at %= len(content)
    changed = content[:at] + new + (b"" if cut else content[at + len(new) :])
    (path / name).write_bytes(changed)
    with bounded_memory():
        errors = outcomes(path)
    if len(errors) < 3:  # inspect does not read tensors
        assert changed == content or (name == NAME and json.loads(changed) == json.loads(content))


class State:
    """What a run saves, on one rank: a weight, a table, plain values, generators and a position."""

    def __init__(self, number: int):
        self.weight = tf.Variable(np.full((3, 2), number, np.float32))
        self.generators = [
            random.Random(number),
            np.random.default_rng(int(number)),
            np.random.RandomState(int(number)),
        ]
        self.seed = keras.random.SeedGenerator(number)
        self.position = Position(None)
        self.position.step = number
        self.values = {"name": "x", "rate": 0.1, "none": None, "list": [1, 2]}

    def mapping(self) -> dict[str, Any]:
        return {"w": self.weight, "random": [*self.generators, self.seed], "position": self.position, "v": self.values}


@pytest.mark.full
@examples()
@given(st.data(), st.sampled_from([NAME, "shard-00000-of-00001.safetensors"]))
def test_random_changes_are_restored_or_an_error_that_names_the_checkpoint(saved_run, tmp_path_factory, data, name):
    """What a restart does: matching, values, states of generators."""
    path = copied(saved_run, tmp_path_factory.mktemp("fuzz"))
    if name == NAME:
        edited(path, lambda content: change_of(data, content))
    else:
        rewritten(path, name, lambda entries: change_of(data, entries))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    state = State(9)
    with cluster.alone():
        try:
            hk.checkpoint.restore(path, state.mapping())
        except hk.CheckpointError as error:
            assert str(path) in str(error)
        else:
            np.testing.assert_array_equal(state.weight, np.full((3, 2), 5, np.float32))
            assert type(state.position.step) is int and state.position.step >= 0
    # Generators work, whatever was restored.
    state.generators[0].random()
    state.generators[1].random(1000)
    state.generators[2].random_sample(1000)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory) -> Path:
    with cluster.alone():
        return hk.checkpoint.save(tmp_path_factory.mktemp("run") / step_name(5), State(5).mapping())
