"""The traceback of an exception, in which frames of libraries between the user's are folded."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

_FRAME = re.compile(r'  File "(.*)", line \d+, in ')
_LIBRARY = re.compile(r"/(?:site|dist)-packages/(keras|tensorflow|horovod|hvdkit)/")
_HVDKIT = f"{Path(__file__).parents[1]}/"
_BETWEEN = re.compile(r"/lib/python3\.\d+/contextlib\.py$")


def format_exception(error: BaseException) -> list[str]:
    """Return the traceback of an exception and of its causes, without the newlines at the ends of lines.

    Frames of Keras, TensorFlow, Horovod and hvdkit are folded, except where Keras, TensorFlow or Horovod raise. All are
    shown after ``keras.config.disable_traceback_filtering()``, Keras's own switch, and for errors that hvdkit does not
    raise on purpose.
    """
    parts = traceback.TracebackException(type(error), error, error.__traceback__, compact=True).format()
    blocks = list(parts)
    if _folds() and not _is_defect(error):
        blocks = list(_folded(list(_with_graph_frames(blocks))))
    return "".join(blocks).splitlines()


def _folds() -> bool:
    """Return True unless the user has switched Keras's filtering off."""
    keras = sys.modules.get("keras")
    is_enabled: Callable[[], bool] | None = getattr(
        getattr(keras, "config", None), "is_traceback_filtering_enabled", None
    )
    return is_enabled is None or is_enabled()


def _is_defect(error: BaseException) -> bool:
    """Return True if an exception comes from a line of hvdkit that is no ``raise`` statement.

    Keras cuts its own frames, so that a line of hvdkit which called it seems to be the origin: those that it has cut
    were raised ``from None``.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not frames[-1].filename.startswith(_HVDKIT) or (frames[-1].line or "").startswith("raise"):
        return False
    return not error.__suppress_context__


def _with_graph_frames(blocks: list[str]) -> Iterator[str]:
    """Yield the blocks, with each line of TensorFlow's message about an error in a graph as a block of its own.

    The message contains where each node of the graph was defined, with a frame on every other line.
    """
    for block in blocks:
        if "Graph execution error" in block:
            yield from (line for line in block.splitlines(keepends=True) if line.strip())
        else:
            yield block


def _folded(blocks: list[str]) -> Iterator[str]:
    """Yield the blocks of a report, one per frame and other text, with runs of a library's frames folded."""
    hint = " (keras.config.disable_traceback_filtering() shows them)"
    names = [_library(block) for block in blocks]
    has_users = any(_FRAME.match(block) and not name for block, name in zip(blocks, names, strict=True))
    numbered = list(enumerate(blocks))
    for is_library, run in groupby(numbered, key=lambda item: bool(names[item[0]])):
        members = list(run)
        last = members[-1][0]
        is_innermost = last + 1 == len(blocks) or not _FRAME.match(blocks[last + 1])
        kept = members[-1:] if is_innermost and names[last] not in ("hvdkit", "contextlib") else []
        hidden = members[: len(members) - len(kept)]
        if not is_library or not has_users or not hidden:
            yield from (block for _, block in members)
            continue
        libraries = sorted({names[index] for index, _ in hidden} - {"contextlib"}) or ["contextlib"]
        number = f"{len(hidden)} {'frame' if len(hidden) == 1 else 'frames'}"
        yield f"  ... {number} of {' and '.join(libraries)}{hint}\n"
        hint = ""
        yield from (block for _, block in kept)


def _library(block: str) -> str:
    """Return the library that a frame is of; "" for the user's frames, and for what is no frame."""
    frame = _FRAME.match(block)
    if frame is None:
        return ""
    path = frame[1]
    if path.startswith(_HVDKIT):
        return "hvdkit"
    if _BETWEEN.search(path):
        return "contextlib"
    library = _LIBRARY.search(path)
    return "" if library is None else library[1]
