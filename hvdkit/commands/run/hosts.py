"""Hosts and their slots, from the command line, a file, Slurm or PBS; and the number of ranks on each."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.commands.options import read_text
from hvdkit.errors import describe
from hvdkit.machine.interfaces import host_names

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
_ENTRY = re.compile(r"(?P<name>[^\s:]+)(:(?P<colon>\S+)|\s+slots\s*=\s*(?P<slots>\S+)(\s+max[-_]slots\s*=\s*\d+)?)?$")
_COUNT = re.compile(r"(?P<count>\d+)(\(x(?P<times>\d+)\))?$")


@dataclass(frozen=True)
class Host:
    """A host and its slots: the number of ranks that may run there."""

    name: str
    slots: int

    @property
    def is_local(self) -> bool:
        """True if this is a name of the host on which ``hvdkit run`` runs."""
        return self.name in host_names()

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def slots_of(hosts: Sequence[Host]) -> int:
    """Return the number of slots of all ``hosts``."""
    return sum(host.slots for host in hosts)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of ``node1:4,node2``.

    Raises:
        ValueError: an entry is not a host and its slots.

    Example:
        >>> [str(host) for host in parse_hosts("node1:4,node2")]
        ['node1:4', 'node2:1']
    """
    return _merge_slots([_entry(entry.strip(), "-H") for entry in text.split(",")])


def read_hostfile(path: Path, argument: str = "--hostfile") -> tuple[Host, ...]:
    """Return the hosts of a file with ``node1 slots=4`` or ``node1:4`` per line; ``#`` starts a comment.

    Raises:
        ValueError: the file cannot be read or does not contain a host, or a line is not a host and its slots.
    """
    hosts = []
    for number, line in enumerate(read_text(argument, path).splitlines(), 1):
        text = line.partition("#")[0].strip()
        if text:
            hosts.append(_entry(text, f"{argument} {path}, line {number}"))
    if not hosts:
        raise ValueError(describe(argument, f"{path} without a host", "one host per line", "write `node1 slots=4`"))
    return _merge_slots(hosts)


def _entry(text: str, argument: str) -> Host:
    match = _ENTRY.fullmatch(text)
    slots = (match["colon"] or match["slots"] or "1") if match else ""
    if _is_ipv6(text):
        got = f"{text!r}, an IPv6 address"
        remedy = "give the host a name, in DNS or in /etc/hosts"
        raise ValueError(describe(argument, got, "a name or an IPv4 address, as mpirun and Horovod read hosts", remedy))
    if match is None or not _NAME.match(match["name"]) or not slots.isdigit() or int(slots) < 1:
        raise ValueError(describe(argument, repr(text), "a host and its slots", "write node1:4 (or node1 slots=4)"))
    return Host(match["name"], int(slots))


def _is_ipv6(entry: str) -> bool:
    try:
        ipaddress.IPv6Address(entry.partition(" ")[0].removeprefix("[").partition("]")[0])
    except ValueError:
        return False
    return True


def _merge_slots(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return each host once, with the sum of its slots, in the order of first mention."""
    slots: Counter[str] = Counter()
    for host in hosts:
        slots[host.name] += host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def slurm_hosts(environment: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts of a Slurm allocation, with the number of tasks on each as slots.

    Raises:
        ValueError: this process is not in an allocation, or the variables cannot be parsed.

    Example:
        >>> slurm_hosts({"SLURM_JOB_NODELIST": "n[1-2,7]", "SLURM_TASKS_PER_NODE": "4(x2),2"})
        (Host(name='n1', slots=4), Host(name='n2', slots=4), Host(name='n7', slots=2))
    """
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        remedy = "call hvdkit run inside sbatch or salloc (launch/slurm.sbatch)"
        raise ValueError(describe("--slurm", "no SLURM_JOB_NODELIST", "a Slurm allocation", remedy))
    names = expand_nodes(nodes)
    text = environment.get("SLURM_TASKS_PER_NODE", "1")
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ValueError(describe("SLURM_TASKS_PER_NODE", text, "as 4(x2),2", "pass -H instead of --slurm"))
        counts += [int(match["count"])] * int(match["times"] or 1)
    if len(counts) != len(names):
        got = f"{text} for {nodes}"
        raise ValueError(describe("SLURM_TASKS_PER_NODE", got, "a number for each node", "pass -H instead of --slurm"))
    return tuple(Host(name, count) for name, count in zip(names, counts, strict=True))


def expand_nodes(text: str) -> list[str]:
    """Return the names in a Slurm node list.

    Example:
        >>> expand_nodes("gpu[08-10],login,r[1-2]n[1-2]")
        ['gpu08', 'gpu09', 'gpu10', 'login', 'r1n1', 'r1n2', 'r2n1', 'r2n2']
    """
    names = []
    for entry in re.split(r",(?![^\[]*\])", text):
        parts = [""]
        for piece in re.findall(r"\[[^\]]*\]|[^\[\]]+", entry.strip()):
            ends = _numbers(piece[1:-1], text) if piece.startswith("[") else [piece]
            parts = [begin + end for begin in parts for end in ends]
        names += parts
    return names


def _numbers(ranges: str, text: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ValueError(describe("SLURM_JOB_NODELIST", text, "as n[1-3]", "pass -H instead of --slurm"))
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers


def place_ranks(hosts: Sequence[Host], np: int | None) -> tuple[Host, ...]:
    """Return the hosts for ``np`` ranks (None: all slots), in order, with the number of ranks on each as slots.

    Raises:
        ValueError: there are fewer slots than ranks.

    Example:
        >>> [str(host) for host in place_ranks(parse_hosts("a:2,b:2,c:2"), 3)]
        ['a:2', 'b:1']
    """
    slots = slots_of(hosts)
    remaining = slots if np is None else np
    if remaining > slots:
        shown = ", ".join(map(str, hosts))
        raise ValueError(
            describe("-np", remaining, f"at most {slots} ranks ({shown})", "give the hosts more slots: node1:4")
        )
    placement = []
    for host in hosts:
        if remaining:
            placement.append(Host(host.name, min(host.slots, remaining)))
            remaining -= placement[-1].slots
    return tuple(placement)
