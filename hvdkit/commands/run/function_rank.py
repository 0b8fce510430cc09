"""A rank of ``hk.run``: calls the function, and delivers what it returned or raised."""

from __future__ import annotations

import inspect
import linecache
import pickle
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

import cloudpickle

from hvdkit.commands.run.function_transfer import FunctionCall, FunctionOutcome, deliver, fetch
from hvdkit.errors import HvdkitError, describe
from hvdkit.machine.launcher import launched_rank
from hvdkit.watchdog.tracebacks import format_exception


def call_function() -> None:
    """Call the function of this rank, and deliver the outcome. An exception then continues as in any program."""
    launched = launched_rank()
    call: FunctionCall = pickle.loads(fetch(launched))
    sys.path[:] = [*call.path, *(folder for folder in sys.path[1:] if folder not in call.path)]
    for name, lines in call.sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    try:
        parts = returned_parts(call.pickled, launched.rank)
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        error.__traceback__ = trace  # without the frames of this file
        with suppress(OSError, HvdkitError):  # the rank's output has the traceback as well
            deliver(launched, *raised_parts(error))
        raise
    deliver(launched, *parts)


def returned_parts(pickled: bytes, rank: int) -> tuple[bytes, bytes]:
    """Call a pickled function, and return its pickled outcome. Raises TypeError if it cannot be pickled."""
    function: Callable[..., object]
    function, args, kwargs = pickle.loads(pickled)
    restore_main(function)
    value = function(*args, **kwargs)
    kind = type_name(value)
    try:
        data = cloudpickle.dumps(value)
    except Exception as error:
        got = f"a value of type {kind} on rank {rank}, which cannot be pickled ({error})"
        expected = "a value that can be pickled, for the list of results"
        raise TypeError(describe("the function's result", got, expected, "return e.g. arrays or numbers")) from error
    return cloudpickle.dumps(FunctionOutcome(host=socket.gethostname(), kind=kind)), data


def restore_main(function: Callable[..., object]) -> None:
    """Make what the function uses of the caller's main program part of this one: pickle looks up classes there."""
    if inspect.isfunction(function) and function.__module__ == "__main__":
        used = {name: value for name, value in function.__globals__.items() if not name.startswith("__")}
        vars(sys.modules["__main__"]).update(used)


def raised_parts(error: Exception) -> tuple[bytes, bytes]:
    """Return the pickled outcome of a function that raised an exception."""
    try:
        data = cloudpickle.dumps(error)
    except Exception:
        data = b""
    outcome = FunctionOutcome(
        host=socket.gethostname(),
        kind=type_name(error),
        traceback="\n".join(format_exception(error)),
        message=str(error),
        is_pickled=bool(data),
    )
    return cloudpickle.dumps(outcome), data


def type_name(value: object) -> str:
    """Return the name of a value's type, with its module unless that is Python itself or the main program."""
    kind = type(value)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
