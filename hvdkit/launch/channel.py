"""The connections from the wrappers of all ranks to ``hvdkit run``."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdkit.cluster.launcher import promised
from hvdkit.cluster.report import FailureReport
from hvdkit.errors import ClusterError
from hvdkit.launch.rank import (
    CHALLENGE,
    END,
    HEADER,
    HELLO,
    LEAVE,
    REPORT,
    STDERR,
    STDOUT,
    keep_alive,
    proof,
)
from hvdkit.machine.processes import allow_files

_LARGEST_FRAME = 1 << 20
# A wrapper greets at once. A connection that does not is closed after these seconds; at most so many more of them than
# there are ranks still to come are kept.
_GREET_SECONDS, _STRANGERS = 10.0, 64
_LONGEST_NONCE = 64


@dataclass(frozen=True)
class Event:
    """What a rank's wrapper said: ``began``, ``output``, ``failed``, ``ended``, or ``lost``: its connection broke.

    ``failed`` comes with the ``report`` of hvdkit in the rank's program.
    """

    kind: str
    rank: int
    channel: int = 0
    data: bytes = b""
    details: dict[str, Any] = field(default_factory=dict)
    report: FailureReport | None = None


class Channel:
    """Listens for ``size`` ranks' wrappers, and turns what they say into events.

    No wrapper is served before it has proved that it knows the token that :attr:`told` holds; the token is never sent.

    Args:
        addresses: of this host, at which ranks can reach it.
        size: number of ranks.
        settings: what a rank is answered, by its number: its program, its environment's additions and its terminal.
    """

    def __init__(self, addresses: Sequence[str], size: int, settings: Callable[[int], dict[str, Any]]) -> None:
        self._size = size
        self._settings = settings
        self._token = secrets.token_hex(16)
        allow_files(2 * size)  # a connection and a log for each rank
        self.selector = selectors.DefaultSelector()
        self.ranks: dict[int, _Wrapper] = {}
        self._strangers: dict[_Wrapper, float] = {}
        port = 0
        for address in addresses:
            try:
                listener = socket.create_server((address, port), backlog=max(128, size))
            except OSError as error:
                self.close()
                remedy = "name another --interface"
                raise ClusterError(
                    f"hvdkit run cannot listen at {address} port {port} ({error.strerror}); {remedy}"
                ) from error
            listener.setblocking(False)
            port = listener.getsockname()[1]
            self.selector.register(listener, selectors.EVENT_READ, listener)
        self.told = " ".join([str(port), self._token, *addresses])

    def take(self, key: selectors.SelectorKey) -> Iterator[Event]:
        """Return the events of a file that the selector says is ready."""
        if isinstance(key.data, socket.socket):
            self._admit(key.data)
            return
        wrapper = key.data
        if wrapper.gone:
            return
        try:
            data = wrapper.connection.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return
        except OSError:
            data = b""
        if not data:
            yield from self._gone(wrapper)
            return
        wrapper.received += data
        try:
            for kind, payload in wrapper.frames():
                yield from self._event(wrapper, kind, payload)
        except (ValueError, KeyError, OSError, TypeError, AttributeError, RecursionError):
            # A stranger at our port, who may send anything, or a rank that went away.
            yield from self._gone(wrapper)

    def _admit(self, listener: socket.socket) -> None:
        now = time.monotonic()
        while self._strangers:  # in the order in which they came
            wrapper, since = next(iter(self._strangers.items()))
            if now - since <= _GREET_SECONDS:
                break
            for _ in self._gone(wrapper):
                pass
        try:
            connection, _ = listener.accept()
        except OSError:  # the peer has gone, or this process has no descriptors left: do not spin
            time.sleep(0.01)
            return
        if len(self._strangers) >= self._size - len(self.ranks) + _STRANGERS:
            connection.close()
            return
        keep_alive(connection)
        # Writes wait: they are small, and a rank reads them at once or is gone.
        connection.settimeout(5.0)
        wrapper = _Wrapper(connection)
        self._strangers[wrapper] = now
        self.selector.register(connection, selectors.EVENT_READ, wrapper)

    def order(self, rank: int, number: int = LEAVE) -> None:
        """Send a signal to a rank's program, or let its wrapper leave."""
        wrapper = self.ranks.get(rank)
        if wrapper is not None and not wrapper.gone:
            with contextlib.suppress(OSError):
                wrapper.connection.send(bytes([number]))

    def close(self) -> None:
        """End all connections; wrappers that are still there end their programs."""
        for key in list((self.selector.get_map() or {}).values()):
            if isinstance(key.data, (socket.socket, _Wrapper)):
                self.selector.unregister(key.fileobj)
                (key.data if isinstance(key.data, socket.socket) else key.data.connection).close()
        self.selector.close()

    def _event(self, wrapper: _Wrapper, kind: int, payload: bytes) -> Iterator[Event]:
        if wrapper.proof is None:
            self._challenge(wrapper, kind, json.loads(payload))
        elif wrapper.rank is None:
            yield self._greeted(wrapper, kind, json.loads(payload))
        elif kind in (STDOUT, STDERR):
            yield Event("output", wrapper.rank, kind, payload)
        elif kind == REPORT:
            if (report := FailureReport.decode(payload)) is not None:
                yield Event("failed", wrapper.rank, report=report)
        elif kind == END:
            wrapper.ended = True
            yield Event("ended", wrapper.rank, details=json.loads(payload))

    def _challenge(self, wrapper: _Wrapper, kind: int, hello: dict[str, Any]) -> None:
        """Answer a wrapper's nonce with this end's own, and the proof that this end knows the token."""
        theirs, mine = str(hello["nonce"]), secrets.token_hex(16)
        if kind != HELLO or not theirs.isalnum() or len(theirs) > _LONGEST_NONCE:
            raise ValueError("a stranger")
        wrapper.proof = proof(self._token, "rank", theirs, mine)
        answer = json.dumps({"nonce": mine, "proof": proof(self._token, "run", theirs, mine)}).encode()
        wrapper.connection.sendall(HEADER.pack(CHALLENGE, len(answer)) + answer)

    def _greeted(self, wrapper: _Wrapper, kind: int, hello: dict[str, Any]) -> Event:
        shown, expected = str(hello["proof"]).encode(errors="replace"), str(wrapper.proof).encode()
        if kind != HELLO or not hmac.compare_digest(shown, expected):
            raise ValueError("a stranger")
        del self._strangers[wrapper]
        promise = promised(hello["place"])
        if promise.size != self._size or promise.rank in self.ranks:
            raise ValueError("a rank that is not one of this attempt")
        began = Event("began", promise.rank, details={"host": hello["host"]})
        answer = json.dumps(self._settings(promise.rank)).encode()
        wrapper.connection.sendall(HEADER.pack(HELLO, len(answer)) + answer)
        wrapper.rank = promise.rank  # from here on its loss is that of a rank
        self.ranks[promise.rank] = wrapper
        return began

    def _gone(self, wrapper: _Wrapper) -> Iterator[Event]:
        self._strangers.pop(wrapper, None)
        self.selector.unregister(wrapper.connection)
        wrapper.connection.close()
        wrapper.gone = True
        if wrapper.rank is not None and not wrapper.ended:
            yield Event("lost", wrapper.rank)


@dataclass(eq=False)
class _Wrapper:
    """A rank's wrapper, as seen from here."""

    connection: socket.socket
    rank: int | None = None
    proof: str | None = None  # that it knows the token
    received: bytearray = field(default_factory=bytearray)
    ended: bool = False
    gone: bool = False

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Return what has arrived whole."""
        while len(self.received) >= HEADER.size:
            kind, length = HEADER.unpack_from(self.received)
            if length > _LARGEST_FRAME or (self.rank is None and length > 1 << 16):
                raise ValueError("no frame")
            if len(self.received) < HEADER.size + length:
                return
            payload = bytes(self.received[HEADER.size : HEADER.size + length])
            del self.received[: HEADER.size + length]
            yield kind, payload
