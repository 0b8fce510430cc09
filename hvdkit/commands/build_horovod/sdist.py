"""Horovod's source archive: download with pip, verify, cache and unpack."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

from hvdkit.commands.build_horovod import cache
from hvdkit.commands.build_horovod.process import run_pip
from hvdkit.errors import BuildError, describe

HOROVOD = "0.28.1"
ARCHIVE = f"horovod-{HOROVOD}.tar.gz"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


def fetch(folder: Path, tools: Path, log: Path) -> Path:
    """Return Horovod's archive in ``folder``; download it with pip unless a valid copy is there.

    ``tools`` is where setuptools is installed, which pip needs to read the archive's metadata.

    Raises:
        BuildError: pip cannot download it, or its checksum is wrong (pip checks it as well).
    """
    archive = folder / ARCHIVE
    if archive.is_file() and _digest(archive) == SHA256:
        return archive
    downloads = tools.parent / "download"
    pinned = tools.parent / "horovod.txt"
    pinned.write_text(f"horovod=={HOROVOD} --hash=sha256:{SHA256}\n")
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes"]
    arguments = ["download", *options, "--dest", str(downloads), "-r", str(pinned)]
    failure = f"pip could not download Horovod {HOROVOD}"
    run_pip(*arguments, log=log, failure=failure, variables={"PYTHONPATH": str(tools)})
    return cache.store(downloads / ARCHIVE, folder)


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack ``archive`` under ``folder`` and return the source folder.

    Raises:
        BuildError: the file does not exist, or is not byte for byte Horovod's release.
    """
    if not archive.is_file():
        raise BuildError(describe("--sdist", str(archive), "Horovod's source archive", "check the path"))
    digest = _digest(archive)
    if digest != SHA256:
        remedy = f"fetch it again: pip download --no-deps --no-binary :all: horovod=={HOROVOD}"
        raise BuildError(describe(f"sha256 of {archive}", digest, SHA256, remedy))
    with tarfile.open(archive) as tar:
        # Rejects paths outside the folder; Python before 3.10.12 lacks it.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(folder)
    return folder / f"horovod-{HOROVOD}"


def _digest(archive: Path) -> str:
    return hashlib.sha256(archive.read_bytes()).hexdigest()
