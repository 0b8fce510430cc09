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

import errno
import hmac
import os
import random
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from hvdkit.watchdog.events import VERSION, Joined, Message, Refused, Welcome, decode

MESSAGE = 0
STDOUT = 1
STDERR = 2
# Errors that the kernel reports for a host that it cannot reach.
NO_ANSWER = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}
_HEADER = struct.Struct("!BI")
LONGEST = 1 << 24
LONGEST_BEFORE_PROOF = 4096
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


class Closed(OSError):
    """The peer has closed the connection, or has sent data that is not a frame of this protocol (no ``errno``)."""


class _Ended(Closed):
    """The peer has closed the connection."""


@dataclass(frozen=True, kw_only=True)
class Hello(Message, kind="_Hello"):
    """The first message of a sentinel, see above."""

    nonce: str
    version: int
    proof: str = ""


@dataclass(frozen=True, kw_only=True)
class Challenge(Message, kind="_Challenge"):
    """The coordinator's answer to :class:`Hello`."""

    nonce: str
    proof: str


@dataclass(frozen=True, kw_only=True)
class Proof(Message, kind="_Proof"):
    """The sentinel's answer to :class:`Challenge`."""

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

    Raises Closed if the data is not a frame of this protocol, or its payload is longer than ``longest`` bytes.
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

    ``selector`` waits for the socket, to read and, while bytes are unsent, to write; ``data`` is that of its key.
    """

    def __init__(self, connected: socket.socket, selector: selectors.BaseSelector, data: object = None) -> None:
        connected.setblocking(False)
        self.socket = connected
        self._selector = selector
        self._data = data
        self.longest = LONGEST  # maximum bytes of a frame's payload
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
        """Yield the frames that have arrived; then raise Closed if the connection has ended.

        Call it when the selector reports the socket as readable.
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


def proof_of(token: str, role: str, *nonces: str) -> str:
    """Return what proves in a ``role`` that one knows the token: the HMAC of random numbers."""
    return hmac.digest(token.encode(), "\n".join([role, *nonces]).encode(errors="replace"), "sha256").hex()


def is_equal(one: str, other: str) -> bool:
    """Compare proofs in a time that does not depend on where they differ."""
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
            connected, welcome = _connect_once(offer, joined, once)
            return Connection(connected, selector, data), welcome
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


def _connect_once(offer: Offer, joined: Joined, seconds: float) -> tuple[socket.socket, Welcome]:
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
            return connected, _authenticate(connected, offer.token, joined)
        except ConnectionRefusedError:
            connected.close()
            raise
        except OSError as error:  # the address, e.g. of a bridge, may lead to another machine
            problem = error
            is_accepted |= error.errno in _RETRIED or isinstance(error, (_Ended, TimeoutError))
            connected.close()
    may_pass |= is_accepted
    raise Unreachable(problem, may_pass=may_pass, is_accepted=is_accepted)


def _authenticate(connected: socket.socket, token: str, joined: Joined) -> Welcome:
    nonce = os.urandom(16).hex()
    send_now(connected, Hello(nonce=nonce, version=VERSION, proof=proof_of(token, "hello", nonce)))
    challenge = receive_now(connected, LONGEST_BEFORE_PROOF)
    expected = proof_of(token, "coordinator", nonce, getattr(challenge, "nonce", ""))
    if not isinstance(challenge, Challenge) or not is_equal(challenge.proof, expected):
        raise Closed("the server at this address does not know the job's token")
    send_now(connected, Proof(proof=proof_of(token, "sentinel", nonce, challenge.nonce)))
    send_now(connected, joined)
    welcome = receive_now(connected, LONGEST)
    if isinstance(welcome, Refused):
        raise ConnectionRefusedError(f"the job's coordinator rejects this rank: {welcome.why}")
    if not isinstance(welcome, Welcome):
        raise Closed("the other end does not use hvdkit's protocol")
    keep_alive(connected, welcome.heartbeat)
    return welcome


def send_now(connected: socket.socket, message: Message) -> None:
    """Send one message over a blocking socket."""
    connected.sendall(_frame(message))


def receive_now(connected: socket.socket, longest: int = LONGEST) -> Message:
    """Wait for one message on a blocking socket, without reading beyond it.

    Raises OSError if the socket fails, and Closed if the peer has closed it or has sent something else.
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
