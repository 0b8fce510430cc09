"""The command line of each engine. Pure functions, which can be tested without launching."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvdkit.commands.run.hosts import Host
from hvdkit.errors import describe
from hvdkit.machine.environment import SECRET
from hvdkit.machine.mpi import Mpi

# Variables passed to ranks if they are set, except those whose names look like secrets; --env adds others.
DEFAULT_NAMES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG", "TZ", "TMPDIR")
DEFAULT_PREFIXES = (
    "HOROVOD_", "HVDKIT_", "TF_", "KERAS_", "NCCL_", "OMP_", "XLA_", "CUDA_", "PYTHON", "LC_", "MKL_", "UCX_", "FI_",
)  # fmt: skip
# Variables that the engine needs on this host; not sent to other hosts.
OWN_NAMES = ("HOME", "USER", "LOGNAME", "SHELL", "TERM", "SSH_AUTH_SOCK", "KRB5CCNAME", "XDG_RUNTIME_DIR")
OWN_PREFIXES = ("OMPI_", "PRTE_", "PMIX_MCA_", "OPAL_", "HYDRA_", "I_MPI_", "MPICH_", "SLURM_", "PBS_", "KUBERNETES_")


@dataclass(frozen=True)
class Engine:
    """An engine on this machine.

    Attributes:
        name: mpirun, horovodrun (over MPI), gloo (horovodrun --gloo) or srun.
        program: path of its program.
        mpi: the MPI that mpirun belongs to, or None if unknown.
        prefix: installation folder of that MPI, the same on every host.
        slurm_mpi: srun's plugin for Horovod's MPI.
    """

    name: str
    program: str
    mpi: Mpi | None = None
    prefix: str | None = None
    slurm_mpi: str = "pmix"


@dataclass(frozen=True, kw_only=True)
class Start:
    """The parameters of one start of the job, for the command line of any engine.

    Attributes:
        engine: starts the ranks.
        np: number of ranks.
        command: the command that each rank runs.
        hosts: hosts and the number of ranks on each; empty: only this machine.
        names: environment variables to pass on.
        interface: network interface between the hosts, or a subnet such as 10.0.0.0/24 if names differ.
        ssh_args: arguments for ssh.
        root: whether the user is root, which Open MPI allows only with an option.
        slurm: whether Slurm starts the engine's daemons on other hosts. Open MPI's mpirun detects this itself.
    """

    engine: Engine
    np: int
    command: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    names: tuple[str, ...] = ()
    interface: str | None = None
    ssh_args: str = ""
    root: bool = False
    slurm: bool = False

    @property
    def is_spread(self) -> bool:
        """True if ranks run on other hosts."""
        return any(not host.is_local for host in self.hosts)

    @property
    def slots(self) -> str:
        """The hosts and their ranks in the format of most engines: ``node1:4,node2:4``."""
        return ",".join(map(str, self.hosts))


@dataclass(frozen=True)
class CommandLine:
    """A command, and variables that only the engine reads."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.argv)])


def command_line(start: Start) -> CommandLine:
    """Return the command line of the engine of ``start``.

    Raises:
        ValueError: the engine does not support ``start``, or its MPI is not supported.

    Example:
        >>> engine = Engine("mpirun", "mpirun", Mpi("Open MPI", "4.1"))
        >>> print(command_line(Start(engine=engine, np=2, command=("python", "train.py"))))
        mpirun -np 2 --bind-to none --map-by slot --oversubscribe python train.py
    """
    engine = start.engine
    if engine.name in ("horovodrun", "gloo"):
        return _horovodrun(start)
    if engine.name == "srun":
        return _srun(start)
    of_vendor = _MPIRUNS.get(engine.mpi.vendor) if engine.mpi else None
    if of_vendor is None:
        got = f"{engine.mpi or 'unknown MPI'} at {engine.program}"
        raise ValueError(describe("--engine mpirun", got, "Open MPI, MPICH or Intel MPI", "--engine gloo"))
    return of_vendor(start)


def _open_mpi(start: Start) -> CommandLine:
    """Open MPI: do not bind threads to one core, and allow more ranks than cores, because slots have been checked.

    From version 5 on, PRRTE starts the ranks, with its own options.
    """
    if start.engine.mpi and start.engine.mpi.major >= 5:
        placement, fabric = ["--map-by", "slot:OVERSUBSCRIBE"], []
        flag, ssh_args, interface = "--prtemca", "plm_ssh_args", "prte_if_include"
    else:  # As Horovod recommends, exclude the old InfiniBand transport, which fails on many clusters.
        placement, fabric = ["--map-by", "slot", "--oversubscribe"], ["--mca", "btl", "^openib"]
        flag, ssh_args, interface = "--mca", "plm_rsh_args", "oob_tcp_if_include"
    argv = [start.engine.program, "-np", str(start.np), "--bind-to", "none", *placement]
    argv += ["--allow-run-as-root"] if start.root else []
    argv += _option("--host", start.slots)
    if start.is_spread:
        argv += ["--mca", "pml", "ob1", *fabric, *_option("--prefix", start.engine.prefix)]
        argv += _option(flag, ssh_args, start.ssh_args)
        argv += _option("--mca", "btl_tcp_if_include", start.interface) + _option(flag, interface, start.interface)
    names = [word for name in start.names for word in ("-x", name)]
    return CommandLine((*argv, *names, *start.command))


def _mpich(start: Start) -> CommandLine:
    """MPICH: Hydra passes on all variables unless it gets a list of names.

    Hydra 5.0 does not send the last variable of its environment to other hosts, so the unused HVDKIT_LAST comes last.
    """
    argv = [start.engine.program, "-n", str(start.np), "-bind-to", "none"]
    environment = {}
    if start.hosts:
        argv += ["-launcher", "slurm" if start.slurm else "ssh", "-hosts", start.slots]
    if start.is_spread:
        environment = {"HYDRA_LAUNCHER_EXTRA_ARGS": start.ssh_args} if start.ssh_args else {}
        environment["HVDKIT_LAST"] = "1"
        argv += _option("-iface", _interface_name(start, "MPICH"))
    return CommandLine((*argv, "-genvlist", ",".join(start.names), *start.command), environment)


def _intel_mpi(start: Start) -> CommandLine:
    """Intel MPI: a variant of Hydra with one block of arguments per host."""
    argv = [start.engine.program]
    environment = {"I_MPI_PIN": "0"}
    if start.is_spread:
        if start.ssh_args:
            environment["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = start.ssh_args
        argv += ["-bootstrap", "slurm" if start.slurm else "ssh"]
        argv += _option("-iface", _interface_name(start, "Intel MPI"))
    argv += ["-genvlist", ",".join(start.names)]
    if not start.hosts:
        return CommandLine((*argv, "-n", str(start.np), *start.command), environment)
    blocks: list[str] = []
    for host in start.hosts:
        blocks += [*([":"] if blocks else []), "-host", host.name, "-n", str(host.slots), *start.command]
    return CommandLine((*argv, *blocks), environment)


_MPIRUNS: Mapping[str, Callable[[Start], CommandLine]] = {
    "Open MPI": _open_mpi,
    "MPICH": _mpich,
    "Intel MPI": _intel_mpi,
}


def _horovodrun(start: Start) -> CommandLine:
    """Horovod's launcher, over MPI or Gloo. It passes on its whole environment, which is therefore kept small."""
    argv = [start.engine.program, "--gloo" if start.engine.name == "gloo" else "--mpi", "-np", str(start.np)]
    argv += _option("-H", start.slots)
    if start.is_spread:
        argv += [*_horovod_ssh(start), *_option("--network-interfaces", _interface_name(start, "horovodrun"))]
    return CommandLine((*argv, *start.command))


def _horovod_ssh(start: Start) -> list[str]:
    """Return horovodrun's ssh options: port and key. Over MPI, mpirun gets the prefix and all other ssh arguments."""
    own, others = [], []
    words = iter(shlex.split(start.ssh_args))
    for word in words:
        flag, value = word[:2], word[2:]
        if flag in ("-p", "-i"):
            own += ["--ssh-port" if flag == "-p" else "--ssh-identity-file", value or next(words, "")]
        else:
            others.append(word)
    if others and start.engine.name == "gloo":
        remedy = "put the rest into ~/.ssh/config, or use --engine mpirun"
        expected = "-p PORT and -i FILE only, for horovodrun --gloo"
        raise ValueError(describe("--ssh-args", start.ssh_args, expected, remedy))
    to_mpirun = _option("--prefix", start.engine.prefix)
    if others:
        own = []
        to_mpirun += ["-mca", "plm_rsh_args", start.ssh_args]
    return own + _option("--mpi-args", shlex.join(to_mpirun))


def _srun(start: Start) -> CommandLine:
    """Slurm starts the ranks itself, and ends the step if a rank fails.

    By default Slurm 22.05 runs PMIx's barrier along a tree that ends on each host. Open MPI relies on it in MPI_Init: a
    rank that still is in MPI_Init crashes when a message arrives. The ring waits for all hosts.
    """
    engine = start.engine
    pmix = () if "SLURM_PMIX_FENCE" in start.names else ("SLURM_PMIX_FENCE=ring",)
    argv = [engine.program, "--ntasks", str(start.np), f"--mpi={engine.slurm_mpi}", "--kill-on-bad-exit=1"]
    argv += ["--cpu-bind=none", "--unbuffered", "--overlap"]
    if start.hosts:
        argv += ["--nodelist", ",".join(host.name for host in start.hosts), "--nodes", str(len(start.hosts))]
        if len({host.slots for host in start.hosts}) == 1:
            argv += ["--ntasks-per-node", str(start.hosts[0].slots)]
    return CommandLine((*argv, "--export=" + ",".join([*pmix, *start.names]), *start.command))


def _option(*words: str | None) -> list[str]:
    """Return an option and its value, or nothing if the value is empty."""
    return [word for word in words if word] if words[-1] else []


def _interface_name(start: Start, engine: str) -> str | None:
    """Return the interface for an engine that does not accept subnets. Raises ValueError for a subnet."""
    if start.interface and "/" in start.interface:
        expected = f"one name on all hosts, for {engine}"
        raise ValueError(describe("--interface", start.interface, expected, "use --engine mpirun with Open MPI"))
    return start.interface


def passed_on(environment: Mapping[str, str], named: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the variables to pass to ranks: those that configure training, and ``named``.

    Args:
        environment: environment of this process.
        named: names from --env. Variables whose names look like secrets are passed on only if named here.

    Raises:
        ValueError: a variable of ``named`` is not set.

    Example:
        >>> passed_on({"TF_X": "1", "TF_TOKEN": "t", "MINE": "2", "OTHER": "3"}, ("MINE",))
        ('MINE', 'TF_X')
    """
    for name in named:
        if name not in environment:
            raise ValueError(describe("--env", name, "a variable that is set", f"export {name}=..., or leave it out"))
    default = {
        name
        for name in environment
        if (name in DEFAULT_NAMES or name.startswith(DEFAULT_PREFIXES)) and not SECRET.search(name)
    }
    return tuple(sorted(default.union(named)))


def engine_environment(environment: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """Return the engine's environment: the variables to pass on, and those that it needs on this host."""
    return {
        name: value
        for name, value in environment.items()
        if name in names or name in OWN_NAMES or name.startswith(OWN_PREFIXES)
    }
