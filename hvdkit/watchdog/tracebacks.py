"""What an exception says to the user: its cause, and its traceback, in which frames of libraries are folded.

Also whether an exception that the program handles has ended a step in which other ranks may still be.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, cast

from hvdkit.errors import printable
from hvdkit.watchdog.events import Raised

if TYPE_CHECKING:
    import tensorflow as tf

LONGEST_TEXT = 60_000
"""Characters of a traceback that a rank sends at most: the last ones."""
_FRAME = re.compile(r'  File "(.*)", line \d+, in ')
_LIBRARY = re.compile(r"/(?:site|dist)-packages/(keras|tensorflow|horovod|hvdkit)/")
_HVDKIT = f"{Path(__file__).parents[1]}/"
_BETWEEN = re.compile(r"/lib/python3\.\d+/contextlib\.py$")
# The op that runs a graph, as TensorFlow names it: in a separate frame that it does not remove from tracebacks.
_GRAPH = re.compile(r"__(?:inference|forward)_(.*)_\d+")
_TRACEBACK = "Traceback (most recent call last):"
# What TensorFlow puts before the message of an error of an eager op, e.g. of a dataset's iterator.
_FUNCTION_NODE = re.compile(r"^\{\{function_node [^}]*\}\} ")
# Keras's colors, and the line that it puts before the message of a layer's error.
_COLOR = re.compile(r"\x1b\[[0-9;]*m|\\x1b\[[0-9;]*m")
_IN_A_LAYER = "Exception encountered when calling"


def format_exception(error: BaseException) -> list[str]:
    """Return the traceback of an exception and of its causes, without the newlines at the ends of lines.

    Frames of Keras, TensorFlow, Horovod and hvdkit are folded, except where Keras, TensorFlow or Horovod raise. All are
    shown after ``keras.config.disable_traceback_filtering()``, Keras's own switch, and for errors that hvdkit does not
    raise on purpose.
    """
    blocks = list(traceback.TracebackException(type(error), error, error.__traceback__, compact=True).format())
    if _folds() and not _is_defect(error):
        blocks = list(_folded(list(_with_graph_frames(blocks))))
    return "".join(blocks).splitlines()


def _folds() -> bool:
    """Return True unless the user has switched Keras's filtering off."""
    config = getattr(sys.modules.get("keras"), "config", None)
    is_enabled: Callable[[], bool] | None = getattr(config, "is_traceback_filtering_enabled", None)
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
    """Yield the blocks, with each line of TensorFlow's message about an error in a graph as a separate block.

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
    for is_library, run in groupby(range(len(blocks)), key=lambda index: bool(names[index])):
        members = list(run)
        last = members[-1]
        is_innermost = last + 1 == len(blocks) or not _FRAME.match(blocks[last + 1])
        kept = members[-1:] if is_innermost and names[last] not in ("hvdkit", "contextlib") else []
        hidden = members[: len(members) - len(kept)]
        if not is_library or not has_users or not hidden:
            yield from (blocks[index] for index in members)
            continue
        libraries = sorted({names[index] for index in hidden} - {"contextlib"}) or ["contextlib"]
        number = f"{len(hidden)} {'frame' if len(hidden) == 1 else 'frames'}"
        yield f"  ... {number} of {' and '.join(libraries)}{hint}\n"
        hint = ""
        yield from (blocks[index] for index in kept)


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


# ---- the cause -------------------------------------------------------------------------------------------------------


def report_lines(error: BaseException) -> list[str]:
    """Return the lines of a traceback. The first is the cause if TensorFlow puts that after all nodes of a graph."""
    lines = [printable(line, keep="\t") for line in format_exception(error)]
    is_hidden = "Graph execution error" in str(error)
    return [f"{type(error).__name__}: {cause_of(error)}", *lines] if is_hidden else lines


def raised(error: BaseException) -> Raised:
    """Return the report of an exception that the program may catch."""
    text = "\n".join(report_lines(error))[-LONGEST_TEXT:]
    return Raised(cause=f"{type(error).__name__}: {cause_of(error)}", text=text)


def with_cause_first(error: Exception, rank: int) -> Exception:
    """Return an error of TensorFlow with its cause and the rank in the first line; other errors unchanged.

    TensorFlow puts the cause of an error in a graph after a list of the graph's nodes.
    """
    text = str(error)
    names = {kind.__name__ for kind in type(error).__mro__}
    if "OpError" not in names or not text.startswith("Graph execution error"):
        return error
    of_graph = cast("tf.errors.OpError", error)
    message = f"rank {rank}: {cause_of(error)}\n\n{text}"
    explained: Exception = type(of_graph)(of_graph.node_def, of_graph.op, message)
    return explained.with_traceback(error.__traceback__)


def ended_a_step(error: BaseException, graphs: Collection[str]) -> bool:
    """Return True if one of ``graphs``, the functions of TensorFlow that have collectives, raised an exception."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = _GRAPH.fullmatch(str(frame.f_locals.get("op_name")))
        if name is not None and name[1] in graphs:
            return True
    return False


def left_a_loop(error: BaseException, callers: Mapping[CodeType, Collection[int]]) -> bool:
    """Return True if an exception that is being handled has ended a function or a loop with steps.

    A handler inside the loop may continue it, e.g. after it has read a batch again. ``callers`` is the code that called
    functions with collectives, and the lines of the calls.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return False
    handler, line = frames[0]
    for start, end in _loops_of(handler.f_code.co_filename, callers.get(handler.f_code, ())):
        if start <= line <= end and not start <= handler.f_lineno <= end:
            return True
    return any(frame.f_code in callers for frame, _ in frames[1:])  # these functions have ended


def _loops_of(file: str, lines: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield first and last line of the innermost loop around each of ``lines``."""
    if not lines:
        return
    loops = [(one.lineno, one.end_lineno or 0) for one in nodes_of(file) if isinstance(one, (ast.For, ast.While))]
    for line in lines:
        around = [loop for loop in loops if loop[0] <= line <= loop[1]]
        if around:
            yield max(around)


def nodes_of(file: str) -> list[ast.AST]:
    """Return the nodes of a source file; none if it is not known or not Python."""
    try:
        return list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except (SyntaxError, ValueError):
        return []


def cause_of(error: BaseException) -> str:
    """Return the most informative line of an error's message, without the name of TensorFlow's function."""
    text = _COLOR.sub("", str(error))
    lines = [_FUNCTION_NODE.sub("", line.strip()) for line in text.splitlines() if line.strip()] or ["no message"]
    if lines[0].startswith(_IN_A_LAYER) and len(lines) > 1:
        return f"{lines[1]} ({lines[0].rstrip('.')})"
    if "Graph execution error:" in lines[1:2]:  # see with_cause_first
        return lines[0].partition(": ")[2]
    if any("has been shut down" in line for line in lines):
        return "another rank left the job; its own error is printed above"
    if lines[0].startswith("Graph execution error") and _TRACEBACK in lines:
        return lines[lines.index(_TRACEBACK) - 1]  # an error of Python in a graph, such as one of a generator
    # TensorFlow puts the cause between "Graph execution error:" with its stack, and the node.
    frame = ("Graph execution error", "Detected at", "File ", "[[{{node")
    causes = [line for line in lines if not line.startswith(frame)] or lines
    return causes[0] if lines[0] in causes else causes[-1]
