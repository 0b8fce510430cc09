"""``hvdkit run``, from its options to its exit code."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hvdkit.cluster import report
from hvdkit.cluster.watchdog import HEARTBEAT, seconds
from hvdkit.errors import describe
from hvdkit.launch import rank, restarts
from hvdkit.launch.attempt import Attempt, Signals
from hvdkit.launch.channel import Channel
from hvdkit.launch.choose import Chosen, EngineFacts, choose, explain
from hvdkit.launch.config import Run
from hvdkit.launch.engines import ENGINES, CommandLine, Start, engine_environment, passed_on
from hvdkit.launch.hosts import Host, parse_hosts, pbs_hosts, placed, read_hostfile, slurm_hosts
from hvdkit.launch.output import Output
from hvdkit.launch.reach import Answer, Network, checked, network, reaching, refuse, srun_command, ssh_command
from hvdkit.launch.secret import PrivateFile
from hvdkit.launch.verdict import Verdict
from hvdkit.machine.environment import SECRET, outside_a_job

STOPPED_SECONDS = 3.0
_HUGE_PAGES = "glibc.malloc.hugetlb=1"  # from version 2.35 on; others take no notice
WRAPPER = (sys.executable, "-IS", str(Path(rank.__file__).resolve()))
# Engines take these for their own: between programs, and before one.
_ENGINES_OWN = (":", "--")


def run(config: Run, program: Sequence[str]) -> int | str:
    """Start ``program`` on all ranks and see it to its end, as often as ``config`` allows.

    Returns:
        The exit code: 0 where every rank of the last attempt ended with 0, else that of the first that failed, 128 + n
        for a signal; 75 where the ranks saved after SIGTERM; 130 after Ctrl-C. With ``dry_run`` what would run.

    Raises:
        ValueError: an option, a host or the program is wrong; nothing has been started.
        ClusterError: a host is not as it must be, or an engine is missing; nothing has been started.
    """
    if config.k8s:
        from hvdkit.launch.manifest import kubernetes

        return kubernetes(config, program)
    job = prepare(config, program)
    if config.dry_run:
        hosts = job.first_hosts()
        way, answers = job.network(hosts)
        refuse(answers)
        return str(job.command_line(hosts, plain(program), way.interface))
    if config.logs is not None:
        try:
            config.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            got = f"{config.logs} ({error.strerror})"
            raise ValueError(describe("--logs", got, "a folder that can be written", "name another")) from None
    output = Output({1: sys.stdout.buffer, 2: sys.stderr.buffer}, config.logs)
    with Signals() as signals:
        return restarts.run(job, program, output, signals)


@dataclass(frozen=True)
class Job:
    """A job that is ready to start: its options, its hosts and its engine."""

    config: Run
    hosts: tuple[Host, ...]
    chosen: Chosen
    names: tuple[str, ...]
    environment: dict[str, str]

    def first_hosts(self) -> tuple[Host, ...]:
        """Return the hosts of the first attempt and their ranks; none where all ranks run on this machine alone."""
        return placed(self.hosts, self.config.np) if self.hosts else ()

    def ranks(self, hosts: tuple[Host, ...]) -> int:
        """Return the number of ranks of an attempt on ``hosts``."""
        return sum(host.slots for host in hosts) if hosts else self.config.np or 1

    def command_line(
        self,
        hosts: tuple[Host, ...],
        command: Sequence[str],
        interface: str | None = None,
        names: tuple[str, ...] = (),
    ) -> CommandLine:
        """Return the engine's command line for an attempt."""
        # Within Slurm an engine that is given no hosts takes all of the allocation, the lost ones, too.
        here = _only_here(hosts) and not self.by_slurm
        start = Start(
            np=self.ranks(hosts),
            command=tuple(command),
            hosts=() if here else hosts,
            names=(*self.names, *names),
            interface=interface or self.config.interface,
            ssh_args=self.config.ssh_args,
            root=os.geteuid() == 0,
            program=self.chosen.program,
            prefix=self.chosen.prefix,
            slurm_mpi=self.chosen.slurm_mpi,
            slurm=self.by_slurm,
        )
        if self.chosen.mpi is not None:
            start = replace(start, mpi=self.chosen.mpi)
        return ENGINES[self.chosen.engine](start)

    @property
    def by_slurm(self) -> bool:
        """Say whether Slurm starts what runs on other hosts: nobody needs ssh then."""
        return self.config.slurm and self.chosen.engine in ("srun", "mpirun")

    def network(self, hosts: tuple[Host, ...], connect_timeout: float | None = None) -> tuple[Network, list[Answer]]:
        """Look at ``hosts``; return how they are reached, and the answers of all but this one.

        Args:
            hosts: to ask.
            connect_timeout: seconds that ssh may take to come in; by default --check-timeout.

        Raises:
            ClusterError: those that answer have no network in common.
        """
        others = [host.name for host in hosts if not host.is_local]
        if not others:
            return Network(None, ("127.0.0.1",)), []
        if not self.config.check:
            return reaching(self.config.interface), []
        timeout = self.config.check_timeout if connect_timeout is None else connect_timeout

        def remote(host: str, command: Sequence[str]) -> list[str]:
            if self.by_slurm:
                return srun_command(host, command)
            return ssh_command(host, self.config.ssh_args, timeout, command)

        answers = checked(others, remote, self.config.check_timeout)
        good = [answer for answer in answers if answer.problem is None]
        return (network(good, self.config.interface) if good else Network(None, ("127.0.0.1",))), answers

    def attempt(
        self, hosts: tuple[Host, ...], program: Sequence[str], output: Output, signals: Signals, way: Network
    ) -> Verdict:
        """Start the job once and return what became of it.

        Args:
            hosts: and how many ranks each of them gets.
            program: what the ranks run.
            output: where their lines go.
            signals: that come to this process.
            way: by which ranks on other hosts reach this one.
        """
        size, config = self.ranks(hosts), self.config
        channel = Channel(way.addresses, size, partial(self._settings, program))
        environment = engine_environment(self.environment, self.names)
        environment[rank.VARIABLE] = channel.told
        # The wrapper gets the program over its connection: engines take some arguments for their own.
        line = self.command_line(hosts, WRAPPER, way.interface, (rank.VARIABLE,))
        # Ranks fill one host after the other; Slurm may choose otherwise.
        filled = () if self.chosen.engine == "srun" else hosts
        places = tuple(host.name for host in filled for _ in range(host.slots))
        attempt = Attempt(self.chosen.engine, line, environment, size, channel, output, signals, config.grace, places)
        if self.chosen.engine != "gloo":
            return attempt.run()
        for name in config.env:
            environment.pop(name, None)
        others = [host.name for host in hosts if not host.is_local]
        try:
            file = PrivateFile(channel.told, others, config.ssh_args, config.check_timeout)
        except BaseException:
            channel.close()
            raise
        environment[rank.VARIABLE] = str(file.path)
        try:
            return attempt.run()
        finally:
            file.remove(attempt.lost_hosts)

    def _settings(self, program: Sequence[str], number: int) -> dict[str, Any]:
        """Return what a rank's wrapper is answered."""
        # Values of named variables come this way under Gloo: horovodrun would write them on a command line.
        added = {name: self.environment[name] for name in self.config.env} if self.chosen.engine == "gloo" else {}
        added["PYTHONUNBUFFERED"] = self.environment.get("PYTHONUNBUFFERED", "1")
        added["GLIBC_TUNABLES"] = with_huge_pages(self.environment.get("GLIBC_TUNABLES", ""))
        terminal = None
        if number == 0 and sys.stdout.isatty():
            size = shutil.get_terminal_size()
            terminal = {"lines": size.lines, "columns": max(20, size.columns - len("[rank 0] "))}
        # A little more than hvdkit's own limit, whose message says more.
        stopped = seconds(HEARTBEAT) + STOPPED_SECONDS if seconds(HEARTBEAT) else float("inf")
        command = [os.fsencode(word).decode("latin-1") for word in program]  # bytes, in JSON
        return {
            "command": command,
            "environment": added,
            "terminal": terminal,
            "stopped_seconds": stopped,
            "report": report.VARIABLE,
        }


def plain(program: Sequence[str]) -> list[str]:
    """Return a command that does the same and that every engine passes on as it is.

    Example:
        >>> plain(["python", "x.py", "a", ":", "b"])
        ['sh', '-c', 'exec python x.py a : b']
        >>> plain(["python", "x.py", "a b"])
        ['python', 'x.py', 'a b']
    """
    if any(word in _ENGINES_OWN for word in program):
        return ["sh", "-c", f"exec {shlex.join(program)}"]
    return list(program)


def with_huge_pages(tunables: str) -> str:
    """Return the C library's settings, with huge pages for large memory unless they speak of that.

    Gradients and tables are read and written all over, and other ranks copy them page by page. The library reads this
    when a process starts: no program can set it for itself. Source: glibc's manual, "Memory Allocation Tunables".

    Example:
        >>> with_huge_pages("glibc.malloc.arena_max=4")
        'glibc.malloc.arena_max=4:glibc.malloc.hugetlb=1'
    """
    return tunables if "glibc.malloc.hugetlb" in tunables else ":".join([*filter(None, [tunables]), _HUGE_PAGES])


def prepare(config: Run, program: Sequence[str]) -> Job:
    """Find hosts and engine, and refuse what cannot work.

    Raises:
        ValueError: an option, a host or the program is wrong.
        ClusterError: an engine is missing.
    """
    environment = outside_a_job(os.environ)
    seconds(HEARTBEAT)  # refused here rather than on every rank
    explain(program, shutil.which(program[0]) if program else None)
    hosts = _hosts(config, environment)
    if not hosts and config.np is None:
        raise ValueError(describe("-np", "none", "a number of ranks", "hvdkit run -np 4 -- python train.py"))
    if hosts:
        _check_least(config, placed(hosts, config.np))
    chosen = choose(config.engine, config.slurm, EngineFacts())
    return Job(config, hosts, chosen, passed_on(environment, config.env, SECRET), environment)


def _hosts(config: Run, environment: dict[str, str]) -> tuple[Host, ...]:
    """Return the hosts that the options, or the cluster's variables, name; none: this machine."""
    if config.hosts is not None:
        return parse_hosts(config.hosts)
    if config.hostfile is not None:
        return read_hostfile(config.hostfile)
    if config.slurm:
        return slurm_hosts(environment)
    return pbs_hosts(environment) or ()


def _check_least(config: Run, hosts: tuple[Host, ...]) -> None:
    total = sum(host.slots for host in hosts)
    if config.min_np is not None and config.min_np > total:
        raise ValueError(
            describe("--min-np", config.min_np, f"at most the {total} ranks of these hosts", "lower it, or add hosts")
        )


def _only_here(hosts: tuple[Host, ...]) -> bool:
    return len(hosts) == 1 and hosts[0].is_local
