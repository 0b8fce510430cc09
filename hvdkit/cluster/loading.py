"""Loading TensorFlow: after MPI or before it, and without its start-up lines."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

from hvdkit.cluster import chatter
from hvdkit.cluster.bindings import bind_hwloc
from hvdkit.machine.launcher import ALONE, promised


def prepare_import() -> None:
    """Make ``import hvdkit`` safe in any order; load TensorFlow now in a process that a launcher started.

    A launched process will train, so TensorFlow's seconds are spent anyway; spending them here keeps a later
    ``from mpi4py import MPI`` behind it, and TensorFlow's start-up lines away. Without a launcher (the command line, a
    notebook) nothing heavy is imported.
    """
    if "mpi4py.MPI" in sys.modules:
        bind_hwloc()
    promise = promised()
    if promise is not ALONE and promise.size > 1:
        load_tensorflow()


def load_tensorflow() -> None:
    """Import TensorFlow without its start-up lines, and without the garbage collector in its way.

    ``TF_CPP_MIN_LOG_LEVEL`` is set to 1 on the chief and to 2 on other ranks, so that a warning appears once and an
    error always. If the user has set it to 0, nothing is held back.

    Raises:
        ImportError: TensorFlow is not installed; the message names the command that brings it.
    """
    if "tensorflow" in sys.modules:
        return
    if "mpi4py.MPI" in sys.modules:
        bind_hwloc()
    level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1" if promised().rank == 0 else "2")
    try:
        with _collector_at_rest(), _without_chatter() if level != "0" else nullcontext():
            import tensorflow  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise ImportError(
            "hvdkit needs TensorFlow 2.16 to 2.21, which is not installed; "
            "run `pip install 'hvdkit[cpu]'` (or `'hvdkit[gpu]'`)",
            name="tensorflow",
        ) from error


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Keep the garbage collector from going through what is imported, now and in every later pass.

    TensorFlow's hundreds of thousands of objects live as long as the process. To look through them again and again,
    and once more at exit, took a second of the 2.5 that a process needs to start and end.
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
def _without_chatter() -> Iterator[None]:
    """Send what is written to file descriptor 2 through a process that drops start-up lines.

    TensorFlow writes some of them whatever its log level is. A process, since what TensorFlow says before it aborts (a
    processor that lacks instructions) must appear.
    """
    if sys.stderr is None:  # Python was started with file descriptor 2 closed
        yield
        return
    sys.stderr.flush()
    saved = os.dup(2)
    process = subprocess.Popen([sys.executable, "-IS", chatter.__file__], stdin=subprocess.PIPE, stdout=saved)
    assert process.stdin is not None
    os.dup2(process.stdin.fileno(), 2)
    process.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)  # the last writer is gone: the filter ends
        os.close(saved)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
