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
from hvdkit.cluster.processes import allow_files
from hvdkit.errors import ClusterError
from hvdkit.launch.rank import END, HEADER, HELLO, LEAVE, STDERR, STDOUT, keep_alive

_LARGEST_FRAME = 1 << 20
# A wrapper greets at once. Whoever does not, and more of them than ranks are left to come and so many, is no wrapper.
_GREET_SECONDS, _STRANGERS = 10.0, 64


@dataclass(frozen=True)
class Event:
    """What a rank's wrapper said: ``began``, ``output``, ``ended``, or ``lost`` where its connection broke."""

    kind: str
    rank: int
    channel: int = 0
    data: bytes = b""
    details: dict[str, Any] = field(default_factory=dict)


class Channel:
    """Listens for ``size`` ranks' wrappers, and turns what they say into events.

    Nobody is listened to before it has shown the token that :attr:`told` holds.

    Args:
        addresses: of this host, at which ranks can reach it.
        size: number of ranks.
        settings: what a rank is answered, by its number: its environment's additions and its terminal.
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
        for wrapper, since in list(self._strangers.items()):
            if now - since > _GREET_SECONDS:
                for _ in self._gone(wrapper):
                    pass
        try:
            connection, _ = listener.accept()
        except OSError:  # it is gone again, or this process has no file left: do not ask again and again for it
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
        if wrapper.rank is None:
            yield self._greeted(wrapper, kind, json.loads(payload))
        elif kind in (STDOUT, STDERR):
            yield Event("output", wrapper.rank, kind, payload)
        elif kind == END:
            wrapper.ended = True
            yield Event("ended", wrapper.rank, details=json.loads(payload))

    def _greeted(self, wrapper: _Wrapper, kind: int, hello: dict[str, Any]) -> Event:
        if kind != HELLO or not hmac.compare_digest(str(hello["token"]).encode(errors="replace"), self._token.encode()):
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
