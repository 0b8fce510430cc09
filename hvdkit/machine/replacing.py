"""Replace a file or a folder at once: write it under a temporary name, then rename it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced(path: Path, temporary: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield ``temporary``, which the caller writes; rename it to ``path`` at the end, or remove it on an error.

    A kill at any time leaves the old ``path`` or the new one, and perhaps ``temporary``.

    Args:
        path: the file to replace, which need not exist; or a folder that is missing or empty at the end.
        temporary: a path in the same folder that no other writer uses.
        durable: sync the file before it is renamed, so that after a crash of the host ``path`` is not incomplete. The
            new name itself is durable only after the folder is synced.

    Raises:
        OSError: it cannot be written, synced or renamed.
    """
    try:
        yield temporary
        if durable:
            sync(temporary)
        temporary.replace(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # does nothing to a file
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sync(path: Path) -> None:
    """Sync a file or a folder to disk. A new or renamed file is durable only after its folder is synced."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
