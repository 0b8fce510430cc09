"""The watchdog's channel: lines over TCP between rank 0 and each rank, after both have proved that they know the token.

A line is an object of JSON, or a heartbeat: ``beat`` from rank 0, ``beat STEP IDLE`` from a rank, in which ``-`` is no
step yet. Heartbeats are nearly all that is sent, and cost neither end a parse of JSON.

A connection begins with a handshake, in which the token is not sent::

    rank    hello      a random number A
    rank 0  challenge  a random number B, HMAC-SHA256(token, "rank 0" A B)
    rank    proof      HMAC-SHA256(token, "rank" A B), and who it is
    rank 0  welcome
    rank    joined
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import ipaddress
import json
import math
import secrets
import socket
import struct
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import psutil

from hvdkit.cluster.logs import get_logger
from hvdkit.machine import interfaces

_SEND_SECONDS = 2.0
_CONNECT_SECONDS = 2.0
# A rank that nobody can look at may be silent for so many times the heartbeat's limit, if its host answers: it may be
# computing without letting its other threads run.
LONE = 3
# Rank 0 may have a thousand others to welcome, or hold Python's lock.
_WELCOME_SECONDS = 15.0
# What a stranger may send before it is shut out, and the longest message of a rank.
LONGEST_HELLO, LONGEST = 4096, 2**24
# Connections that wait to be accepted; the kernel lowers it to net.core.somaxconn, 4,096 on most hosts.
_BACKLOG = 1 << 16
# Attempts to find a port that is free on all of several named interfaces.
_PORT_ATTEMPTS = 20
_BEAT = b"beat"
# Heartbeats in the limit, for up to so many ranks. For 16 times as many and more there are half as many: what rank 0
# spends on them grows more slowly than the number of ranks.
_BEATS, _FEW = 5, 64


class Offer(NamedTuple):
    """Where rank 0 listens, and the secret by which rank 0 and the ranks of its job know each other.

    ``heartbeat`` and ``patience`` are rank 0's settings, in seconds: all ranks go by the same.
    """

    addresses: tuple[str, ...]
    port: int
    token: str
    heartbeat: float
    patience: float


def interval(heartbeat: float, size: int) -> float:
    """Return the seconds between two heartbeats of a rank: a fifth of the limit, in large jobs up to two fifths.

    Example:
        >>> interval(10.0, 4), interval(10.0, 256), interval(10.0, 4096)
        (2.0, 3.0, 4.0)
    """
    doublings = math.log2(max(size, _FEW) / _FEW)
    return heartbeat / _BEATS * min(2.0, 1 + doublings / 4)


class Link:
    """One end of a connection. Any thread sends; one thread receives.

    Args:
        connection: to the other end.
        waits: sending waits for the other end, for two seconds at most, and receiving for a message. Rank 0, which
            serves all ranks with one thread, does not wait.
    """

    def __init__(self, connection: socket.socket, *, waits: bool = True) -> None:
        connection.settimeout(_SEND_SECONDS if waits else 0.0)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.longest = LONGEST
        self._left = self._unsent = b""
        self._kept: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def send(self, kind: str, **fields: Any) -> bool:
        """Send one message; return False if the other end does not take it. The rest goes with the next message."""
        return self._send(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def beat(self, step: int | None = None, idle: float | None = None, busy: str | None = None) -> bool:
        """Send a heartbeat, unless earlier messages still wait: these come first, and are a sign of life, too.

        Args:
            step: of a rank: steps trained, or None.
            idle: of a rank: seconds for which nothing has moved there; None: this is rank 0's.
            busy: of a rank: what it says that it waits for, or None.
        """
        if self._unsent:
            return self._send(b"")
        if busy is not None:
            return self.send("beat", step=step, idle=idle, busy=busy)
        if idle is None:
            return self._send(_BEAT + b"\n")
        return self._send(b"%b %b %.3f\n" % (_BEAT, b"-" if step is None else b"%d" % step, idle))

    def _send(self, data: bytes) -> bool:
        with self._lock:
            self._unsent += data
            try:
                while self._unsent:
                    self._unsent = self._unsent[self.socket.send(self._unsent) :]
            except (TimeoutError, BlockingIOError):
                return False
            except OSError:
                self._unsent = b""
                return False
        return True

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that are here; one of kind ``"closed"`` at the end of the connection."""
        kept, self._kept = self._kept, []
        yield from kept
        try:
            data = self.socket.recv(65536)
        except (TimeoutError, BlockingIOError):
            return
        except OSError:
            data = b""
        *lines, self._left = (self._left + data).split(b"\n")
        if not data or len(self._left) > self.longest:
            yield {"kind": "closed"}
            return
        for line in lines:
            yield _message(line)

    def next(self) -> dict[str, Any]:
        """Wait for one message; one of kind ``"closed"`` if the other end does not send it in time."""
        until = time.monotonic() + (self.socket.gettimeout() or 0.0)
        messages: list[dict[str, Any]] = []
        while not messages and time.monotonic() < until:
            messages = list(self.receive())
        self._kept = messages[1:]
        return messages[0] if messages else {"kind": "closed"}

    def is_cut_off(self, seconds: float) -> bool:
        """Return True where the other host has acknowledged nothing for so long, though something was sent to it.

        A process that is stopped, or computes without letting its other threads run, has a host that acknowledges.
        Source: struct tcp_info of linux/tcp.h. Elsewhere than on Linux it is not known, and taken to be so.
        """
        try:
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            queued = struct.unpack("i", fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4)))[0]
        except (AttributeError, OSError):
            return True
        return queued > 0 and struct.unpack_from("I", info, 56)[0] > seconds * 1000

    def close(self) -> None:
        """Close this end."""
        with contextlib.suppress(OSError):
            self.socket.close()


def _message(line: bytes) -> dict[str, Any]:
    """Return what a line says; a stranger may send anything."""
    try:
        if line.startswith(_BEAT):
            _, *said = line.split(b" ")
            if not said:
                return {"kind": "beat"}
            step, idle = said
            return {"kind": "beat", "step": None if step == b"-" else int(step), "idle": float(idle), "busy": None}
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else {"kind": "closed"}


class Listener(NamedTuple):
    """Sockets at one port, at each of ``addresses``."""

    sockets: tuple[socket.socket, ...]
    addresses: tuple[str, ...]

    @property
    def port(self) -> int:
        """The port's number."""
        return self.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Let no more ranks in."""
        for one in self.sockets:
            one.close()


def listen(one_host: bool) -> Listener:
    """Listen where ranks can connect.

    Args:
        one_host: all ranks are on this host, and connect by loopback. Otherwise it listens at the addresses of the
            networks that ``HOROVOD_GLOO_IFACE``, ``OMPI_MCA_btl_tcp_if_include``, ``HOROVOD_IFACE`` or
            ``NCCL_SOCKET_IFNAME`` name, and on all interfaces if none of them is set.

    Raises:
        OSError: it cannot listen.
    """
    if one_host:
        return _listen_at(["127.0.0.1"])
    addresses, warning = interfaces.chosen_addresses()
    if warning is not None:
        get_logger().warning("watchdog: %s", warning)
    if addresses:
        return _listen_at(addresses)
    everywhere = tuple(interfaces.reachable_addresses())
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            both = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
            return Listener((both,), everywhere)
    return Listener((socket.create_server(("", 0), backlog=_BACKLOG),), everywhere)


def _listen_at(addresses: Sequence[str]) -> Listener:
    """Listen at one port of all ``addresses``: the first address's choice, which another one may have taken."""
    for attempt in range(_PORT_ATTEMPTS):
        sockets: list[socket.socket] = []
        try:
            for address in addresses:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                port = sockets[0].getsockname()[1] if sockets else 0
                sockets.append(socket.create_server((address, port), family=family, backlog=_BACKLOG))
            return Listener(tuple(sockets), tuple(addresses))
        except OSError as error:
            for one in sockets:
                one.close()
            if error.errno != errno.EADDRINUSE or attempt == _PORT_ATTEMPTS - 1:
                raise
    raise AssertionError("not reached")


def offer(listener: Listener, heartbeat: float, patience: float) -> Offer:
    """Return what ranks need in order to connect to ``listener``."""
    return Offer(listener.addresses, listener.port, secrets.token_hex(16), heartbeat, patience)


def connect(place: Offer, hello: dict[str, Any]) -> Link | None:
    """Return a connection to rank 0 over the first address that leads there, or None.

    Args:
        place: rank 0's offer.
        hello: who this is; sent only to the process that has proved to be rank 0 of this job.
    """
    for address in _nearest_first(place.addresses):
        try:
            link = Link(socket.create_connection((address, place.port), timeout=_CONNECT_SECONDS))
        except OSError:
            continue
        # An address such as a bridge's own may lead to another machine, or another job.
        link.socket.settimeout(_WELCOME_SECONDS)
        if _greet(link, place.token, hello):
            link.socket.settimeout(_SEND_SECONDS)
            return link
        link.close()
    return None


def _greet(link: Link, token: str, hello: dict[str, Any]) -> bool:
    """Take a rank's part in the handshake; return False if the other end is not rank 0 of this job."""
    mine = secrets.token_hex(16)
    challenge = link.next() if link.send("hello", nonce=mine) else {"kind": "closed"}
    theirs = str(challenge.get("nonce"))
    if challenge["kind"] != "challenge" or not proves(challenge, token, "rank 0", mine, theirs):
        return False
    link.send("proof", proof=proof(token, "rank", mine, theirs), **hello)
    return link.next()["kind"] == "welcome" and link.send("joined")


def proof(token: str, role: str, *nonces: str) -> str:
    """Return what only an owner of ``token`` can say about a connection: HMAC-SHA256 over its role and both numbers."""
    said = "\n".join([role, *nonces]).encode(errors="replace")
    return hmac.digest(token.encode(), said, "sha256").hex()


def proves(message: dict[str, Any], token: str, role: str, *nonces: str) -> bool:
    """Return True if ``message`` holds the :func:`proof` of ``role``."""
    said = str(message.get("proof")).encode(errors="replace")
    return hmac.compare_digest(said, proof(token, role, *nonces).encode())


def _nearest_first(addresses: Sequence[str]) -> list[str]:
    """Return ``addresses`` with those of a network that this host is in before the others."""
    networks = [
        ipaddress.ip_network(f"{entry.address}/{entry.netmask}", strict=False)
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and entry.netmask and not entry.address.startswith("127.")
    ]
    return sorted(addresses, key=lambda text: not any(ipaddress.ip_address(text) in network for network in networks))
