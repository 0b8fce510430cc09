"""The check before the start, over ssh or srun: all hosts answer, have the same software, and reach each other."""

from __future__ import annotations

import ipaddress
import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from hvdkit.commands.run import host_probe
from hvdkit.errors import ClusterError, describe
from hvdkit.machine.interfaces import Address, own_addresses

_FOLDER = str(Path(host_probe.__file__).resolve().parents[2])  # of hvdkit
_SSH_PROBLEMS = (  # message of ssh or srun, problem, remedy
    ("Could not resolve hostname", "its name is unknown", "check the name, or add it to ~/.ssh/config or /etc/hosts"),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key has changed",
     "make sure that it is the same host, then ssh-keygen -R {host} and ssh {host} once"),
    ("Host key verification failed", "its host key is not known here", "ssh {host} once, and accept its key"),
    ("Permission denied", "it refuses the login", "ssh-copy-id {host}; ssh must need no password"),
    ("Connection refused", "no ssh server listens there", "start sshd, or pass its port: --ssh-args='-p 2222'"),
    ("timed out", "it does not answer", "is it up, and is there a firewall in between?"),
    ("No route to host", "there is no route to it", "is it up, and in this network?"),
    ("Communication connection failure", "its slurmd does not answer", "is it up, and in this network?"),
    ("Requested node configuration is not available", "Slurm has taken it from this job", "see `sinfo -R`"),
)  # fmt: skip
# Maximum number of concurrent threads that run ssh or srun.
_MOST_THREADS = 64
# A function that returns the command to run another command on a host.
Remote = Callable[[str, Sequence[str]], list[str]]


@dataclass(frozen=True)
class Answer:
    """The result of the check on a host.

    Attributes:
        problem: why the job cannot run there, and the remedy; or None.
        addresses: the IPv4 addresses and netmasks of its interfaces, by interface name.
        client: this host's address in the connection to it.
        server: its own address in that connection.
    """

    host: str
    problem: str | None = None
    addresses: Mapping[str, Sequence[Sequence[str | None]]] = field(default_factory=dict)
    client: str = ""
    server: str = ""


@dataclass(frozen=True)
class Network:
    """The network between the hosts.

    Attributes:
        interface: name of the interface, a subnet if names differ between hosts, or None.
        addresses: addresses at which ranks on other hosts reach this host.
    """

    interface: str | None
    addresses: tuple[str, ...]


THIS_HOST = Network(None, ("127.0.0.1",))


def ssh_command(ssh_args: str, timeout: float, host: str, command: Sequence[str]) -> list[str]:
    """Return the ssh command that runs ``command`` on ``host`` without asking for a password.

    Example:
        >>> ssh_command("-p 2222", 5, "node1", ["true"])
        ['ssh', '-p', '2222', '-o', 'BatchMode=yes', '-o', 'ConnectTimeout=5', 'node1', 'true']
    """
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, round(timeout))}"]
    return ["ssh", *shlex.split(ssh_args), *options, host, shlex.join(command)]


def srun_command(host: str, command: Sequence[str]) -> list[str]:
    """Return the srun command that runs ``command`` once on ``host`` of this Slurm allocation, next to other tasks.

    Example:
        >>> " ".join(srun_command("node1", ["true"]))
        'srun --nodelist=node1 --nodes=1 --ntasks=1 --overlap --mpi=none --quiet --export=PATH,LD_LIBRARY_PATH true'
    """
    task = [f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--overlap"]
    return ["srun", *task, "--mpi=none", "--quiet", "--export=PATH,LD_LIBRARY_PATH", *command]


def run_on(
    hosts: Sequence[str], remote: Remote, command: Sequence[str], text: str, timeout: float
) -> list[tuple[str, str | None]]:
    """Run a command on all hosts concurrently, with input ``text``; return output, and problem or None, of each."""

    def run(host: str) -> tuple[str, str | None]:
        argv = remote(host, command)
        try:
            done = subprocess.run(
                argv, input=text, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return "", f"it does not answer within {timeout:g} s; is it up, and does its file system respond?"
        except FileNotFoundError:
            return "", f"there is no {argv[0]} here; install it (ssh: an OpenSSH client)"
        problem = explain_failure(host, done.returncode, done.stderr, argv[0]) if done.returncode else None
        return done.stdout, problem

    with ThreadPoolExecutor(_MOST_THREADS) as pool:
        return list(pool.map(run, hosts))


def explain_failure(host: str, code: int, text: str, program: str = "ssh") -> str:
    """Return problem and remedy for a command that failed on a host, from the output of ssh, srun or the host's shell.

    Example:
        >>> explain_failure("node9", 255, "ssh: Could not resolve hostname node9: Name or service not known")
        'its name is unknown; check the name, or add it to ~/.ssh/config or /etc/hosts'
    """
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
    if code in (126, 127):  # from the host's shell, whose message may equal that of a rejected login
        return f"it has no {sys.executable} ({last}); install the same environment at the same path there"
    for message, problem, remedy in _SSH_PROBLEMS:
        if message in text:
            return f"{problem}; {remedy.format(host=host)}"
    command = f"ssh {host}" if program == "ssh" else f"srun --nodelist={host} --overlap"
    return f"{program} ended with exit code {code}: {last}; try `{command} {sys.executable} --version`"


def check(hosts: Sequence[str], remote: Remote, timeout: float, temporary_bytes: int = 0) -> list[Answer]:
    """Run the probe on all hosts concurrently.

    Returns:
        The answers, in order, with a problem if the host did not run the probe, has other versions than this one, or
        less than ``temporary_bytes`` for temporary files.
    """
    source = Path(host_probe.__file__).read_text(encoding="utf-8")
    local = host_probe.versions(_FOLDER)
    replies = run_on(hosts, remote, [sys.executable, "-", _FOLDER, str(temporary_bytes)], source, timeout)
    answers = []
    for host, (output, problem) in zip(hosts, replies, strict=True):
        line = next((line for line in output.splitlines() if line.startswith(host_probe.MARK)), None)
        if line is None:
            answers.append(Answer(host, problem or f"it did not run {sys.executable}; does ssh force a command there?"))
            continue
        report = json.loads(line.removeprefix(host_probe.MARK))
        problem = differences(report["versions"], local) or report["temporary"]
        answers.append(Answer(host, problem, report["addresses"], report["client"], report["server"]))
    return answers


def differences(remote: Mapping[str, str | None], local: Mapping[str, str | None]) -> str | None:
    """Describe how a host's versions differ from those of this host; None if they do not.

    Example:
        >>> differences({"Keras": "3.5", "hvdkit": "1"}, {"Keras": "3.6", "hvdkit": "1"})
        'it has Keras 3.5 (this host: 3.6); install the same versions on all hosts'
    """
    found = [
        f"{name} {remote.get(name) or '(none)'} (this host: {version or 'none'})"
        for name, version in local.items()
        if remote.get(name) != version
    ]
    return f"it has {', '.join(found)}; install the same versions on all hosts" if found else None


def raise_problems(answers: Sequence[Answer]) -> None:
    """Raise ClusterError, with each host, its problem and the remedy, if any host has a problem."""
    if problems := [f"host {answer.host}: {answer.problem}" for answer in answers if answer.problem]:
        raise ClusterError("\n".join(problems))


def network(answers: Sequence[Answer] | None, named: str | None, local: Sequence[Address] | None = None) -> Network:
    """Return the network between this host and those that answered.

    This is the network by which ssh or srun reached them, which is known to work. Loopback, and bridges inside a host,
    are rejected.

    Args:
        answers: answers of other hosts, without problems; None: not checked, any network is allowed.
        named: the interface given by the user with --interface.
        local: this host's addresses; by default read from the kernel.

    Raises:
        ClusterError: this host or another one does not have such an interface.
    """
    local = own_addresses(socket.AF_INET) if local is None else local
    if named is not None:
        return _named(answers or (), named, local)
    if answers is None:
        reachable = tuple(one.address for one in local if not one.is_local)
        if not reachable:
            expected = "an interface that other hosts can reach"
            raise ClusterError(describe("--interface", "none that reaches other hosts", expected, "pass another"))
        return Network(None, reachable)
    by_address = {one.address: one for one in local}
    names = set()
    for answer in answers:
        here = by_address.get(answer.client)
        if here is None or here.is_local:
            got = f"{here.interface if here else answer.client}, by which {answer.host} is reached"
            remedy = "pass one that reaches all hosts: --interface eth0"
            raise ClusterError(describe("--interface", got, "one that others can reach", remedy))
        names.add(here.interface)
        names |= {name for name, found in answer.addresses.items() if answer.server in (one for one, _ in found)}
    interface = names.pop() if len(names) == 1 else _subnet(answers, names)
    return Network(interface, tuple(dict.fromkeys(answer.client for answer in answers)))


def _named(answers: Sequence[Answer], named: str, local: Sequence[Address]) -> Network:
    found = [one for one in local if one.interface == named]
    if not found or found[0].is_local:
        choices = ", ".join(one.interface for one in local if not one.is_local) or "none here"
        why = "which reaches no other host" if found else "which this host does not have"
        raise ClusterError(describe("--interface", f"{named}, {why}", f"one of {choices}", "pass another"))
    without = [answer.host for answer in answers if not answer.addresses.get(named)]
    if without:
        got = f"{named}, which is missing on {', '.join(without)}"
        raise ClusterError(
            describe("--interface", got, "one that all hosts have", "leave it out to detect it automatically")
        )
    return Network(named, tuple(one.address for one in found))


def _is_in(subnet: ipaddress.IPv4Network | ipaddress.IPv6Network, address: str) -> bool:
    """Return False, too, if ``address`` is what a host reports that does not know its own."""
    try:
        return ipaddress.ip_address(address) in subnet
    except ValueError:
        return False


def _subnet(answers: Sequence[Answer], names: set[str]) -> str:
    """Return the subnet that contains the addresses of all hosts."""
    addresses = [one for answer in answers for one in (answer.client, answer.server)]
    for answer in answers:
        for address, mask in chain.from_iterable(answer.addresses.values()):
            if address == answer.server and mask:
                subnet = ipaddress.ip_network(f"{address}/{mask}", strict=False)
                if all(_is_in(subnet, one) for one in addresses):
                    return str(subnet)
    raise ClusterError(
        describe("--interface", " and ".join(sorted(names)), "one network that all hosts are in", "pass --interface")
    )
