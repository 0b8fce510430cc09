"""Read the best settings from the file in which ``hvdkit tune`` saves them with its measurements."""

from __future__ import annotations

import json
from pathlib import Path

from hvdkit.errors import describe

FORMAT_VERSION = 1
# The only environment variables of the user that a file may set, before MPI and Horovod start.
SETTINGS = ("HVDKIT_BUCKET_BYTES", "HOROVOD_CYCLE_TIME", "HOROVOD_AUTOTUNE", "HOROVOD_DISABLE_GROUP_FUSION")


def read_settings(path: Path) -> dict[str, str]:
    """Return the best settings from a file written by ``hvdkit tune``, as environment variables.

    Raises:
        ValueError: the file does not exist or was not written by ``hvdkit tune``.
    """
    settings = read_file(path).get("settings")
    if not isinstance(settings, dict) or not all(isinstance(value, str) for value in settings.values()):
        raise invalid_file(path, "has no settings")
    if unknown := sorted(set(settings) - set(SETTINGS)):
        raise invalid_file(path, f"sets {unknown[0]}")
    return settings


def read_file(path: Path) -> dict[str, object]:
    """Return the contents of the file. Raises ValueError if it is missing or was not written by ``hvdkit tune``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid_file(path, f"cannot be read ({error.strerror})") from None
    except ValueError:
        raise invalid_file(path, "is not JSON") from None
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT_VERSION:
        raise invalid_file(path, "is not such a file, or has another format version")
    return content


def invalid_file(path: Path, why: str) -> ValueError:
    """Return the error for a file that ``why`` describes, e.g. ``has no settings``."""
    remedy = f"write it again: hvdkit tune --save {path}"
    return ValueError(describe("tuned file", f"{path}, which {why}", "a file written by `hvdkit tune --save`", remedy))
