"""Run pip, either this Python's or the one bundled with ``ensurepip``."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hvdkit.errors import BuildError, describe


def pip_command() -> list[str]:
    """Return the command that runs pip for this Python.

    Environments created by ``uv`` or ``python -m venv --without-pip`` lack pip; Python's bundled wheel is a zip file
    that can be run directly.

    Raises:
        BuildError: neither is available.
    """
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    bundled = sorted(wheel for folder in folders for wheel in Path(folder, "_bundled").glob("pip-*.whl"))
    if not bundled:
        remedy = "apt install python3-venv, or 'uv pip install pip' into this environment"
        raise BuildError(describe("pip", "none for this Python", "pip or Python's ensurepip", remedy))
    return [sys.executable, str(bundled[-1] / "pip")]


def pip_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment, without variables that change what pip installs and to which folder."""
    dropped = ("PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_HASHES", "PIP_NO_BINARY")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**env, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(extra or {})}
