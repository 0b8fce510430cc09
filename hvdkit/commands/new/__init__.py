"""``hvdkit new``: a small project that trains at once. It copies files from ``project`` and from launch/."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from hvdkit.commands.options import output_errors
from hvdkit.errors import describe
from hvdkit.machine.terminal import aligned

_HERE = Path(__file__).parent
Cluster = Literal["local", "ssh", "slurm", "kubernetes", "kubeflow"]
# The file that each cluster adds from launch/, and where a job runs.
_CLUSTERS = {
    "ssh": ("hosts.sh", "on the hosts in the file `hosts`"),
    "slurm": ("slurm.sbatch", "under Slurm"),
    "kubernetes": ("kubernetes.yaml", "on Kubernetes"),
    "kubeflow": ("kubeflow-trainjob.yaml", "with Kubeflow Trainer"),
}


@dataclass(frozen=True, kw_only=True)
class New:
    """Write a small project that trains at once: train.py, README.md, Makefile and the files to launch it.

    It never overwrites files. Exit code: 0; 2 if the folder cannot be used.

    For example:
        hvdkit new my_project
        hvdkit new my_project --form loop --cluster slurm
        hvdkit new .                                        in this folder

    See `hvdkit docs first-steps`.
    """

    path: Positional[Path]
    """Folder of the project; created if it does not exist."""
    form: Literal["fit", "loop"] = "fit"
    """How train.py trains: with Keras's fit, or in a training loop."""
    cluster: Cluster = "local"
    """Where it will run, in addition to this machine: kubernetes with the MPI operator, kubeflow with Trainer."""


def new(config: New) -> str:
    """Write the project; return the next steps.

    Raises:
        ValueError: the folder is not empty, or cannot be written.
    """
    files = project(config)
    with output_errors("PATH", config.path, "folder"):
        _check_unused(config.path, files)
        for name, text in files.items():
            _write(config.path / name, text)
    return f"{config.path}: {', '.join(files)}\n\nnext steps:\n" + "\n".join(f"  {step}" for step in _steps(config))


def project(config: New) -> dict[str, str]:
    """Return the project's files, by their paths in its folder."""
    source = _HERE / "project"
    cluster = source / config.cluster
    name = config.path.resolve().name or "project"
    files = {
        "train.py": (source / config.form / "train.py").read_text(),
        "README.md": _joined(source / "README.md", cluster / "README.md").replace("my_project", name, 1),
        "Makefile": _joined(source / "Makefile", cluster / "Makefile"),
        "requirements.txt": (source / "requirements.txt").read_text(),
        ".gitignore": (source / "gitignore").read_text(),
    }
    if config.cluster == "ssh":
        files["hosts"] = (cluster / "hosts").read_text()
    if config.cluster != "local":
        launch_file, _ = _CLUSTERS[config.cluster]
        text = (_HERE / "launch" / launch_file).read_text()
        files[f"launch/{launch_file}"] = text.replace("models/train.py cifar10", "train.py")
    return files


def _joined(*paths: Path) -> str:
    return "".join(path.read_text() for path in paths if path.exists())


def _check_unused(folder: Path, files: Mapping[str, str]) -> None:
    """Raise ValueError if the folder has files. Hidden ones, such as .git or .venv, may be there."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(describe("PATH", f"{folder}, a file", "a new or empty folder", "choose another name"))
    used = sorted(one.name for one in folder.iterdir() if not one.name.startswith(".") or one.name in files)
    if used:
        shown = ", ".join(used[:3]) + (", ..." if len(used) > 3 else "")
        got = f"{folder}, which has {shown}"
        raise ValueError(describe("PATH", got, "a new or empty folder", "choose another name, or move the files away"))


def _write(path: Path, text: str) -> None:
    """Write a new file; a script becomes executable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x") as file:
        file.write(text)
        if text.startswith("#!"):
            readable = os.fstat(file.fileno()).st_mode & 0o444
            os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode | readable >> 2)


def _steps(config: New) -> list[str]:
    """Return the commands to run next; each works as it is."""
    steps = [
        ("make setup", "installs what train.py needs, checks this machine"),
        ("make train", "trains on 2 ranks; NP=4 for 4"),
        ("hvdkit checkpoint inspect runs/digits", ""),
    ]
    if config.cluster != "local":
        _, where = _CLUSTERS[config.cluster]
        steps.append(("make submit", f"the same {where}; see README.md"))
    lines = aligned([(command, note and f"# {note}") for command, note in steps])
    return lines if config.path.resolve() == Path.cwd() else [f"cd {shlex.quote(str(config.path))}", *lines]
