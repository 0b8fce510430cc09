"""The coordinator's end of the channel: accepts the sentinels of a job, and rejects all other connections."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hvdkit.watchdog.channel import (
    LONGEST,
    LONGEST_BEFORE_PROOF,
    Challenge,
    Closed,
    Connection,
    Hello,
    Output,
    Proof,
    is_equal,
    keep_alive,
    proof_of,
)
from hvdkit.watchdog.events import VERSION, Joined, Message, Refused, Welcome

# Seconds for a new connection to authenticate before it is closed; and how many connections without a valid ``Hello``
# are allowed beyond the number of sentinels still expected. Above that, the oldest one is closed.
_PROOF_SECONDS = 10.0
_MAX_UNAUTHENTICATED = 64
_BACKLOG = 1 << 16  # the kernel lowers it to net.core.somaxconn
_PORT_ATTEMPTS = 20


def listen(addresses: Sequence[str] = ()) -> list[socket.socket]:
    """Listen on the same port of all ``addresses``, by default of all interfaces. Raises OSError if that fails."""
    if not addresses:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                return [socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)]
        return [socket.create_server(("", 0), backlog=_BACKLOG)]
    for attempt in range(_PORT_ATTEMPTS):  # the port chosen on the first address may be in use on another
        sockets: list[socket.socket] = []
        try:
            for address in addresses:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                port = sockets[0].getsockname()[1] if sockets else 0
                sockets.append(socket.create_server((address, port), family=family, backlog=_BACKLOG))
            return sockets
        except OSError as error:
            for one in sockets:
                one.close()
            if error.errno != errno.EADDRINUSE or attempt == _PORT_ATTEMPTS - 1:
                raise
    raise AssertionError("not reached")


@dataclass(eq=False)
class Peer:
    """The coordinator's end of a connection. :attr:`rank` is -1 until a sentinel of this job has joined."""

    since: float
    connection: Connection = field(init=False)
    version: int = VERSION
    expected: str = ""  # proof
    proved: bool = False
    rank: int = -1


class Server:
    """Accepts the sentinels of a job, ``expected`` in number, and rejects all other connections."""

    def __init__(
        self, selector: selectors.BaseSelector, listeners: Sequence[socket.socket], token: str, expected: int
    ) -> None:
        self._selector = selector
        self._listeners = list(listeners)
        self._token = token
        self._expected = expected
        # Connections of sentinels that have not joined, and others, in order of arrival. Only the latter are closed in
        # favour of new ones: many programs without the token cannot keep a sentinel out.
        self._joining: dict[Peer, None] = {}
        self._unauthenticated: dict[Peer, None] = {}
        for one in listeners:
            one.setblocking(False)
            selector.register(one, selectors.EVENT_READ, one)

    def admit(self, listener: socket.socket) -> None:
        """Accept pending connections of ``listener``, a limited number so that open ones are served in between."""
        self.close_unauthenticated(time.monotonic())
        for _ in range(_MAX_UNAUTHENTICATED):
            try:
                connected = listener.accept()[0]
            except BlockingIOError:
                return
            except OSError:  # the peer has disconnected, or file descriptors have run out: do not spin
                time.sleep(0.01)
                return
            if len(self._unauthenticated) >= max(0, self._expected) + _MAX_UNAUTHENTICATED:
                self.drop(next(iter(self._unauthenticated)))
            peer = Peer(time.monotonic())
            peer.connection = Connection(connected, self._selector, peer)
            peer.connection.longest = LONGEST_BEFORE_PROOF
            self._unauthenticated[peer] = None
            next(self.receive(peer), None)  # read a sentinel's first message before others are accepted

    def close_unauthenticated(self, now: float) -> None:
        """Close the connections that have not authenticated in time."""
        for waiting in (self._unauthenticated, self._joining):
            while waiting and now - (oldest := next(iter(waiting))).since > _PROOF_SECONDS:
                self.drop(oldest)

    def extend_deadlines(self, seconds: float) -> None:
        """Extend the deadline of unauthenticated connections, because this process itself was stopped."""
        for one in (*self._unauthenticated, *self._joining):
            one.since += seconds

    def drop(self, peer: Peer) -> None:
        """Close an unauthenticated or rejected connection."""
        self._forget(peer)
        peer.connection.close()

    def _forget(self, peer: Peer) -> None:
        self._unauthenticated.pop(peer, None)
        self._joining.pop(peer, None)

    def receive(self, peer: Peer) -> Iterator[Message | Output]:
        """Yield a sentinel's messages: first ``Joined``, to be answered by :meth:`welcome` or with ``Refused``.

        Raises Closed if a sentinel's connection has ended, but not for an unauthenticated connection.
        """
        try:
            for message in peer.connection.receive():
                if not peer.proved:
                    self._challenge(peer, message)
                elif isinstance(message, Joined) != (peer.rank < 0):
                    raise Closed("a sentinel must join once, before any other message")
                elif peer.version != VERSION:
                    versions = f"its watchdog has version {VERSION}, this one {peer.version}"
                    peer.connection.send(Refused(why=f"{versions}; use the same hvdkit on all hosts"))
                    raise Closed("rejected")
                else:
                    yield message
                    if peer.rank < 0:  # the receiver has not welcomed it
                        raise Closed("rejected")
        except Closed:
            self.drop(peer)
            if peer.rank >= 0:
                raise

    def _challenge(self, peer: Peer, message: Message | Output) -> None:
        if isinstance(message, Hello) and not peer.expected:
            if is_equal(message.proof, proof_of(self._token, "hello", message.nonce)):
                self._forget(peer)
                self._joining[peer] = None
            nonce = os.urandom(16).hex()
            peer.version = message.version
            peer.expected = proof_of(self._token, "sentinel", message.nonce, nonce)
            proof = proof_of(self._token, "coordinator", message.nonce, nonce)
            peer.connection.send(Challenge(nonce=nonce, proof=proof))
        elif isinstance(message, Proof) and peer.expected and is_equal(message.proof, peer.expected):
            peer.proved = True
            peer.connection.longest = LONGEST
        else:
            raise Closed("rejected")

    def welcome(self, peer: Peer, rank: int, answer: Welcome) -> None:
        """Admit the sentinel of ``rank``."""
        self._forget(peer)
        peer.rank = rank
        self._expected -= 1
        keep_alive(peer.connection.socket, answer.heartbeat)
        peer.connection.send(answer)

    def close(self) -> None:
        """Stop listening, and close unauthenticated connections."""
        for peer in [*self._unauthenticated, *self._joining]:
            self.drop(peer)
        for one in self._listeners:
            self._selector.unregister(one)
            one.close()
        self._listeners = []
