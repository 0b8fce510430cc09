"""The caller's side of ``hk.ray.run``: connects to a Ray cluster, and reserves resources of it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Literal

from hvdkit.commands.run.ray_job import RayReservation
from hvdkit.errors import ClusterError, counted, describe

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


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
