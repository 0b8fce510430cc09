"""Adds what a misspelled name may have meant to the message of an uncaught exception.

Python itself suggests names when it prints an exception, but not keyword arguments before version 3.13, and not in
:mod:`traceback`, which formats the reports, before version 3.12.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from types import FrameType, ModuleType

from hvdkit.watchdog.tracebacks import nodes_of

_UNEXPECTED = re.compile(r"(.+)\(\) got an unexpected keyword argument '(\w+)'")
_UNRECOGNIZED = re.compile(r"Unrecognized keyword arguments passed to (\w+): \{'(\w+)'")  # Keras's layers


def add_suggestion(error: BaseException) -> None:
    """Add to the message of an exception the name that a misspelled one is closest to."""
    if len(error.args) == 1 and (words := _suggestion(error)):
        error.args = (f"{error.args[0]}. Did you mean {words!r}?",)


def _suggestion(error: BaseException) -> str:
    """Return the name that the misspelled one in an exception is closest to, or "" without one."""
    frames = list(traceback.walk_tb(error.__traceback__))  # with their lines, the innermost one last
    if not frames:
        return ""
    if isinstance(error, (TypeError, ValueError)):
        pattern = _UNEXPECTED if isinstance(error, TypeError) else _UNRECOGNIZED
        found = pattern.match(str(error))
        if found is None or "Did you mean" in str(error):
            return ""
        called, wrong = found.groups()
        return _closest(wrong, _parameters(frames, called, wrong))
    if sys.version_info >= (3, 12):
        return ""
    if isinstance(error, AttributeError) and isinstance(error.name, str):
        return _closest(error.name, dir(error.obj))
    if isinstance(error, NameError) and isinstance(error.name, str):
        innermost = frames[-1][0]
        return _closest(error.name, {**vars(builtins), **innermost.f_globals, **innermost.f_locals})
    return ""


def _closest(wrong: str, names: Iterable[str]) -> str:
    return next(iter(get_close_matches(wrong, list(names), n=1)), "")


def _parameters(frames: list[tuple[FrameType, int]], called: str, wrong: str) -> list[str]:
    """Return the keywords of the function that was called with a wrong one, or an empty list if it is not found.

    ``called`` is the function's name in the message, e.g. "fit", "Supervisor.__init__"; a layer's class for Keras.
    """
    for frame, line in reversed(frames):
        for expression in _calls(frame.f_code.co_filename, line, wrong):
            function = _value_of(expression, frame)
            names = {getattr(one, "__qualname__", "") for one in (function, getattr(function, "__init__", None))}
            if called not in names or not callable(function):
                continue
            try:
                parameters = inspect.signature(function).parameters.values()
            except (TypeError, ValueError):
                continue
            return [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return []


def _calls(file: str, line: int, wrong: str) -> Iterator[ast.expr]:
    """Yield the functions, as expressions, of the calls at a source line that pass this keyword or a dictionary."""
    for node in nodes_of(file):
        if not isinstance(node, ast.Call) or not node.lineno <= line <= (node.end_lineno or 0):
            continue
        if any(keyword.arg in (wrong, None) for keyword in node.keywords):
            yield node.func


def _value_of(expression: ast.expr, frame: FrameType) -> Callable[..., object] | object | None:
    """Return the value of a name or an attribute in a frame, or None. Runs no code of an object: only looks it up."""
    if isinstance(expression, ast.Name):
        for names in (frame.f_locals, frame.f_globals, vars(builtins)):
            if expression.id in names:
                value: object = names[expression.id]
                return value
    if isinstance(expression, ast.Attribute):
        owner = _value_of(expression.value, frame)
        if owner is not None:
            owner = owner if isinstance(owner, (ModuleType, type)) else type(owner)
            return getattr(owner, expression.attr, None)
    return None
