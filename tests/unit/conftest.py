"""Settings of the unit tests, and fixtures that several of them use."""

import pytest
from hypothesis import HealthCheck, settings

# No deadline for Hypothesis: a slow machine is not a failure.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="module")
def object_store():
    """A server of an object store, for all tests of a module."""
    from helpers.object_store import served

    with served() as store:
        yield store


@pytest.fixture
def store(object_store):
    """The server with an empty bucket, and hvdkit initialized."""
    import hvdkit as hk

    hk.init()
    object_store.clear()
    return object_store
