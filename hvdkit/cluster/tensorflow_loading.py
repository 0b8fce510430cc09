"""Loads TensorFlow before MPI, and hides its startup messages."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

from hvdkit.cluster import log_filter
from hvdkit.errors import ClusterError, describe, see
from hvdkit.machine import supported
from hvdkit.machine.launcher import ALONE, launched_rank
from hvdkit.machine.mpi import tensorflow_exports_hwloc


def prepare_import() -> None:
    """Import TensorFlow in a rank of several, as part of ``import hvdkit``.

    Such a process will train, and needs the seconds for TensorFlow's import anyway. Importing it here ensures that a
    later ``from mpi4py import MPI`` comes after it, and hides the startup messages. Other processes, such as the hvdkit
    command and notebooks, may not need TensorFlow.

    Raises:
        ClusterError: MPI has been started first, and would crash when it is finalized.
    """
    launched = launched_rank()
    if launched is not ALONE and launched.size > 1:
        load_tensorflow()


def load_tensorflow() -> None:
    """Import TensorFlow without its startup messages, and with the garbage collector disabled.

    ``TF_CPP_MIN_LOG_LEVEL`` is set to 1 on the chief and to 2 on other ranks, so that warnings appear once and errors
    always. If the user has set it to 0, all lines are shown.

    Raises:
        ImportError: TensorFlow is not installed; the message includes the command that installs it.
        ClusterError: MPI has been started first, and would crash when it is finalized.
    """
    _check_import_order()
    if "tensorflow" in sys.modules:
        return
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


def _check_import_order() -> None:
    """Raise ClusterError if mpi4py has started MPI before TensorFlow is loaded, and MPI would crash at exit.

    Open MPI 4 and TensorFlow each contain hwloc, and export functions with the same names. The linker binds a function
    at its first call: those of ``MPI_Init`` to MPI's copy, but those that only ``MPI_Finalize`` calls to TensorFlow's,
    if TensorFlow has been loaded in between. It gets a topology with another layout, and crashes in
    ``hwloc__topology_disadopt``. If TensorFlow is loaded first, all of MPI's calls go to its copy, which works.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    modules = list(sys.modules)  # in the order of their imports
    if "tensorflow" in modules and modules.index("tensorflow") < modules.index("mpi4py.MPI"):
        return
    vendor, version = mpi.get_vendor()
    # LD_BIND_NOW binds all functions when MPI is loaded, to its own copy.
    if vendor != "Open MPI" or version[0] >= 5 or os.environ.get("LD_BIND_NOW") or not tensorflow_exports_hwloc():
        return
    first = "hvdkit" if launched_rank().size > 1 else "tensorflow"
    got = f"mpi4py.MPI before TensorFlow, so that Open MPI {'.'.join(map(str, version))} would crash at exit"
    remedy = f"import {first} before mpi4py"
    raise ClusterError(describe("imports", got, "TensorFlow first", remedy) + f"; {see('settings#import-order')}")


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
