"""The command line of each engine. Pure: functions of a start and of what was found, tested without launching."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdkit.errors import describe
from hvdkit.launch.hosts import Host
from hvdkit.machine.mpi import Mpi

# Passed on by name, where they are set; more by --env. Whatever sounds like a secret needs to be named.
DEFAULT_NAMES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG", "TZ", "TMPDIR")
DEFAULT_PREFIXES = (
    "HOROVOD_", "HVDKIT_", "TF_", "KERAS_", "NCCL_", "OMP_", "XLA_", "CUDA_", "PYTHON", "LC_", "MKL_", "UCX_", "FI_",
)  # fmt: skip
# The engine itself needs these on this host; they are not sent to others.
OWN_NAMES = ("HOME", "USER", "LOGNAME", "SHELL", "TERM", "SSH_AUTH_SOCK", "KRB5CCNAME", "XDG_RUNTIME_DIR")
OWN_PREFIXES = ("OMPI_", "PRTE_", "PMIX_MCA_", "OPAL_", "HYDRA_", "I_MPI_", "MPICH_", "SLURM_", "PBS_", "KUBERNETES_")


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the job: what every engine's command line is made from.

    Attributes:
        np: ranks.
        hosts: hosts and how many ranks each gets; none: this machine alone.
        command: what each rank runs.
        names: environment variables that are passed on.
        interface: network interface between the hosts, or a subnet such as 10.0.0.0/24 where its name differs.
        ssh_args: arguments for ssh.
        root: run by root, which Open MPI refuses unless told.
        program: the engine's path.
        mpi: the MPI that ``program`` is of.
        prefix: where that MPI is installed, on every host.
        slurm_mpi: srun's plugin for this MPI.
        slurm: Slurm starts an engine's helpers on other hosts. Open MPI's mpirun sees by itself that it may.
    """

    np: int
    command: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    names: tuple[str, ...] = ()
    interface: str | None = None
    ssh_args: str = ""
    root: bool = False
    program: str = "mpirun"
    mpi: Mpi = field(default_factory=lambda: Mpi("Open MPI", "4.1"))
    prefix: str | None = None
    slurm_mpi: str = "pmix"
    slurm: bool = False

    @property
    def spread(self) -> bool:
        """Say whether ranks run elsewhere than on this host."""
        return any(not host.is_local for host in self.hosts)


@dataclass(frozen=True)
class CommandLine:
    """What is run, and the variables that only the engine itself reads."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.argv)])


def mpirun(start: Start) -> CommandLine:
    """Return the command line of the mpirun of whichever MPI ``start`` names.

    Raises:
        ValueError: no flags are known for that MPI.

    Example:
        >>> print(mpirun(Start(np=2, command=("python", "train.py"))))
        mpirun -np 2 --bind-to none --map-by slot --oversubscribe python train.py
    """
    vendor = start.mpi.vendor
    if vendor == "Open MPI":
        return open_mpi_5(start) if start.mpi.major >= 5 else open_mpi_4(start)
    if vendor == "MPICH":
        return mpich(start)
    if vendor == "Intel MPI":
        return intel_mpi(start)
    raise ValueError(
        describe("--engine mpirun", f"{start.mpi} at {start.program}", "Open MPI, MPICH or Intel MPI", "--engine gloo")
    )


def open_mpi_4(start: Start) -> CommandLine:
    """Open MPI 4: threads are not bound to one core; more ranks than cores are fine, slots have been checked."""
    argv = [start.program, "-np", str(start.np), "--bind-to", "none", "--map-by", "slot", "--oversubscribe"]
    argv += ["--allow-run-as-root"] if start.root else []
    if start.hosts:
        argv += ["-H", _with_slots(start)]
    if start.spread:
        # As Horovod advises: its own messages by TCP; InfiniBand's old transport fails on many clusters.
        argv += ["--mca", "pml", "ob1", "--mca", "btl", "^openib"]
        argv += ["--prefix", start.prefix] if start.prefix else []
        argv += ["--mca", "plm_rsh_args", start.ssh_args] if start.ssh_args else []
        if start.interface:
            argv += ["--mca", "btl_tcp_if_include", start.interface, "--mca", "oob_tcp_if_include", start.interface]
    return CommandLine((*argv, *_each("-x", start.names), *start.command))


def open_mpi_5(start: Start) -> CommandLine:
    """Open MPI 5: its launcher is PRRTE, which has options of its own and takes no single dashes."""
    argv = [start.program, "-np", str(start.np), "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
    argv += ["--allow-run-as-root"] if start.root else []
    if start.hosts:
        argv += ["--host", _with_slots(start)]
    if start.spread:
        argv += ["--mca", "pml", "ob1"]
        argv += ["--prefix", start.prefix] if start.prefix else []
        argv += ["--prtemca", "plm_ssh_args", start.ssh_args] if start.ssh_args else []
        if start.interface:
            argv += ["--mca", "btl_tcp_if_include", start.interface, "--prtemca", "prte_if_include", start.interface]
    return CommandLine((*argv, *_each("-x", start.names), *start.command))


def mpich(start: Start) -> CommandLine:
    """MPICH: Hydra passes everything on unless it is given a list of names.

    Hydra 5.0 forgets the last variable of its environment on the way to other hosts: here that is one nobody needs.
    """
    argv = [start.program, "-n", str(start.np), "-bind-to", "none"]
    environment = {"HVDKIT_LAST": "1"} if start.spread else {}
    if start.hosts:
        argv += ["-launcher", "slurm" if start.slurm else "ssh", "-hosts", _with_slots(start)]
    if start.spread and start.ssh_args:
        environment = {"HYDRA_LAUNCHER_EXTRA_ARGS": start.ssh_args, **environment}
    if start.spread and start.interface:
        argv += ["-iface", _named(start.interface, "MPICH")]
    return CommandLine((*argv, "-genvlist", ",".join(start.names), *start.command), environment)


def intel_mpi(start: Start) -> CommandLine:
    """Intel MPI: a Hydra whose hosts are given slots in blocks of one number, or one block for each host."""
    argv = [start.program]
    environment = {"I_MPI_PIN": "0"}
    if start.spread:
        if start.ssh_args:
            environment["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = start.ssh_args
        argv += ["-bootstrap", "slurm" if start.slurm else "ssh"]
        if start.interface:
            argv += ["-iface", _named(start.interface, "Intel MPI")]
    argv += ["-genvlist", ",".join(start.names)]
    if not start.hosts:
        return CommandLine((*argv, "-n", str(start.np), *start.command), environment)
    blocks: list[str] = []
    for host in start.hosts:
        blocks += [*([":"] if blocks else []), "-host", host.name, "-n", str(host.slots), *start.command]
    return CommandLine((*argv, *blocks), environment)


def horovodrun(start: Start, *, gloo: bool = False) -> CommandLine:
    """Horovod's own launcher, over MPI or Gloo; it passes its whole environment on, so it is given a small one.

    Raises:
        ValueError: ``ssh_args`` holds what horovodrun cannot pass on.
    """
    argv = [start.program, "--gloo" if gloo else "--mpi", "-np", str(start.np)]
    if start.hosts:
        argv += ["-H", _with_slots(start)]
    if start.spread:
        argv += _horovod_ssh(start.ssh_args, None if gloo else start.prefix, gloo)
        if start.interface:
            argv += ["--network-interfaces", _named(start.interface, "horovodrun")]
    return CommandLine((*argv, *start.command))


def _horovod_ssh(ssh_args: str, prefix: str | None, gloo: bool) -> list[str]:
    """horovodrun takes a port and a key; over MPI it hands any other argument, and the prefix, to mpirun."""
    found, rest = [], []
    words = iter(shlex.split(ssh_args))
    for word in words:
        flag, value = word[:2], word[2:]
        if flag in ("-p", "-i"):
            found += ["--ssh-port" if flag == "-p" else "--ssh-identity-file", value or next(words, "")]
        else:
            rest.append(word)
    if rest and gloo:
        remedy = "put the rest into ~/.ssh/config, or use --engine mpirun"
        raise ValueError(describe("--ssh-args", ssh_args, "-p PORT and -i FILE only, for horovodrun --gloo", remedy))
    if rest:
        found = []
    passed = [*(["--prefix", prefix] if prefix else []), *(["-mca", "plm_rsh_args", ssh_args] if rest else [])]
    return [*found, "--mpi-args", shlex.join(passed)] if passed else found


def srun(start: Start) -> CommandLine:
    """Slurm starts the ranks itself; a rank that fails ends the step."""
    argv = [start.program, "--ntasks", str(start.np), f"--mpi={start.slurm_mpi}", "--kill-on-bad-exit=1"]
    argv += ["--cpu-bind=none", "--unbuffered", "--overlap"]
    if start.hosts:
        argv += ["--nodelist", ",".join(host.name for host in start.hosts), "--nodes", str(len(start.hosts))]
        if len({host.slots for host in start.hosts}) == 1:
            argv += ["--ntasks-per-node", str(start.hosts[0].slots)]
    return CommandLine((*argv, "--export=" + ",".join(start.names), *start.command))


ENGINES = {
    "mpirun": mpirun,
    "horovodrun": horovodrun,
    "gloo": lambda start: horovodrun(start, gloo=True),
    "srun": srun,
}


def passed_on(environment: Mapping[str, str], named: tuple[str, ...], secret) -> tuple[str, ...]:
    """Return the names of the variables that ranks get: those that steer training, and the named ones.

    Args:
        environment: this process's.
        named: by --env.
        secret: a pattern for names that must be named, e.g. KEY or TOKEN.

    Raises:
        ValueError: a named variable is not set.

    Example:
        >>> import re
        >>> passed_on({"TF_X": "1", "TF_TOKEN": "t", "MINE": "2", "OTHER": "3"}, ("MINE",), re.compile("TOKEN"))
        ('MINE', 'TF_X')
    """
    for name in named:
        if name not in environment:
            raise ValueError(describe("--env", name, "a variable that is set", f"export {name}=..., or leave it out"))
    default = {
        name
        for name in environment
        if (name in DEFAULT_NAMES or name.startswith(DEFAULT_PREFIXES)) and not secret.search(name)
    }
    return tuple(sorted(default.union(named)))


def engine_environment(environment: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """Return what the engine itself runs with: what it passes on, and what it needs on this host."""
    return {
        name: value
        for name, value in environment.items()
        if name in names or name in OWN_NAMES or name.startswith(OWN_PREFIXES)
    }


def _with_slots(start: Start) -> str:
    return ",".join(map(str, start.hosts))


def _each(flag: str, names: tuple[str, ...]) -> list[str]:
    return [word for name in names for word in (flag, name)]


def _named(interface: str, engine: str) -> str:
    if "/" in interface:
        expected = f"one name on all hosts, for {engine}"
        raise ValueError(describe("--interface", interface, expected, "use --engine mpirun with Open MPI"))
    return interface
