"""Starts Horovod and, under an MPI launcher, MPI through mpi4py."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from hvdkit.cluster.mesh import HorovodProcessSet
from hvdkit.cluster.tensorflow_loading import load_tensorflow
from hvdkit.errors import ClusterError, describe, see
from hvdkit.machine.launcher import ALONE, LaunchedRank
from hvdkit.machine.mpi import loaded_libraries
from hvdkit.watchdog.lines import write_line

if TYPE_CHECKING:
    from mpi4py import MPI

# Free bytes below which the disk of Open MPI's temporary files counts as full.
_LEAST_BYTES = 1 << 16


def load_horovod() -> ModuleType:
    """Import and return ``horovod.tensorflow``.

    Raises:
        ImportError: Horovod is missing or was built for another TensorFlow; the message names
            ``hvdkit build-horovod``. Or Keras is set to another backend than TensorFlow.
    """
    _check_keras_backend()
    load_tensorflow()
    try:
        import horovod.tensorflow as hvd
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("horovod"):
            raise
        raise ImportError(
            "hvdkit needs Horovod, which is not installed; run `hvdkit build-horovod` (1 to 3 minutes); "
            + see("compatibility"),
            name="horovod",
        ) from error
    except Exception as error:
        cause = str(error).strip().partition("\n")[0]  # Horovod's next lines advise a pip install, which would fail
        raise ImportError(
            f"Horovod is installed but cannot be loaded ({type(error).__name__}: {cause}); it was probably built for "
            "another TensorFlow: run `hvdkit build-horovod`, and `hvdkit doctor` to see what differs; "
            + see("compatibility"),
            name="horovod",
        ) from error
    return cast("ModuleType", hvd)


def _check_keras_backend() -> None:
    """Raise ImportError if Keras uses, or will use, another backend: Horovod's import would fail, with other advice."""
    backend = os.environ.get("KERAS_BACKEND")
    where = "KERAS_BACKEND"
    if (keras := sys.modules.get("keras")) is not None and hasattr(keras, "config"):
        backend = keras.config.backend()
    elif backend is None:
        file = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras")) / "keras.json"
        where = str(file)
        with suppress(OSError, ValueError, AttributeError):
            backend = json.loads(file.read_text(encoding="utf-8")).get("backend")
    if backend not in (None, "", "tensorflow"):
        remedy = "export KERAS_BACKEND=tensorflow before Keras is imported"
        raise ImportError(describe(where, backend, "tensorflow, whose variables hvdkit trains", remedy), name="keras")


def start_horovod(
    launched: LaunchedRank, sets: Sequence[tuple[int, ...]] = ()
) -> tuple[ModuleType, MPI.Intracomm | None, dict[tuple[int, ...], HorovodProcessSet]]:
    """Start Horovod, under an MPI launcher after MPI.

    mpi4py starts MPI, so that mpi4py also finalizes it, when the interpreter exits. Horovod can then be shut down and
    started again in the same process.

    Args:
        launched: the rank and size set by the launcher.
        sets: process sets to create, the same on every rank. Under MPI they are compared first, and not created if
            ranks differ, because Horovod would wait forever.

    Returns:
        The module ``horovod.tensorflow``; a duplicate of ``COMM_WORLD`` for hvdkit only, or None without MPI or mpi4py;
        and Horovod's process set for each of ``sets``.

    Raises:
        ClusterError: mpi4py and Horovod load different MPI libraries, Horovod lacks the launcher's controller, or the
            world size differs from the launcher's.
    """
    _check_mpirun_is_running(launched)
    _warn_of_full_disk(launched)
    hvd = load_horovod()
    communicator = None
    if launched.controller == "mpi":
        if not hvd.mpi_built():
            remedy = "run `hvdkit build-horovod --mpi wheel`, or start with `horovodrun --gloo`"
            raise ClusterError(describe("launcher", launched.launcher, "a Horovod built with MPI", remedy))
        _check_srun_plugin(launched)
        communicator = _mpi_communicator()
    if communicator is not None and any(other != list(sets) for other in communicator.allgather(list(sets))):
        sets = ()
    process_sets = {ranks: hvd.ProcessSet(list(ranks)) for ranks in sets}
    try:
        with _world_of_one() if launched is ALONE else nullcontext():
            hvd.init(process_sets=list(process_sets.values()) or None)
    except Exception as error:
        raise ClusterError(f"Horovod did not start: {error}; run `hvdkit doctor`") from error
    _check_size(hvd.size(), launched)
    return hvd, communicator, process_sets


def finalize_mpi() -> None:
    """Finalize MPI if mpi4py has started it, instead of at exit. All ranks must call it."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def add_process_sets(
    hvd: ModuleType, known: dict[tuple[int, ...], HorovodProcessSet], new: Sequence[tuple[int, ...]], *, over_mpi: bool
) -> None:
    """Create Horovod's process sets of ``new``, and add them to ``known``. Every rank calls it, between collectives.

    Horovod is restarted, because it creates process sets when it starts. It could also create them dynamically, but
    then all ranks would exchange two more numbers in each of its cycles.

    Raises:
        ClusterError: Horovod cannot be restarted, e.g. under Gloo.
    """
    added = {ranks: hvd.ProcessSet(list(ranks)) for ranks in new}
    if os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1":
        for process_set in added.values():
            hvd.add_process_set(process_set)
    elif not over_mpi:
        got = f"ranks {list(map(list, new))} after hk.init() under Gloo"
        expected = "HOROVOD_DYNAMIC_PROCESS_SETS=1, without which Horovod creates sets only when it starts"
        raise ClusterError(describe("ProcessSet", got, expected, "set it in the job's environment, or start under MPI"))
    else:
        hvd.shutdown()
        hvd.init(process_sets=[*known.values(), *added.values()])
    known.update(added)


def _check_mpirun_is_running(launched: LaunchedRank) -> None:
    """Raise ClusterError if Open MPI's variables belong to no mpirun, or to a rank that has started this process.

    MPI's own messages would be unclear. MPI_Init sets ``OMPI_MCA_ess=pmi`` for child processes.
    """
    if launched.launcher != "mpirun (Open MPI)":
        return
    if os.environ.get("OMPI_MCA_ess") == "pmi":  # noqa: SIM112
        got = f"the variables of rank {launched.rank} of {launched.size}, which has started this process"
        remedy = "start it with `hvdkit run -np 1 -- python ...`, which removes them"
        raise ClusterError(describe("launcher", got, "a process that mpirun started", remedy))
    if launched.size == 1 or "PMIX_RANK" in os.environ:
        return
    variables = f"OMPI_COMM_WORLD_RANK={launched.rank} and OMPI_COMM_WORLD_SIZE={launched.size}"
    got = f"{variables} without an mpirun around this process (PMIX_RANK is not set)"
    remedy = f"start with `mpirun -np {launched.size} python ...`, or unset the OMPI_COMM_WORLD variables"
    raise ClusterError(describe("launcher", got, f"a rank that mpirun started, one of {launched.size}", remedy))


def _warn_of_full_disk(launched: LaunchedRank) -> None:
    """Warn if Open MPI has no space for its temporary files: MPI_Init then fails without naming the folder."""
    folder = os.environ.get("PMIX_SERVER_TMPDIR", "")
    with suppress(OSError):
        if launched.local_rank == 0 and folder and shutil.disk_usage(folder).free < _LEAST_BYTES:
            write_line(
                f"hvdkit: the disk of {folder} is full, where Open MPI writes temporary files: if MPI does not start, "
                "free space there, or export TMPDIR=/another/folder before mpirun"
            )


def _check_srun_plugin(launched: LaunchedRank) -> None:
    """Raise ClusterError if srun does not provide PMIx, without which Open MPI aborts. Other MPIs do not need PMIx."""
    if launched.launcher != "srun (Slurm)" or launched.size == 1 or "PMIX_RANK" in os.environ:
        return
    if any(".so.40" in path for path in loaded_libraries()):
        got = os.environ.get("SLURM_MPI_TYPE", "none")
        remedy = "srun --mpi=pmix (`srun --mpi=list` shows what this Slurm has), or `hvdkit run --slurm`"
        raise ClusterError(describe("srun --mpi", got, "pmix, by which Open MPI learns its ranks", remedy))


def _mpi_communicator() -> MPI.Intracomm | None:
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    # libmpi_abi may be a layer on top of libmpi, which is then the same MPI.
    libraries = [path for path in loaded_libraries() if "/libmpi_abi" not in path]
    if len(libraries) > 1:
        got = " and ".join(libraries)
        expected = "mpi4py and Horovod to load one MPI library"
        remedy = "rebuild Horovod against mpi4py's MPI: `hvdkit build-horovod --mpi wheel` (or `--mpi system`)"
        raise ClusterError(describe("MPI", got, expected, remedy))
    return MPI.COMM_WORLD.Dup()


@contextmanager
def _world_of_one() -> Iterator[None]:
    """Set Horovod's variables for a process without a launcher: Gloo, one process, no rendezvous.

    Gloo needs neither a launcher nor a daemon, while MPI may fail to start without mpirun. The variables are removed
    afterwards, so that a launcher started by this process does not inherit them.
    """
    world = {"RANK": 0, "SIZE": 1, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    variables = {f"HOROVOD_{name}": str(value) for name, value in world.items()}
    variables |= {"HOROVOD_HOSTNAME": "localhost", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _check_size(size: int, launched: LaunchedRank) -> None:
    if size == launched.size:
        return
    got = f"{size} on rank {launched.rank} ({socket.gethostname()})"
    expected = f"{launched.size}, as {launched.launcher} promised ({asdict(launched)})"
    remedy = (
        "the launcher and Horovod use different MPIs: start with the mpirun of the MPI that Horovod was built against "
        f"(`hvdkit doctor` names it; this Python is {sys.executable})"
    )
    raise ClusterError(describe("world size", got, expected, remedy))
