"""Limits of this process. Standard library only."""

from __future__ import annotations

import contextlib
import resource

_FILES = 512


def allow_files(number: int) -> None:
    """Raise this process's limit of open files, often 1,024, by enough for ``number`` files besides its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + _FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
