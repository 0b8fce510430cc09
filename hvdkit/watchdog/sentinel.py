"""Entry point of a sentinel: watches a rank from outside, reports to the coordinator, and ends the rank on request.

It uses only the standard library, so it starts in about 40 ms and takes 9 MB. Under ``hvdkit run``, the engine starts
it, and it starts the rank's program::

    python -IS .../hvdkit/watchdog/sentinel.py run

Without ``hvdkit run``, ``hk.init()`` starts it. The arguments are the PID and start time of the rank's process, and
descriptors of a socket to the rank and, in rank 0, of the listening sockets for metrics (-1: none) and of the
coordinator::

    python -IS .../hvdkit/watchdog/sentinel.py watch PID STARTED SOCKET METRICS [LISTENER ...]
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import types
from collections.abc import Sequence

PATH = os.path.realpath(__file__)  # pathlib would take half a megabyte

if __name__ == "__main__":  # find the modules below without running hvdkit/__init__.py
    _package = types.ModuleType("hvdkit")
    _package.__path__ = [os.path.dirname(os.path.dirname(PATH))]  # noqa: PTH120
    sys.modules["hvdkit"] = _package


def main(arguments: Sequence[str]) -> int:
    """Watch a rank, or run one; return the exit code.

    Each kind of sentinel imports only what it needs, because every rank has one.
    """
    mode, *rest = arguments
    if mode == "run":
        from hvdkit.watchdog.running import run

        return run()
    pid, started, file, metrics, *listeners = map(int, rest)
    if os.fork():  # detach: the rank must not see this process as its child
        return 0
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # ends only with its rank
    connected = socket.socket(fileno=file)
    if listeners:
        from hvdkit.watchdog.coordinating import CoordinatingSentinel

        sockets = [socket.socket(fileno=listener) for listener in listeners]
        metrics_listener = None if metrics < 0 else socket.socket(fileno=metrics)
        return CoordinatingSentinel(pid, started, connected, sockets, metrics_listener).run()
    from hvdkit.watchdog.watching import WatchingSentinel

    return WatchingSentinel(pid, started, connected).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
