"""The subprocess that imports TensorFlow, Horovod and mpi4py, and reports on them.

``python -m hvdkit.commands.doctor.probe STAGE...``: each stage prints one JSON line when it ends, with ``error`` if its
import failed. The first stage without a line has crashed or hung. Only the stage ``alone`` starts MPI.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys

from hvdkit.machine.mpi import loaded_libraries, tensorflow_exports_hwloc


def tensorflow() -> dict[str, object]:
    """Report TensorFlow's version, whether it is built for CUDA, its GPUs, and whether it exports hwloc."""
    import tensorflow as tf

    return {
        "version": tf.__version__,
        "cuda": bool(tf.test.is_built_with_cuda()),
        "gpus": [device.name for device in tf.config.list_physical_devices("GPU")],
        "exports_hwloc": tensorflow_exports_hwloc(),
    }


def keras() -> dict[str, object]:
    """Report version and backend of Keras, and the version of ``tf.keras``."""
    import keras as keras_module
    import tensorflow as tf

    backend = getattr(getattr(keras_module, "backend", None), "backend", None)
    return {
        "version": keras_module.__version__,
        "backend": backend and backend(),
        "tf_keras_version": tf.keras.__version__,
    }


def horovod() -> dict[str, object]:
    """Load Horovod's TensorFlow engine; report the features that it was built with, and the MPI that it loads."""
    before = loaded_libraries()
    import horovod.tensorflow as hvd

    return {
        "mpi": bool(hvd.mpi_built()),
        "gloo": bool(hvd.gloo_built()),
        "nccl": bool(hvd.nccl_built()),
        "rocm": bool(hvd.rocm_built()),
        **_loaded_since(before),
    }


def mpi4py() -> dict[str, object]:
    """Load ``mpi4py.MPI`` without starting MPI, and report the MPI library that it loads."""
    before = loaded_libraries()
    import mpi4py as package

    package.rc.initialize = False
    package.rc.finalize = False
    from mpi4py import MPI

    return {**_loaded_since(before), "library": MPI.Get_library_version().strip("\0\n ")}


def alone() -> dict[str, object]:
    """Start and finalize MPI in this process without a launcher, through mpi4py's library."""
    import mpi4py as package

    package.rc.initialize = False
    from mpi4py import MPI

    MPI.Init()
    MPI.Finalize()
    return {}


def _loaded_since(before: list[str]) -> dict[str, object]:
    """Report the MPI libraries in this process, and the version string of the first new one."""
    now = loaded_libraries()
    new = [path for path in now if path not in before]
    return {"libmpi": now, "library": library_version(new[0]) if new else None}


def library_version(path: str) -> str | None:
    """Return the version string of an MPI library, which is available before ``MPI_Init``."""
    library = ctypes.CDLL(path)
    if not hasattr(library, "MPI_Get_library_version"):
        return None
    text = ctypes.create_string_buffer(8192)
    length = ctypes.c_int()
    library.MPI_Get_library_version(text, ctypes.byref(length))
    return text.value.decode(errors="replace").strip()


STAGES = {stage.__name__: stage for stage in (tensorflow, keras, horovod, mpi4py, alone)}


def main(names: list[str]) -> None:
    """Run the named stages in order, and print one JSON line for each."""
    for name in names:
        try:
            report = STAGES[name]()
        except Exception as error:  # report any failure of an import
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            report = {"error": f"{type(error).__name__}: {error}", "missing": missing}
        print(json.dumps({"stage": name, **report}), flush=True)


if __name__ == "__main__":
    gc.disable()  # imported objects live as long as this short process
    main(sys.argv[1:])
    gc.freeze()  # skip them at exit, too
