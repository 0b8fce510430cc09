"""The options of ``hvdkit run``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from tyro.conf import UseAppendAction, arg

from hvdkit.commands.options import UNSET, check_minimum
from hvdkit.commands.run.output import Shown
from hvdkit.errors import describe
from hvdkit.machine.launcher import ALONE, launched_rank
from hvdkit.watchdog.metrics_server import MetricsAddress, address_from_environment

EngineKind = Literal["auto", "mpirun", "horovodrun", "gloo", "srun"]
# The minimum of each number.
_MINIMUM: Mapping[str, int] = {
    "np": 1, "min_np": 1, "max_restarts": 0, "slots_per_worker": 1, "check_timeout": 0, "grace": 0, "backoff": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Start a program on many ranks: on this machine, on several hosts, under Slurm or on Kubernetes.

    The program begins after `--`, or at the first word that is not an option; `train.py` stands for `python train.py`.
    The last line names the rank that failed first, and why. Exit code: 0 if all ranks ended with 0; otherwise that of
    the first rank that failed; 2 for wrong usage; 75 if all ranks have saved after SIGTERM or SIGHUP, otherwise 143 or
    129; 130 after Ctrl-C.

    For example:
        hvdkit run -np 4 -- python train.py                        this machine
        hvdkit run -H node1:4,node2:4 -- python train.py           two hosts, over ssh
        hvdkit run --slurm -- python train.py                      in sbatch or salloc
        hvdkit run -np 4 --max-restarts 3 -- python train.py       continues after failures
        hvdkit run -np 4 --dry-run -- python train.py              starts nothing

    See `hvdkit docs launching`.

    Raises:
        ValueError: an option is invalid, or contradicts another.

    Example:
        >>> RunConfig(np=4).engine
        'auto'
    """

    np: Annotated[int | None, arg(aliases=["-np"], help_behavior_hint="")] = None
    """Number of ranks; default: the slots of all hosts."""
    hosts: Annotated[str | None, arg(aliases=["-H"], help_behavior_hint="")] = None
    """Hosts and their slots, e.g. node1:4,node2:4; a host without a number has one slot."""
    hostfile: Annotated[Path | None, UNSET] = None
    """File with one host per line: `node1 slots=4` or `node1:4`."""
    slurm: bool = False
    """Take hosts and slots from this Slurm allocation."""
    k8s: bool = False
    """Create an MPIJob for Kubernetes (kubeflow.org/v2beta1); needs --image."""
    engine: EngineKind = "auto"
    """Launcher of the ranks: mpirun, horovodrun (over MPI), gloo (horovodrun --gloo) or srun; auto selects the one
    that suits Horovod's build."""
    dry_run: bool = False
    """Print the command (or the manifest) without starting it."""
    max_restarts: int = 0
    """Number of restarts after failures."""
    min_np: Annotated[int | None, UNSET] = None
    """Minimum number of ranks for a restart after hosts are lost; default: -np."""
    env: UseAppendAction[tuple[str, ...]] = ()
    """Name (not value) of an environment variable to pass on: --env A --env B."""
    logs: Annotated[Path | None, UNSET] = None
    """Folder for a log of each rank: rank-0.log, rank-1.log, ..."""
    output: Annotated[Shown | None, UNSET] = None
    """Which lines to show: of all ranks (all); lines that ranks write alike once, with these ranks (merged); of rank 0
    (rank0); none, only in files (files, with --logs). Default: merged on a terminal, otherwise all."""
    interface: Annotated[str | None, UNSET] = None
    """Network interface between the hosts; default: the one that ssh or srun uses."""
    ssh_args: str = ""
    """Arguments for ssh, e.g. --ssh-args="-p 2222 -i key"; also passed to the engine."""
    check: bool = True
    """Before the start, check over ssh (srun with --slurm) that all hosts are reachable, and have the same Python and
    the same versions."""
    check_timeout: float = 15.0
    """Seconds after which a host that has not answered counts as unreachable."""
    grace: float = 30.0
    """Seconds for ranks to save after SIGTERM or Ctrl-C before they are killed."""
    metrics_port: Annotated[str | None, UNSET] = None
    """Port of 127.0.0.1, or HOST:PORT, on which to serve metrics of the job to Prometheus; 0: a free port. Default:
    HVDKIT_METRICS, otherwise none."""
    backoff: float = 1.0
    """Seconds before the first restart; doubled for each further restart, up to a minute."""
    image: Annotated[str | None, UNSET] = None
    """Container image with hvdkit and the program, for --k8s."""
    name: str = "hvdkit"
    """Name of the MPIJob, for --k8s."""
    slots_per_worker: int = 1
    """Ranks per pod, for --k8s; with --gpu each gets a GPU."""
    gpu: bool = False
    """Request a GPU for each rank, for --k8s."""

    @property
    def metrics_address(self) -> MetricsAddress | None:
        """Where to serve metrics, or None. A job that a rank of another one starts does not inherit its address."""
        if self.metrics_port is not None:
            return MetricsAddress.parse("--metrics-port", self.metrics_port)
        return address_from_environment() if launched_rank() is ALONE else None

    def __post_init__(self) -> None:
        if self.engine not in get_args(EngineKind):
            raise ValueError(describe("--engine", self.engine, " or ".join(get_args(EngineKind)), "leave it out"))
        sources = {"-H": self.hosts, "--hostfile": self.hostfile, "--slurm": self.slurm, "--k8s": self.k8s}
        named = [flag for flag, value in sources.items() if value not in (None, False)]
        if len(named) > 1:
            raise ValueError(describe("hosts", " and ".join(named), "one of them", "leave the others out"))
        if self.output == "files" and self.logs is None:
            raise ValueError(describe("--output", "files, without --logs", "a folder for them", "pass --logs DIR"))
        if self.k8s and self.image is None:
            raise ValueError(describe("--image", "none", "a container image, for --k8s", "pass --image NAME"))
        check_minimum(self, _MINIMUM)
        if self.min_np is not None and self.np is not None and self.min_np > self.np:
            raise ValueError(describe("--min-np", self.min_np, f"at most -np ({self.np})", "lower it, or raise -np"))
        for name in self.env:
            if not name.isidentifier():
                shown = name.partition("=")[0] + "=..." if "=" in name else name
                remedy = "export the variable, and pass its name only: values would be seen on the command line"
                raise ValueError(describe("--env", shown, "the name of a variable", remedy))
        if self.metrics_port is not None:
            MetricsAddress.parse("--metrics-port", self.metrics_port)
        try:
            shlex.split(self.ssh_args)
        except ValueError as error:
            got = f"{self.ssh_args} ({error})"
            raise ValueError(describe("--ssh-args", got, "arguments as for a shell", "close the quotation")) from None
