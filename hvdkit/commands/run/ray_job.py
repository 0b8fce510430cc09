"""A job whose ranks are actors of a Ray cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hvdkit.commands.run.engines import CommandLine, Engine, function_process
from hvdkit.commands.run.hosts import Host, slots_of
from hvdkit.commands.run.job import Job
from hvdkit.commands.run.preflight import Answer, Network
from hvdkit.errors import counted


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
        reservation: where.
        np: number of ranks.
        command: of each rank.
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

    @property
    def temporary_bytes(self) -> int:
        """Ray's nodes are running, so the engine needs no folder for temporary files."""
        return 0

    def start_line(self, hosts: tuple[Host, ...]) -> str:
        """Return what is about to start."""
        each = ", ".join(f"{amount:g} {name}" for name, amount in self.reservation.resources.items())
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
    values = {field.name: getattr(job, field.name) for field in fields(job)}
    return RayJob(**values | {"engine": Engine("ray", sys.executable)}, reservation=reservation)
