"""The order in which TensorFlow and MPI are loaded, and TensorFlow's chatter.

TensorFlow exports a symbol, ``hwloc__topology_disadopt``, that Open MPI 4.1 also has and binds lazily. When MPI
was loaded first, its own call lands in TensorFlow's copy at exit and crashes (seen with three or more local ranks).
Two cures, both here: load TensorFlow first, or, where mpi4py came first, move Open MPI's library to the global
scope *before* TensorFlow enters it, so that MPI finds its own symbol there.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from hvdkit.cluster.launcher import ALONE, promised
from hvdkit.cluster.logs import get_logger

# Lines that say nothing about this job: absl's preamble and informational lines of TensorFlow's libraries.
CHATTER = (
    "WARNING: All log messages before absl::InitializeLog()",
    "I0000 ",
    "To enable the following instr",
)


def mapped_libraries(part: str) -> list[str]:
    """Return the files mapped into this process whose name contains ``part`` (Linux; elsewhere none)."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    files = {line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if "/" in line}
    return sorted(file for file in files if part in Path(file).name)


def prepare_import() -> None:
    """Make ``import hvdkit`` safe in any order; load TensorFlow now in a process that a launcher started.

    A launched process will train, so TensorFlow's seconds are spent anyway; spending them here keeps a later
    ``from mpi4py import MPI`` behind it, and keeps start-up chatter to the chief. Without a launcher (the
    command line, a notebook) nothing heavy is imported.
    """
    promise = promised()
    if "tensorflow" in sys.modules:
        _warn_if_mpi_came_first()
        return
    if "mpi4py.MPI" in sys.modules:
        _expose_open_mpi()
    if promise is not ALONE and promise.size > 1:
        load_tensorflow()


def load_tensorflow() -> None:
    """Import TensorFlow, muted on every rank but the chief, and without the garbage collector in its way.

    Raises:
        ImportError: TensorFlow is not installed; the message names the command that brings it.
    """
    if "tensorflow" in sys.modules:
        return
    quiet = promised().rank > 0
    if quiet:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        with _collector_at_rest(), _muted_stderr() if quiet else nullcontext():
            import tensorflow  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise ImportError(
            "hvdkit needs TensorFlow 2.16 to 2.21, which is not installed; "
            "run `pip install 'hvdkit[cpu]'` (or `'hvdkit[gpu]'`)",
            name="tensorflow",
        ) from error


def _expose_open_mpi() -> None:
    for library in mapped_libraries("libopen-pal.so"):
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_GLOBAL | os.RTLD_LAZY)


def _warn_if_mpi_came_first() -> None:
    """Warn where both are loaded already in the order that crashes at exit: nothing can mend that any more."""
    loaded = list(sys.modules)
    if "mpi4py.MPI" not in sys.modules or loaded.index("mpi4py.MPI") > loaded.index("tensorflow"):
        return
    if os.environ.get("LD_BIND_NOW") or not mapped_libraries("libopen-pal.so.40"):
        return
    get_logger().warning(
        "import order: mpi4py.MPI was imported before tensorflow, and hvdkit after both; with Open MPI 4.1 and "
        "three or more ranks on a host such a process crashes when it exits. Import hvdkit (or tensorflow) "
        "first, or set LD_BIND_NOW=1."
    )


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
def _muted_stderr() -> Iterator[None]:
    """Hold back what is written to file descriptor 2, and pass on whatever is no chatter afterwards."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        saved = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            kept = [line for line in held.read().decode(errors="replace").splitlines(keepends=True) if line.strip()]
            rest = "".join(line for line in kept if not line.startswith(CHATTER))
            if rest:
                os.write(2, rest.encode())
