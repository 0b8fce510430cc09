"""The engine of ``hk.ray.run``: starts a sentinel for each rank in an actor, and waits for their ends.

It plays the part of ``horovodrun --gloo``: it numbers the ranks node by node, and runs the server by which their Gloo
finds each other. If this process ends, Ray ends the actors, and the kernel their sentinels.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TextIO

from hvdkit.commands.run.ray_job import RayLaunch

if TYPE_CHECKING:
    from horovod.runner.common.util.hosts import SlotInfo
    from ray.actor import ActorHandle


class RankActor:
    """A rank's place in the cluster. Ray sends this class to its nodes by value."""

    def place(self) -> tuple[str, str]:
        """Return the IP address of this node, and the name of the interface with it."""
        import ray

        from hvdkit.machine.interfaces import own_addresses

        address = ray.util.get_node_ip_address()
        names = [own.interface for own in own_addresses() if own.address == address]
        return address, names[0] if names else ""

    def run(self, command: Sequence[str], variables: Mapping[str, str], folder: str) -> int:
        """Run a rank's sentinel to its end; return its exit code."""
        import ctypes  # noqa: F401 - of signal_at_parent_end, which must not import it in the forked child
        import os
        import subprocess

        from hvdkit.machine.processes import signal_at_parent_end

        return subprocess.run(
            command,
            env={**os.environ, **variables},
            cwd=folder if os.path.isdir(folder) else None,  # noqa: PTH112
            stdin=subprocess.DEVNULL,
            check=False,
            preexec_fn=signal_at_parent_end,
        ).returncode


def run_engine(text: str) -> NoReturn:
    """Start the ranks of a :class:`RayLaunch`, and exit with the first exit code that is not 0."""
    import ray

    launch = RayLaunch.parse(text)
    reservation = launch.reservation
    reports = os.fdopen(os.dup(1), "w")  # standard output is for reports about ranks alone: Ray writes to it, too
    os.dup2(2, 1)
    ray.init(address=reservation.address, namespace=reservation.namespace, log_to_driver=False, logging_level="ERROR")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    actors = _actors(launch)
    try:
        sys.exit(_run_ranks(launch, actors, reports))
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.shutdown()


def _actors(launch: RayLaunch) -> list[ActorHandle]:
    """Return an actor for each rank, each in its bundle of the placement group."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    resources = dict(launch.reservation.resources)
    options = {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "memory": resources.pop("memory", None),
        "resources": resources,
    }
    group = ray.util.get_placement_group(launch.reservation.group)
    bundles = (PlacementGroupSchedulingStrategy(group, index) for index in range(launch.np))
    remote = ray.remote(RankActor)
    return [remote.options(**options, scheduling_strategy=bundle).remote() for bundle in bundles]


def _run_ranks(launch: RayLaunch, actors: Sequence[ActorHandle], reports: TextIO) -> int:
    """Run the ranks in ``actors`` to their ends, and report those that die; return the first code that is not 0."""
    import ray
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    places = ray.get([actor.place.remote() for actor in actors])
    slots = _slots([address for address, _ in places])
    server = RendezvousServer()
    common = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": launch.reservation.node,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.start()),
    }
    server.init([slot for slot, _ in slots])
    chosen = {name: os.environ[name] for name in launch.names if name in os.environ}
    ranks = {}
    for slot, index in slots:
        interface = {"HOROVOD_GLOO_IFACE": places[index][1]} if places[index][1] else {}
        variables = {**interface, **chosen, **common, **create_slot_env_vars(slot)}
        ranks[actors[index].run.remote(list(launch.command), variables, launch.folder)] = slot.rank
    code = 0
    while ranks:
        done, _ = ray.wait(list(ranks))
        rank = ranks.pop(done[0])
        try:
            ended = ray.get(done[0])
        except ray.exceptions.RayActorError as error:
            print(f"the Ray actor of rank {rank} died: {reason(str(error))}", file=reports, flush=True)
            ended = 1
        code = code or ended
    return code


def _slots(addresses: Sequence[str]) -> list[tuple[SlotInfo, int]]:
    """Return Horovod's description of each rank, node by node, and the index of its address."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

    counts = Counter(addresses)  # in the order of their first occurrence
    slots = get_host_assignments([HostInfo(address, count) for address, count in counts.items()], len(addresses))
    indices = [index for node in counts for index, address in enumerate(addresses) if address == node]
    return list(zip(slots, indices, strict=True))


def reason(message: str) -> str:
    """Return the reason in Ray's message about a dead actor: its last line, without general advice.

    Example:
        >>> reason("The actor died.\\n\\tpid: 7\\nWorker exit detail: It was killed. Some common causes include: ...")
        'It was killed'
    """
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith("\t")]
    last = lines[-1] if lines else "unknown"
    return last.rpartition("exit detail: ")[2].partition(" Some common causes")[0].rstrip(".")
