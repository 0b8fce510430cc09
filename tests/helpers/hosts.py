"""Simulate several hosts on one machine: network namespaces on one bridge, each with its own name, sshd and settings.

MPI, Horovod and ssh treat them as real hosts; a link can be cut or slowed down, and a host can die. Requires root,
``iproute2`` and ``openssh-server``.

    with Hosts(3) as hosts:
        process = hosts[0].start(["hostname"], stdout=subprocess.PIPE)
        hosts[2].cut()
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from helpers.speed import WAIT

SSHD = "/usr/sbin/sshd"
# Debian installs administration tools such as `tc` in sbin, which may be missing from the PATH.
os.environ["PATH"] += f"{os.pathsep}/usr/sbin{os.pathsep}/sbin"
_NUMBERS = (f"-{number}" for number in itertools.count())


def missing() -> str | None:
    """Return why this machine cannot simulate hosts, or None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "ssh", "ssh-keygen", "unshare", "nsenter", SSHD):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: iproute2, openssh-server)"
    name = f"hk{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"`ip netns add` fails: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return None


def _ip(*words: str, inside: str | None = None) -> None:
    subprocess.run(["ip", *(["-n", inside] if inside else []), *words], check=True, capture_output=True)


class Host:
    """One host: a network namespace and a namespace for its host name.

    Attributes:
        name: its host name.
        address: its IP address.
    """

    def __init__(self, name: str, namespace: str, address: str, folder: Path) -> None:
        self.name, self.address, self._namespace, self._folder = name, address, namespace, folder
        self._sshd: subprocess.Popen[bytes] | None = None

    @property
    def settings(self) -> Path:
        """The folder whose files this host sees in /etc."""
        return Path("/etc/netns") / self._namespace

    def boot(self) -> None:
        """Start the host's sshd; all its processes run in the sshd's namespaces."""
        config = self._folder / f"sshd-{self.name}"
        lines = {
            "ListenAddress": self.address,
            "HostKey": self._folder / "host-key",
            "AuthorizedKeysFile": self._folder / "key.pub",
            "PidFile": "none",
            "UsePAM": "no",
            "StrictModes": "no",
            "PermitRootLogin": "yes",
            "SetEnv": "SHLVL=2",  # keeps bash from reading the user's startup files, which may wait for a lock
        }
        config.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        Path("/run/sshd").mkdir(exist_ok=True)
        start = f"hostname {self.name} && exec {SSHD} -D -e -f {config}"
        with (self._folder / f"sshd-{self.name}.log").open("wb") as log:
            self._sshd = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace, "unshare", "--uts", "sh", "-c", start], stderr=log, stdout=log
            )

    def is_up(self) -> bool:
        """Return True once sshd listens."""
        return "Server listening" in (self._folder / f"sshd-{self.name}.log").read_text()

    @property
    def enter(self) -> list[str]:
        """Return the command prefix that runs a command on this host."""
        assert self._sshd is not None
        return ["nsenter", "--target", str(self._sshd.pid), "--net", "--uts", "--mount", "--wd=."]

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this host in a new session."""
        return subprocess.Popen([*self.enter, *command], start_new_session=True, **options)

    def processes(self) -> list[int]:
        """Return the pids of this host's processes."""
        listed = subprocess.run(["ip", "netns", "pids", self._namespace], capture_output=True, text=True, check=False)
        return [int(number) for number in listed.stdout.split()]

    def cut(self) -> None:
        """Cut the network: other hosts do not see connections end."""
        _ip("link", "set", "eth0", "down", inside=self._namespace)

    def plug_in(self) -> None:
        """Restore the network."""
        _ip("link", "set", "eth0", "up", inside=self._namespace)

    def put(self, source: Path, target: Path) -> None:
        """Mount ``source``, a file or a folder, at ``target`` on this host only."""
        self.start(["mount", "--bind", str(source), str(target)]).wait()

    def slow_down(self, rate: str, burst: str = "32kb", latency: str = "400ms") -> None:
        """Limit the sending rate, e.g. to ``"1mbit"``; a fast link needs a larger ``burst``."""
        limit = ["tbf", "rate", rate, "burst", burst, "latency", latency]
        subprocess.run(["tc", "-n", self._namespace, "qdisc", "replace", "dev", "eth0", "root", *limit], check=True)

    def kill(self) -> None:
        """Kill all its processes at once."""
        while pids := self.processes():
            # Stop all first, so that none can report another's end. Then kill children before their parents: Linux
            # continues a stopped group of processes, and sends it SIGHUP, when its last parent in the session ends.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in sorted(pids, reverse=number == signal.SIGKILL):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            time.sleep(0.02)
            if self._sshd is not None:
                self._sshd.poll()


class Hosts:
    """Start ``count`` hosts on one bridge within a context; remove them and all their processes at its end.

    Args:
        count: number of hosts, named host-a, host-b, ...
    """

    def __init__(self, count: int) -> None:
        self._prefix = f"hk{os.getpid()}{next(_NUMBERS)}"
        self._switch = f"{self._prefix}-sw"
        self.folder = Path(tempfile.mkdtemp(prefix="hvdkit-hosts-"))
        self._hosts = [
            Host(f"host-{letter}", f"{self._prefix}-{letter}", f"10.77.0.{number}", self.folder)
            for number, letter in enumerate("abcdefgh"[:count], start=1)
        ]

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    @property
    def list(self) -> str:
        """The hosts with one slot each, in the format of ``-H``."""
        return ",".join(f"{host.address}:1" for host in self._hosts)

    def _make(self) -> None:
        for name in ("key", "host-key"):
            path = str(self.folder / name)
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        # The bridge has a separate namespace, to leave this machine's network alone.
        _ip("netns", "add", self._switch)
        _ip("link", "add", "br0", "type", "bridge", inside=self._switch)
        _ip("link", "set", "br0", "up", inside=self._switch)
        # As users set up a cluster: ssh logs in without a prompt.
        ssh = {"IdentityFile": self.folder / "key", "StrictHostKeyChecking": "yes", "LogLevel": "ERROR"}
        ssh["UserKnownHostsFile"] = Path(os.devnull)
        ssh["GlobalKnownHostsFile"] = self.folder / "known-hosts"
        key = (self.folder / "host-key.pub").read_text()
        (self.folder / "known-hosts").write_text("".join(f"{h.address},{h.name} {key}" for h in self._hosts))
        names = "".join(f"{host.address} {host.name}\n" for host in self._hosts)
        for host in self._hosts:
            # `ip netns exec` mounts the files of this folder over /etc/hosts and /etc/ssh.
            (host.settings / "ssh").mkdir(parents=True)
            (host.settings / "ssh" / "ssh_config").write_text("".join(f"{name} {ssh[name]}\n" for name in ssh))
            (host.settings / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            inside, port = host._namespace, host.name
            _ip("netns", "add", inside)
            _ip("link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self._switch, inside=inside)
            _ip("link", "set", port, "master", "br0", "up", inside=self._switch)
            _ip("address", "add", f"{host.address}/24", "dev", "eth0", inside=inside)
            _ip("link", "set", "eth0", "up", inside=inside)
            _ip("link", "set", "lo", "up", inside=inside)
            host.boot()
        until = time.monotonic() + WAIT
        while not all(host.is_up() for host in self._hosts):
            if time.monotonic() > until:
                raise RuntimeError("no sshd: " + "".join(p.read_text() for p in self.folder.glob("sshd-*.log")))
            time.sleep(0.02)

    def _remove(self) -> None:
        for host in self._hosts:
            host.kill()
            if host._sshd is not None:
                host._sshd.wait()
            subprocess.run(["ip", "netns", "delete", host._namespace], capture_output=True, check=False)
            shutil.rmtree(host.settings, ignore_errors=True)
        subprocess.run(["ip", "netns", "delete", self._switch], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
