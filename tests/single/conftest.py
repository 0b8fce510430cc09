"""What the tests in one process share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from speed import WAIT

from hvdkit.commands.doctor import facts

# Properties are searched without a limit on seconds: a slow machine is no failure.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def here() -> facts.Facts:
    """The doctor's facts of the environment that runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        return facts.gather(np=2, timeout=WAIT)
