"""The watchdog's part of benchmarks/control_plane.py: rank 0's hub and member, and ranks that are simulated."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from simulated import RANKS_PER_HOST, cpu, peak_mb, read, sent_and_received, write

from hvdkit.cluster import wire
from hvdkit.machine import processes

HEARTBEAT, PATIENCE = 10.0, 600.0
TRACEBACK = "\n".join(f"  File train.py, line {line}, in step" for line in range(100))
CONNECTING = 16  # simulated ranks of a process that connect at the same time


def identity(rank: int) -> processes.Identity:
    """Return the identity of a simulated rank's process, which does not exist."""
    return processes.Identity(f"simulated-{rank // RANKS_PER_HOST}", 10_000_000 + rank, 1.0)


def greeting(rank: int) -> dict[str, Any]:
    """Return what a simulated rank says of itself."""
    return {"rank": rank, "host": f"host-{rank // RANKS_PER_HOST}", "identity": identity(rank)}


def watchdog_rank0(size: int, folder: Path, seconds: float, fault: str) -> None:
    """Admit all ranks, watch them for some seconds, and see one fail. The verdict ends this process."""
    from hvdkit.cluster.hub import Hub
    from hvdkit.cluster.watchdog import Watchdog

    processes.allow_files(size)
    memory, before = peak_mb(), cpu()
    listener = wire.listen(one_host=True)
    hub = Hub(listener, place := wire.offer(listener, HEARTBEAT, PATIENCE), size)
    hub.start()
    write(folder, "place.json", place)
    hosts = tuple(f"host-{rank // RANKS_PER_HOST}" for rank in range(size))
    began = time.monotonic()
    Watchdog(hub=hub).join(place, 0, hosts, [processes.own_identity(), *map(identity, range(1, size))])
    while not hub._complete.wait(1.0):
        pass
    links = [rank.link.socket for rank in hub._ranks.values()]
    found: dict[str, Any] = {"start": {"seconds": time.monotonic() - began, "cpu": cpu() - before}}
    found["start"] |= {"messages": hub.messages + 2 * size, "bytes": sent_and_received(links)}
    time.sleep(wire.interval(HEARTBEAT, size))  # the ranks' heartbeats have begun
    messages, carried = hub.messages + hub.beats, sent_and_received(links)
    wakeups, before, began = hub.wakeups, cpu(), time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    found["steady"] = {
        "share": 100 * (cpu() - before) / elapsed,
        "wakeups": (hub.wakeups - wakeups) / elapsed,
        "messages": (hub.messages + hub.beats - messages) / elapsed,
        "bytes": (sent_and_received(links) - carried) / elapsed,
        "memory": peak_mb() - memory,
    }
    found["cpu"] = cpu()  # the rest of this process's is the failure's
    write(folder, "rank0.json", found)
    write(folder, "fault.json", fault)
    time.sleep(60)
    raise SystemExit("the failure was not noticed")


class Fleet:
    """Simulated ranks of the watchdog's channel: hvdkit's links and messages, one thread for all of them."""

    def __init__(self, place: wire.Offer, ranks: range, size: int) -> None:
        processes.allow_files(len(ranks))
        self.size, self.interval = size, wire.interval(place.heartbeat, size)
        self.selector = selectors.DefaultSelector()
        with ThreadPoolExecutor(CONNECTING) as pool:
            links = pool.map(lambda rank: wire.connect(place, greeting(rank)), ranks)
        self.links: dict[int, wire.Link] = {}
        for rank, link in zip(ranks, links, strict=True):
            assert link is not None, f"rank {rank} was not let in"
            self.links[rank] = link
            self.selector.register(link.socket, selectors.EVENT_READ, rank)
        # As members do, ranks take turns.
        now = time.monotonic()
        self.due = {rank: now + self.interval * (1 - rank / size) for rank in ranks}
        self.turn = sorted(self.due, key=self.due.__getitem__)
        self.next = 0
        self.heard: dict[int, list[tuple[str, float]]] = {rank: [] for rank in ranks}

    def run(self, until: Callable[[], bool]) -> None:
        """Send heartbeats and note what comes, until ``until`` says so."""
        while not until():
            for key, _ in self.selector.select(0.01):
                self._hear(key)
            now = time.monotonic()
            while self.links and self.due[rank := self.turn[self.next]] <= now:
                self.due[rank] += self.interval
                self.next = (self.next + 1) % len(self.turn)
                if rank in self.links:
                    self.links[rank].beat(1234, 0.25)

    def _hear(self, key: selectors.SelectorKey) -> None:
        rank = key.data
        for message in self.links[rank].receive():
            if message["kind"] != "beat":
                self.heard[rank].append((message["kind"], time.monotonic()))
            if message["kind"] in ("end", "closed"):  # its process ends
                self.selector.unregister(key.fileobj)
                self.links.pop(rank).close()
                return


def watchdog_ranks(size: int, folder: Path, ranks: range) -> None:
    """Be some ranks: connect, beat, and when rank 0 asks for it let the last one fail."""
    offer = read(folder, "place.json")
    fleet = Fleet(wire.Offer(tuple(offer[0]), *offer[1:]), ranks, size)
    fleet.run((folder / "fault.json").exists)
    fault, victim, struck = read(folder, "fault.json"), size - 1, time.monotonic()
    if victim in ranks and fault == "kill":
        fleet.selector.unregister(fleet.links[victim].socket)
        fleet.links.pop(victim).close()
    elif victim in ranks:
        fleet.links[victim].send("failed", step=1234, cause="ValueError: simulated", text=TRACEBACK)
    if fault != "kill":  # the others' collectives fail in turn
        for rank, link in fleet.links.items():
            if rank != victim:
                link.send("failed", step=1234, cause="HorovodInternalError", text=TRACEBACK, victim=True)
    give_up = struck + 60
    fleet.run(lambda: not fleet.links or time.monotonic() > give_up)
    ends = [heard[-1][1] if heard and heard[-1][0] in ("end", "closed") else None for heard in fleet.heard.values()]
    told = [end for rank, end in zip(ranks, ends, strict=True) if rank != victim or fault != "kill"]
    write(folder, f"ranks-{ranks.start}.json", {"struck": struck if victim in ranks else None, "ends": told})
