"""A job whose ranks are actors of a Ray cluster, and the reservation of its resources by the caller."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from hvdkit.commands.run.engines import CommandLine, Engine, function_process
from hvdkit.commands.run.hosts import Host, slots_of
from hvdkit.commands.run.job import Job
from hvdkit.commands.run.preflight import Answer, Network
from hvdkit.errors import ClusterError, counted, describe

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


@dataclass(frozen=True, kw_only=True)
class RayReservation:
    """Resources of a Ray cluster that are reserved for a job.

    Attributes:
        address: of the cluster's GCS.
        namespace: of the placement group.
        group: the name of the placement group.
        resources: of each rank.
        node: the IP address of this node.
    """

    address: str
    namespace: str
    group: str
    resources: Mapping[str, float]
    node: str


@dataclass(frozen=True, kw_only=True)
class RayLaunch:
    """What the engine starts.

    Attributes:
        names: variables of the engine's environment to pass to ranks.
        folder: the working folder, if a node has it.
    """

    reservation: RayReservation
    np: int
    command: Sequence[str]
    names: Sequence[str]
    folder: str

    @staticmethod
    def parse(text: str) -> RayLaunch:
        """Return the launch with this text."""
        values = json.loads(text)
        values["reservation"] = RayReservation(**values["reservation"])
        return RayLaunch(**values)

    def __str__(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class RayJob(Job):
    """A job in a part of a Ray cluster."""

    reservation: RayReservation

    def start_line(self, hosts: tuple[Host, ...]) -> str:
        """Return what is about to start."""
        each = _shown(self.reservation.resources)
        return f"starting {counted(slots_of(hosts), 'rank')} as Ray actors, each with {each}"

    def network(self, hosts: tuple[Host, ...], connect_timeout: float | None = None) -> tuple[Network, list[Answer]]:
        """Return the network in which Ray's nodes reach this one."""
        return Network(None, (self.reservation.node,)), []

    def command_line(
        self, hosts: tuple[Host, ...], command: Sequence[str], interface: str | None, *names: str
    ) -> CommandLine:
        """Return the command line of the engine."""
        launch = RayLaunch(
            reservation=self.reservation,
            np=slots_of(hosts),
            command=tuple(command),
            names=(*(name for name in self.names if name not in self.config.env), *names),
            folder=str(Path.cwd()),
        )
        return CommandLine(function_process("ray", str(launch)), {"PYTHONUNBUFFERED": "1"})


def on_ray(job: Job, reservation: RayReservation) -> RayJob:
    """Return a job that runs in a part of a Ray cluster. Horovod's Gloo connects its ranks."""
    values = vars(job) | {"engine": Engine("ray", sys.executable)}
    return RayJob(**values, reservation=reservation)


def check_resources(resources: object) -> dict[str, float]:
    """Return the resources of each rank; None: one CPU.

    Raises:
        TypeError: they are not a dict of numbers.
        ValueError: a number is not positive, or they are empty.
    """
    if resources is None:
        return {"CPU": 1.0}
    remedy = 'write e.g. resources={"CPU": 4, "GPU": 1}'
    if not isinstance(resources, Mapping):
        raise TypeError(describe("resources", resources, "a dict of numbers by name, of each rank", remedy))
    for name, amount in resources.items():
        if not isinstance(name, str) or isinstance(amount, bool) or not isinstance(amount, (int, float)):
            raise TypeError(describe("resources", dict(resources), "a dict of numbers by name, of each rank", remedy))
        if not amount > 0:
            raise ValueError(describe(f"resources[{name!r}]", amount, "a positive number", remedy))
    if not resources:
        raise ValueError(describe("resources", resources, "at least one", remedy))
    return {name: float(amount) for name, amount in resources.items()}


def connected() -> ModuleType:
    """Return Ray, connected to a cluster; without one, Ray starts one on this machine.

    Raises:
        ClusterError: Ray is not installed, or this process uses Ray Client.
    """
    try:
        import ray
    except ImportError as error:
        got = f"no Ray ({error})"
        raise ClusterError(describe("hk.ray.run", got, "Ray in this environment", "pip install ray")) from error
    if not ray.is_initialized():
        ray.init()
    if ray.util.client.ray.is_connected():
        remedy = "start this program on a node of the cluster, e.g. by `ray job submit`"
        raise ClusterError(describe("hk.ray.run", "a connection of Ray Client (ray://)", "a driver of Ray", remedy))
    module: ModuleType = ray
    return module


@contextmanager
def reserved(np: int, resources: Mapping[str, float], strategy: Strategy, seconds: float) -> Iterator[RayReservation]:
    """Reserve resources for ``np`` ranks inside the context.

    Raises:
        ClusterError: they are not free within ``seconds``.
    """
    ray = connected()
    name = f"hvdkit-{secrets.token_hex(8)}"
    group = ray.util.placement_group([dict(resources)] * np, strategy=strategy, name=name)
    try:
        if not group.wait(seconds):
            each = _shown(resources)
            cluster = f"in all {_shown(ray.cluster_resources(), resources)}"
            free = f"free {_shown(ray.available_resources(), resources)}"
            got = f"{counted(np, 'rank')} with {each} each ({strategy}), and a cluster that has {cluster}, {free}"
            expected = f"as much within {seconds:g} s"
            remedy = (
                "lower num_workers or resources, end other jobs, add nodes, or raise wait= for a cluster that grows"
            )
            raise ClusterError(describe("num_workers", got, expected, remedy))
        context = ray.get_runtime_context()
        yield RayReservation(
            address=context.gcs_address,
            namespace=context.namespace,
            group=name,
            resources=dict(resources),
            node=ray.util.get_node_ip_address(),
        )
    finally:
        ray.util.remove_placement_group(group)


def _shown(amounts: Mapping[str, float], names: Mapping[str, float] | None = None) -> str:
    """Return amounts of resources, of those that are in ``names``.

    Example:
        >>> _shown({"CPU": 2.0, "node:1": 1.0}, {"CPU": 4.0, "GPU": 1.0})
        '2 CPU, 0 GPU'
    """
    return ", ".join(f"{amounts.get(name, 0.0):g} {name}" for name in (amounts if names is None else names))
