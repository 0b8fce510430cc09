"""Limits of this process. Standard library only."""

from __future__ import annotations

import contextlib
import resource

_OTHER_FILES = 512


def allow_files(number: int) -> None:
    """Raise this process's limit of open files, often 1,024, to allow ``number`` files and some others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = number + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        with contextlib.suppress(ValueError, OSError):
            limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
