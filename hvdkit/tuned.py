"""Settings that ``hvdkit tune`` has found best, in the file where it keeps them with what it measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hvdkit.errors import describe

FORMAT_VERSION = 1
# What a file may set before MPI and Horovod start: nothing else of a person's environment.
SETTINGS = ("HVDKIT_BUCKET_BYTES", "HOROVOD_CYCLE_TIME", "HOROVOD_AUTOTUNE", "HOROVOD_DISABLE_GROUP_FUSION")


def settings_of(path: Path) -> dict[str, str]:
    """Return the environment variables that a file of ``hvdkit tune`` found best.

    Raises:
        ValueError: there is no such file, or it is another one.
    """
    settings = read(path).get("settings")
    if not isinstance(settings, dict) or not all(isinstance(value, str) for value in settings.values()):
        raise wrong(path, "has no settings")
    if unknown := sorted(set(settings) - set(SETTINGS)):
        raise wrong(path, f"sets {unknown[0]}")
    return settings


def read(path: Path) -> dict[str, Any]:
    """Return what the file holds. Raises ValueError where there is no such file, or it is another one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise wrong(path, f"cannot be read ({error.strerror})") from None
    except ValueError:
        raise wrong(path, "is no JSON") from None
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT_VERSION:
        raise wrong(path, "is another file, or has another format")
    return found


def wrong(path: Path, why: str) -> ValueError:
    """Return the error for a file that is not what it should be; ``why`` is what to say of it."""
    remedy = f"write it anew: hvdkit tune --save {path}"
    return ValueError(describe("tuned file", f"{path}, which {why}", "a file of `hvdkit tune`", remedy))
