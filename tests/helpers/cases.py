"""Loops over the cases of one property, inside one test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def case(**values: object) -> Iterator[None]:
    """Add the values of a case to an error that is raised inside.

    for dtype, shape in product(DTYPES, SHAPES):
        with case(dtype=dtype, shape=shape):
            assert ...
    """
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        named = ", ".join(f"{name}={value!r}" for name, value in values.items())
        text = f"in the case {named}: {type(error).__name__}: {error}"
        raise AssertionError(text).with_traceback(error.__traceback__) from None
