"""Transfers a function to the ranks of ``hk.run``, and what it returned or raised back, between all hosts of a job.

A rank connects twice to the process that started the job, with the handshake of :mod:`hvdkit.watchdog.channel`: to
fetch the function, and to deliver its outcome: a pickled :class:`FunctionOutcome`, followed by the pickled value or
exception.
"""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedRWPair
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.machine import processes
from hvdkit.machine.launcher import LaunchedRank
from hvdkit.watchdog.admission import Peer, Server, listen
from hvdkit.watchdog.channel import Offer, connect
from hvdkit.watchdog.events import Joined, Refused, Welcome
from hvdkit.watchdog.settings import HEARTBEAT, seconds

FUNCTION_VARIABLE = "HVDKIT_FUNCTION"
"""Variable of a rank with the offer of the process that has the function."""
# File with the pickled FunctionCall, in the folder of the outcomes.
CALL = "call"
_FETCH = b"f"
_DELIVER = b"d"
_LENGTH = struct.Struct("!Q")
_CHUNK_BYTES = 1 << 20
# Seconds after which the server looks whether it is to close.
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """What a rank calls.

    Attributes:
        pickled: the function, its positional and its keyword arguments.
        path: ``sys.path`` of the caller, to import the same modules.
        sources: source lines that are in no file, such as those of a notebook's cells, by the name of the file.
    """

    pickled: bytes
    path: list[str]
    sources: dict[str, list[str]]


@dataclass(frozen=True, kw_only=True)
class FunctionOutcome:
    """What a rank's function did.

    Attributes:
        host: the rank's host.
        kind: the type of the value that it returned, or of the exception that it raised.
        traceback: the traceback of an exception; empty if the function returned.
        message: the message of the exception.
        is_pickled: whether the value or the exception follows.
    """

    host: str
    kind: str
    traceback: str = ""
    message: str = ""
    is_pickled: bool = True


def outcome_file(folder: Path, rank: int) -> Path:
    """Return the file in which a rank's outcome is stored."""
    return folder / f"outcome-{rank}"


class FunctionServer:
    """Serves the function in the folder of a job to its ranks, and stores their outcomes there. It runs in a thread.

    Attributes:
        variables: the environment variables with which ranks find it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.variables: dict[str, str] = {}

    def open(self, addresses: Sequence[str], size: int) -> None:
        """Remove outcomes of an earlier attempt, and listen at ``addresses``; raise OSError if that fails."""
        for rank in range(size):
            outcome_file(self._folder, rank).unlink(missing_ok=True)
        listeners = listen(addresses)
        offer = Offer(tuple(addresses), listeners[0].getsockname()[1], os.urandom(16).hex())
        self.variables = {FUNCTION_VARIABLE: str(offer)}
        selector = selectors.DefaultSelector()
        server = Server(selector, listeners, offer.token, 2 * size)
        self._closing.clear()
        self._thread = threading.Thread(target=self._serve, args=(server, selector, size), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _serve(self, server: Server, selector: selectors.BaseSelector, size: int) -> None:
        while not self._closing.is_set():
            for key, events in selector.select(_LOOK_SECONDS):
                if isinstance(key.data, socket.socket):
                    server.admit(key.data)
                    continue
                peer: Peer = key.data
                if events & selectors.EVENT_WRITE:
                    peer.connection.flush()
                if events & selectors.EVENT_READ:
                    self._join(server, selector, peer, size)
        server.close()
        selector.close()

    def _join(self, server: Server, selector: selectors.BaseSelector, peer: Peer, size: int) -> None:
        """Continue a handshake; serve a rank in its own thread once it has joined."""
        for message in server.receive(peer):
            if not isinstance(message, Joined):
                continue
            if not 0 <= message.rank < size:
                peer.connection.send(Refused(why=f"rank {message.rank} is not one of its {size} ranks"))
                server.drop(peer)
                return
            server.welcome(peer, message.rank, Welcome(heartbeat=seconds(HEARTBEAT), interval=0.0))
            selector.unregister(peer.connection.socket)
            peer.connection.socket.setblocking(True)
            threading.Thread(target=self._exchange, args=(peer.connection.socket, peer.rank), daemon=True).start()
            return

    def _exchange(self, connected: socket.socket, rank: int) -> None:
        with suppress(OSError), connected, connected.makefile("rwb") as stream:  # a rank may end at any time
            request = stream.read(1)
            if request == _FETCH:
                with (self._folder / CALL).open("rb") as call:
                    stream.write(_LENGTH.pack(os.fstat(call.fileno()).st_size))
                    shutil.copyfileobj(call, stream, _CHUNK_BYTES)
            elif request == _DELIVER:
                stream.write(self._store(stream, rank))

    def _store(self, stream: BufferedRWPair, rank: int) -> bytes:
        """Store an outcome; return why it could not be stored, or nothing."""
        (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
        path = outcome_file(self._folder, rank)
        part = path.with_suffix(".part")
        try:
            with part.open("wb") as file:
                while length:
                    data = _read(stream, min(length, _CHUNK_BYTES))
                    length -= len(data)
                    file.write(data)
            part.replace(path)
        except ConnectionResetError:  # the rank has ended
            part.unlink(missing_ok=True)
        except OSError as error:
            part.unlink(missing_ok=True)
            while length:  # the rank reads the answer after it has sent everything
                length -= len(_read(stream, min(length, _CHUNK_BYTES)))
            return f"{self._folder} on {socket.gethostname()}: {error.strerror}".encode()
        return b""


def fetch(launched: LaunchedRank) -> bytes:
    """Return the pickled :class:`FunctionCall` of this rank."""
    with _connected(launched) as stream:
        stream.write(_FETCH)
        stream.flush()
        (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
        return _read(stream, length)


def deliver(launched: LaunchedRank, *parts: bytes) -> None:
    """Deliver the outcome of this rank.

    Raises:
        OSError: the process that started the job cannot be reached.
        HvdkitError: it cannot store the outcome.
    """
    length = sum(map(len, parts))
    with _connected(launched) as stream:
        stream.write(_DELIVER + _LENGTH.pack(length))
        for part in parts:
            stream.write(part)
        stream.flush()
        problem = stream.read()
    if problem:
        raise HvdkitError(
            f"hk.run: the result of rank {launched.rank} ({length:,} bytes) cannot be stored in "
            f"{problem.decode(errors='replace')}; free space there, set TMPDIR to another folder, or return less"
        )


@contextmanager
def _connected(launched: LaunchedRank) -> Iterator[BufferedRWPair]:
    selector = selectors.DefaultSelector()
    joined = Joined(rank=launched.rank, size=launched.size, host=socket.gethostname(), place=processes.place())
    connection, _ = connect(Offer.parse(os.environ[FUNCTION_VARIABLE]), joined, selector, None)
    selector.close()
    connection.socket.setblocking(True)
    with connection.socket, connection.socket.makefile("rwb") as stream:
        yield stream


def _read(stream: BufferedRWPair, length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise ConnectionResetError("the process that started the job has closed the connection")
    return data
