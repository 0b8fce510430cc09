"""The watchdog's part of benchmarks/control_plane.py: rank 0's sentinel, and sentinels of simulated ranks."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

from simulated import Sentinels, joined, peak_mb, read, sent_and_received, write

from hvdkit.machine import processes
from hvdkit.machine.processes import allow_files
from hvdkit.watchdog import flight_file
from hvdkit.watchdog.admission import listen
from hvdkit.watchdog.channel import MESSAGE, Offer, Output, send_now
from hvdkit.watchdog.coordinating import CoordinatingSentinel
from hvdkit.watchdog.events import (
    Connect,
    End,
    Exited,
    Failed,
    Flight,
    GiveFlight,
    Release,
    Status,
    Training,
    Unwound,
)
from hvdkit.watchdog.flight_recorder import CollectiveRecord, FlightRecorder

TRACEBACK = "\n".join(f"  File train.py, line {line}, in step" for line in range(100))
CONNECTING = 16  # simulated sentinels per process that connect at the same time
RECORD = CollectiveRecord(
    number=1234, key="eager 1234", what="allreduce(float32[4096, 64])", line="/home/me/train.py:123",
    ranks="", nbytes=1 << 20, step=1233, start=1234.5678901, end=1234.5789012,
)  # fmt: skip
GIVE_UP_SECONDS = 60.0


class Rank0:
    """Rank 0's sentinel in this process, as ``hk.init()`` starts it; its rank is a process that sleeps."""

    def __init__(self, size: int, folder: Path) -> None:
        self.rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"])
        started = processes.stat(self.rank.pid)
        assert started is not None
        mine, theirs = socket.socketpair()
        listeners = listen(["127.0.0.1"])
        offer = Offer(("127.0.0.1",), listeners[0].getsockname()[1], os.urandom(16).hex())
        self.sentinel = CoordinatingSentinel(self.rank.pid, started.started, theirs, listeners)
        socket.send_fds(mine, [b"f"], [FlightRecorder().file, os.open(os.devnull, os.O_RDONLY)])
        host = joined(0, size).host
        send_now(mine, Connect(rank=0, size=size, host=host, offer=str(offer), chief_host=host, speaks=False))
        send_now(mine, Training(pid=self.rank.pid))
        self._mine, self.turns = mine, 0
        self.run(lambda: self.sentinel.coordinator is not None)
        assert self.sentinel.coordinator is not None
        self.coordinator = self.sentinel.coordinator
        write(folder, "place.json", str(offer))

    def run(self, until: Callable[[], bool]) -> None:
        """Run the sentinel's loop until ``until()`` is true."""
        while not until():
            self.sentinel.turn(0.2)
            self.turns += 1

    def connections(self) -> list[socket.socket]:
        """Return the sockets of all other ranks' sentinels."""
        return [member.peer.connection.socket for member in self.coordinator.members.values() if member.peer]


def watchdog_rank0(size: int, folder: Path, seconds: float, fault: str) -> None:
    """Admit all ranks, watch them for some seconds, and detect a failure."""
    allow_files(size)
    os.environ[flight_file.FOLDER] = str(folder)
    memory, before, began = peak_mb(), process_time(), time.monotonic()
    rank0 = Rank0(size, folder)
    coordinator = rank0.coordinator
    rank0.run(lambda: len(coordinator.members) == size and coordinator.messages >= size)
    found: dict[str, Any] = {"start": {"seconds": time.monotonic() - began, "cpu": process_time() - before}}
    sockets = rank0.connections()
    # Each handshake has five messages.
    found["start"] |= {"messages": coordinator.messages + 5 * size, "bytes": sent_and_received(sockets)}
    wait_until(rank0, coordinator.settings.interval(size))  # the ranks have begun to report
    messages, carried = coordinator.messages, sent_and_received(sockets)
    turns, before, began = rank0.turns, process_time(), time.monotonic()
    wait_until(rank0, seconds)
    elapsed = time.monotonic() - began
    found["steady"] = {
        "share": 100 * (process_time() - before) / elapsed,
        "wakeups": (rank0.turns - turns) / elapsed,
        "messages": (coordinator.messages - messages) / elapsed,
        "bytes": (sent_and_received(sockets) - carried) / elapsed,
        "memory": peak_mb() - memory,
    }
    before = process_time()
    write(folder, "fault.json", fault)
    give_up = time.monotonic() + GIVE_UP_SECONDS
    others = [member for rank, member in coordinator.members.items() if rank]
    rank0.run(lambda: not any(member.is_running for member in others) or time.monotonic() > give_up)
    assert coordinator.verdict is not None and coordinator.verdict.rank == size - 1, coordinator.verdict
    found["cpu"] = process_time() - before
    write(folder, "rank0.json", found)
    rank0.rank.kill()
    rank0.rank.wait()


def wait_until(rank0: Rank0, seconds: float) -> None:
    """Run the sentinel for ``seconds``."""
    until = time.monotonic() + seconds
    rank0.run(lambda: time.monotonic() >= until)


class Fleet(Sentinels):
    """Sentinels that report, and end their ranks when ordered."""

    def __init__(self, offer: Offer, ranks: range, size: int) -> None:
        super().__init__(offer, ranks, size, at_once=CONNECTING)
        for rank in ranks:
            self.say(rank, Training(pid=1))
        # Spread the sentinels' reports over the interval.
        now, self.interval = time.monotonic(), self.welcome.interval
        self.due = {rank: now + self.interval * (1 - rank / size) for rank in ranks}
        self.turns = itertools.cycle(sorted(self.due, key=self.due.__getitem__))
        self.turn = next(self.turns)
        self.ended: dict[int, float] = {}  # when each got the order to end its rank
        self._flight: tuple[int, bytes] = (0, b"")

    def run(self, until: Callable[[], bool]) -> None:
        """Send reports and record received messages until ``until()`` is true."""
        while not until():
            self.serve(0.01)
            now = time.monotonic()
            while self.links and self.due[self.turn] <= now:
                self.due[self.turn] += self.interval
                if self.turn in self.links:
                    self.say(self.turn, Status(step=1234, idle=0.25, count=1234))
                self.turn = next(self.turns)

    def obey(self, rank: int, order: Any) -> None:
        """Send the flight recorder's lines, or end the rank."""
        if isinstance(order, GiveFlight):
            if self._flight[0] != order.most:
                self._flight = order.most, Flight(records=[RECORD] * order.most).encode()
            self.links[rank].send(Output(MESSAGE, self._flight[1]))
        elif isinstance(order, End):
            self.ended[rank] = time.monotonic()
            self.say(rank, Unwound(), Exited(code=order.code))
        elif isinstance(order, Release):
            self.ended.setdefault(rank, time.monotonic())


def watchdog_ranks(size: int, folder: Path, ranks: range, _: str) -> None:
    """Simulate some ranks: connect, report, and have the last one fail when rank 0 requests it."""
    fleet = Fleet(Offer.parse(read(folder, "place.json")), ranks, size)
    fleet.run((folder / "fault.json").exists)
    fault, victim, struck = read(folder, "fault.json"), size - 1, time.monotonic()
    if victim in ranks and fault == "kill":
        fleet.say(victim, Exited(code=None, step=1234))
    elif victim in ranks:
        fleet.say(victim, Failed(step=1234, cause="ValueError: simulated", text=TRACEBACK))
    if fault != "kill":  # the collectives of the other ranks then fail
        for rank in ranks:
            if rank != victim:
                fleet.say(rank, Failed(step=1234, cause="HorovodInternalError", text=TRACEBACK, follows=True))
    give_up = struck + GIVE_UP_SECONDS
    fleet.run(lambda: not fleet.links or time.monotonic() > give_up)
    ends = [fleet.ended.get(rank) for rank in ranks if rank != victim or fault != "kill"]
    write(folder, f"ranks-{ranks.start}.json", {"struck": struck if victim in ranks else None, "ends": ends})
