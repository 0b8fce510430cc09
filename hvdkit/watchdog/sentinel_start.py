"""How a rank gets its sentinel: it inherits a connection to the one that started it, or starts one; and keeps it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence

from hvdkit.machine import processes
from hvdkit.machine.interfaces import chosen_addresses, reachable_addresses
from hvdkit.watchdog import sentinel
from hvdkit.watchdog.admission import listen
from hvdkit.watchdog.channel import Offer
from hvdkit.watchdog.settings import SOCKET_VARIABLE

_LOGGER = logging.getLogger("hvdkit")


def inherited_socket() -> socket.socket | None:
    """Return the socket to the sentinel that started this program, or None. Child programs do not inherit it.

    Raises OSError if the descriptor in the variable is closed.
    """
    number, _, inode = os.environ.pop(SOCKET_VARIABLE, "").partition(" ")
    if not number.isdigit() or not inode.isdigit():
        return None
    status = os.fstat(int(number))
    if not stat.S_ISSOCK(status.st_mode) or status.st_ino != int(inode):
        return None
    os.set_inheritable(int(number), False)
    return socket.socket(fileno=int(number))


def start_sentinel(
    pid: int, listeners: Sequence[socket.socket], metrics_listener: socket.socket | None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a sentinel of process ``pid``, which calls this; return its parent, which exits, and the socket to it.

    The sentinel of rank 0 gets the listening sockets. Raises OSError if it cannot be started.
    """
    process = processes.stat(pid)
    python = sys.executable or "python3"  # may be empty in a program that embeds Python
    rank_end, sentinel_end = socket.socketpair()
    with sentinel_end:
        metrics = -1 if metrics_listener is None else metrics_listener.fileno()
        files = [sentinel_end.fileno(), metrics, *(one.fileno() for one in listeners)]
        numbers = [pid, process.started if process is not None else 0, *files]
        command = [python, "-IS", sentinel.PATH, "watch", *map(str, numbers)]
        passed = [file for file in files if file >= 0]
        nothing = subprocess.DEVNULL
        return subprocess.Popen(command, pass_fds=passed, stdin=nothing, stdout=nothing), rank_end


def resume_if_stopped(pid: int) -> None:
    """Resume a sentinel, 0 if unknown, that is stopped while its rank runs."""
    process = processes.stat(pid) if pid else None
    if process is not None and process.state == "T":
        processes.kill(pid, signal.SIGCONT)


def listen_for_ranks(*, on_several_hosts: bool) -> tuple[Sequence[socket.socket], str]:
    """Listen for the sentinels of all ranks; return the sockets, and the offer by which the sentinels find them.

    Both are empty, with a warning, if this host cannot listen.
    """
    addresses = ["127.0.0.1"]
    if on_several_hosts:
        addresses, warning = chosen_addresses()
        if warning is not None:
            _LOGGER.warning("watchdog: %s", warning)
    try:
        listeners = listen(addresses)
    except OSError as error:
        _LOGGER.warning("watchdog: rank 0 cannot listen (%s): failures may not be noticed", error)
        return (), ""
    reached_at = tuple(addresses or reachable_addresses())
    return listeners, str(Offer(reached_at, listeners[0].getsockname()[1], os.urandom(16).hex()))
