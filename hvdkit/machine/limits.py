"""Limits of this process. Standard library only."""

from __future__ import annotations

import contextlib
import resource

_FILES = 512


def allow_files(number: int) -> None:
    """Let this process open ``number`` files and those that it opens anyway; 1,024 is a common limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + _FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
