"""Collectives among a subset of the ranks: a user-defined set, or the ranks along an axis of the mesh."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster import Group
from hvdkit.cluster.agreement import compare, gather
from hvdkit.collectives.call_checks import Call, agree_on_call, attempt
from hvdkit.errors import describe


class ProcessSet:
    """A subset of the ranks, for collectives among them.

    Every rank must construct it, with the same ranks and in the same order relative to other collectives; only its
    members then pass it to collectives. Sets may overlap. Under MPI a set can be created at any time: Horovod restarts
    for it, which takes about a tenth of a second. Under ``horovodrun --gloo`` Horovod cannot restart, so set
    ``HOROVOD_DYNAMIC_PROCESS_SETS=1`` for the job.

    Args:
        ranks: distinct ranks, in any order; at least one.

    Attributes:
        ranks: the ranks in ascending order.

    Raises:
        ValueError: ``ranks`` is empty, has duplicates, or contains values that are not ranks of this world.
        CollectiveMismatchError: ranks constructed different sets, or another rank's ``ranks`` are invalid.
        ClusterError: under Gloo, Horovod cannot create a set without the setting above.

    Example::

        even = hk.ProcessSet(range(0, hk.size(), 2))
        if even.included():
            total = hk.allreduce(x, hk.Sum, process_set=even)
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        remedy = "construct the same sets in the same order on every rank"
        of_ranks = gather(cluster.exchange(), "ProcessSet(...)", lambda: _checked(ranks))
        compare(of_ranks, "ProcessSet", remedy)
        self.ranks = of_ranks[0]
        (self._group,) = cluster.make_groups([self.ranks])

    @classmethod
    def _of(cls, ranks: tuple[int, ...], group: Group | None) -> ProcessSet:
        made = cls.__new__(cls)
        made.ranks, made._group = ranks, group
        return made

    def size(self) -> int:
        """Return the number of ranks in the set."""
        return len(self.ranks)

    def included(self) -> bool:
        """Return True if this rank is in the set."""
        return cluster.rank() in self.ranks

    def rank(self) -> int | None:
        """Return this rank's index in the set, or None if it is not a member."""
        return self.ranks.index(cluster.rank()) if self.included() else None

    def group(self) -> Group:
        """Return the set as a ``Group`` for collectives.

        Raises:
            ValueError: this rank is not in the set.
        """
        if self._group is None:
            raise ValueError(
                describe(
                    "process_set",
                    f"{self} on rank {cluster.rank()}",
                    "a set that contains the caller",
                    "call the collective on the set's ranks only: if process_set.included(): ...",
                )
            )
        return self._group

    def __repr__(self) -> str:
        return f"ProcessSet({list(self.ranks)})"


def local_set() -> ProcessSet:
    """Return the set of all ranks on this rank's host. Every rank must call it.

    Raises:
        CollectiveMismatchError: a rank called another collective instead.
        ClusterError: as for :class:`ProcessSet`.

    Example::

        host = hk.local_set()
        on_this_host = hk.allreduce(x, hk.Sum, process_set=host)
    """
    return _mine("local_set()", cluster.cluster().hosts)


def cross_set() -> ProcessSet:
    """Return the set of all ranks with this rank's ``local_rank``, one per host. Every rank must call it.

    Raises:
        CollectiveMismatchError: a rank called another collective instead.
        ClusterError: as for :class:`ProcessSet`.

    Example::

        one_per_host = hk.cross_set()  # on ranks with hk.local_rank() == 0
    """
    hosts = cluster.cluster().hosts
    return _mine("cross_set()", [hosts[:rank].count(host) for rank, host in enumerate(hosts)])


def _mine(kind: str, labels: Sequence[Hashable]) -> ProcessSet:
    """Create the sets of all labels; return that of this rank's label."""
    agree_on_call(Call(kind))
    sets: dict[Hashable, list[int]] = {}
    for rank, one in enumerate(labels):
        sets.setdefault(one, []).append(rank)
    listed = [tuple(ranks) for ranks in sets.values()]
    made = dict(zip(listed, cluster.make_groups(listed), strict=True))
    ranks = next(ranks for ranks in listed if cluster.rank() in ranks)
    return ProcessSet._of(ranks, made[ranks])


RankGroup: TypeAlias = ProcessSet | Group | str | None


def resolve(process_set: RankGroup, group: RankGroup = None) -> Group | None:
    """Return the ranks of a collective; None for all ranks. In eager mode, an invalid argument raises on all ranks.

    Args:
        process_set: a :class:`ProcessSet`, the name of an axis of the mesh (the ranks along it), or None for all ranks.
        group: alias of ``process_set``; at most one of the two is given.

    Raises:
        TypeError: an argument has another type.
        ValueError: both are given, the mesh has no such axis, or the set does not contain this rank.
    """
    given = process_set if process_set is not None else group
    if given is None:
        return None
    problem = attempt(lambda: _check(process_set, group))
    if problem is not None:
        if tf.executing_eagerly():
            agree_on_call(Call("a collective with a bad process_set", problem=problem))
        raise problem
    if isinstance(given, ProcessSet):
        given = given.group()  # raises only here: members do not wait for other ranks
    elif isinstance(given, str):
        given = cluster.group(given)
    assert isinstance(given, Group)
    return None if given.size == cluster.size() else given


def _check(process_set: RankGroup, group: RankGroup) -> None:
    if process_set is not None and group is not None:
        raise ValueError(describe("group", group, "either process_set or group", "pass one of the two"))
    given = process_set if process_set is not None else group
    if isinstance(given, str):
        mesh = cluster.cluster().mesh
        if given not in mesh:
            remedy = "name it in hk.init(mesh=...)"
            raise ValueError(describe("process_set", repr(given), f"an axis of the mesh {dict(mesh)}", remedy))
    elif not isinstance(given, (ProcessSet, Group)):
        expected = "an hk.ProcessSet, an axis of the mesh or None"
        raise TypeError(describe("process_set", f"{given!r}", expected, "make one: hk.ProcessSet([0, 1])"))


def label(group: Group | None) -> str:
    """Return the description of a group among a collective's arguments; "" for all ranks."""
    return "" if group is None else f"process_set={list(group.ranks)}"


def _checked(ranks: Sequence[int]) -> tuple[int, ...]:
    size = cluster.size()
    listed = list(ranks)
    are_ranks = all(isinstance(r, (int, np.integer)) and not isinstance(r, bool) and 0 <= r < size for r in listed)
    if not listed or not are_ranks or len(set(listed)) < len(listed):
        expected = f"at least one rank, each of 0 to {size - 1} at most once"
        raise ValueError(describe("ranks", listed, expected, "list the ranks of the set"))
    return tuple(sorted(int(r) for r in listed))
