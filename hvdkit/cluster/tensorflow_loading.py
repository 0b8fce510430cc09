"""Loads TensorFlow, before or after MPI, and hides its startup messages."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

from hvdkit.cluster import log_filter
from hvdkit.cluster.hwloc import bind_hwloc
from hvdkit.machine import supported
from hvdkit.machine.launcher import ALONE, launched_rank


def prepare_import() -> None:
    """Make ``import hvdkit`` safe in any order. In a process started by a launcher, import TensorFlow now.

    Such a process will train, and needs the seconds for TensorFlow's import anyway. Importing it here ensures that a
    later ``from mpi4py import MPI`` comes after it, and hides the startup messages. Without a launcher (as for the
    hvdkit command or in a notebook), TensorFlow is not imported.
    """
    if "mpi4py.MPI" in sys.modules:
        bind_hwloc()
    launched = launched_rank()
    if launched is not ALONE and launched.size > 1:
        load_tensorflow()


def load_tensorflow() -> None:
    """Import TensorFlow without its startup messages, and with the garbage collector disabled.

    ``TF_CPP_MIN_LOG_LEVEL`` is set to 1 on the chief and to 2 on other ranks, so that warnings appear once and errors
    always. If the user has set it to 0, all lines are shown.

    Raises:
        ImportError: TensorFlow is not installed; the message includes the command that installs it.
    """
    if "tensorflow" in sys.modules:
        return
    if "mpi4py.MPI" in sys.modules:
        bind_hwloc()
    level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1" if launched_rank().rank == 0 else "2")
    try:
        with _garbage_collection_paused(), _filtered_stderr() if level != "0" else nullcontext():
            import tensorflow  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise ImportError(
            f"hvdkit needs {supported.TENSORFLOW}, which is not installed; "
            "run `pip install 'hvdkit[cpu]'` (or `'hvdkit[gpu]'`)",
            name="tensorflow",
        ) from error


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Exclude the imported objects from garbage collection, now and in all later passes.

    TensorFlow's hundreds of thousands of objects live as long as the process. Traversing them repeatedly, and again at
    exit, took one of the 2.5 seconds that a process needs to start and exit.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def _filtered_stderr() -> Iterator[None]:
    """Pipe file descriptor 2 through a process that drops startup messages.

    TensorFlow writes some of them at any log level. The filter is a separate process, so that a message that
    TensorFlow writes before it aborts (e.g. about missing CPU instructions) still appears.
    """
    if sys.stderr is None:  # Python was started with file descriptor 2 closed
        yield
        return
    sys.stderr.flush()
    saved = os.dup(2)
    process = subprocess.Popen([sys.executable, "-IS", log_filter.__file__], stdin=subprocess.PIPE, stdout=saved)
    assert process.stdin is not None
    os.dup2(process.stdin.fileno(), 2)
    process.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)  # closes the last write end of the pipe, which ends the filter
        os.close(saved)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
