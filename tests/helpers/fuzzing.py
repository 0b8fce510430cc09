"""Settings of tests with random input. A few examples, the same ones every time; many random ones in the nightly tier.

``HVDKIT_TEST_EXAMPLES=5000`` tries that many. What such a run finds becomes an ``@example`` of its test.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from helpers.tiers import EXAMPLES_VARIABLE

COUNT = os.environ.get(EXAMPLES_VARIABLE)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(2**62) | st.just(10**30),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=6,
)
"""JSON of any form."""

CHANGES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 8), st.binary(max_size=12)), min_size=1, max_size=3)
"""Changes for :func:`changed`."""


def examples(few: int = 40) -> settings:
    """Return the settings of a test, which tries ``few`` examples by default."""
    return settings(
        max_examples=int(COUNT or few),
        derandomize=COUNT is None,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],  # to explain a failure takes minutes
        suppress_health_check=list(HealthCheck),
    )


def changed(content: bytes, changes: list[tuple[int, int, bytes]], *, is_cut: bool = False) -> bytes:
    """Return ``content`` after changes ``(place, removed, inserted)``, and cut after the last one if ``is_cut``."""
    for number, (place, removed, inserted) in enumerate(changes, 1):
        place %= len(content) + 1
        is_last = number == len(changes)
        content = content[:place] + inserted + (b"" if is_cut and is_last else content[place + removed :])
    return content
