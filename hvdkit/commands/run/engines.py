"""The command line of each engine. Pure functions, which can be tested without launching."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.commands.run.hosts import Host
from hvdkit.errors import describe
from hvdkit.machine.environment import SECRET
from hvdkit.machine.mpi import Mpi

# Variables passed to ranks if they are set, except those whose names look like secrets; --env adds others.
DEFAULT_NAMES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG", "TZ", "TMPDIR")
DEFAULT_PREFIXES = (
    "HOROVOD_", "HVDKIT_", "TF_", "KERAS_", "NCCL_", "OMP_", "XLA_", "CUDA_", "PYTHON", "LC_", "MKL_", "UCX_", "FI_",
    "WANDB_", "MLFLOW_", "AWS_", "AZURE_", "GOOGLE_",
)  # fmt: skip
# Variables that the engine needs on this host; not sent to other hosts.
ENGINE_NAMES = ("HOME", "USER", "LOGNAME", "SHELL", "TERM", "SSH_AUTH_SOCK", "KRB5CCNAME", "XDG_RUNTIME_DIR")
ENGINE_PREFIXES = (
    "OMPI_", "PRTE_", "PMIX_MCA_", "OPAL_", "HYDRA_", "I_MPI_", "MPICH_", "SLURM_", "PBS_", "KUBERNETES_",
    "RAY_AUTH", "RAY_TLS", "RAY_USE_TLS",
)  # fmt: skip


def function_process(kind: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line of a process of ``hk.run``, see ``function_process.py``."""
    return (sys.executable, os.path.realpath(Path(__file__).with_name("function_process.py")), kind, *arguments)


@dataclass(frozen=True)
class Engine:
    """An engine on this machine.

    Attributes:
        name: mpirun, horovodrun (over MPI), gloo (horovodrun --gloo), srun or ray.
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
class LaunchSpec:
    """The parameters of one start of the job, for the command line of any engine.

    Attributes:
        hosts: hosts and the number of ranks on each; empty: only this machine.
        names: environment variables to pass on.
        interface: network interface between the hosts, or a subnet such as 10.0.0.0/24 if names differ.
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


def command_line(spec: LaunchSpec) -> CommandLine:
    """Return the command line of the engine of ``spec``.

    Raises:
        ValueError: the engine does not support ``spec``, or its MPI is not supported.

    Example:
        >>> engine = Engine("mpirun", "mpirun", Mpi("Open MPI", "4.1"))
        >>> print(command_line(LaunchSpec(engine=engine, np=2, command=("python", "train.py"))))
        mpirun -np 2 --bind-to none --map-by slot --oversubscribe python train.py
    """
    engine = spec.engine
    if engine.name in ("horovodrun", "gloo"):
        return _horovodrun(spec)
    if engine.name == "srun":
        return _srun(spec)
    mpirun = _MPIRUNS.get(engine.mpi.vendor) if engine.mpi else None
    if mpirun is None:
        got = f"{engine.mpi or 'unknown MPI'} at {engine.program}"
        raise ValueError(describe("--engine mpirun", got, "Open MPI, MPICH or Intel MPI", "--engine gloo"))
    return mpirun(spec)


def _open_mpi(spec: LaunchSpec) -> CommandLine:
    """Open MPI: do not bind threads to one core, and allow more ranks than cores, because slots have been checked.

    From version 5 on, PRRTE starts the ranks, with its own options.
    """
    if spec.engine.mpi and spec.engine.mpi.major >= 5:
        placement = ["--map-by", "slot:OVERSUBSCRIBE"]
        fabric = []
        flag = "--prtemca"
        ssh_args = "plm_ssh_args"
        interface = "prte_if_include"
    else:  # As Horovod recommends, exclude the old InfiniBand transport, which fails on many clusters.
        placement = ["--map-by", "slot", "--oversubscribe"]
        fabric = ["--mca", "btl", "^openib"]
        flag = "--mca"
        ssh_args = "plm_rsh_args"
        interface = "oob_tcp_if_include"
    argv = [spec.engine.program, "-np", str(spec.np), "--bind-to", "none", *placement]
    argv += ["--allow-run-as-root"] if spec.root else []
    argv += _option("--host", spec.slots)
    if spec.is_spread:
        argv += ["--mca", "pml", "ob1", *fabric, *_option("--prefix", spec.engine.prefix)]
        argv += _option(flag, ssh_args, spec.ssh_args)
        argv += _option("--mca", "btl_tcp_if_include", spec.interface) + _option(flag, interface, spec.interface)
    names = [argument for name in spec.names for argument in ("-x", name)]
    return CommandLine((*argv, *names, *spec.command))


def _mpich(spec: LaunchSpec) -> CommandLine:
    """MPICH: Hydra passes on all variables unless it gets a list of names.

    Hydra 5.0 does not send the last variable of its environment to other hosts, so the unused HVDKIT_LAST comes last.
    """
    argv = [spec.engine.program, "-n", str(spec.np), "-bind-to", "none"]
    environment = {}
    if spec.hosts:
        argv += ["-launcher", "slurm" if spec.slurm else "ssh", "-hosts", spec.slots]
    if spec.is_spread:
        environment = {"HYDRA_LAUNCHER_EXTRA_ARGS": spec.ssh_args} if spec.ssh_args else {}
        environment["HVDKIT_LAST"] = "1"
        argv += _option("-iface", _interface_name(spec, "MPICH"))
    return CommandLine((*argv, "-genvlist", ",".join(spec.names), *spec.command), environment)


def _intel_mpi(spec: LaunchSpec) -> CommandLine:
    """Intel MPI: a variant of Hydra with one block of arguments per host."""
    argv = [spec.engine.program]
    environment = {"I_MPI_PIN": "0"}
    if spec.is_spread:
        if spec.ssh_args:
            environment["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = spec.ssh_args
        argv += ["-bootstrap", "slurm" if spec.slurm else "ssh"]
        argv += _option("-iface", _interface_name(spec, "Intel MPI"))
    argv += ["-genvlist", ",".join(spec.names)]
    if not spec.hosts:
        return CommandLine((*argv, "-n", str(spec.np), *spec.command), environment)
    blocks: list[str] = []
    for host in spec.hosts:
        blocks += [*([":"] if blocks else []), "-host", host.name, "-n", str(host.slots), *spec.command]
    return CommandLine((*argv, *blocks), environment)


_MPIRUNS: Mapping[str, Callable[[LaunchSpec], CommandLine]] = {
    "Open MPI": _open_mpi,
    "MPICH": _mpich,
    "Intel MPI": _intel_mpi,
}


def _horovodrun(spec: LaunchSpec) -> CommandLine:
    """Horovod's launcher, over MPI or Gloo. It passes on its whole environment, which is therefore kept small."""
    argv = [spec.engine.program, "--gloo" if spec.engine.name == "gloo" else "--mpi", "-np", str(spec.np)]
    argv += _option("-H", spec.slots)
    if spec.is_spread:
        argv += [*_horovod_ssh(spec), *_option("--network-interfaces", _interface_name(spec, "horovodrun"))]
    return CommandLine((*argv, *spec.command))


def _horovod_ssh(spec: LaunchSpec) -> list[str]:
    """Return horovodrun's ssh options: port and key. Over MPI, mpirun gets other arguments."""
    options = []
    others = []
    arguments = iter(shlex.split(spec.ssh_args))
    for argument in arguments:
        flag = argument[:2]
        value = argument[2:]
        if flag in ("-p", "-i"):
            options += ["--ssh-port" if flag == "-p" else "--ssh-identity-file", value or next(arguments, "")]
        else:
            others.append(argument)
    if others and spec.engine.name == "gloo":
        remedy = "put the rest into ~/.ssh/config, or use --engine mpirun"
        expected = "-p PORT and -i FILE only, for horovodrun --gloo"
        raise ValueError(describe("--ssh-args", spec.ssh_args, expected, remedy))
    mpi_args = _option("--prefix", spec.engine.prefix)
    if others:
        options = []
        mpi_args += ["-mca", "plm_rsh_args", spec.ssh_args]
    return options + _option("--mpi-args", shlex.join(mpi_args))


def _srun(spec: LaunchSpec) -> CommandLine:
    """Slurm starts the ranks itself, and ends the step if a rank fails.

    By default Slurm 22.05 runs PMIx's barrier along a tree that ends on each host. Open MPI relies on it in MPI_Init: a
    rank that is still in MPI_Init crashes when a message arrives. The ring waits for all hosts.
    """
    engine = spec.engine
    pmix = () if "SLURM_PMIX_FENCE" in spec.names else ("SLURM_PMIX_FENCE=ring",)
    argv = [engine.program, "--ntasks", str(spec.np), f"--mpi={engine.slurm_mpi}", "--kill-on-bad-exit=1"]
    argv += ["--cpu-bind=none", "--unbuffered", "--overlap"]
    if spec.hosts:
        argv += ["--nodelist", ",".join(host.name for host in spec.hosts), "--nodes", str(len(spec.hosts))]
        if len({host.slots for host in spec.hosts}) == 1:
            argv += ["--ntasks-per-node", str(spec.hosts[0].slots)]
    return CommandLine((*argv, "--export=" + ",".join([*pmix, *spec.names]), *spec.command))


def _option(*arguments: str | None) -> list[str]:
    """Return an option and its value, or nothing if the value is empty."""
    return [argument for argument in arguments if argument] if arguments[-1] else []


def _interface_name(spec: LaunchSpec, engine: str) -> str | None:
    """Return the interface for an engine that does not accept subnets. Raises ValueError for a subnet."""
    if spec.interface and "/" in spec.interface:
        expected = f"one name on all hosts, for {engine}"
        raise ValueError(describe("--interface", spec.interface, expected, "use --engine mpirun with Open MPI"))
    return spec.interface


def select_variables(environment: Mapping[str, str], named: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the variables to pass to ranks: those that configure training, and ``named``.

    Variables whose names look like secrets are passed on only if they are in ``named``, the names from --env.

    Raises:
        ValueError: a variable of ``named`` is not set.

    Example:
        >>> select_variables({"TF_X": "1", "TF_TOKEN": "t", "MINE": "2", "OTHER": "3"}, ("MINE",))
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
        if name in names or name in ENGINE_NAMES or name.startswith(ENGINE_PREFIXES)
    }
