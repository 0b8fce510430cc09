"""Properties that ranks exchange in ``hk.init()``, with checks of those that must be equal."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import NamedTuple

from hvdkit.cluster import settings
from hvdkit.cluster.agreement import compare, gather
from hvdkit.cluster.exchange import ObjectExchange
from hvdkit.cluster.mesh import checked_mesh
from hvdkit.errors import ClusterError
from hvdkit.machine import processes


class RankFacts(NamedTuple):
    """A rank's properties, as sent to all ranks in ``hk.init()``.

    Attributes:
        host: its host's name.
        mesh: axis names and sizes.
        place: equal for ranks that can see each other's processes.
        offer: on rank 0, the addresses of the coordinator.
        bucket_bytes: minimum bytes of a bucket of gradients.
    """

    host: str
    mesh: list[tuple[str, int]]
    place: str
    offer: str
    bucket_bytes: int


def gather_rank_facts(
    mesh: Mapping[str, int] | None, exchange: ObjectExchange, size: int, offer: str, problem: Exception | None
) -> tuple[list[RankFacts], dict[str, int]]:
    """Return the facts of every rank, and the mesh.

    Raises on every rank if a mesh is invalid, settings differ, or this rank has a ``problem``.
    """

    def local_facts() -> RankFacts:
        if problem is not None:
            raise problem
        axes = checked_mesh(mesh, size)
        bucket_bytes = settings.bucket_bytes()
        return RankFacts(socket.gethostname(), list(axes.items()), processes.place(), offer, bucket_bytes)

    facts = gather(exchange, "hk.init()", local_facts, error=ClusterError)
    remedy = "set it to the same number on every rank"
    compare([each.bucket_bytes for each in facts], "HVDKIT_BUCKET_BYTES", remedy, error=ClusterError)
    meshes = [dict(each.mesh) for each in facts]
    compare(meshes, "mesh", "pass the same mesh on every rank", error=ClusterError, key=lambda axes: list(axes.items()))
    return facts, meshes[0]
