"""``hk.run``: calls a function on several ranks, from a notebook or a program, and returns their results.

A child process, the launcher, starts the job: it has neither the threads nor the children of the caller.
"""

from __future__ import annotations

import codecs
import inspect
import linecache
import os
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TypeVar, cast

import cloudpickle

from hvdkit.commands.run.command import start
from hvdkit.commands.run.config import EngineKind, RunConfig
from hvdkit.commands.run.engines import function_process
from hvdkit.commands.run.function_transfer import (
    CALL,
    FUNCTION_VARIABLE,
    FunctionCall,
    FunctionOutcome,
    FunctionServer,
    outcome_file,
)
from hvdkit.commands.run.job import prepare
from hvdkit.commands.run.output import Shown
from hvdkit.commands.run.ray_job import RayReservation, on_ray
from hvdkit.errors import ClusterError, HvdkitError, describe, integer, printable
from hvdkit.machine import processes
from hvdkit.machine.launcher import launched_rank
from hvdkit.machine.terminal import on_terminal
from hvdkit.watchdog.verdict import Verdict

_Result = TypeVar("_Result")
# Files in the folder of a job, next to those of function_transfer.py: its options, and how it ended.
_CONFIG = "config"
_VERDICT = "verdict"


def run(
    function: Callable[..., _Result],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    np: int = 2,
    hosts: str | None = None,
    engine: EngineKind = "auto",
    env: Sequence[str] = (),
    logs: str | os.PathLike[str] | None = None,
    output: Shown | None = None,
    grace: float = 30.0,
) -> list[_Result]:
    """Call a function on several ranks, from a notebook or a program, and return what it returned on each rank.

    The ranks are new processes, which are started and ended as by ``hvdkit run``. The function is what a script would
    be: it calls ``hk.init()`` before other functions of hvdkit. It may be defined in a notebook's cell, in the program
    itself or in another function. The output of the ranks appears as that of the caller, with the rank before each
    line. Ctrl-C, or the stop button of a notebook, ends all ranks.

    Args:
        function: the function. With the values that it uses, its arguments and its result, it is pickled (by
            cloudpickle); modules are imported on each rank, from the folders of the caller's ``sys.path``.
        args: its positional arguments, the same on every rank.
        kwargs: its keyword arguments, the same on every rank.
        np: number of ranks.
        hosts: hosts and their slots, e.g. ``"node1:4,node2:4"``; by default, all ranks run on this host.
        engine: launcher of the ranks, as for ``hvdkit run``.
        env: names of environment variables to pass on, in addition to those that ``hvdkit run`` passes on.
        logs: folder for a log of each rank.
        output: which lines to show: ``"all"``, ``"merged"``, ``"rank0"`` or ``"files"``. Default: merged on a terminal,
            otherwise all.
        grace: seconds for ranks to save after Ctrl-C before they are killed. A second Ctrl-C kills them at once.

    Returns:
        The results, in the order of the ranks.

    Raises:
        TypeError: an argument has the wrong type, or the function, one of ``args`` or ``kwargs``, or a result cannot be
            pickled.
        ValueError: an option is invalid; nothing has been started.
        ClusterError: this process is a rank of a job, or the ranks cannot be started.
        HvdkitError: a rank was killed, or has ended without a result; or its result or exception cannot be unpickled
            here. The message names the rank and the cause.
        Exception: the exception of the rank that failed first. Its ``__cause__`` shows the rank and the traceback.

    Examples:
        >>> import hvdkit as hk
        >>> def train(scale):
        ...     cluster = hk.init()
        ...     return scale * cluster.rank
        >>> hk.run(train, args=(10,), np=2)
        [0, 10]
    """
    call = function_call("hk.run", function, args, kwargs)
    config = RunConfig(
        np=integer("np", np, minimum=1),
        hosts=hosts,
        engine=engine,
        env=tuple(env),
        logs=None if logs is None else Path(logs),
        output=output or ("merged" if on_terminal() else "all"),
        grace=grace,
    )
    return [cast("_Result", result) for result in call_on_ranks("hk.run", call, config)]


def function_call(caller: str, function: object, args: object, kwargs: object) -> FunctionCall:
    """Return what the ranks call, for ``caller``: ``hk.run`` or ``hk.ray.run``.

    Raises:
        TypeError: an argument has the wrong type, or cannot be pickled.
        ClusterError: this process is a rank of a job.
    """
    launched = launched_rank()
    if launched.size > 1 or FUNCTION_VARIABLE in os.environ:
        got = f"a call on rank {launched.rank} of {launched.size}"
        expected = "a call outside of a job, because it starts one"
        raise ClusterError(describe(caller, got, expected, "start this program without a launcher, or remove the call"))
    if not callable(function):
        raise TypeError(describe("function", function, "a function", f"pass it without calling it: {caller}(train)"))
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise TypeError(describe("args", args, "a tuple or list of arguments", "write args=(value,)"))
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(describe("kwargs", kwargs, "a dict of arguments by name", 'write kwargs={"name": value}'))
    pickled = _pickled(function, tuple(args), dict(kwargs or {}))
    return FunctionCall(pickled=pickled, path=list(sys.path), sources=_sources())


def call_on_ranks(
    caller: str, call: FunctionCall, config: RunConfig, reservation: RayReservation | None = None
) -> list[object]:
    """Start ranks that make a call, and return what it returned on each. For the errors, see :func:`run`.

    A part of a Ray cluster runs them; without a ``reservation``, they are started as by ``hvdkit run``.
    """
    folder = Path(tempfile.mkdtemp(prefix="hvdkit-function-"))  # only this user may read it
    try:
        with (folder / CALL).open("wb") as file:
            pickle.dump(call, file)
        (folder / _CONFIG).write_bytes(pickle.dumps((config, reservation)))
        _raise_failure(caller, folder, _run_launcher(folder))
        return [_result(caller, folder, rank) for rank in range(config.np or 0)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class RemoteTraceback(Exception):
    """The traceback of a rank, as the cause of the exception that ``hk.run`` raises."""

    def __str__(self) -> str:
        rank, outcome = self.args
        text = printable(outcome.traceback, keep="\n\t")
        return f'on rank {rank} ({outcome.host}):\n"""\n{text}\n"""'


def _pickled(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> bytes:
    """Return the pickled function and arguments. Raises TypeError that names what cannot be pickled."""
    try:
        pickled: bytes = cloudpickle.dumps((function, args, kwargs))
        return pickled
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        sent = {f"args[{index}]": value for index, value in enumerate(args)}
        sent |= {f"kwargs[{key!r}]": value for key, value in kwargs.items()}
        what = next((one for one, value in sent.items() if _problem(value) is not None), "")
        value = sent.get(what, function)
        if not what:
            used = _variables(function)
            variable = next((one for one, value in used.items() if _problem(value) is not None), None)
            what = f"function {name}" if variable is None else f"the variable {variable} that {name} uses"
            value = function if variable is None else used[variable]
        got = f"{type(value).__name__}, which cannot be pickled ({_problem(value) or error})"
        remedy = "create it within the function, on each rank"
        raise TypeError(describe(what, got, "something that can be sent to the ranks", remedy)) from error


def _variables(function: Callable[..., object]) -> dict[str, object]:
    """Return the variables outside of a function that it uses."""
    if not inspect.isfunction(function):
        return {}
    used = inspect.getclosurevars(function)
    return {**used.globals, **used.nonlocals}


def _problem(value: object) -> Exception | None:
    """Return why ``value`` cannot be pickled, or None."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return error
    return None


def _sources() -> dict[str, list[str]]:
    """Return the source lines of a notebook's cells, for tracebacks, and for AutoGraph, which compiles them."""
    entries = [(name, entry) for name, entry in [*linecache.cache.items()] if len(entry) == 4]
    return {name: list(entry[2]) for name, entry in entries if not os.path.exists(name)}  # noqa: PTH110


def _run_launcher(folder: Path) -> int:
    """Run the launcher of the job of ``folder`` and forward its output; return its exit code.

    It is in its own session: only this function passes Ctrl-C on to it, and raises KeyboardInterrupt after all ranks
    have ended.
    """
    interrupt: KeyboardInterrupt | None = None
    launcher = subprocess.Popen(
        function_process("launcher", str(folder), str(os.getpid())),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with launcher, selectors.DefaultSelector() as selector:
        for pipe, stream in ((launcher.stdout, sys.stdout), (launcher.stderr, sys.stderr)):
            assert pipe is not None
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            selector.register(pipe, selectors.EVENT_READ, (stream, decoder))
        try:
            while True:
                try:
                    _forward_output(selector)
                    launcher.wait()
                    break
                except KeyboardInterrupt as error:
                    interrupt = error
                    launcher.send_signal(signal.SIGINT)
        except BaseException:  # e.g. standard output is closed
            launcher.terminate()
            raise
    if interrupt is not None:
        raise interrupt
    return launcher.returncode


def _forward_output(selector: selectors.BaseSelector) -> None:
    """Forward output until its end to ``sys.stdout`` and ``sys.stderr``, which a notebook may have replaced."""
    while selector.get_map():
        for key, _ in selector.select():
            stream, decoder = key.data
            data = os.read(key.fd, 1 << 16)
            text = decoder.decode(data, final=not data)
            if stream is not None and text:  # None if Python was started with this file closed
                encoding = getattr(stream, "encoding", None) or "utf-8"
                stream.write(text.encode(encoding, "replace").decode(encoding))
                stream.flush()
            if not data:
                selector.unregister(key.fileobj)


def launch(name: str, caller: str) -> None:
    """Run the job of a folder, in the launcher, and write its verdict, or the error that prevented its start.

    The job ends with the process that called ``hk.run``, whose PID is ``caller``.
    """
    processes.signal_at_parent_end(signal.SIGTERM)
    if os.getppid() != int(caller):
        return
    folder = Path(name)
    config: RunConfig
    reservation: RayReservation | None
    config, reservation = pickle.loads((folder / _CONFIG).read_bytes())
    program = function_process("rank")
    end: Verdict | Exception
    try:
        job = prepare(config, program)
        if reservation is not None:
            job = on_ray(job, reservation)
        end = start(replace(job, function=FunctionServer(folder)), program)
    except (ValueError, HvdkitError) as error:
        end = error
    if os.getppid() == int(caller):
        (folder / _VERDICT).write_bytes(pickle.dumps(end))
    else:  # it was killed, and will not remove the folder
        shutil.rmtree(folder, ignore_errors=True)


def _raise_failure(caller: str, folder: Path, code: int) -> None:
    """Raise the error with which the job ended, if it failed."""
    file = folder / _VERDICT
    if not file.exists():
        raise HvdkitError(
            f"{caller}: the process that starts the ranks ended with exit code {code}; see its output above"
        )
    end: Verdict | Exception = pickle.loads(file.read_bytes())
    if isinstance(end, Exception):
        raise end
    if end.code == 0:
        return
    if end.rank is not None and outcome_file(folder, end.rank).exists():
        with outcome_file(folder, end.rank).open("rb") as stored:
            outcome: FunctionOutcome = pickle.load(stored)
            if outcome.traceback:
                raise _exception(caller, stored, end.rank, outcome) from RemoteTraceback(end.rank, outcome)
    raise HvdkitError(f"{caller}: {end.line}")


def _exception(caller: str, stored: IO[bytes], rank: int, outcome: FunctionOutcome) -> Exception:
    """Return a rank's exception, or an HvdkitError with its message if it cannot be unpickled here."""
    why = "it cannot be pickled"
    if outcome.is_pickled:
        try:
            error: object = pickle.load(stored)
            if isinstance(error, Exception):
                return error
            why = f"unpickling it gives {type(error).__name__}"
        except Exception as problem:
            why = f"unpickling it raises {type(problem).__name__}: {problem}"
    return HvdkitError(
        f"{caller}: rank {rank} raised {outcome.kind}: {outcome.message}; shown as HvdkitError because {why}"
    )


def _result(caller: str, folder: Path, rank: int) -> object:
    file = outcome_file(folder, rank)
    if not file.exists():
        raise HvdkitError(
            f"{caller}: rank {rank} ended with exit code 0 before its function returned, e.g. by sys.exit()"
        )
    with file.open("rb") as stored:
        outcome: FunctionOutcome = pickle.load(stored)
        try:
            value: object = pickle.load(stored)
            return value
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise HvdkitError(
                f"{caller}: the result of rank {rank}, of type {outcome.kind}, cannot be unpickled here ({why}); "
                "return a value whose class this process can import, e.g. arrays or numbers"
            ) from error
