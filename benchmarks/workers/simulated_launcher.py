"""hvdkit run's part of benchmarks/control_plane.py: its own code, and wrappers that are simulated."""

from __future__ import annotations

import json
import os
import selectors
import sys
import time
from pathlib import Path

from simulated import RANKS_PER_HOST, cpu, peak_mb, read, sent_and_received, write

from hvdkit.launch import rank as wrapper

OUTPUT_LINES = 20
WRAPPERS = 500  # in a process: a wrapper waits by select(2), which knows 1,024 files


def launcher_rank0(size: int, folder: Path, seconds: float, fault: str) -> None:
    """Be ``hvdkit run``: an engine whose ranks' wrappers are simulated, from its start to the verdict."""
    from hvdkit.launch.attempt import Attempt, Signals
    from hvdkit.launch.channel import Channel
    from hvdkit.launch.engines import CommandLine
    from hvdkit.launch.output import Output
    from hvdkit.launch.rank import VARIABLE

    memory, before, began = peak_mb(), cpu(), time.monotonic()
    settings = {"environment": {"PYTHONUNBUFFERED": "1"}, "terminal": None, "stopped_seconds": 13.0}
    channel = Channel(["127.0.0.1"], size, lambda rank: settings)
    program = str(Path(__file__).with_name("control_plane.py"))
    argv = [sys.executable, program, "ranks", "launcher", str(size), str(folder), "--fault", fault]
    (folder / "logs").mkdir(exist_ok=True)
    environment = {**os.environ, VARIABLE: channel.told}
    with (folder / "output").open("ab") as file, Signals() as signals:
        output = Output({1: file, 2: file}, folder / "logs")
        attempt = Attempt("simulated", CommandLine(argv, {}), environment, size, channel, output, signals, 10.0)
        verdict = attempt.run()
    lines = (folder / "output").read_bytes().count(b"\n")
    wanted = (0, None) if fault == "none" else (3, size - 1)
    assert (verdict.code, verdict.rank) == wanted, verdict
    assert fault != "none" or lines == OUTPUT_LINES * size, f"{lines} lines came, of {OUTPUT_LINES * size}"
    heard = read(folder, "ranks-0.json")
    found = {"seconds": time.monotonic() - began, "cpu": cpu() - before, "memory": peak_mb() - memory}
    found |= {"messages": heard["messages"], "bytes": heard["bytes"]}
    if fault != "none":
        found["known"] = heard["known"]
    write(folder, "rank0.json", {"launcher" if fault == "none" else "launcher, a failure": found})


def launcher_ranks(size: int, folder: Path, fault: str) -> None:
    """Be the engine: all wrappers, some hundreds in each process."""
    children = []
    for first in range(0, size, WRAPPERS):
        pid = os.fork()
        if pid == 0:
            wrappers = Wrappers(range(first, min(first + WRAPPERS, size)), size)
            write(folder, f"ready-{first}.json", {})
            for other in range(0, size, WRAPPERS):  # none fails before all are there
                read(folder, f"ready-{other}.json")
            found = wrappers.run(size - 1 if fault != "none" else None)
            write(folder, f"wrappers-{first}.json", found)
            os._exit(0)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert not any(codes), codes
    parts = [json.loads(path.read_text()) for path in folder.glob("wrappers-*.json")]
    struck = max(part["struck"] for part in parts)
    known = max(part["ordered"] for part in parts) - struck
    total = {"messages": sum(part["messages"] for part in parts), "bytes": sum(part["bytes"] for part in parts)}
    write(folder, "ranks-0.json", {**total, "known": known})
    sys.exit(3 if fault != "none" else 0)


class Wrappers:
    """Wrappers of some ranks: hvdkit's own connection, and programs that write some lines and end."""

    def __init__(self, ranks: range, size: int) -> None:
        self.connections: dict[int, wrapper.Connection] = {}
        for rank in ranks:
            os.environ |= {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size)}
            connection = self.connections[rank] = wrapper.Connection(wrapper.told())
            connection.greet(f"host-{rank // RANKS_PER_HOST}")
        self.messages = 3 * len(ranks)  # greeting, answer, and the order to leave
        self.ordered = 0.0

    def run(self, failed: int | None) -> dict[str, float]:
        """Write the lines, end all ranks, or ``failed`` alone and the others as they are ordered to."""
        line = b"%b\n" % (b"x" * 79)
        for _ in range(OUTPUT_LINES if failed is None else 1):
            for connection in self.connections.values():
                connection.send(wrapper.STDOUT, line)
                self.messages += 1
        struck = time.monotonic()
        if failed is None:
            for rank in self.connections:
                self._end(rank, 0)
        elif failed in self.connections:
            self._end(failed, 3)
        self._obey(failed)
        carried = sent_and_received([connection.socket for connection in self.connections.values()])
        struck = 0.0 if failed is not None and failed not in self.connections else struck
        return {"messages": self.messages, "bytes": carried, "struck": struck, "ordered": self.ordered}

    def _obey(self, failed: int | None) -> None:
        """Wait until hvdkit run lets all wrappers leave."""
        ended = {failed}
        with selectors.DefaultSelector() as selector:
            for rank, connection in self.connections.items():
                selector.register(connection.socket, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select(1.0):
                    for order in self.connections[key.data].socket.recv(64) or bytes([wrapper.LEAVE]):
                        if order == wrapper.LEAVE:
                            selector.unregister(key.fileobj)
                            break
                        if key.data not in ended:
                            ended.add(key.data)
                            self.ordered = time.monotonic()
                            self._end(key.data, -order)

    def _end(self, rank: int, code: int) -> None:
        said = {"code": code, "signals": [], "stopped": False}
        self.connections[rank].send(wrapper.END, json.dumps(said).encode())
        self.messages += 1
