"""Runs on other hosts before the start, over ssh or srun, and reports their software and addresses.

The source is sent on standard input, and needs only the standard library, to be able to report missing packages. The
arguments are the folder of hvdkit on the host that runs the check, and the bytes that the engine writes to the folder
for temporary files.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

DISTRIBUTIONS = {
    "TensorFlow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
    "Keras": ("keras", "keras-nightly"),
    "Horovod": ("horovod",),
}
MARK = "hvdkit-probe "


def versions(folder: str) -> dict[str, str | None]:
    """Return the versions that must be equal on all hosts; None for packages that are not installed."""
    found: dict[str, str | None] = {"Python": ".".join(map(str, sys.version_info[:2]))}
    for name, distributions in DISTRIBUTIONS.items():
        found[name] = next((version for one in distributions if (version := _version(one))), None)
    file = Path(folder) / "_version.py"
    text = re.search(r'__version__ = "([^"]+)"', file.read_text()) if file.exists() else None
    found["hvdkit"] = text[1] if text else None
    return found


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def temporary_problem(variables: Mapping[str, str], needed: int) -> str | None:
    """Return why the engine cannot write ``needed`` bytes of temporary files, with a remedy; None if it can.

    Open MPI fails after a minute, with messages of PMIx that do not name the folder. It creates the folder if it does
    not exist.
    """
    if needed == 0:
        return None
    names = ("OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_tmpdir_base", "TMPDIR")
    name = next((one for one in names if variables.get(one)), "TMPDIR")
    chosen = Path(variables.get(name) or "/tmp").absolute()
    folder = next(one for one in (chosen, *chosen.parents) if os.access(one, os.F_OK))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, needed)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot reserve space
            return None
        got = f"{name}: got {chosen} ({os.strerror(error.errno or 0)})"
        size = f"{needed >> 20} MiB" if needed >> 20 else f"{needed >> 10} KiB"
        remedy = "free space there, or export TMPDIR=/another/folder"
        return f"{got}, expected a folder for temporary files that can be written, with {size} of free space; {remedy}"
    return None


def report(folder: str, needed: int) -> dict[str, object]:
    """Return the facts about this host that the check needs."""
    try:
        import psutil

        addresses = {
            name: [(one.address, one.netmask) for one in found if one.family == socket.AF_INET]
            for name, found in psutil.net_if_addrs().items()
        }
    except ImportError:
        addresses = {}
    client, server = _ends()
    return {
        "versions": versions(folder),
        "addresses": addresses,
        "client": client,
        "server": server,
        "temporary": temporary_problem(os.environ, needed),
    }


def _ends() -> tuple[str, str]:
    """Return the addresses of the checking host and of this host in the connection between them."""
    if "SSH_CONNECTION" in os.environ:
        client, _, server, _ = os.environ["SSH_CONNECTION"].split()
        return client, server
    client = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "-")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((client, 9))  # sends nothing
            return client, route.getsockname()[0]
    except OSError:
        return client, "-"


if __name__ == "__main__":
    print(MARK + json.dumps(report(sys.argv[1], int(sys.argv[2]))))
