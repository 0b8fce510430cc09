"""The check before the start, over ssh or by Slurm: every host answers, has the same software, a way to the others."""

from __future__ import annotations

import ipaddress
import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.errors import ClusterError, describe
from hvdkit.launch import probe
from hvdkit.machine.interfaces import Address, own_addresses

_FOLDER = Path(probe.__file__).resolve().parent.parent
_SAID = (  # what ssh or srun says -> what is wrong, and the remedy
    ("Could not resolve hostname", "its name is unknown", "check the name, or add it to ~/.ssh/config or /etc/hosts"),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key has changed",
     "make sure that it is the same host, then ssh-keygen -R {host} and ssh {host} once"),
    ("Host key verification failed", "its host key is not known here", "ssh {host} once, and accept its key"),
    ("Permission denied", "it refuses the login", "ssh-copy-id {host}; ssh must need no password"),
    ("Connection refused", "no ssh server listens there", "start sshd, or pass its port: --ssh-args='-p 2222'"),
    ("timed out", "it does not answer", "is it up, and does a firewall stand between?"),
    ("No route to host", "there is no route to it", "is it up, and in this network?"),
    ("Communication connection failure", "its slurmd does not answer", "is it up, and in this network?"),
    ("Requested node configuration is not available", "Slurm has taken it from this job", "see `sinfo -R`"),
)  # fmt: skip
# The command that runs another on a host.
Remote = Callable[[str, Sequence[str]], list[str]]


@dataclass(frozen=True)
class Answer:
    """What a host said, or the ``problem`` that kept it from answering."""

    host: str
    problem: str | None = None
    versions: dict[str, str | None] | None = None
    addresses: dict[str, list[Any]] | None = None
    client: str = ""
    server: str = ""


@dataclass(frozen=True)
class Network:
    """How hosts reach each other: an interface's name, or a subnet where names differ, and this host's addresses."""

    interface: str | None
    addresses: tuple[str, ...]


def ssh_command(host: str, ssh_args: str, timeout: float, command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command`` on ``host``, asking nobody anything.

    Example:
        >>> ssh_command("node1", "-p 2222", 5, ["true"])
        ['ssh', '-p', '2222', '-o', 'BatchMode=yes', '-o', 'ConnectTimeout=5', 'node1', 'true']
    """
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, round(timeout))}"]
    return ["ssh", *shlex.split(ssh_args), *options, host, shlex.join(command)]


def srun_command(host: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command`` once on ``host`` of this Slurm allocation, beside whatever runs there.

    Example:
        >>> " ".join(srun_command("node1", ["true"]))
        'srun --nodelist=node1 --nodes=1 --ntasks=1 --overlap --mpi=none --quiet --export=PATH,LD_LIBRARY_PATH true'
    """
    place = [f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--overlap"]
    return ["srun", *place, "--mpi=none", "--quiet", "--export=PATH,LD_LIBRARY_PATH", *command]


def ask_all(hosts: Sequence[str], remote: Remote, timeout: float) -> list[Answer]:
    """Ask all hosts at once; return their answers in order."""
    if not hosts:
        return []
    with ThreadPoolExecutor(min(64, len(hosts))) as pool:
        return list(pool.map(lambda host: ask(host, remote, timeout), hosts))


def ask(host: str, remote: Remote, timeout: float) -> Answer:
    """Ask one host what it has; a host that cannot be asked is an answer with a problem."""
    source = Path(probe.__file__).read_text(encoding="utf-8")
    source = source.replace("from __future__ import annotations\n", f"GIVEN = {str(_FOLDER)!r}\n", 1)
    source = f"from __future__ import annotations\n{source}"
    command = remote(host, [sys.executable, "-"])
    try:
        done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Answer(host, f"it does not answer within {timeout:g} s; is it up, and its file system not stuck?")
    except FileNotFoundError:
        return Answer(host, f"there is no {command[0]} here; install it (ssh: an OpenSSH client)")
    for line in done.stdout.splitlines():
        if line.startswith(probe.MARK):
            said = json.loads(line.removeprefix(probe.MARK))
            return Answer(host, None, said["versions"], said["addresses"], said["client"], said["server"])
    return Answer(host, refusal(host, done.returncode, done.stderr, command[0]))


def refusal(host: str, code: int, text: str, asked_by: str = "ssh") -> str:
    """Say why a host did not answer, from what ssh or srun, or its shell, said.

    Example:
        >>> refusal("node9", 255, "ssh: Could not resolve hostname node9: Name or service not known")
        'its name is unknown; check the name, or add it to ~/.ssh/config or /etc/hosts'
    """
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
    if code in (126, 127):  # a shell's there: its words may be those of a login that fails
        return f"it has no {sys.executable} ({last}); install the same environment at the same path there"
    for words, what, remedy in _SAID:
        if words in text:
            return f"{what}; {remedy.format(host=host)}"
    by_hand = f"ssh {host}" if asked_by == "ssh" else f"srun --nodelist={host} --overlap"
    return f"{asked_by} ended with exit code {code}: {last}; try `{by_hand} {sys.executable} --version`"


def differences(answer: Answer, mine: dict[str, str | None]) -> str | None:
    """Say in what a host differs from this one, or None.

    Example:
        >>> differences(Answer("n", versions={"Keras": "3.5", "hvdkit": "1"}), {"Keras": "3.6", "hvdkit": "1"})
        'it has Keras 3.5 where this host has 3.6; install the same versions on all hosts'
    """
    theirs = answer.versions or {}
    found = [
        f"{name} {theirs.get(name) or '(none)'} where this host has {version or 'none'}"
        for name, version in mine.items()
        if theirs.get(name) != version
    ]
    return f"it has {', '.join(found)}; install the same versions on all hosts" if found else None


def checked(hosts: Sequence[str], remote: Remote, timeout: float) -> list[Answer]:
    """Ask all hosts; an answer has a problem where the host cannot be asked or has other versions than this one."""
    mine = probe.versions(str(_FOLDER))
    return [
        answer if answer.problem else Answer(**{**vars(answer), "problem": differences(answer, mine)})
        for answer in ask_all(hosts, remote, timeout)
    ]


def refuse(answers: Sequence[Answer]) -> None:
    """Raise if any host has a problem.

    Raises:
        ClusterError: names each host, what is wrong with it, and the remedy.
    """
    problems = [f"host {answer.host}: {answer.problem}" for answer in answers if answer.problem]
    if problems:
        raise ClusterError("\n".join(problems))


def network(answers: Sequence[Answer], named: str | None, mine: Sequence[Address] | None = None) -> Network:
    """Return the interface by which this host and those that answered reach each other.

    It is the one that ssh or srun came by, since that is known to work; loopback and bridges of one host are refused.

    Args:
        answers: of other hosts, without problems.
        named: the interface that --interface names.
        mine: this host's addresses.

    Raises:
        ClusterError: there is no such interface, on this host or another.
    """
    mine = own_addresses(socket.AF_INET) if mine is None else mine
    if named is not None:
        return _named(answers, named, mine)
    by_address = {one.address: one for one in mine}
    used = {answer.client: answer.host for answer in answers}
    for address, host in used.items():
        if address not in by_address or by_address[address].is_local:
            name = by_address[address].interface if address in by_address else address
            remedy = "name one that reaches all hosts: --interface eth0"
            raise ClusterError(
                describe("--interface", f"{name}, by which {host} is reached", "one that others can reach", remedy)
            )
    names = {by_address[address].interface for address in used}
    for answer in answers:
        names |= {n for n, found in (answer.addresses or {}).items() if answer.server in (a for a, _ in found)}
    if len(names) == 1:
        return Network(names.pop(), tuple(used))
    return Network(_subnet(answers, names), tuple(used))


def _named(answers: Sequence[Answer], named: str, mine: Sequence[Address]) -> Network:
    found = [one for one in mine if one.interface == named]
    if not found or found[0].is_local:
        choices = ", ".join(one.interface for one in mine if not one.is_local) or "none here"
        why = "which reaches no other host" if found else "which this host does not have"
        raise ClusterError(describe("--interface", f"{named}, {why}", f"one of {choices}", "name another"))
    without = [answer.host for answer in answers if not (answer.addresses or {}).get(named)]
    if without:
        got = f"{named}, which {', '.join(without)} has not"
        raise ClusterError(describe("--interface", got, "one that all hosts have", "leave it out, to have it found"))
    return Network(named, tuple(one.address for one in found))


def _subnet(answers: Sequence[Answer], names: set[str]) -> str:
    """Return the network that all hosts' addresses are in."""
    nets = set()
    for answer in answers:
        masks = [mask for found in (answer.addresses or {}).values() for one, mask in found if one == answer.server]
        if masks:
            nets.add(ipaddress.ip_network(f"{answer.server}/{masks[0]}", strict=False))
    everybody = [ipaddress.ip_address(one) for answer in answers for one in (answer.client, answer.server)]
    for net in nets:
        if all(address in net for address in everybody):
            return str(net)
    raise ClusterError(
        describe("--interface", " and ".join(sorted(names)), "one network that all hosts are in", "pass --interface")
    )


def reaching(named: str | None) -> Network:
    """Return this host's addresses where nobody was asked: those of the named interface, or all that may serve.

    Raises:
        ClusterError: there is none.
    """
    here = own_addresses(socket.AF_INET)
    found = [one for one in here if (one.interface == named if named else not one.is_local)]
    if not found or any(one.is_local for one in found):
        got = named or "none that reaches other hosts"
        raise ClusterError(describe("--interface", got, "an interface that other hosts can reach", "name another"))
    return Network(named, tuple(one.address for one in found))
