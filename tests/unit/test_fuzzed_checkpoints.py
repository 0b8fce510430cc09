"""Random changes of a checkpoint's files: right values, or an error that names the file, in bounded memory.

Nothing on the disk is changed by reading. The changes of JSON have valid checksums. ``HVDKIT_FUZZ_EXAMPLES=5000`` tries
that many random changes; by default a few are tried, the same ones every time.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.faults import edited, rewritten
from helpers.forged import bounded_memory, copied, outcomes, places, replaced, save_as
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hvdkit.checkpoint.manifest import NAME, step_name

COUNT = os.environ.get("HVDKIT_FUZZ_EXAMPLES")
FILES = [NAME, "replicated.safetensors", "shard-00001-of-00002.safetensors"]
examples = settings(
    max_examples=int(COUNT or 40),
    derandomize=COUNT is None,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return save_as(tmp_path_factory.mktemp("whole") / step_name(20), size=2, rows=7)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(2**62) | st.just(10**30),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=6,
)


def change_of(data: st.DataObject, content: dict[str, Any]) -> None:
    """Change one to three places of a manifest or a header: to other JSON, to a neighbour's value, or to nothing."""
    for _ in range(data.draw(st.integers(1, 3))):
        paths = [*places(content)]
        at = data.draw(st.sampled_from(paths))
        other = content
        for key in data.draw(st.sampled_from(paths)):
            other = other[key]
        new = data.draw(JSON | st.just(...) | st.just(copy.deepcopy(other)))
        changed = replaced(content, at, new)
        content.clear()
        content.update(changed)


@examples
@given(st.data(), st.sampled_from(FILES))
def test_random_changes_give_right_values_or_an_error_that_names_the_file(whole, tmp_path_factory, data, name):
    path = copied(whole, tmp_path_factory.mktemp("fuzz"))
    if name == NAME:
        edited(path, lambda content: change_of(data, content))
    else:
        rewritten(path, name, lambda entries: change_of(data, entries))
    with bounded_memory():
        outcomes(path)


@examples
@given(
    st.sampled_from(FILES),
    st.integers(0, 10**6),
    st.binary(max_size=12),
    st.booleans(),
)
@example("manifest.json", 0, b"\xff\xfe", False)
def test_random_bytes_give_right_values_or_an_error_that_names_the_file(whole, tmp_path_factory, name, at, new, cut):
    path = copied(whole, tmp_path_factory.mktemp("fuzz"))
    content = (path / name).read_bytes()
    at %= len(content)
    changed = content[:at] + new + (b"" if cut else content[at + len(new) :])
    (path / name).write_bytes(changed)
    with bounded_memory():
        errors = outcomes(path)
    assert changed == content or len(errors) >= 3  # inspect does not read tensors
