"""What each rank tells all others when the world begins, and what has to be the same on all of them."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from typing import NamedTuple

from hvdkit.cluster import settings
from hvdkit.cluster.exchange import ObjectExchange
from hvdkit.cluster.wire import Offer
from hvdkit.errors import ClusterError, describe
from hvdkit.machine import processes


class Place(NamedTuple):
    """What each rank tells all others when the world begins."""

    host: str
    mesh: list[tuple[str, int]]
    problem: str | None
    process: processes.Identity
    offer: Offer | None
    bucket_bytes: int


def agree(
    mesh: Mapping[str, int] | None, exchange: ObjectExchange, size: int, offer: Offer | None
) -> tuple[list[Place], dict[str, int]]:
    """Return every rank's place and the mesh, or raise on every rank if any rank's mesh is bad or another."""
    axes: dict[str, int] = {}
    bucket_bytes = 0
    problem: Exception | None = None
    try:
        axes = checked_mesh(mesh, size)
        bucket_bytes = settings.bucket_bytes()
    except (TypeError, ValueError) as error:
        problem = error
    words = None if problem is None else str(problem)
    mine = Place(socket.gethostname(), list(axes.items()), words, processes.own_identity(), offer, bucket_bytes)
    places: list[Place] = exchange.allgather(mine)
    if problem is not None:
        raise problem
    for rank_, place in enumerate(places):
        if place.problem is not None:
            raise ClusterError(f"hk.init(): rank {rank_} passed a bad argument: {place.problem}")
        if place.bucket_bytes != places[0].bucket_bytes:
            got, expected = f"{place.bucket_bytes} on rank {rank_}", f"{places[0].bucket_bytes}, as on rank 0"
            raise ClusterError(describe("HVDKIT_BUCKET_BYTES", got, expected, "set it to one number everywhere"))
    _check_meshes([place.mesh for place in places])
    return places, axes


def checked_mesh(mesh: Mapping[str, int] | None, size: int) -> dict[str, int]:
    """Return the axes of ``mesh``, one for all ranks where it is None. Raises ValueError for one that does not fit."""
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


def _check_meshes(meshes: list[list[tuple[str, int]]]) -> None:
    for rank_, mesh in enumerate(meshes):
        if mesh != meshes[0]:
            raise ClusterError(
                describe(
                    "mesh",
                    f"{dict(mesh)} on rank {rank_}",
                    f"{dict(meshes[0])}, as on rank 0",
                    "pass one mesh everywhere",
                )
            )
