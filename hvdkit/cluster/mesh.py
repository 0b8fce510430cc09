"""The mesh: ranks arranged in a grid, and the groups of ranks along its axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hvdkit.errors import describe

DATA = "data"
"""The axis along which batches differ. Ranks along all other axes process the same batch."""


class HorovodProcessSet(Protocol):
    """Horovod's process set: hvdkit gets it from Horovod and passes it to Horovod."""

    process_set_id: int | None


@dataclass(frozen=True)
class Group:
    """The ranks whose coordinates differ from this rank's along one axis only, including this rank.

    Attributes:
        axis: the axis.
        ranks: the ranks, ordered by their coordinate along the axis.
        index: this rank's coordinate along the axis.
        process_set: Horovod's process set of these ranks; None for all ranks, or only this one.
    """

    axis: str
    ranks: tuple[int, ...]
    index: int
    process_set: HorovodProcessSet | None = None

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)


def checked_mesh(mesh: Mapping[str, int] | None, size: int) -> dict[str, int]:
    """Return the axes of ``mesh``; by default one axis with all ranks. Raises ValueError for an invalid mesh."""
    axes = {DATA: size} if mesh is None else dict(mesh)
    are_positive = all(isinstance(extent, int) and extent > 0 for extent in axes.values())
    if not axes or not are_positive or math.prod(axes.values()) != size:
        expected = f"positive axis sizes whose product is the world size, {size}"
        raise ValueError(describe("mesh", axes, expected, "change the axes or start another number of ranks"))
    return axes


def coordinates(rank: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """Return a rank's coordinate along every axis. Consecutive ranks are neighbours along the last axis.

    Example:
        >>> coordinates(3, {"data": 2, "model": 2}), coordinates(2, {"data": 2, "model": 2})
        ({'data': 1, 'model': 1}, {'data': 1, 'model': 0})
    """
    found = {}
    for axis, extent in reversed(list(mesh.items())):
        rank, found[axis] = divmod(rank, extent)
    return {axis: found[axis] for axis in mesh}


def groups_along(axis: str, mesh: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return all groups of ranks that differ along ``axis`` only.

    Example:
        >>> groups_along("data", {"data": 2, "model": 2})
        [(0, 2), (1, 3)]
    """
    index = list(mesh).index(axis)
    groups: dict[tuple[int, ...], list[int]] = {}  # by the coordinates along the other axes
    for rank, point in enumerate(itertools.product(*map(range, mesh.values()))):
        groups.setdefault((*point[:index], *point[index + 1 :]), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def sets_of_any_mesh(mesh: Mapping[str, int] | None, size: int) -> list[tuple[int, ...]]:
    """Return the groups of all axes that need a process set of Horovod: those with neither one rank nor all ranks.

    Empty for an invalid mesh, which raises later on all ranks.
    """
    try:
        axes = checked_mesh(mesh, size)
    except (TypeError, ValueError):
        return []
    groups = [ranks for axis in axes for ranks in groups_along(axis, axes)]
    return [ranks for ranks in dict.fromkeys(groups) if 1 < len(ranks) < size]
