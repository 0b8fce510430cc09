"""Faults of disks: damaged bytes, and limits under which system calls fail as on a full disk."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path


def flip(file: Path, at: int = -3) -> None:
    """Flip one bit of the byte at offset ``at``; a second call repairs it."""
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)


@contextlib.contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """Lower a limit of this process, e.g. ``resource.RLIMIT_FSIZE`` for the length of files it writes."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
