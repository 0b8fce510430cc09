"""Build the source archive and the wheel of the last commit: the same bytes from every clone.

make dist
python tools/build_dist.py --out dist

Modification times are that of the commit, or ``SOURCE_DATE_EPOCH``. setuptools applies it to wheels, but not to source
archives (https://github.com/pypa/setuptools/issues/2133), so their members are normalized here.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Options:
    """Build the source archive and the wheel of the last commit."""

    out: Path = ROOT / "dist"
    """Folder for both files."""


def build(source: Path, out: Path, epoch: int) -> tuple[Path, Path]:
    """Build the tree ``source`` with the installed setuptools; return the source archive and the wheel in ``out``.

    The wheel is built from the source archive. Both depend on the contents of the tree, on whether files are
    executable and on ``epoch``, but not on other attributes of files, the umask or the time.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hvdkit-dist-") as name:
        folder = Path(name)
        made = _run_build("--sdist", source, folder / "sdist", epoch)
        archive = out / made.name
        _normalize(made, archive, epoch)
        with tarfile.open(archive) as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 lacks it
            tar.extractall(folder / "unpacked")
        made = _run_build("--wheel", next((folder / "unpacked").iterdir()), folder / "wheel", epoch)
        wheel = out / made.name
        wheel.write_bytes(made.read_bytes())
    return archive, wheel


def _run_build(kind: str, source: Path, out: Path, epoch: int) -> Path:
    """Run ``python -m build`` and return the file that it made."""
    command = [sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", str(out), str(source)]
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, umask=0o022)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return next(out.iterdir())


def _normalize(archive: Path, result: Path, epoch: int) -> None:
    """Copy ``archive`` to ``result`` with sorted members and without the times, owners and permissions of this host."""
    with (
        tarfile.open(archive) as old,
        result.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w") as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            clean = tarfile.TarInfo(member.name)
            clean.type, clean.linkname, clean.size, clean.mtime = member.type, member.linkname, member.size, epoch
            clean.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(clean, old.extractfile(member) if member.isfile() else None)


def main() -> int:
    """Build the last commit, and print the files with their SHA-256."""
    options = tyro.cli(Options)

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout

    if git("status", "--porcelain"):
        print("note: changes that are not committed are left out", file=sys.stderr)
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory(prefix="hvdkit-commit-") as folder:
        subprocess.run(["tar", "-x", "-C", folder], input=git("archive", "HEAD"), check=True)
        for file in build(Path(folder), options.out, epoch):
            print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
