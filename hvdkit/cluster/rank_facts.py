"""Properties that ranks exchange in ``hk.init()``, with checks of those that must be equal."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from typing import NamedTuple

from hvdkit.cluster import settings
from hvdkit.cluster.agreement import compare, gather
from hvdkit.cluster.exchange import ObjectExchange
from hvdkit.errors import ClusterError, describe
from hvdkit.machine import processes


class RankFacts(NamedTuple):
    """A rank's properties, as sent to all ranks in ``hk.init()``."""

    host: str
    mesh: list[tuple[str, int]]
    processes: str  # equal for ranks that can see each other's processes
    offer: str
    bucket_bytes: int


def agreed_places(
    mesh: Mapping[str, int] | None, exchange: ObjectExchange, size: int, offer: str
) -> tuple[list[RankFacts], dict[str, int]]:
    """Return every rank's place, and the mesh. Raises on every rank if a mesh is invalid, or ranks' settings differ."""

    def place() -> RankFacts:
        axes, bucket_bytes = checked_mesh(mesh, size), settings.bucket_bytes()
        return RankFacts(socket.gethostname(), list(axes.items()), processes.place(), offer, bucket_bytes)

    places = gather(exchange, "hk.init()", place, error=ClusterError)
    remedy = "set it to one number everywhere"
    compare([each.bucket_bytes for each in places], "HVDKIT_BUCKET_BYTES", remedy, error=ClusterError)
    meshes = [dict(each.mesh) for each in places]
    compare(meshes, "mesh", "pass one mesh everywhere", error=ClusterError, key=lambda axes: list(axes.items()))
    return places, meshes[0]


def checked_mesh(mesh: Mapping[str, int] | None, size: int) -> dict[str, int]:
    """Return the axes of ``mesh``; by default one axis with all ranks. Raises ValueError for an invalid mesh."""
    axes = {"data": size} if mesh is None else dict(mesh)
    whole = all(isinstance(extent, int) and extent > 0 for extent in axes.values())
    if not axes or not whole or math.prod(axes.values()) != size:
        raise ValueError(
            describe(
                "mesh",
                axes,
                f"positive axis sizes whose product is the world size, {size}",
                "change the axes or start another number of ranks",
            )
        )
    return axes
