"""The connection between a sentinel and the coordinator: frames over TCP, after mutual authentication.

A frame is one byte of kind, four bytes of length, and that many bytes: a message of ``events``, or output of the rank's
program. A connection begins with a handshake that proves knowledge of the job's token without sending it::

    sentinel     Hello      a random number A, HMAC-SHA256(token, "hello" A)
    coordinator  Challenge  a random number B, HMAC-SHA256(token, "coordinator" A B)
    sentinel     Proof      HMAC-SHA256(token, "sentinel" A B)
    sentinel     Joined     who it is
    coordinator  Welcome, or Refused

The proof in ``Hello`` can be replayed. It only keeps the coordinator from closing the connection in favour of others.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import random
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hvdkit.watchdog.events import VERSION, Joined, Message, Refused, Welcome, decode

MESSAGE = 0
STDOUT = 1
STDERR = 2
# Errors that the kernel reports for a host that it cannot reach.
NO_ANSWER = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}
_HEADER = struct.Struct("!BI")
_LONGEST = 1 << 24
_LONGEST_BEFORE_PROOF = 4096
# Bytes of unsent output above which reading the program's output pauses.
CROWDED = 1 << 20
_CONNECT_SECONDS = 2.0
_WELCOME_SECONDS = 15.0
# Seconds for all attempts of a sentinel, if the coordinator's host accepts connections: a coordinator that gets no core
# on a busy host answers late.
_ALL_SECONDS = 60.0
# Seconds until a sentinel connects again after a reset or without an answer: the first time, and at most.
_FIRST_RETRY_SECONDS = 0.05
_LAST_RETRY_SECONDS = 2.0
# Errors after which connecting again may help: the coordinator is busy, or other programs use up its connections.
_RETRIED = {errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED, errno.EADDRNOTAVAIL, errno.ETIMEDOUT}
# Seconds for a new connection to authenticate before it is closed; and how many connections without a valid ``Hello``
# are allowed beyond the number of sentinels still expected. Above that, the oldest one is closed.
_PROOF_SECONDS = 10.0
_MAX_UNAUTHENTICATED = 64
_BACKLOG = 1 << 16  # the kernel lowers it to net.core.somaxconn
_PORT_ATTEMPTS = 20


class Closed(OSError):
    """The peer has closed the connection, or has sent data that is not a frame of this protocol (no ``errno``)."""


class _Ended(Closed):
    """The peer has closed the connection."""


@dataclass(frozen=True, kw_only=True)
class _Hello(Message):
    nonce: str
    version: int
    proof: str = ""


@dataclass(frozen=True, kw_only=True)
class _Challenge(Message):
    nonce: str
    proof: str


@dataclass(frozen=True, kw_only=True)
class _Proof(Message):
    proof: str


@dataclass(frozen=True)
class Output:
    """Output of a rank's program on ``channel``: :data:`STDOUT` or :data:`STDERR`."""

    channel: int
    data: bytes


@dataclass(frozen=True)
class Offer:
    """The coordinator's addresses and port, and the token of the job."""

    addresses: tuple[str, ...]
    port: int
    token: str

    def __str__(self) -> str:
        return " ".join([str(self.port), self.token, *self.addresses])

    @staticmethod
    def parse(text: str) -> Offer:
        """Return the offer from its ``str``. Raises ValueError for malformed text."""
        port, token, *addresses = text.split()
        return Offer(tuple(addresses), int(port), token)


def _frame(message: Message | Output) -> bytes:
    if isinstance(message, Output):
        return _HEADER.pack(message.channel, len(message.data)) + message.data
    payload = message.encode()
    return _HEADER.pack(MESSAGE, len(payload)) + payload


def _pop_frame(received: bytearray, longest: int) -> Message | Output | int:
    """Remove the first frame from ``received`` and return its contents, or the minimum number of bytes still missing.

    Raises:
        Closed: the data is not a frame of this protocol, or its payload is longer than ``longest`` bytes.
    """
    length = _HEADER.unpack_from(received)[1] if len(received) >= _HEADER.size else 0
    if length > longest:
        raise Closed("the other end does not use hvdkit's protocol")
    size = _HEADER.size + length
    if len(received) < size:
        return size - len(received)
    kind = received[0]
    payload = bytes(received[_HEADER.size : size])
    del received[:size]
    if kind in (STDOUT, STDERR):
        return Output(kind, payload)
    try:
        return decode(payload)
    except ValueError as error:
        raise Closed(str(error)) from error


class Connection:
    """One end of a connection: sends without blocking, and yields whole frames.

    Args:
        connected: a connected socket.
        selector: waits for the socket, to read and, while bytes are unsent, to write.
        data: ``data`` of the selector's key.

    Attributes:
        longest: maximum bytes of a frame's payload.
    """

    def __init__(self, connected: socket.socket, selector: selectors.BaseSelector, data: object = None) -> None:
        connected.setblocking(False)
        self.socket = connected
        self._selector = selector
        self._data = data
        self.longest = _LONGEST
        self._received = bytearray()
        self._unsent = bytearray()
        self._events = selectors.EVENT_READ
        selector.register(connected, self._events, data)

    @property
    def unsent(self) -> int:
        """Number of bytes not sent yet."""
        return len(self._unsent)

    def send(self, message: Message | Output) -> None:
        """Send ``message`` now, or once the peer reads again. :meth:`receive` detects a broken connection."""
        self._unsent += _frame(message)
        self.flush()

    def flush(self) -> None:
        """Send as many of the unsent bytes as the socket accepts."""
        if self._events == 0:
            self._unsent.clear()
            return
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if events != self._events:
            self._events = events
            self._selector.modify(self.socket, events, self._data)

    def receive(self) -> Iterator[Message | Output]:
        """Yield the frames that have arrived. Call it when the selector reports the socket as readable.

        Raises:
            Closed: the connection has ended; raised after all frames that arrived before.
        """
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            raise Closed(error.errno, error.strerror) from error
        self._received += data
        while not isinstance(message := _pop_frame(self._received, self.longest), int):
            yield message
        if not data:
            raise Closed("the end of the connection")

    def is_cut_off(self, seconds: float) -> bool:
        """Return True if the peer's host has acknowledged nothing for ``seconds``, although data was sent to it.

        If only the peer process is stopped, busy or not reading, its host still acknowledges data and the kernel's
        window probes. The interval between probes grows, so elapsed time alone is not sufficient evidence. Nor are
        unacknowledged bytes: those that this process has just sent, after it was stopped itself, are not acknowledged
        yet. The kernel must have sent them again at least twice.
        Source: struct tcp_info of linux/tcp.h: ``tcpi_retransmits`` and ``tcpi_probes`` (unanswered), ``tcpi_unacked``
        and ``tcpi_last_ack_recv``.
        """
        try:
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        except OSError:  # not TCP; :meth:`receive` detects a broken connection
            return False
        retransmits = info[2]
        probes = info[3]
        unacknowledged = struct.unpack_from("I", info, 24)[0]
        milliseconds = struct.unpack_from("I", info, 56)[0]
        has_no_answer = (unacknowledged > 0 and retransmits > 1) or probes > 1
        return has_no_answer and milliseconds > seconds * 1000

    @property
    def is_open(self) -> bool:
        """True until :meth:`close`."""
        return bool(self._events)

    def close(self) -> None:
        """Close this end."""
        if self.is_open:
            self._events = 0
            self._selector.unregister(self.socket)
            self.socket.close()


def keep_alive(connected: socket.socket, seconds: float) -> None:
    """Have the kernel end an idle connection if the peer's host does not answer for ``seconds``; 0: never."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not seconds:
        return
    pause = max(1, int(seconds) // 3)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


def _proof(token: str, role: str, *nonces: str) -> str:
    return hmac.digest(token.encode(), "\n".join([role, *nonces]).encode(errors="replace"), "sha256").hex()


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())


def connect(
    offer: Offer, joined: Joined, selector: selectors.BaseSelector, data: object, seconds: float = _ALL_SECONDS
) -> tuple[Connection, Welcome]:
    """Connect to the coordinator by the first address that works; return the connection and the coordinator's answer.

    The answer must arrive within ``seconds``. Until then, connect again after a reset or without an answer. For
    ``selector`` and ``data``, see :class:`Connection`.

    Raises:
        ConnectionRefusedError: the coordinator rejects this rank.
        Unreachable: the coordinator of this job cannot be reached at any of its addresses.
    """
    began = time.monotonic()
    pause = _FIRST_RETRY_SECONDS
    once = min(seconds, _WELCOME_SECONDS)
    while True:
        try:
            return _connect_once(offer, joined, selector, data, once)
        except Unreachable as error:
            limit = seconds if error.is_accepted else once
            if not error.may_pass or time.monotonic() - began + pause >= limit:
                where = f"{', '.join(offer.addresses)} port {offer.port}"
                problem = f"the job's coordinator cannot be reached at {where} ({error})"
                raise Unreachable(problem, may_pass=False, is_accepted=error.is_accepted) from error
        time.sleep(pause * (0.5 + random.random()))  # not all ranks at the same time
        pause = min(2 * pause, _LAST_RETRY_SECONDS)


class Unreachable(OSError):
    """The coordinator cannot be reached.

    Attributes:
        may_pass: connecting again may help.
        is_accepted: a host has accepted a connection, and may still be the coordinator's.
    """

    def __init__(self, problem: Exception | str | None, *, may_pass: bool, is_accepted: bool) -> None:
        super().__init__(str(problem))
        self.may_pass = may_pass
        self.is_accepted = is_accepted


def _connect_once(
    offer: Offer, joined: Joined, selector: selectors.BaseSelector, data: object, seconds: float
) -> tuple[Connection, Welcome]:
    problem: Exception | None = None
    may_pass = is_accepted = False
    for address in offer.addresses:
        try:
            connected = socket.create_connection((address, offer.port), min(seconds, _CONNECT_SECONDS))
        except OSError as error:
            problem = error
            may_pass |= error.errno in _RETRIED or isinstance(error, TimeoutError)
            continue
        connected.settimeout(seconds)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the handshake sends two messages in a row
        try:
            return _authenticate(connected, offer.token, joined, selector, data)
        except ConnectionRefusedError:
            connected.close()
            raise
        except OSError as error:  # the address, e.g. of a bridge, may lead to another machine
            problem = error
            is_accepted |= error.errno in _RETRIED or isinstance(error, (_Ended, TimeoutError))
            connected.close()
    may_pass |= is_accepted
    raise Unreachable(problem, may_pass=may_pass, is_accepted=is_accepted)


def _authenticate(
    connected: socket.socket, token: str, joined: Joined, selector: selectors.BaseSelector, data: object
) -> tuple[Connection, Welcome]:
    nonce = os.urandom(16).hex()
    send_now(connected, _Hello(nonce=nonce, version=VERSION, proof=_proof(token, "hello", nonce)))
    challenge = receive_now(connected, _LONGEST_BEFORE_PROOF)
    expected = _proof(token, "coordinator", nonce, getattr(challenge, "nonce", ""))
    if not isinstance(challenge, _Challenge) or not _equal(challenge.proof, expected):
        raise Closed("the server at this address does not know the job's token")
    send_now(connected, _Proof(proof=_proof(token, "sentinel", nonce, challenge.nonce)))
    send_now(connected, joined)
    welcome = receive_now(connected, _LONGEST)
    if isinstance(welcome, Refused):
        raise ConnectionRefusedError(f"the job's coordinator rejects this rank: {welcome.why}")
    if not isinstance(welcome, Welcome):
        raise Closed("the other end does not use hvdkit's protocol")
    keep_alive(connected, welcome.heartbeat)
    return Connection(connected, selector, data), welcome


def send_now(connected: socket.socket, message: Message) -> None:
    """Send one message over a blocking socket."""
    connected.sendall(_frame(message))


def receive_now(connected: socket.socket, longest: int = _LONGEST) -> Message:
    """Wait for one message on a blocking socket, without reading beyond it.

    Raises:
        OSError: the socket failed; :class:`Closed`: the peer has closed the connection, or has sent something else.
    """
    received = bytearray()
    while isinstance(message := _pop_frame(received, longest), int):  # an int is the number of missing bytes
        data = connected.recv(message)
        if not data:
            raise _Ended("the other end has closed the connection")
        received += data
    if isinstance(message, Output):
        raise Closed("the other end does not use hvdkit's protocol")
    return message


def listen(addresses: Sequence[str] = ()) -> list[socket.socket]:
    """Listen on the same port of all ``addresses``, by default of all interfaces.

    Raises:
        OSError: listening failed.
    """
    if not addresses:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                both = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
                return [both]
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
            peer.connection.longest = _LONGEST_BEFORE_PROOF
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

        Raises:
            Closed: a sentinel's connection has ended. Not raised for an unauthenticated connection.
        """
        try:
            for message in peer.connection.receive():
                if not peer.proved:
                    self._challenge(peer, message)
                elif isinstance(message, Joined) != (peer.rank < 0):
                    raise Closed("a sentinel must join once, before any other message")
                else:
                    if peer.version == VERSION:
                        yield message
                    else:
                        versions = f"its watchdog has version {VERSION}, this one {peer.version}"
                        peer.connection.send(Refused(why=f"{versions}; use the same hvdkit on all hosts"))
                    if peer.rank < 0:
                        raise Closed("rejected")
        except Closed:
            self.drop(peer)
            if peer.rank >= 0:
                raise

    def _challenge(self, peer: Peer, message: Message | Output) -> None:
        if isinstance(message, _Hello) and not peer.expected:
            if _equal(message.proof, _proof(self._token, "hello", message.nonce)):
                self._forget(peer)
                self._joining[peer] = None
            nonce = os.urandom(16).hex()
            peer.version = message.version
            peer.expected = _proof(self._token, "sentinel", message.nonce, nonce)
            proof = _proof(self._token, "coordinator", message.nonce, nonce)
            peer.connection.send(_Challenge(nonce=nonce, proof=proof))
        elif isinstance(message, _Proof) and peer.expected and _equal(message.proof, peer.expected):
            peer.proved = True
            peer.connection.longest = _LONGEST
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
