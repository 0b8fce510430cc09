"""Names of this host."""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path

from hvdkit.machine.interfaces import own_addresses


def boot_id() -> str | None:
    """Return an ID of this machine that is equal in all containers and changes at each boot; None except on Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return None


@cache
def host_names() -> frozenset[str]:
    """Return the names and IPv4 addresses that refer to this host."""
    whole = socket.gethostname()
    addresses = {one.address for one in own_addresses(socket.AF_INET)}
    return frozenset({"localhost", "127.0.0.1", whole, whole.partition(".")[0]} | addresses)
