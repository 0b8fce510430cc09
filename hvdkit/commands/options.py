"""What options of several commands have in common."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from tyro.conf import arg

from hvdkit.errors import describe

UNSET = arg(help_behavior_hint="")
"""Mark of an option whose default is None: its help does not show that, and says in words what happens without it."""


@contextlib.contextmanager
def output_errors(option: str, path: Path, kind: Literal["file", "folder"] = "file") -> Iterator[None]:
    """Turn an OSError while the output of an option is written into a ValueError that names the option and the path."""
    try:
        yield
    except OSError as error:
        got = f"{path} ({error.strerror})"
        raise ValueError(describe(option, got, f"a {kind} that can be written", "pass another")) from None


def check_output(option: str, path: Path) -> None:
    """Fail before the work if a file cannot be written afterwards. The file is neither created nor opened.

    Raises:
        ValueError: the path is a folder, its folder does not exist, or one of them may not be written.
    """
    with output_errors(option, path):
        target = path if path.exists() else path.parent
        target.stat()
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(target, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def read_text(option: str, path: Path) -> str:
    """Return the text of a file that an option names. Raises ValueError if it cannot be read, or is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ValueError(describe(option, f"{path} ({why})", "a readable file", "check its path")) from None


def check_minimum(config: object, minimum: Mapping[str, float]) -> None:
    """Raise ValueError if a number of a config is less than its minimum, by the name of its field, or NaN."""
    for name, least in minimum.items():
        value = getattr(config, name)
        if value is not None and not value >= least:
            option = "-np" if name == "np" else f"--{name.replace('_', '-')}"
            raise ValueError(describe(option, value, f"at least {least}", "pass another number"))
