"""Environments of Python in which some of the packages installed here are missing."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment_without(folder: Path, *missing: str) -> Path:
    """Create an environment without pip and the packages whose names begin with ``missing``; return its Python."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.lower().startswith((*missing, "__editable__", "pip")):
            (site / package.name).symlink_to(package)
    (site / "hvdkit.pth").write_text(str(ROOT))
    return folder / "bin" / "python"
