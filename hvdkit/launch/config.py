"""The options of ``hvdkit run``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from tyro.conf import UseAppendAction, arg

from hvdkit.errors import describe

EngineKind = Literal["auto", "mpirun", "horovodrun", "gloo", "srun"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Start a program on many ranks: hvdkit run -np 4 -- python train.py.

    Raises:
        ValueError: an option is none of its choices, or contradicts another.

    Example:
        >>> Run(np=4).engine
        'auto'
    """

    np: Annotated[int | None, arg(aliases=["-np"])] = None
    """Ranks to start; by default as many as the hosts have slots."""
    hosts: Annotated[str | None, arg(aliases=["-H"])] = None
    """Hosts and their slots, e.g. node1:4,node2:4; a host without a number has one slot."""
    hostfile: Path | None = None
    """File with a host a line: `node1 slots=4` or `node1:4`."""
    slurm: bool = False
    """Take hosts and slots from this Slurm allocation."""
    k8s: bool = False
    """Make an MPIJob for Kubernetes (kubeflow.org/v2beta1); needs --image."""
    engine: EngineKind = "auto"
    """What starts the ranks: mpirun, horovodrun (over MPI), gloo (horovodrun --gloo) or srun; auto takes what Horovod
    was built for."""
    dry_run: bool = False
    """Print the command (or the manifest) that would run, and start nothing."""
    max_restarts: int = 0
    """Start again so many times after a failure."""
    min_np: int | None = None
    """Go on with so many ranks at least where hosts are lost; by default all of -np."""
    env: UseAppendAction[tuple[str, ...]] = ()
    """Name of an environment variable to pass on (--env A --env B); never its value."""
    logs: Path | None = None
    """Folder for a log of each rank: rank-0.log, rank-1.log, ..."""
    interface: str | None = None
    """Network interface by which hosts reach each other; by default it is found over ssh, or by srun."""
    ssh_args: str = ""
    """Arguments for ssh, e.g. --ssh-args="-p 2222 -i key"; the engine gets them, too."""
    check: bool = True
    """Look at all hosts before the start, over ssh, or with --slurm by srun: reachable, the same Python and the same
    versions."""
    check_timeout: float = 15.0
    """Seconds after which a host that does not answer counts as unreachable."""
    grace: float = 30.0
    """Seconds that ranks have to save after SIGTERM or Ctrl-C, before they are killed."""
    backoff: float = 1.0
    """Seconds before the first restart; doubled at each further one, up to a minute."""
    image: str | None = None
    """Container image with hvdkit and the program, for --k8s."""
    name: str = "hvdkit"
    """Name of the MPIJob, for --k8s."""
    slots_per_worker: int = 1
    """Ranks in a pod, for --k8s; each gets a GPU with --gpu."""
    gpu: bool = False
    """Ask for a GPU for each rank, for --k8s."""

    def __post_init__(self) -> None:
        if self.engine not in get_args(EngineKind):
            raise ValueError(describe("--engine", self.engine, " or ".join(get_args(EngineKind)), "leave it out"))
        self._check_sources()
        for name, least in (("np", 1), ("min_np", 1), ("max_restarts", 0), ("slots_per_worker", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                flag = "-np" if name == "np" else f"--{name.replace('_', '-')}"
                raise ValueError(describe(flag, value, f"at least {least}", "pass another number"))
        for name in ("check_timeout", "grace", "backoff"):
            if getattr(self, name) < 0:
                raise ValueError(describe(f"--{name}", getattr(self, name), "0 or more seconds", "leave it out"))
        if self.min_np is not None and self.np is not None and self.min_np > self.np:
            raise ValueError(describe("--min-np", self.min_np, f"at most -np ({self.np})", "lower it, or raise -np"))
        for name in self.env:
            if not name.replace("_", "a").isalnum() or name[0].isdigit():
                shown = name.partition("=")[0] + "=..." if "=" in name else name
                remedy = "export the variable, and pass its name only: values would be seen on the command line"
                raise ValueError(describe("--env", shown, "the name of a variable", remedy))

    def _check_sources(self) -> None:
        given = {
            "-H": self.hosts is not None,
            "--hostfile": self.hostfile is not None,
            "--slurm": self.slurm,
            "--k8s": self.k8s,
        }
        named = [flag for flag, is_given in given.items() if is_given]
        if len(named) > 1:
            raise ValueError(describe("hosts", " and ".join(named), "one of them", "leave the others out"))
        if self.k8s and self.image is None:
            raise ValueError(describe("--image", "none", "a container image, for --k8s", "pass --image NAME"))
