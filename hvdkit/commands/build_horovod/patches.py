"""Patches for Horovod 0.28.1, with their reasons.

A patch replaces one exact text in one file of the source archive. It is an error if the text is missing or occurs more
than once: the archive is then not the expected one, and its build would fail later or, worse, succeed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import BuildError, describe

Version = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The target of a build: versions as (major, minor)."""

    tensorflow: Version
    python: Version
    gpu: bool
    mpi: bool


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Replace ``old`` with ``new`` in ``path`` for targets for which ``needed`` is true; by default, for all."""

    name: str
    why: str
    path: str
    old: str
    new: str
    needed: Callable[[Target], bool] = lambda target: True


def _built(name: str, library: str, answer: str, needed: Callable[[Target], bool] = lambda target: True) -> Patch:
    """Return a patch of the function that loads TensorFlow to ask whether the wheel was compiled with a library."""
    return Patch(
        name=f"{name}-built-{answer.lower()}",
        why="horovodrun imported TensorFlow in another process, for seconds, to ask how this wheel was compiled",
        path="horovod/common/util.py",
        old=f"""\
def {name}_built(verbose=False):
    for ext_base_name in EXTENSIONS:
        built_fn = lambda ext: ext.{name}_built()
        result = _check_extension_lambda(
            ext_base_name, built_fn, 'built with {library}', verbose)
        if result is not None:
            return result
    return None
""",
        new=f"def {name}_built(verbose=False):\n    return {answer}\n",
        needed=needed,
    )


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="no-xla-op",
        why="xla_mpi_ops.cc includes XLA headers that TensorFlow's wheels do not ship in full; "
        "the one op it defines is for GPUs and off by default",
        path="horovod/tensorflow/CMakeLists.txt",
        old='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        new="",
        needed=lambda target: target.tensorflow >= (2, 16),
    ),
    Patch(
        name="no-distutils",
        why="Python 3.12 dropped distutils, and horovodrun imports it through js_run.py",
        path="horovod/runner/js_run.py",
        old="from distutils.spawn import find_executable\n",
        new="from shutil import which as find_executable\n",
        needed=lambda target: target.python >= (3, 12),
    ),
    Patch(
        name="gpu-stream",
        why="TensorFlow's libraries (2.21's for certain) do not export AsGpuStreamValue, so the built "
        "library would not load; since 2.16 every stream gives the same handle itself",
        path="horovod/tensorflow/mpi_ops.cc",
        old="""\
// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
#if TENSORFLOW_VERSION >= 2011000000
#include "tensorflow/compiler/xla/stream_executor/stream.h"
#else
#include "tensorflow/stream_executor/stream.h"
#endif // TENSORFLOW_VERSION >= 2011000000
""",
        new="""\
#include "xla/stream_executor/stream.h"
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
""",
        needed=lambda target: target.gpu and target.tensorflow >= (2, 16),
    ),
    Patch(
        name="gcc13-stdexcept",
        why="GCC 13 no longer includes <stdexcept> by way of other headers (horovod#3957)",
        path="horovod/common/common.h",
        old="#include <memory>\n#include <string>\n",
        new="#include <memory>\n#include <stdexcept>\n#include <string>\n",
    ),
    Patch(
        name="gcc13-string",
        why="GCC 13 no longer includes <string> by way of other headers (horovod#3957)",
        path="horovod/common/group_table.h",
        old="#include <queue>\n",
        new="#include <queue>\n#include <string>\n",
    ),
    Patch(
        name="gcc14-flatbuffers",
        why="GCC 14 rejects the assignment to const members, even in a template that is never instantiated",
        path="third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        old="  pointer const data_;\n  const size_type count_;\n",
        new="  pointer data_;\n  size_type count_;\n",
    ),
    Patch(
        name="gcc15-cstdint",
        why="GCC 15 no longer includes <cstdint> by way of other headers",
        path="third_party/gloo/gloo/types.h",
        old="#include <iostream>\n",
        new="#include <cstdint>\n#include <iostream>\n",
    ),
    Patch(
        name="relative-rpath",
        why="the folder of libmpi.so is written into the library; relative to the library itself "
        "it stays right when the wheel is installed into another environment",
        path="CMakeLists.txt",
        old="project(horovod CXX)\n",
        new="project(horovod CXX)\n"
        "if(DEFINED ENV{HVDKIT_RPATH})\n"
        "    set(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)\n"
        '    set(CMAKE_INSTALL_RPATH "$ENV{HVDKIT_RPATH}")\n'
        "endif()\n",
    ),
    Patch(
        name="compiled-against",
        why="the wheel requires the TensorFlow and the MPI that it was compiled against, so that pip on another host "
        "installs them or reports the conflict",
        path="setup.py",
        old="install_requires=require_list,\n",
        new="install_requires=require_list + os.environ['HVDKIT_REQUIRES'].split(),\n",
    ),
    Patch(
        name="compile-together",
        why="most of the compiler's time goes into headers, debugging information and -O3 for code that runs once; "
        "files that are compiled as one share their headers",
        path="CMakeLists.txt",
        old="# Add architecture specific optimization flags\n",
        new="""\
string(REGEX REPLACE "(^| )-g( |$)" " " CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")

# Replace the files of the list ${list} that match ${pattern} by one that includes them, with its own options.
function(compile_together list name pattern options)
    set(files ${${list}})
    list(FILTER files INCLUDE REGEX "${pattern}")
    list(REMOVE_DUPLICATES files)
    set(others ${${list}})
    list(FILTER others EXCLUDE REGEX "${pattern}")
    string(REPLACE ";" "\\"\\n#include \\"" text "${files}")
    set(together "${CMAKE_CURRENT_BINARY_DIR}/${name}.cc")
    file(WRITE "${together}" "#include \\"${text}\\"\\n")
    set_source_files_properties("${together}" PROPERTIES COMPILE_OPTIONS "${options}")
    set(${list} ${others} "${together}" PARENT_SCOPE)
endfunction()

# Add architecture specific optimization flags
""",
    ),
    Patch(
        name="compile-together-horovod",
        why="see compile-together; -O3 stays for sums of tensors and for GPUs, and -O1 is for the search of parameters "
        "(HOROVOD_AUTOTUNE) and the registration of ops",
        path="horovod/tensorflow/CMakeLists.txt",
        old="add_library(${TF_TARGET_LIB} SHARED ${SOURCES} ${TF_SOURCES})\n",
        new="""\
compile_together(SOURCES sums "/(half|(gloo|mpi)_operations|adasum_mpi|adasum_mpi_operations)[.]cc$" "-O3")
compile_together(SOURCES autotune "/(parameter_manager|bayesian_optimization|gaussian_process)[.]cc$" "-O1")
compile_together(SOURCES transports "/common/(operations|(gloo|mpi)/[a-z_]+)[.]cc$" "-O2")
compile_together(SOURCES engine "/common/(utils/|ops/(collective|operation)_)?[a-z_]+[.]cc$" "-O2")
set_source_files_properties("${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc" PROPERTIES COMPILE_OPTIONS "-O1")
add_library(${TF_TARGET_LIB} SHARED ${SOURCES} ${TF_SOURCES})
""",
    ),
    Patch(
        name="compile-together-gloo",
        why="see compile-together; Horovod does not use allreduce_local, which defines a name twice",
        path="third_party/gloo/gloo/CMakeLists.txt",
        old="add_library(gloo ${GLOO_STATIC_OR_SHARED} ${GLOO_SRCS})\n",
        new="""\
list(FILTER GLOO_SRCS EXCLUDE REGEX "/allreduce_local[.]cc$")
compile_together(GLOO_SRCS collectives "/gloo/((common|mpi|rendezvous|transport)/)?[a-z_]+[.]cc$" "-O2")
compile_together(GLOO_SRCS tcp "/transport/tcp/[a-z_]+[.]cc$" "-O2")
add_library(gloo ${GLOO_STATIC_OR_SHARED} ${GLOO_SRCS})
""",
    ),
    _built("mpi", "MPI", "True", needed=lambda target: target.mpi),
    _built("mpi", "MPI", "False", needed=lambda target: not target.mpi),
    _built("gloo", "Gloo", "True"),
    Patch(
        name="one-gloo",
        why="Horovod compiles Gloo for C++11 and C++17; TensorFlow >= 2.10 takes the second",
        path="CMakeLists.txt",
        old="    add_subdirectory(third_party/gloo)\n",
        new="    add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)\n",
    ),
)


def needed_patches(target: Target) -> list[Patch]:
    """Return the patches that a build for ``target`` needs, in the table's order.

    Example:
        >>> [p.name for p in needed_patches(Target(tensorflow=(2, 21), python=(3, 11), gpu=False, mpi=True))][:2]
        ['no-xla-op', 'gcc13-stdexcept']
    """
    return [patch for patch in PATCHES if patch.needed(target)]


def revision(patches: Sequence[Patch]) -> str:
    """Return a short digest of the patches, so that a wheel cached with different patches is not reused."""
    digest = hashlib.sha256()
    for patch in patches:
        digest.update("\0".join((patch.path, patch.old, patch.new, "")).encode())
    return digest.hexdigest()[:8]


def apply_patches(source: Path, patches: Sequence[Patch]) -> None:
    """Apply ``patches`` to the unpacked archive at ``source``.

    Raises:
        BuildError: a file is missing or does not contain a patch's text exactly once.
    """
    for patch in patches:
        file = source / patch.path
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        count = text.count(patch.old)
        if count != 1:
            got = f"the text {count} times in {patch.path}" if file.is_file() else f"no file {patch.path}"
            remedy = "use the unmodified Horovod 0.28.1 archive, or report this as a bug of hvdkit"
            raise BuildError(describe(f"patch {patch.name}", got, "its text exactly once", remedy))
        file.write_text(text.replace(patch.old, patch.new), encoding="utf-8")
