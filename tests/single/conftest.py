"""Fixtures and settings of the single-process tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from speed import WAIT

from hvdkit.commands.doctor import facts

# No deadline for Hypothesis: a slow machine is not a failure.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def here() -> facts.Facts:
    """Return the doctor's facts about the environment that runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        return facts.gather(np=2, timeout=WAIT)
