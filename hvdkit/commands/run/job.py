"""A job that is ready to start: its options, hosts, engine and environment."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hvdkit.commands.run.config import RunConfig
from hvdkit.commands.run.engine_choice import EngineFacts, choose
from hvdkit.commands.run.engines import CommandLine, Engine, LaunchSpec, command_line, select_variables
from hvdkit.commands.run.function_transfer import FunctionServer
from hvdkit.commands.run.hosts import Host, parse_hosts, place_ranks, read_hostfile, slots_of, slurm_hosts
from hvdkit.commands.run.preflight import THIS_HOST, Answer, Network, Remote, check, network, srun_command, ssh_command
from hvdkit.errors import counted, describe
from hvdkit.machine.cores import available_cores
from hvdkit.machine.environment import outside_a_job
from hvdkit.machine.gpus import gpu_device_files
from hvdkit.machine.terminal import is_terminal
from hvdkit.watchdog.job_metrics import JobMetrics
from hvdkit.watchdog.settings import HEARTBEAT, seconds

# Open MPI 4.1 writes two files of 4 MiB, and one per 4 MiB of the ranks' addresses; the file of secret.py is small.
_OPEN_MPI_BYTES = 16 << 20
_OFFER_BYTES = 4 << 10

_MOST_RANKS = 128  # on this host, if no hosts are given
_MOST_RANKS_PER_CORE = 32


@dataclass(frozen=True)
class Job:
    """A job that is ready to start.

    Attributes:
        hosts: all hosts, with their slots.
        names: environment variables to pass to ranks.
        environment: environment of this process, without variables of a job that it may belong to.
        function: serves the function of ``hk.run`` to the ranks, or None.
        metrics: collects the metrics of all attempts, or None.
    """

    config: RunConfig
    hosts: tuple[Host, ...]
    engine: Engine
    names: tuple[str, ...]
    environment: dict[str, str]
    function: FunctionServer | None = None
    metrics: JobMetrics | None = None

    @property
    def by_slurm(self) -> bool:
        """True if Slurm instead of ssh starts processes on other hosts."""
        return self.config.slurm and self.engine.name in ("srun", "mpirun")

    @property
    def sends_variables(self) -> bool:
        """True if sentinels send the variables of --env: horovodrun would put their values on a command line."""
        return self.engine.name in ("gloo", "ray")

    def start_line(self, hosts: tuple[Host, ...]) -> str:
        """Return what is about to start: how many ranks, by which launcher, on which hosts."""
        ranks = slots_of(hosts)
        what = f"starting {counted(ranks, 'rank')} with {self.engine.name}"
        if len(hosts) > 1 or not hosts[0].is_local:
            return f"{what} on {', '.join(map(str, hosts))}"
        cores = available_cores()
        gpus = gpu_device_files()
        if gpus:
            shared = "; ranks share GPUs" if ranks > len(gpus) else ""
            return f"{what} on this host, which has {counted(len(gpus), 'GPU')}{shared}"
        shared = "; ranks share cores, which makes start and steps slower" if ranks > cores else ""
        return f"{what} on this host, which has {counted(cores, 'core')}{shared}"

    @property
    def temporary_bytes(self) -> int:
        """Bytes that the engine writes to the folder for temporary files on each host. srun writes them elsewhere."""
        if self.engine.name in ("mpirun", "horovodrun"):
            is_open_mpi = self.engine.mpi is None or self.engine.mpi.vendor == "Open MPI"
            return _OPEN_MPI_BYTES if is_open_mpi else _OFFER_BYTES
        return _OFFER_BYTES if self.engine.name == "gloo" else 0

    def command_line(
        self, hosts: tuple[Host, ...], command: Sequence[str], interface: str | None, *names: str
    ) -> CommandLine:
        """Return the engine's command line for an attempt; ``names`` are additional variables to pass to ranks."""
        # Inside Slurm, an engine without a list of hosts uses the whole allocation, including lost hosts.
        is_local = len(hosts) == 1 and hosts[0].is_local and not self.by_slurm
        spec = LaunchSpec(
            engine=self.engine,
            np=slots_of(hosts),
            command=tuple(command),
            hosts=() if is_local else hosts,
            names=(*self.names, *names),
            interface=interface,
            ssh_args=self.config.ssh_args,
            root=os.geteuid() == 0,
            slurm=self.by_slurm,
        )
        return command_line(spec)

    def remote(self, connect_timeout: float | None = None) -> Remote:
        """Return the function for commands on other hosts; ssh may take ``connect_timeout`` seconds to connect."""
        if self.by_slurm:
            return srun_command
        timeout = self.config.check_timeout if connect_timeout is None else connect_timeout
        return partial(ssh_command, self.config.ssh_args, timeout)

    def network(self, hosts: tuple[Host, ...], connect_timeout: float | None = None) -> tuple[Network, list[Answer]]:
        """Check ``hosts``; return the network between them, and the answers of all except this host.

        Raises:
            ClusterError: the hosts that answer do not have a common network.
        """
        others = [host.name for host in hosts if not host.is_local]
        if not others:
            return THIS_HOST, []
        if not self.config.check:
            return network(None, self.config.interface), []
        answers = check(others, self.remote(connect_timeout), self.config.check_timeout, self.temporary_bytes)
        good = [answer for answer in answers if answer.problem is None]
        return (network(good, self.config.interface) if good else THIS_HOST), answers

    def program(self, command: Sequence[str], rank: int) -> dict[str, object]:
        """Return the program for the sentinel of a rank: ``command``, its environment and its terminal."""
        added = {name: self.environment[name] for name in self.config.env} if self.sends_variables else {}
        added |= {} if self.function is None else self.function.variables
        added["PYTHONUNBUFFERED"] = self.environment.get("PYTHONUNBUFFERED", "1")
        added["GLIBC_TUNABLES"] = with_huge_pages(self.environment.get("GLIBC_TUNABLES", ""))
        # As hk.init() sets it, which is too late for a program that imports TensorFlow first.
        level = "1" if rank == 0 else "2"
        added["TF_CPP_MIN_LOG_LEVEL"] = self.environment.get("TF_CPP_MIN_LOG_LEVEL", level)
        terminal = None
        if is_terminal(sys.stdout):
            size = shutil.get_terminal_size()
            columns = max(20, size.columns - len("[ranks 0-9] "))
            if rank == 0:
                terminal = {"lines": size.lines, "columns": columns}
            else:  # tables have the same width on all ranks
                added["COLUMNS"] = str(columns)
        arguments = [os.fsencode(argument).decode("latin-1") for argument in command]  # bytes, in JSON
        return {"command": arguments, "environment": added, "terminal": terminal}


def with_huge_pages(tunables: str) -> str:
    """Return glibc's tunables with huge pages for large allocations, unless the user has set that tunable.

    Programs read and write whole gradients and tables, and other ranks copy them page by page. glibc reads the tunables
    when a process starts, so a program cannot set them for itself. Source: glibc's manual, "Memory Allocation
    Tunables".

    Example:
        >>> with_huge_pages("glibc.malloc.arena_max=4")
        'glibc.malloc.arena_max=4:glibc.malloc.hugetlb=1'
    """
    if "glibc.malloc.hugetlb" in tunables:
        return tunables
    return f"{tunables}:glibc.malloc.hugetlb=1".lstrip(":")  # glibc 2.35+; ignored by earlier versions


def prepare(config: RunConfig, program: Sequence[str], variables: Mapping[str, str] | None = None) -> Job:
    """Find hosts and engine, and check the options and the program; ``variables`` are additional ones for all ranks.

    Raises:
        ValueError: an option, a host or the program is invalid.
        ClusterError: an engine is missing.
    """
    environment = {**outside_a_job(os.environ), **(variables or {})}
    seconds(HEARTBEAT)  # validate it here rather than on every rank
    _check_program(program, config)
    hosts = _hosts(config, environment)
    ranks = slots_of(place_ranks(hosts, config.np))
    if config.min_np is not None and config.min_np > ranks:
        expected = f"at most the {ranks} ranks of these hosts"
        raise ValueError(describe("--min-np", config.min_np, expected, "lower it, or add hosts"))
    engine = choose(config.engine, config.slurm, EngineFacts())
    return Job(config, hosts, engine, select_variables(environment, config.env), environment)


def with_interpreter(program: Sequence[str], python: str = sys.executable) -> list[str]:
    """Return the command of a program; a Python script that is not executable gets its interpreter.

    Example:
        >>> with_interpreter(["python", "train.py"])
        ['python', 'train.py']
    """
    words = list(program)
    is_script = bool(words) and words[0].endswith(".py") and Path(words[0]).is_file() and shutil.which(words[0]) is None
    # Options of hvdkit run after the script would be passed to it.
    return [python, *words] if is_script and not {"-np", "--np"} & set(words) else words


def _check_program(program: Sequence[str], config: RunConfig) -> None:
    if not program:
        remedy = "write: hvdkit run -np 4 -- python train.py"
        raise ValueError(describe("program", "none", "a command after --", remedy))
    name = program[0]
    is_here = config.hosts is None and config.hostfile is None and not config.slurm and not config.dry_run
    if shutil.which(name) is not None:
        if is_here and Path(name).name.startswith("python") and len(program) > 1:
            script = Path(program[1])
            if script.suffix == ".py" and not script.exists():  # otherwise every rank would report it
                got = f"{script} (no such file in {Path.cwd()})"
                raise ValueError(describe("program", got, "a script", "check its path"))
        return
    expected = "a command that can be run here"
    if not name.endswith(".py"):
        raise ValueError(describe("program", name, expected, "check its name, or activate its environment"))
    write = f"write: {_command_for_script(program, config)}"
    if is_here and not Path(name).exists():
        remedy = f"check its path, as {Path.cwd()} has no such file, and {write}"
        raise ValueError(describe("program", name, expected, remedy))
    if {"-np", "--np"} & set(program):
        raise ValueError(describe("program", shlex.join(program), "options before the program", write))
    raise ValueError(describe("program", name, expected, write))


def _command_for_script(program: Sequence[str], config: RunConfig) -> str:
    """Return the command that starts a script, whose name may stand before the options of ``hvdkit run``."""
    words = list(program)
    ranks = config.np
    for option in ("-np", "--np"):
        if option in words[:-1]:
            index = words.index(option)
            if ranks is None and words[index + 1].isdecimal():
                ranks = int(words[index + 1])
            del words[index : index + 2]
    return f"hvdkit run -np {ranks or 2} -- python {shlex.join(words)}"


def _hosts(config: RunConfig, environment: dict[str, str]) -> tuple[Host, ...]:
    """Return the hosts from the options or the cluster's variables; otherwise this host with -np slots."""
    if config.hosts is not None:
        return parse_hosts(config.hosts)
    if config.hostfile is not None:
        return read_hostfile(config.hostfile)
    if config.slurm:
        return slurm_hosts(environment)
    if path := environment.get("PBS_NODEFILE"):  # one slot per line
        return read_hostfile(Path(path), "PBS_NODEFILE")
    if config.np is None:
        raise ValueError(describe("-np", "none", "a number of ranks", "write: hvdkit run -np 4 -- python train.py"))
    most = max(_MOST_RANKS, _MOST_RANKS_PER_CORE * available_cores())
    if config.np > most:  # each takes hundreds of megabytes
        got = f"{config.np} on this host, which has {counted(available_cores(), 'core')}"
        remedy = f"correct the number, or write -H localhost:{config.np} to start them all the same"
        raise ValueError(describe("-np", got, f"at most {most}", remedy))
    return (Host(socket.gethostname(), config.np),)
