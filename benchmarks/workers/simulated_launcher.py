"""hvdkit run's part of benchmarks/control_plane.py: its own code with simulated sentinels."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from time import process_time
from typing import Any

from simulated import Sentinels, peak_mb, read, sent_and_received, write

from hvdkit.watchdog.channel import STDOUT, Output
from hvdkit.watchdog.events import End, Exited, Flight, GiveFlight, Leaving, Message, Release, Training
from hvdkit.watchdog.running import read_offer

OUTPUT_LINES = 20
SENTINELS = 500  # per process


def launcher_rank0(size: int, folder: Path, _: float, fault: str) -> None:
    """Act as ``hvdkit run``: an engine whose ranks' sentinels are simulated, from its start to the verdict."""
    from hvdkit.commands.run.attempt import Attempt, Signals
    from hvdkit.commands.run.config import RunConfig
    from hvdkit.commands.run.engines import CommandLine, Engine
    from hvdkit.commands.run.hosts import Host
    from hvdkit.commands.run.job import Job
    from hvdkit.commands.run.output import OutputWriter
    from hvdkit.commands.run.preflight import THIS_HOST

    class SimulatedJob(Job):
        def command_line(self, *_: Any) -> CommandLine:
            worker = str(Path(__file__).with_name("control_plane.py"))
            argv = (sys.executable, worker, "ranks", "launcher", str(size), str(folder), "--fault", fault)
            return CommandLine(argv)

    memory, before, began = peak_mb(), process_time(), time.monotonic()
    environment = dict(os.environ)
    hosts = (Host(socket.gethostname(), size),)
    job = SimulatedJob(RunConfig(grace=10.0), hosts, Engine("simulated", ""), tuple(environment), environment)
    (folder / "logs").mkdir(exist_ok=True)
    with (folder / "output").open("ab") as file, Signals() as signals:
        output = OutputWriter({1: file, 2: file}, folder / "logs")
        verdict = Attempt(job, hosts, THIS_HOST, ["true"], output, signals).run()
        assert output.finish(60)
    lines = (folder / "output").read_bytes().count(b"\n")
    wanted = (0, None) if fault == "none" else (3, size - 1)
    assert (verdict.code, verdict.rank) == wanted, verdict
    assert fault != "none" or lines == OUTPUT_LINES * size, f"got {lines} lines, expected {OUTPUT_LINES * size}"
    heard = read(folder, "ranks-0.json")
    found = {"seconds": time.monotonic() - began, "cpu": process_time() - before, "memory": peak_mb() - memory}
    found |= {"messages": heard["messages"], "bytes": heard["bytes"]}
    if fault != "none":
        found["known"] = heard["known"]
    write(folder, "rank0.json", {"launcher" if fault == "none" else "launcher, a failure": found})


def launcher_ranks(size: int, folder: Path, _: range, fault: str) -> None:
    """Act as the engine: all sentinels, several hundred per process."""
    children = []
    for first in range(0, size, SENTINELS):
        pid = os.fork()
        if pid == 0:
            fleet = Programs(range(first, min(first + SENTINELS, size)), size)
            write(folder, f"ready-{first}.json", {})
            for other in range(0, size, SENTINELS):  # all connect before one fails
                read(folder, f"ready-{other}.json")
            found = fleet.run(size - 1 if fault != "none" else None)
            write(folder, f"sentinels-{first}.json", found)
            os._exit(0)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert not any(codes), codes
    parts = [json.loads(path.read_text()) for path in folder.glob("sentinels-*.json")]
    struck = max(part["struck"] for part in parts)
    known = max(part["ordered"] for part in parts) - struck
    total = {"messages": sum(part["messages"] for part in parts), "bytes": sum(part["bytes"] for part in parts)}
    write(folder, "ranks-0.json", {**total, "known": known})
    sys.exit(3 if fault != "none" else 0)


class Programs(Sentinels):
    """Sentinels of programs that write some lines and exit."""

    def __init__(self, ranks: range, size: int) -> None:
        super().__init__(read_offer(), ranks, size, at_once=1)
        assert self.welcome.program is not None
        self.messages = 5 * len(ranks)  # for the handshakes
        self.ordered = 0.0
        self.bytes = 0
        self._ended: set[int] = set()

    def run(self, failed: int | None) -> dict[str, float]:
        """Write the lines; end all ranks, or only ``failed`` and the others when ordered."""
        line = b"%b\n" % (b"x" * 79)
        for rank in self.links:
            self.say(rank, Training(pid=1))
        for _ in range(OUTPUT_LINES if failed is None else 1):
            for link in self.links.values():
                link.send(Output(STDOUT, line))
                self.messages += 1
        struck = time.monotonic()
        has_failed = failed in self.links
        if failed is None:
            for rank in self.links:
                self.say(rank, Leaving())
        elif has_failed:
            self._end(failed, 3)
        while self.links:
            self.serve(1.0)
        struck = 0.0 if failed is not None and not has_failed else struck
        return {"messages": self.messages, "bytes": self.bytes, "struck": struck, "ordered": self.ordered}

    def obey(self, rank: int, order: Any) -> None:
        """Send the flight recorder's lines, end the program, or leave."""
        self.messages += 1
        if isinstance(order, GiveFlight):
            self.say(rank, Flight(records=[]))
        elif isinstance(order, End) and rank not in self._ended:
            self.ordered = time.monotonic()
            self._end(rank, -15)
        elif isinstance(order, Release) and rank in self._ended:
            self.close(rank)
        elif isinstance(order, Release):
            self._end(rank, 0)

    def _end(self, rank: int, code: int) -> None:
        self._ended.add(rank)
        self.say(rank, Exited(code=code))

    def say(self, rank: int, *messages: Message) -> None:
        """Send and count messages from one sentinel."""
        super().say(rank, *messages)
        self.messages += len(messages)

    def close(self, rank: int) -> None:
        """Count a connection's bytes, and close it."""
        if rank in self.links:
            self.bytes += sent_and_received([self.links[rank].socket])
        super().close(rank)
