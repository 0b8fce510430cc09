"""Control groups: limits set for this process by a container, a batch system or systemd.

Limits apply to this process's own group and all groups above it; the lowest one counts.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst, and cgroup-v1/ next to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def folders(controller: str, filesystem: Path = Path("/")) -> Iterator[Path]:
    """Yield the folder of this process's group, then of each group above it, in cgroup v1 and v2.

    Inside a container, the path of the group may be the one on the host, which the container cannot see. Then only the
    last of these folders exists: the container's own.

    Args:
        controller: the limited resource: ``"cpu"`` or ``"memory"``.
        filesystem: the folder that contains ``proc`` and ``sys``.
    """
    try:
        lines = (filesystem / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    root = filesystem / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # v1 mounts controllers together ("cpu,cpuacct", in either order) and links each name to them.
        base = next(filter(Path.is_dir, (root / controllers, root / controller)), root) if controllers else root
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder
            if folder == base:
                break
