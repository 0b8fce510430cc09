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

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> even = hk.ProcessSet(range(0, hk.size(), 2))  # on every rank
        >>> even.size() == (hk.size() + 1) // 2
        True
        >>> if even.included():  # on ranks 0, 2, 4, ...
        ...     assert hk.allreduce(1, hk.Sum, process_set=even) == even.size()
        ...     assert hk.rank() == 2 * even.rank() == even.ranks[even.rank()] == even.group().ranks[even.rank()]
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        remedy = "construct the same sets in the same order on every rank"
        proposals = gather(cluster.exchange(), "ProcessSet(...)", lambda: _checked_ranks(ranks))
        compare(proposals, "ProcessSet", remedy)
        self.ranks = proposals[0]
        (self._group,) = cluster.make_groups([self.ranks])

    @classmethod
    def _from_group(cls, group: Group) -> ProcessSet:
        process_set = cls.__new__(cls)
        process_set.ranks = group.ranks
        process_set._group = group
        return process_set

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
        ClusterError: as for ``hk.ProcessSet``.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> host = hk.local_set()
        >>> hk.allreduce(1, hk.Sum, process_set=host) == hk.local_size()
        True
    """
    return _set_with_equal_label("local_set()", cluster.cluster().hosts)


def cross_set() -> ProcessSet:
    """Return the set of all ranks with this rank's ``local_rank``, one per host. Every rank must call it.

    Raises:
        CollectiveMismatchError: a rank called another collective instead.
        ClusterError: as for ``hk.ProcessSet``.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> one_per_host = hk.cross_set()
        >>> one_per_host.size() == len(set(cluster.hosts))  # if every host has the same number of ranks
        True
    """
    hosts = cluster.cluster().hosts
    return _set_with_equal_label("cross_set()", [hosts[:rank].count(host) for rank, host in enumerate(hosts)])


def _set_with_equal_label(kind: str, labels: Sequence[Hashable]) -> ProcessSet:
    """Create one set per label, given the label of each rank; return the set that contains this rank."""
    agree_on_call(Call(kind))
    sets: dict[Hashable, list[int]] = {}
    for rank, label in enumerate(labels):
        sets.setdefault(label, []).append(rank)
    (group,) = filter(None, cluster.make_groups([tuple(ranks) for ranks in sets.values()]))
    return ProcessSet._from_group(group)


RankGroup: TypeAlias = ProcessSet | Group | str | None


def resolve(process_set: RankGroup, group: RankGroup = None) -> Group | None:
    """Return the ranks of a collective; None for all ranks. In eager mode, an invalid argument raises on all ranks.

    Args:
        process_set: a :class:`ProcessSet`, the name of an axis of the mesh (the ranks along it), or None for all ranks.
        group: alias of ``process_set``; at most one of the two may be passed.

    Raises:
        TypeError: an argument has another type.
        ValueError: both are passed, the mesh has no such axis, or the set does not contain this rank.
    """
    members = process_set if process_set is not None else group
    if members is None:
        return None
    problem = attempt(lambda: _check_arguments(process_set, group))
    if problem is not None:
        if tf.executing_eagerly():
            agree_on_call(Call("a collective with a bad process_set", problem=problem))
        raise problem
    if isinstance(members, ProcessSet):
        members = members.group()  # raises only on ranks outside the set: its members do not wait for them
    elif isinstance(members, str):
        members = cluster.group(members)
    assert isinstance(members, Group)
    return None if members.size == cluster.size() else members


def _check_arguments(process_set: RankGroup, group: RankGroup) -> None:
    if process_set is not None and group is not None:
        raise ValueError(describe("group", group, "either process_set or group", "pass one of the two"))
    members = process_set if process_set is not None else group
    if isinstance(members, str):
        mesh = cluster.cluster().mesh
        if members not in mesh:
            remedy = "name it in hk.init(mesh=...)"
            raise ValueError(describe("process_set", repr(members), f"an axis of the mesh {dict(mesh)}", remedy))
    elif not isinstance(members, (ProcessSet, Group)):
        expected = "an hk.ProcessSet, an axis of the mesh or None"
        raise TypeError(describe("process_set", f"{members!r}", expected, "create one: hk.ProcessSet([0, 1])"))


def describe_group(group: Group | None) -> str:
    """Return how a collective's description shows its group; "" for all ranks."""
    return "" if group is None else f"process_set={list(group.ranks)}"


def _checked_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    size = cluster.size()
    listed = list(ranks)
    are_valid = all(isinstance(r, (int, np.integer)) and not isinstance(r, bool) and 0 <= r < size for r in listed)
    if not listed or not are_valid or len(set(listed)) < len(listed):
        expected = f"at least one rank, each of 0 to {size - 1} at most once"
        raise ValueError(describe("ranks", listed, expected, "list the ranks of the set"))
    return tuple(sorted(int(r) for r in listed))
