"""The watchdog's channel: lines of JSON over TCP between rank 0 and each rank, for those who know the token."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
import termios
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import psutil

_SEND_SECONDS = 2.0
_CONNECT_SECONDS = 2.0
# A rank that nobody can look at may be silent for so many times the heartbeat's limit, if its host answers: it may be
# computing without letting its other threads run.
LONE = 3
# Rank 0 may have a thousand others to welcome, or hold Python's lock.
_WELCOME_SECONDS = 15.0
# What a stranger may send before it is shut out, and the longest message of a rank.
LONGEST_HELLO, LONGEST = 4096, 2**24
# The variables by which people choose the network of a job.
_INTERFACES = ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include", "HOROVOD_IFACE")


class Offer(NamedTuple):
    """Where rank 0 listens, and what a rank has to say to be let in.

    ``heartbeat`` and ``patience`` are rank 0's settings, in seconds: all ranks go by the same.
    """

    addresses: tuple[str, ...]
    port: int
    token: str
    heartbeat: float
    patience: float


class Link:
    """One end of a connection. Any thread sends; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_SECONDS)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.longest = LONGEST
        self._left = self._unsent = b""
        self._kept: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def send(self, kind: str, **fields: Any) -> bool:
        """Send one message; return False where nobody takes it. What did not go at once goes with the next one."""
        data = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        with self._lock:
            self._unsent += data
            try:
                while self._unsent:
                    self._unsent = self._unsent[self.socket.send(self._unsent) :]
            except TimeoutError:
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
        except TimeoutError:
            return
        except OSError:
            data = b""
        *lines, self._left = (self._left + data).split(b"\n")
        if not data or len(self._left) > self.longest:
            yield {"kind": "closed"}
            return
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):  # a stranger may send anything
                message = None
            yield message if isinstance(message, dict) and "kind" in message else {"kind": "closed"}

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


def listen(one_host: bool) -> socket.socket:
    """Return a socket that ranks can reach: by loopback where all of them are on this host."""
    if one_host:
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def offer(server: socket.socket, one_host: bool, heartbeat: float, patience: float) -> Offer:
    """Return what ranks need to know in order to come in."""
    addresses = ("127.0.0.1",) if one_host else tuple(_own_addresses())
    return Offer(addresses, server.getsockname()[1], secrets.token_hex(16), heartbeat, patience)


def _own_addresses() -> list[str]:
    """Return this host's addresses, those of the job's own network first."""
    wanted = [name for variable in _INTERFACES for name in os.environ.get(variable, "").split(",") if name]
    states = psutil.net_if_stats()
    found: list[tuple[bool, str]] = []
    for interface, entries in psutil.net_if_addrs().items():
        for entry in entries:
            is_up = interface in states and states[interface].isup  # others come and go with containers
            if entry.family not in (socket.AF_INET, socket.AF_INET6) or not is_up:
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if not address.is_loopback and not address.is_link_local:
                found.append((interface not in wanted, str(address)))
    return [address for _, address in sorted(found, key=lambda pair: pair[0])]


def connect(place: Offer, hello: dict[str, Any]) -> Link | None:
    """Return a connection to rank 0 over the first address that leads there, or None."""
    for address in _nearest_first(place.addresses):
        try:
            link = Link(socket.create_connection((address, place.port), timeout=_CONNECT_SECONDS))
        except OSError:
            continue
        # An address such as a bridge's own may lead to another machine, or another job.
        link.socket.settimeout(_WELCOME_SECONDS)
        answers = list(link.receive()) if link.send("hello", token=place.token, **hello) else []
        if answers and answers[0]["kind"] == "welcome":
            link._kept = answers[1:]  # rank 0 may be on its way out already
            link.socket.settimeout(_SEND_SECONDS)
            link.send("joined")
            return link
        link.close()
    return None


def _nearest_first(addresses: Sequence[str]) -> list[str]:
    """Return ``addresses`` with those of a network that this host is in before the others."""
    networks = [
        ipaddress.ip_network(f"{entry.address}/{entry.netmask}", strict=False)
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and entry.netmask and not entry.address.startswith("127.")
    ]
    return sorted(addresses, key=lambda text: not any(ipaddress.ip_address(text) in network for network in networks))


def knows(token: str, message: dict[str, Any]) -> bool:
    """Return True for the hello of a rank of this job."""
    said = str(message.get("token")).encode(errors="replace")
    return message["kind"] == "hello" and hmac.compare_digest(said, token.encode())
